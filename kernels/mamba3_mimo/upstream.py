"""Upstream mamba3_mimo: mamba-ssm's TileLang kernels, with the signature of our op.

mamba-ssm rotates state dim i with i + N/2, we rotate the adjacent dims 2i and 2i + 1. A scan does not depend on the
order of its state dims, so queries, keys and biases are permuted on entry, and the state is permuted back.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.mamba3_mimo.naive import Mamba3MimoInputs, Mamba3MimoState
from kernels.op_support import document_borders, peer

INSTALL = "pip install --no-build-isolation mamba-ssm==2.3.2.post1 tilelang==0.1.8"


def load() -> Any:
    """Import the upstream module. Raises ImportError with the install command."""
    return peer("mamba3_mimo", "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo", INSTALL)


def halves_from_pairs(N: int, A: int) -> list[int]:
    """Index of our state dim (of N) at each position of the upstream order; A pairs are rotated."""
    turned_first, turned_second = range(0, 2 * A, 2), range(1, 2 * A, 2)
    still = range(2 * A, N)
    middle = N // 2 - A
    return [*turned_first, *still[:middle], *turned_second, *still[middle:]]


def mamba3_mimo_upstream(
    i: Mamba3MimoInputs, state: Mamba3MimoState | None = None, chunk_size: int = 16
) -> tuple[Tensor, Mamba3MimoState]:
    """Arguments and results of `mamba3_mimo`, on CUDA, in the dtype of v (upstream: bf16); no gradient of the state.

    Rows with several documents are passed as one varlen sequence; doc_ids is read on the host. Raises ImportError
    if mamba-ssm or tilelang is not installed; ValueError on a given state, which upstream does not support, or if
    the angles rotate neither all nor half of the state dims.
    """
    package = load()
    N, A, v = i.q.shape[4], i.angles.shape[3], i.v
    if state is not None:
        raise ValueError("mamba3_mimo: impl 'upstream' takes no state")
    if N not in (2 * A, 4 * A):
        raise ValueError(f"mamba3_mimo: impl 'upstream' turns all or half of the {N} state dims, not {2 * A}")
    order = torch.tensor(halves_from_pairs(N, A), device=v.device)
    q, k, q_bias, k_bias = (t.index_select(-1, order) for t in (i.q, i.k, i.q_bias.float(), i.k_bias.float()))
    (B, T), last_v = i.doc_ids.shape, v[:, -1]
    starts, borders = document_borders(i.doc_ids)
    per_token = [q, k, v, i.adt.float(), i.dt.float(), i.trap.to(v.dtype), i.angles.float(), i.z]
    if borders is not None:
        per_token = [t.reshape(1, B * T, *t.shape[2:]) for t in per_token]
    q, k, v, adt, dt, trap, angles, z = per_token
    adt, dt, trap = (t.transpose(1, 2).contiguous() for t in (adt, dt, trap))
    y, theta, h, k_prev, _ = package.mamba3_mimo(
        q, k, v, adt, dt, trap, q_bias, k_bias, *(t.float() for t in (i.mimo_v, i.mimo_z, i.mimo_out)), angles,
        i.D.float(), z,
        chunk_size=chunk_size, rotary_dim_divisor=N // A, dtype=v.dtype, return_state=True, cu_seqlens=borders,
    )  # fmt: skip
    if borders is not None:
        # One state per document; the final state of a row is its last document's.
        last = starts.sum(1).cumsum(0) - 1
        y, (theta, h, k_prev) = y.reshape(B, T, *y.shape[2:]), (t[last] for t in (theta, h, k_prev))
    ours = order.argsort()
    h, k_prev = (t.index_select(-1, ours) for t in (h, k_prev.transpose(1, 2)))
    return y, Mamba3MimoState(theta, *(t.float() for t in (h, k_prev, last_v)))
