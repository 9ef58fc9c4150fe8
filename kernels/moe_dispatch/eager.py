"""Padded dispatch of tokens to experts, in plain torch, with its gradient.

Each sequence is its own dispatch group (GShard): an expert has `bucket` slots per sequence, taken in token
order. The bucket therefore depends only on T, and the routing of one row never drops a token of another. A token
without a free slot is dropped and counted. Expert -1 is a null assignment: it takes no slot and is not counted.
No value is read on the host: every index is computed on the device, and a dropped token is written to a
spare row after the last one.

B batch, T tokens, D model dim, E experts, K top-k, C bucket (slots per expert and sequence).
Sources: GShard (Lepikhin et al. 2020), Switch Transformer (Fedus et al. 2021).
"""

from __future__ import annotations

import torch
from torch import Tensor


def moe_dispatch_slots(expert: Tensor, E: int, C: int) -> tuple[Tensor, Tensor]:
    """expert (B,T,K) -> slot (B,T,K) int64 in 0..C-1, -1 if the expert was full or -1; overflow () int64."""
    assigned = expert >= 0
    ranked = expert.flatten(1).unsqueeze(-1) == torch.arange(E, device=expert.device)  # (B,T*K,E)
    # int32 halves the largest tensor here; a count never passes T*K.
    before = ranked.cumsum(1, dtype=torch.int32) - 1
    position = before.gather(2, expert.clamp(min=0).flatten(1).unsqueeze(-1)).view_as(expert).to(torch.int64)
    kept = assigned & (position < C)
    return position.where(kept, -1), (assigned & ~kept).sum()


def _rows(expert: Tensor, slot: Tensor, C: int) -> Tensor:
    """The row of the flattened (E*B*C, D) buffer of each assignment (B,T,K); a dropped one gets slot 0's."""
    B = expert.shape[0]
    sequence = torch.arange(B, device=expert.device).view(-1, 1, 1)
    return (expert.clamp(min=0) * B + sequence) * C + slot.clamp(min=0)


def moe_dispatch_eager(
    x: Tensor, expert: Tensor, num_experts: int, bucket: int
) -> tuple[Tensor, Tensor, Tensor]:
    """x (B,T,D), expert (B,T,K) int64 in 0..E-1, or -1 for none
    -> padded (E, B*C, D) in x.dtype, slot (B,T,K) int64, overflow () int64.

    Row b*C + slot of padded[e] is the token; unused rows are exactly zero. Ids outside -1..E-1 are not checked:
    that would force a device sync.
    """
    E, C = num_experts, bucket
    B, _, D = x.shape
    slot, overflow = moe_dispatch_slots(expert, E, C)
    spare = E * B * C
    row = _rows(expert, slot, C).where(slot >= 0, spare)
    tokens = x.unsqueeze(2).expand(*expert.shape, D).reshape(-1, D)
    # A row other than the spare one is written at most once, so that the copy is exact in any dtype.
    padded = x.new_zeros((spare + 1, D)).index_copy(0, row.flatten(), tokens)
    return padded[:-1].view(E, B * C, D), slot, overflow


def moe_dispatch_backward_eager(dpadded: Tensor, expert: Tensor, slot: Tensor, bucket: int) -> Tensor:
    """Gradient of x (B,T,D): the sum over a token's K assignments, in fp32 (fp64 for fp64), cast once.

    A gather per token, no scatter and no atomics: the result does not depend on thread order.
    """
    acc = torch.promote_types(dpadded.dtype, torch.float32)
    rows = dpadded.flatten(0, 1)[_rows(expert, slot, bucket)]  # (B,T,K,D)
    return rows.to(acc).where((slot >= 0).unsqueeze(-1), 0).sum(2).to(dpadded.dtype)
