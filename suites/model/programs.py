"""Synthetic programs for the feature tests, and models whose zero-initialized parameters are set to nonzero values.

B batch, T tokens, S structure components, C chunk slots, K edge slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model.config import (
    DSAConfig,
    EngramConfig,
    HybridConfig,
    HyperConfig,
    MLAConfig,
    MTPConfig,
    NgramConfig,
    StructureConfig,
    TreeConfig,
)
from model.features import Features

FEATURES: dict[str, dict[str, Any]] = {
    "structure": {"structure": StructureConfig(dim=16)},
    "ngram": {"ngram": NgramConfig(table=500)},
    "tree": {"tree": TreeConfig(chunks=24, edges=24, width=16)},
    "mtp": {"mtp": MTPConfig(steps=2)},
    "engram": {"engram": EngramConfig(layers=(0, 4))},
    "hyper": {"hyper": HyperConfig(streams=4, layers=3)},
    "hyper_two_streams": {"hyper": HyperConfig(streams=2, layers=7, uniform=0.1)},
    "engram_mixed": {
        "engram": EngramConfig(layers=(0,)),
        "hyper": HyperConfig(streams=4, layers=3, mix_branches=True),
    },
}

# Other blocks, or other computations in a block: they change parameters that the base model has.
VARIANTS: dict[str, dict[str, Any]] = {
    "mla": {"mla": MLAConfig(16, 16, 16, 16, 16)},
    "dsa": {"dsa": DSAConfig(ranks=(1, 3), heads=2, width=8, top_k=16)},
    "mimo": {"m_mixer": "mimo"},
    "mamba2": {"m_mixer": "mamba2"},
    "null_experts": {"null_rho": 0.5},
    "expert_groups": {"expert_groups": 8, "chosen_groups": 3},
    "moving_bias": {"bias_rate": 1e-3},
    "head_gate": {"attention_gate": "head"},
    "channel_gate": {"attention_gate": "channel"},
}
TOGETHER = {
    "latent_sparse_mimo": VARIANTS["mla"] | VARIANTS["dsa"] | VARIANTS["mimo"] | VARIANTS["null_experts"],
    "gated_mamba2": VARIANTS["head_gate"]
    | VARIANTS["mamba2"]
    | VARIANTS["expert_groups"]
    | VARIANTS["moving_bias"],
}

Span = tuple[int, int, int]  # first token, token after the last, seed of the document's contents


def program(config: HybridConfig, batch: int, *spans: Span, device: str = "cpu") -> Features:
    """Return documents of random chunks and edges at the given spans: a document's contents depend only on its seed."""
    T = spans[-1][1]
    known = Features.absent(torch.zeros(batch, T, dtype=torch.int64), config)
    for row in range(batch):
        slot = edge = 0
        for start, stop, seed in spans:
            g = torch.Generator().manual_seed(1000 * seed + row)

            def draw(low: int, high: int, g: torch.Generator = g) -> int:
                return int(torch.randint(low, high, (), generator=g))

            sizes = config.structure.sizes if config.structure else (4,) * known.structure.shape[-1]
            for s, size in enumerate(sizes):
                ids = torch.randint(-2, size + 2, (stop - start,), generator=g)
                known.structure[row, start:stop, s] = ids
            first, token = slot, start + draw(0, 3)
            while token + 2 <= stop and slot < known.start.shape[1]:
                known.start[row, slot], known.end[row, slot] = token, min(token + draw(2, 7), stop)
                known.level[row, slot], known.preamble[row, slot] = draw(-1, 4), draw(-1, 2)
                token = int(known.end[row, slot]) + draw(0, 3)
                slot += 1
            for table in (known.calls, known.types):
                for k in range(edge, min(edge + 5, table.shape[1]) if slot > first else edge):
                    table[row, k, 0], table[row, k, 1] = draw(first, slot), draw(first, slot)
            edge += 5
    return Features(*(table.to(device) for table in known))


class PresentOnly(nn.Module):
    """The form that rule X4 forbids: a Python list of the components that are present."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 16) for size in sizes)

    def forward(self, *given: Tensor | None) -> Tensor:
        found = [table(ids) for table, ids in zip(self.tables, given) if ids is not None]
        return torch.stack(found).mean(0) if found else self.tables[0].weight.new_zeros(1)


def levels_pair_by_pair(level: Tensor) -> Tensor:
    """The form that rule X5 forbids: a statement for each pair of chunks. level (B,C) -> (B,C,C) bool."""
    C = level.shape[1]
    pairs = [level[:, i] == level[:, j] for i in range(C) for j in range(C)]
    return torch.stack(pairs, dim=1).unflatten(1, (C, C))


def randomize_zero_parameters(model: nn.Module, seed: int = 3) -> nn.Module:
    """Set parameters that are initialized to zero to small random values, so that their branches contribute."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if not parameter.any():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(0.1 * noise)
    return model
