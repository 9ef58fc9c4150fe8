"""mHC: manifold-constrained hyper-connections, several residual streams mixed by doubly stochastic matrices.

B batch, T tokens, D model dim, N streams. Sources: hyper-connections (arXiv 2409.19606), mHC (arXiv 2512.24880).
The streams exist between the first and the last block that they pass through. Embedding, head and the other blocks
see (B,T,D), so every compile policy works as it does without streams.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import HybridConfig
from model.layers import rms_norm, widen

EPS = 1e-6
STAY = 8.0  # initial logit of the diagonal: with four streams, each keeps 1 - 1e-3 of itself
READ = 3.0  # initial logit of the one stream that a layer reads; equal streams would stay equal


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """logits (...,N,N), N >= 3, fp32 or wider -> exp(logits) scaled towards row and column sums of 1.

    Rows are scaled last: they sum to 1, the columns nearly. Raises ValueError on N = 2, where a doubly stochastic
    matrix has equal diagonals (use a softmax), TypeError on 16-bit logits, whose sums are too inexact.
    """
    if logits.shape[-1] < 3:
        raise ValueError("sinkhorn of 2x2 logits loses their difference: use a softmax over two")
    if torch.finfo(logits.dtype).bits < 32:
        raise TypeError(f"sinkhorn needs fp32 logits, not {logits.dtype}")
    matrix = torch.exp(logits - logits.amax((-2, -1), keepdim=True))
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-2, keepdim=True).clamp(min=EPS)
        matrix = matrix / matrix.sum(-1, keepdim=True).clamp(min=EPS)
    return matrix


def doubly_stochastic(logits: Tensor, iterations: int) -> Tensor:
    """logits (...,N,N) -> (...,N,N): Sinkhorn, or [[p,1-p],[1-p,p]] with p by softmax over the first row."""
    if logits.shape[-1] > 2:
        return sinkhorn(logits, iterations)
    row = logits[..., 0, :].softmax(-1)
    return torch.stack((row, row.flip(-1)), dim=-2)


def branch_weights(scores: Tensor) -> Tensor:
    """scores (...,2) of two branches -> weights (...,2) that sum to 2: equal scores give the branches' plain sum."""
    if scores.shape[-1] != 2:
        raise ValueError(
            f"branch_weights weighs two branches, not {scores.shape[-1]}: over one it does nothing"
        )
    return 2 * scores.softmax(-1)


class HyperBlock(nn.Module):
    """H' = Hres H + Hpost (x) f(sum_n Hpre_n H_n) around a residual block x + f(x), coefficients by token.

    Streams are passed as (B,T,N*D): the first block repeats its input, the last one returns the mean. At
    init all streams are equal, Hpost is 1 and Hres is close to the identity: the block without streams.
    """

    def __init__(self, block: nn.Module, config: HybridConfig, layer: int, with_aux: bool) -> None:
        super().__init__()
        assert config.hyper is not None
        N = config.hyper.streams
        self.block, self.with_aux, self.streams = block, with_aux, N
        self.first, self.last = layer == 0, layer == config.hyper.layers - 1
        self.iterations, self.uniform, self.eps = (
            config.hyper.iterations,
            config.hyper.uniform,
            config.norm_eps,
        )
        reads = READ * F.one_hot(torch.tensor(layer % N), N)
        self.bias = nn.Parameter(torch.cat((reads, torch.zeros(N), STAY * torch.eye(N).flatten())))
        self.dynamic = nn.Parameter(torch.zeros(N + N + N * N, config.d_model))

    def coefficients(self, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """H (B,T,N,D) -> Hpre (B,T,N), Hpost (B,T,N), Hres (B,T,N,N), fp32 also under autocast."""
        N = self.streams
        with torch.autocast(H.device.type, enabled=False):
            seen = rms_norm(widen(H).mean(-2), self.eps)
            pre, post, res = (F.linear(seen, widen(self.dynamic)) + self.bias).split((N, N, N * N), dim=-1)
            mixing = doubly_stochastic(res.unflatten(-1, (N, N)), self.iterations)
            mixing = (1 - self.uniform) * mixing + self.uniform / N
            return pre.softmax(-1), 2 * post.sigmoid(), mixing

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Streams (B,T,N*D), or (B,T,D) into the first block, and the block's other arguments -> its results."""
        H = (
            x.unsqueeze(-2).expand(-1, -1, self.streams, -1)
            if self.first
            else x.unflatten(-1, (self.streams, -1))
        )
        pre, post, mixing = (c.to(x.dtype) for c in self.coefficients(H))
        u = (pre.unsqueeze(-1) * H).sum(-2)
        out, aux = self.block(u, *rest) if self.with_aux else (self.block(u, *rest), None)
        H = mixing @ H + post.unsqueeze(-1) * (out - u).unsqueeze(-2)
        y = H.mean(-2) if self.last else H.flatten(-2)
        return y if aux is None else (y, aux)
