"""Functions shared by the kernels of dsa_indexer: gathered tiles and the chosen pairs.

B batch, T tokens, K chosen keys per query, M query rows and N keys of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def gather_rows(x_ptr, at, columns, inside, P: tl.constexpr):
    """Load x[at + column] as a tile, one row per entry of `at`; zero where a row is not `inside`, and past P."""
    mask = inside[:, None] & (columns < P)[None, :]
    return tl.load(x_ptr + at.to(tl.int64)[:, None] + columns[None, :], mask=mask, other=0.0)


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


def query_blocks(indices: Tensor, M: int, N: int) -> tuple[Tensor, Tensor]:
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
