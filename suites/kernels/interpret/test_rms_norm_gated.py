"""The Triton kernels of rms_norm_gated under the interpreter, against the reference in fp64.

N rows, D channels, S group size.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.rms_norm_gated import kernel
from kernels.rms_norm_gated.eager import rms_norm_gated_backward_reference, rms_norm_gated_reference
from suites.kernels.interpret.ratio import DTYPES, outside
from suites.support.comparison import doubled
from suites.support.lanes import Lane, lanes

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rows per tile if groups are small, several tiles per program, the last one not full."""
    monkeypatch.setattr(kernel, "TILE", 32)
    monkeypatch.setattr(kernel, "FORWARD_WARPS", 3)
    monkeypatch.setattr(kernel, "BACKWARD_WARPS", 2)


def make_inputs(N: int, D: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """x is a slice of a wider row, gate has no two adjacent channels, dy has other strides."""
    g = torch.Generator().manual_seed(N)
    x, dy, gate = (torch.randn(N, 2 * D, generator=g, dtype=torch.float64).to(dtype) for _ in range(3))
    weight = torch.randn(D, generator=g, dtype=torch.float64).to(dtype)
    return x[:, 1 : D + 1], gate[:, ::2], weight, dy[:, :D]


def reference(x, gate, weight, dy, S: int, norm_first: bool) -> tuple[Tensor, ...]:
    forward = rms_norm_gated_reference(x, gate, weight, 1e-5, S, norm_first)
    return forward, *rms_norm_gated_backward_reference(x, gate, weight, dy, 1e-5, S, norm_first)


def launched(x, gate, weight, dy, S: int, norm_first: bool, eps: float = 1e-5) -> tuple[Tensor, ...]:
    forward = kernel.rms_norm_gated_fwd_kernel(x, gate, weight, eps, S, norm_first)
    return forward, *kernel.rms_norm_gated_bwd_kernel(x, gate, weight, dy, eps, S, norm_first)


@lanes("cpu")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("N", "D", "S"), [(1, 8, 8), (7, 40, 40), (33, 40, 8), (5, 20, 10), (9, 2, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_meet_error_ratio_rule(lane: Lane, dtype: str, N: int, D: int, S: int, norm_first: bool):
    inputs = make_inputs(N, D, DTYPES[dtype])
    oracle = reference(*doubled(inputs), S, norm_first)
    assert not outside(launched(*inputs, S, norm_first), reference(*inputs, S, norm_first), oracle)


@lanes("cpu")
@pytest.mark.parametrize("norm_first", [False, True])
def test_error_ratio_rule_rejects_another_norm(lane: Lane, norm_first: bool):
    inputs = make_inputs(7, 40, torch.float16)
    oracle, plain = (reference(*i, 40, norm_first) for i in (doubled(inputs), inputs))
    for wrong in (
        launched(*inputs, 20, norm_first),
        launched(*inputs, 40, not norm_first),
        launched(*inputs, 40, norm_first, eps=0.1),
    ):
        assert len({line.split(":")[0] for line in outside(wrong, plain, oracle)}) == 4


@lanes("cpu")
def test_leading_axes_are_rows(lane: Lane):
    x, gate, weight, dy = make_inputs(12, 8, torch.float32)
    flat = launched(x, gate, weight, dy, 8, False)
    split = launched(*(t.unflatten(0, (3, 4)) for t in (x, gate)), weight, dy.unflatten(0, (3, 4)), 8, False)
    assert split[0].shape == (3, 4, 8)
    assert all(torch.equal(a.reshape(b.shape), b) for a, b in zip(split, flat))
