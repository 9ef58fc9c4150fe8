"""grouped_gemm by padding: copy each expert's rows to a bucket of fixed size, then one batched product.

All shapes depend only on the bucket, so a compiler sees the same graph for every routing.

M rows, E experts, C bucket, D_in and D_out model dims on both sides.
"""

from __future__ import annotations

import torch
from torch import Tensor


def power_of_two_bucket(counts: Tensor) -> int:
    """Smallest power of two that holds the largest count. Reads the counts on the host."""
    return 1 << max(0, int(counts.max()) - 1).bit_length()


def grouped_gemm_padded(x: Tensor, weight: Tensor, counts: Tensor, bucket: int | None = None) -> Tensor:
    """x (M,D_in), weight (E,D_in,D_out), counts (E,) -> (M,D_out) in x.dtype.

    bucket None: power_of_two_bucket, which syncs the device. A row beyond its expert's bucket is nan.
    """
    E, D_in, D_out = weight.shape
    C = power_of_two_bucket(counts) if bucket is None else bucket
    row = torch.arange(x.shape[0], device=x.device)
    ends = counts.cumsum(0)
    expert = torch.searchsorted(ends, row, right=True)  # E for a row without expert
    known = expert.clamp(max=E - 1)
    slot = row - (ends - counts)[known]
    fits = (expert < E) & (slot < C)
    spare = E * C  # one row after the buckets receives the overflow
    place = (known * C + slot).where(fits, spare)
    buckets = x.new_zeros((spare + 1, D_in)).index_copy(0, place, x)[:-1]
    products = torch.bmm(buckets.view(E, C, D_in), weight).view(spare, D_out)
    y = products[place.clamp(max=spare - 1)].where(fits.unsqueeze(-1), 0)
    return y.masked_fill(((expert < E) & ~fits).unsqueeze(-1), torch.nan)
