"""A, as sparse attention: a small indexer scores every key, and a query attends only to the best ones.

B batch, T tokens, H heads, P head dim, J indexer heads, I indexer dim, K chosen keys, D model dim.
Source: DeepSeek-V3.2-Exp (2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention import attention_step
from kernels.dsa_indexer import dsa_attention, dsa_distribution, dsa_indexer, dsa_indexer_loss
from model.attention import AttentionBlock, AttentionState
from model.config import HybridConfig
from model.layers import projection, rms_norm, widen


class SparseState(NamedTuple):
    """The attention's cache of S tokens, and the indexer's keys (B,S,I)."""

    attention: AttentionState
    index_key: Tensor


class WithLoss(torch.autograd.Function):
    """Identity on x that adds `weight` times an auxiliary loss () to the objective, by setting the loss's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.like = weight, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, None]:
        return dx, torch.full((), ctx.weight, dtype=ctx.like, device=dx.device), None


@contextmanager
def scaled_losses(model: nn.Module, factor: float) -> Iterator[None]:
    """Scale the loss of each indexer of `model`: a forward of a part of a batch takes the part's share of it.

    Its gradient does not follow the scale of the model's loss (WithLoss).
    """
    weights = {block: block.loss_weight for block in model.modules() if isinstance(block, DSABlock)}
    for block, weight in weights.items():
        block.loss_weight = weight * factor
    try:
        yield
    finally:
        for block, weight in weights.items():
            block.loss_weight = weight


class DSABlock(AttentionBlock):
    """The attention block restricted to the `top_k` keys selected by the indexer.

    The selection has no gradient. The indexer is trained by its own loss, the divergence of its scores from the
    attention over the chosen keys, and its input is detached from the stream.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        assert config.dsa is not None
        sizes = config.dsa
        self.top_k, self.loss_weight = sizes.top_k, sizes.loss_weight
        self.index_heads, self.index_dim = sizes.heads, sizes.width
        self.index_query = projection(config.d_model, sizes.heads * sizes.width)
        self.index_key = projection(config.d_model, sizes.width)
        self.index_weight = projection(config.d_model, sizes.heads)

    def forward(self, x: Tensor, doc_ids: Tensor, positions: Tensor) -> Tensor:
        """x (B,T,D), doc_ids and positions (B,T) int32 -> (B,T,D)."""
        u = rms_norm(x, self.eps)
        q, k, v = self._project(u, positions)
        scored = self._index(u.detach())
        indices = dsa_indexer(*scored, doc_ids, top_k=min(self.top_k, x.shape[1]))
        y = dsa_attention(q, k, v, indices, softcap=self.softcap)
        if self.loss_weight:
            target = dsa_distribution(q, k, indices, softcap=self.softcap)
            y = WithLoss.apply(y, dsa_indexer_loss(*scored, indices, target), self.loss_weight)
        return x + self._gated_output(y, u)

    def step(self, x: Tensor, state: SparseState, positions: Tensor) -> tuple[Tensor, SparseState]:
        """One token: x (B,D), the caches, positions (B,) int32 -> (B,D), the caches including this token."""
        u = rms_norm(x, self.eps).unsqueeze(1)
        q, k, v = self._project(u, positions.unsqueeze(1))
        query, key, weight = self._index(u)
        keys = torch.cat((state.index_key, key), 1)
        cache = AttentionState(
            torch.cat((state.attention.key, k), 1),
            torch.cat((state.attention.value, v), 1),
            F.pad(state.attention.seen, (0, 1), value=True),
        )
        # Elementwise products and sums, no matmul: equal keys must give equal bits, or rounding would decide a tie.
        per_head = F.relu((widen(query).transpose(1, 2) * widen(keys).unsqueeze(1)).sum(-1))  # (B,J,S)
        scores = (widen(weight).transpose(1, 2) * per_head).sum(1).masked_fill(~cache.seen, -torch.inf)
        # A stable sort: ties go to the earlier key, as in the indexer.
        best = scores.argsort(dim=1, descending=True, stable=True)[:, : self.top_k]
        chosen = cache.seen & torch.zeros_like(cache.seen).scatter(1, best, True)
        y = attention_step(q[:, 0], cache.key, cache.value, chosen, softcap=self.softcap)
        return x + self._gated_output(y, u[:, 0]), SparseState(cache, keys)

    def empty_state(self, x: Tensor) -> SparseState:
        """Return the caches before any token, for x (B,D)."""
        return SparseState(super().empty_state(x), x.new_zeros(x.shape[0], 0, self.index_dim))

    def _index(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u (B,T,D) -> the indexer's queries (B,T,J,I), key (B,T,I) and head weights (B,T,J)."""
        query = self.index_query(u).unflatten(-1, (self.index_heads, -1))
        return query, self.index_key(u), self.index_weight(u)
