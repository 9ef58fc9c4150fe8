"""The hybrid: an embedding, `depth` blocks in the order of the layer pattern, a tied loss head.

B batch, T tokens, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.attention import AttentionBlock
from model.config import HybridConfig
from model.dsa import DSABlock
from model.features import Features, TokenFeatures, with_branches
from model.head import IGNORE, LossHead
from model.m2rnn import M2RNNBlock
from model.mamba import Mamba2Block, Mamba3Block
from model.mamba_mimo import Mamba3MIMOBlock
from model.mla import MLABlock
from model.moe import MoEBlock
from model.mtp import MTPHead

# By the kinds of HybridConfig.kinds.
BLOCKS: dict[str, type[nn.Module]] = {
    "A:gqa": AttentionBlock,
    "A:mla": MLABlock,
    "A:dsa": DSABlock,
    "E": MoEBlock,
    "M:mamba3": Mamba3Block,
    "M:mimo": Mamba3MIMOBlock,
    "M:mamba2": Mamba2Block,
    "R": M2RNNBlock,
}


def documents(ids: Tensor, bos_id: int) -> tuple[Tensor, Tensor]:
    """Token ids (B,T) -> document ids (B,T) int32 and positions within the document (B,T) int32.

    A document starts at each BOS; tokens before the first one are document 0.
    """
    starts = ids == bos_id
    doc_ids = starts.cumsum(1, dtype=torch.int32)
    index = torch.arange(ids.shape[1], device=ids.device, dtype=torch.int32).expand_as(doc_ids)
    last_start = torch.where(starts, index, torch.zeros_like(index)).cummax(1).values
    return doc_ids, index - last_start


def next_token_targets(ids: Tensor, doc_ids: Tensor) -> Tensor:
    """Return the next id within the same document, -1 at a document's last token: (B,T) int64."""
    targets = torch.full_like(ids, IGNORE)
    targets[:, :-1] = torch.where(doc_ids[:, 1:] == doc_ids[:, :-1], ids[:, 1:], IGNORE)
    return targets


class Hybrid(nn.Module):
    """Token ids in, training loss out.

    `boundary` is called on the tensors that enter a region; it is the identity here. The regional compile
    policies mark the dynamic batch axis there during warm-up, which only eager code between regions can do.

    The parameters of optional features are created after all others, so that the others do not depend on them.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        # A copy shared by the blocks: everything that a forward reads from it, such as routing, is fixed from here on.
        built = config.replace()
        self.blocks = nn.ModuleList(BLOCKS[kind](built) for kind in config.kinds)
        self.head = LossHead(config.logit_softcap, config.norm_eps)
        self.token_features = TokenFeatures(config) if TokenFeatures.any_enabled(config) else None
        with_branches(self.blocks, config)
        if config.mtp:
            self.head = MTPHead(config)
        self.boundary: Callable[[Tensor], Tensor] = _identity

    def embed(self, ids: Tensor, inputs: Features | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ids (B,T) int64 -> stream (B,T,D), doc_ids (B,T), positions (B,T), targets (B,T).

        Raises ValueError on inputs that are not used by this model's features.
        """
        doc_ids, positions = documents(ids, self.config.bos_id)
        targets = next_token_targets(ids, doc_ids)
        x = self.embedding(ids)
        if self.token_features is not None:
            inputs = Features.absent(ids, self.config) if inputs is None else inputs
            x, marked_ids, marked_docs, *known = (self.boundary(t) for t in (x, ids, doc_ids, *inputs))
            x = self.token_features(x, marked_ids, marked_docs, Features(*known))
        elif inputs is not None:
            raise ValueError(f"{self.config.name}: inputs given, but structure, ngram and tree are all off")
        x, doc_ids, positions, targets = (self.boundary(t) for t in (x, doc_ids, positions, targets))
        return x, doc_ids, positions, targets

    def features(self, ids: Tensor, inputs: Features | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """ids (B,T) int64 -> stream after the last block (B,T,D), targets (B,T), auxiliary loss () fp32."""
        x, doc_ids, positions, targets = self.embed(ids, inputs)
        aux = torch.zeros((), device=x.device)
        for letter, block in zip(self.config.letters, self.blocks):
            if letter == "E":
                x, extra = block(x)
                aux = aux + extra
            else:
                x = block(x, doc_ids, positions)
            x = self.boundary(x)
        return x, targets, aux

    def forward(self, ids: Tensor, inputs: Features | None = None) -> Tensor:
        """ids (B,T) int64 -> mean next-token loss plus the experts' auxiliary losses, () fp32."""
        x, targets, aux = self.features(ids, inputs)
        return self.head(x, self.embedding.weight, targets) + aux

    def logits(self, ids: Tensor, inputs: Features | None = None) -> Tensor:
        """ids (B,T) int64 -> next-token logits (B,T,V) fp32."""
        x, _, _ = self.features(ids, inputs)
        return self.head.logits(x, self.embedding.weight)

    def overflow(self) -> int:
        """Dropped (token, expert) pairs since construction, over all E blocks. Syncs the device: not for a step."""
        return sum(int(block.overflow) for block in self.modules() if isinstance(block, MoEBlock))


def _identity(x: Tensor) -> Tensor:
    return x
