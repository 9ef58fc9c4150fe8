"""Functions shared by the kernels of dsa_indexer: gathered tiles, the softcap, and the chosen pairs.

A logit is kept as its base-2 form u * a + b, where u is x = gain * q.k after the softcap c:

    CAP       u                                               ds/dx ~       a               b
    "none"    x                                               1             scale log2e     0
    "exact"   tanh(x), x = s/c                                1 - u^2       c log2e         0
    "fast"    1/(1 + 2^x) = (1 - tanh(s/c))/2                 u - u^2       -2 c log2e      c log2e

"fast" has an absolute error of 1e-7 c: for c <= 64 negligible next to the rounding of P to bf16 or fp16.

B batch, T tokens, K chosen keys per query, M query rows and N keys of a tile.
Sources: softcap (Gemma 2, 2024), FlashAttention-2 (Dao 2023).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = math.log2(math.e)
LARGEST_FAST_CAP = 64.0


@triton.jit
def rows(x, at, columns, inside, P: tl.constexpr):
    """Load x[at + column] as a tile, one row per entry of `at`; zero where a row is not `inside`, and past P."""
    mask = inside[:, None] & (columns < P)[None, :]
    return tl.load(x + at.to(tl.int64)[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def capped(x, CAP: tl.constexpr):
    """u of the table in the module docstring."""
    if CAP == "none":
        return x
    if CAP == "fast":
        root = tl.rsqrt(1.0 + tl.exp2(x))
        return root * root  # a division takes 4 more instructions, to handle huge divisors
    # 1 - e cancels for small x: use an odd polynomial (least squares on [0, 0.625], relative error 4.5e-9).
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    y = x * x
    c = -0.33333281 + y * (0.13331432 + y * (-0.053739157 + y * (0.020637861 - y * 0.0057040425)))
    return tl.where(tl.abs(x) < 0.625, x + x * y * c, tl.where(x < 0, -large, large))


def logit(scale: float, softcap: float, dtype: torch.dtype) -> tuple[str, float, float, float, float]:
    """CAP, gain, a, b of the module's table, and the factor that scales the backward sums to gradients."""
    if softcap == 0:
        return "none", 1.0, scale * LOG2E, 0.0, scale
    a = softcap * LOG2E
    if dtype == torch.float32 or softcap > LARGEST_FAST_CAP:
        return "exact", scale / softcap, a, 0.0, scale
    return "fast", 2 * LOG2E * scale / softcap, -2 * a, a, 4 * scale


def checked_width(what: str, P: int) -> int:
    """Tile width for a dim, at least 16 for a matrix product. Raises ValueError unless P is a power of two <= 128."""
    if P & (P - 1) or not 1 <= P <= 128:
        raise ValueError(f"{what} must be a power of two up to 128, not {P}")
    return max(P, 16)


def by_key(indices: Tensor, values: Tensor) -> Tensor:
    """Scatter values (B,T,K) by indices to (B,T+1,T), key-major: 0 where a query did not choose the key. The last key
    is the dummy for index -1; ignore its row."""
    B, T, _ = indices.shape
    key = torch.where(indices < 0, T, indices).long()
    return values.new_zeros((B, T + 1, T)).scatter_(1, key.mT, values.mT)


def walks(indices: Tensor, M: int, N: int) -> tuple[Tensor, Tensor]:
    """For each block of N keys: the blocks of M queries, those that chose any of the keys first and in order, (B, key
    blocks, query blocks) int32, and the number of these, (B, key blocks) int32."""
    B, T, _ = indices.shape
    across, down = triton.cdiv(T, M), triton.cdiv(T, N)
    block = torch.where(indices < 0, down, indices // N).long() * across
    block += (torch.arange(T, device=indices.device) // M).unsqueeze(1)
    some = indices.new_zeros((B, (down + 1) * across), dtype=torch.int8).scatter_(1, block.flatten(1), 1)
    some = some.view(B, down + 1, across)[:, :down]
    walk = some.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return walk.contiguous(), some.sum(-1, dtype=torch.int32)
