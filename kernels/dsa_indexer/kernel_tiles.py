"""What the kernels of dsa_indexer share: gathered tiles, the softcap, and who chose whom.

A logit is kept as its base-2 form u * a + b, where u is what the softcap c leaves of x = gain * q.k:

    CAP       u                                               ds/dx ~       a               b
    "none"    x                                               1             scale log2e     0
    "exact"   tanh(x), x = s/c                                1 - u^2       c log2e         0
    "fast"    1/(1 + 2^x) = (1 - tanh(s/c))/2                 u - u^2       -2 c log2e      c log2e

"fast" is off by 1e-7 c absolutely: for c <= 64 nothing beside the rounding of P to bf16 or fp16.

B batch, T tokens, K chosen keys a query, M query rows and N keys of a tile.
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
    """x[at + column] as a tile, one row for each of `at`; zero where a row is not inside, or past P."""
    mask = inside[:, None] & (columns < P)[None, :]
    return tl.load(x + at.to(tl.int64)[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def capped(x, CAP: tl.constexpr):
    """u of the module's table."""
    if CAP == "none":
        return x
    if CAP == "fast":
        root = tl.rsqrt(1.0 + tl.exp2(x))
        return root * root  # a division takes 4 instructions more, for huge divisors
    # 1 - e cancels for small x: there an odd polynomial, least squares on [0, 0.625], off by 4.5e-9 relatively.
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    y = x * x
    c = -0.33333281 + y * (0.13331432 + y * (-0.053739157 + y * (0.020637861 - y * 0.0057040425)))
    return tl.where(tl.abs(x) < 0.625, x + x * y * c, tl.where(x < 0, -large, large))


def logit(scale: float, softcap: float, dtype: torch.dtype) -> tuple[str, float, float, float, float]:
    """CAP, gain, a, b of the module's table, and what turns the sums of the backward into gradients."""
    if softcap == 0:
        return "none", 1.0, scale * LOG2E, 0.0, scale
    a = softcap * LOG2E
    if dtype == torch.float32 or softcap > LARGEST_FAST_CAP:
        return "exact", scale / softcap, a, 0.0, scale
    return "fast", 2 * LOG2E * scale / softcap, -2 * a, a, 4 * scale


def checked_width(what: str, P: int) -> int:
    """The dim as a tile's width, at least the 16 of a matrix product. Raises ValueError on P no power of two <= 128."""
    if P & (P - 1) or not 1 <= P <= 128:
        raise ValueError(f"{what} must be a power of two up to 128, not {P}")
    return max(P, 16)


def by_key(indices: Tensor, values: Tensor) -> Tensor:
    """indices and values (B,T,K) -> (B,T+1,T): key by key, what each query gave it, 0 where it did not choose it. The
    last key stands for none, and holds nothing of use."""
    B, T, _ = indices.shape
    key = torch.where(indices < 0, T, indices).long()
    return values.new_zeros((B, T + 1, T)).scatter_(1, key.mT, values.mT)


def walks(indices: Tensor, M: int, N: int) -> tuple[Tensor, Tensor]:
    """For each block of N keys: the blocks of M queries that chose any of them first, in order, (B, key blocks,
    query blocks) int32, and how many these are, (B, key blocks) int32."""
    B, T, _ = indices.shape
    across, down = triton.cdiv(T, M), triton.cdiv(T, N)
    block = torch.where(indices < 0, down, indices // N).long() * across
    block += (torch.arange(T, device=indices.device) // M).unsqueeze(1)
    some = indices.new_zeros((B, (down + 1) * across), dtype=torch.int8).scatter_(1, block.flatten(1), 1)
    some = some.view(B, down + 1, across)[:, :down]
    walk = some.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return walk.contiguous(), some.sum(-1, dtype=torch.int32)
