"""The optional features of the hybrid: their inputs in addition to the token ids, and where they are inserted.

B batch, T tokens, D model dim, S structure components, C chunk slots, K edge slots.
structure, ngram and tree add to the embedded stream here; engram and hyper wrap blocks; mtp replaces the head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.config import HybridConfig
from model.engram import EngramBlock
from model.hyper import HyperBlock
from model.ngram import NgramHash
from model.relations import NO_CHUNK
from model.structure import ABSENT, COMPONENTS, StructureEmbedding
from model.tree_ffn import TreeFFN


class Features(NamedTuple):
    """Inputs of a batch in addition to its ids, int64, with the same shapes whether the data has them or not."""

    structure: Tensor  # (B,T,S) component ids, -1 where absent
    start: Tensor  # (B,C) first token of each chunk, ascending, 2**30 in unused slots
    end: Tensor  # (B,C) token after the chunk, 0 in unused slots
    level: Tensor  # (B,C) place in the dependency order, -1 unknown
    preamble: Tensor  # (B,C) 1 preamble, 0 code, -1 neither
    calls: Tensor  # (B,K,2) chunk from, chunk to, -1 in unused slots
    types: Tensor  # (B,K,2) the same for uses of types

    @classmethod
    def absent(cls, ids: Tensor, config: HybridConfig) -> Features:
        """Return features marked absent, for ids (B,T)."""
        B, T = ids.shape
        S = len(config.structure.sizes) if config.structure else len(COMPONENTS)
        C, K = (config.tree.chunks, config.tree.edges) if config.tree else (1, 1)
        shapes = {
            "structure": (B, T, S), "start": (B, C), "end": (B, C), "level": (B, C),
            "preamble": (B, C), "calls": (B, K, 2), "types": (B, K, 2),
        }  # fmt: skip
        fills = {"start": NO_CHUNK, "end": 0}
        return cls(
            **{
                name: torch.full(shape, fills.get(name, ABSENT), dtype=torch.int64, device=ids.device)
                for name, shape in shapes.items()
            }
        )


class TokenFeatures(nn.Module):
    """Add the enabled features of each token to the embedded stream; a region to compile."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.ngram = NgramHash(config) if config.ngram else None
        self.structure = StructureEmbedding(config) if config.structure else None
        self.tree = TreeFFN(config) if config.tree else None

    @staticmethod
    def any_enabled(config: HybridConfig) -> bool:
        """Whether any feature handled here is enabled."""
        return any((config.ngram, config.structure, config.tree))

    def forward(self, x: Tensor, ids: Tensor, doc_ids: Tensor, inputs: Features) -> Tensor:
        """x (B,T,D), ids (B,T) int64, doc_ids (B,T) int32 -> (B,T,D)."""
        structure, *chunks = inputs
        if self.ngram is not None:
            x = x + self.ngram(ids, doc_ids)
        if self.structure is not None:
            x = x + self.structure(structure)
        return x if self.tree is None else self.tree(x, doc_ids, *chunks)


def with_branches(blocks: nn.ModuleList, config: HybridConfig) -> None:
    """Wrap the blocks with an Engram branch, then those that the streams pass through, in place."""
    for layer in config.engram.layers if config.engram else ():
        blocks[layer] = EngramBlock(config.letters[layer], blocks[layer], config)
    for layer in range(config.hyper.layers if config.hyper else 0):
        blocks[layer] = HyperBlock(blocks[layer], config, layer, with_aux=config.letters[layer] == "E")
