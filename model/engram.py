"""Engram: a gated memory of the last few tokens in parallel to attention, on A layers only.

B batch, T tokens, D model dim, W bottleneck width, N tokens averaged by a pool.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kernels.causal_conv1d import causal_conv1d
from model.config import HybridConfig
from model.hyper import branch_weights
from model.layers import projection, rms_norm, widen
from model.ngram import document_taps

CONV_WIDTH = 4


def trailing_means(z: Tensor, doc_ids: Tensor, orders: tuple[int, ...]) -> list[Tensor]:
    """Return the mean of the last N tokens for each N of orders: z (B,T,W), doc_ids (B,T) -> each (B,T,W).

    A token of another document counts as zero, and the sum is always divided by N.
    """
    taps = document_taps(z, doc_ids, max(orders))  # (B,T,W,J)
    return [taps[..., :order].sum(-1) / order for order in orders]


class EngramBranch(nn.Module):
    """silu(conv(norm(g W_v y))), y the mixed trailing means of W_in x, g = sigma(norm(x) . norm(W_k y) / sqrt D).

    Zero at init, since W_v is. The norms have no weight and their own kernel: a manually summed bf16 variance
    overflowed in the source.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        assert config.engram is not None
        D, self.orders, self.eps = config.d_model, config.engram.orders, config.norm_eps
        W = D // config.engram.reduction
        self.input = projection(D, W)
        self.mix = nn.Parameter(torch.randn(len(self.orders), W, W) * W**-0.5)
        self.key = projection(W, D)
        self.value = nn.Linear(W, D, bias=False)
        nn.init.zeros_(self.value.weight)
        self.conv_weight = nn.Parameter(torch.randn(D, CONV_WIDTH) * CONV_WIDTH**-0.5)
        self.conv_bias = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor, doc_ids: Tensor) -> Tensor:
        """x (B,T,D), doc_ids (B,T) int32 -> (B,T,D), to be added to the stream."""
        means = trailing_means(self.input(x), doc_ids, self.orders)
        y = torch.stack([mean @ mix.to(mean.dtype) for mean, mix in zip(means, self.mix)]).mean(0)
        match = widen(rms_norm(x, self.eps) * rms_norm(self.key(y), self.eps)).sum(-1, keepdim=True)
        gate = torch.sigmoid(match / math.sqrt(x.shape[-1])).to(x.dtype)
        return causal_conv1d(
            rms_norm(gate * self.value(y), self.eps), self.conv_weight, self.conv_bias, doc_ids
        )


class EngramBlock(nn.Module):
    """An A block and its Engram branch in parallel: x + attention(x) + engram(x), each weighted if `mixed`.

    The weights are computed from the two branches per token: pooling over T, as in one source, would leak future
    tokens into the past. Raises ValueError for any block other than an A block.
    """

    def __init__(self, letter: str, block: nn.Module, config: HybridConfig) -> None:
        super().__init__()
        if letter != "A":
            raise ValueError(f"Engram requires an A layer: it cannot be on a layer {letter!r}")
        self.block = block
        self.engram = EngramBranch(config)
        mixed = config.hyper is not None and config.hyper.mix_branches
        self.score = nn.Parameter(torch.zeros(2, config.d_model)) if mixed else None
        self.eps = config.norm_eps

    def forward(self, x: Tensor, doc_ids: Tensor, positions: Tensor) -> Tensor:
        """x (B,T,D), doc_ids and positions (B,T) int32 -> (B,T,D)."""
        attended, remembered = self.block(x, doc_ids, positions), self.engram(x, doc_ids)
        if self.score is None:
            return attended + remembered
        branches = torch.stack((attended - x, remembered), dim=-2)  # (B,T,2,D)
        match = (widen(rms_norm(branches, self.eps)) * widen(self.score)).sum(-1)
        weights = branch_weights(torch.tanh(match / math.sqrt(x.shape[-1])))
        return x + (weights.unsqueeze(-1).to(x.dtype) * branches).sum(-2)
