"""StructureEmbedding: a token's role in its program's syntax tree, as one vector.

B batch, T tokens, D model dim, S components, W bottleneck width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import HybridConfig
from model.layers import widen

COMPONENTS = ("category", "dependency_level", "depth", "sibling", "node_type")
ABSENT = -1


def stack_columns(columns: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Stack columns (B,T), None if missing in the data -> (B,T,S) int64 with -1 there. `like` is any (B,T).

    The loader's part of the rule "one graph, always": which columns are present is data from here on, not structure.
    """
    absent = torch.full_like(like, ABSENT, dtype=torch.int64)
    return torch.stack([absent if column is None else column.long() for column in columns], dim=-1)


class StructureEmbedding(nn.Module):
    """W_up sum_s softmax(gate)_s scale_s table_s[id_s], the softmax over the components that are present.

    All components are always computed, and an absent one gets the weight exp(-inf): a list of the present
    ones would be a separate program for each of the 2^S patterns. Zero at init, since W_up is.
    """

    offset: Tensor
    size: Tensor

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        assert config.structure is not None
        sizes, W = config.structure.sizes, config.structure.dim
        S = len(sizes)
        self.register_buffer("size", torch.tensor(sizes), persistent=False)
        self.register_buffer("offset", torch.tensor([sum(sizes[:s]) for s in range(S)]), persistent=False)
        self.table = nn.Parameter(torch.randn(sum(sizes), W) * W**-0.5)
        self.scale = nn.Parameter(torch.full((S,), 1 / S))
        self.gate = nn.Parameter(torch.zeros(S))
        self.up = nn.Linear(W, config.d_model, bias=False)
        nn.init.zeros_(self.up.weight)

    def weights(self, present: Tensor) -> Tensor:
        """present (B,T,S) bool -> weights (B,T,S), a softmax over the present ones; zeros if none is."""
        some = present.any(-1, keepdim=True)
        # If no component is present, none is masked: a softmax of only -inf is NaN, and so is its gradient.
        gate = widen(self.gate).expand(present.shape).masked_fill(some & ~present, float("-inf"))
        return gate.softmax(-1) * some

    def forward(self, columns: Tensor) -> Tensor:
        """columns (B,T,S) int64, negative where absent, clamped to the tables -> (B,T,D)."""
        row = self.offset + columns.clamp(min=0).minimum(self.size - 1)
        weight = self.weights(columns >= 0) * widen(self.scale)  # (B,T,S)
        mixed = (weight.unsqueeze(-1) * F.embedding(row, self.table)).sum(-2)  # (B,T,W)
        return self.up(mixed.to(self.up.weight.dtype))
