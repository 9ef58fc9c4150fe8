"""The Triton kernels of causal_conv1d under the interpreter, against the reference in fp64.

B batch, T tokens, D channels, W conv width.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.causal_conv1d import kernel
from kernels.causal_conv1d.eager import causal_conv1d_backward_reference, causal_conv1d_reference
from suites.kernels.interpret.ratio import DTYPES, outside
from suites.support.comparison import doubled
from suites.support.lanes import Lane, lanes

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def short_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs along every axis, and a last one that is not full."""
    for options in (kernel.FORWARD, kernel.BACKWARD):
        monkeypatch.setitem(options, "SPAN", 4)
        monkeypatch.setitem(options, "BD", 16)


def make_inputs(T: int = 11, W: int = 4, D: int = 20, dtype: torch.dtype = torch.float64) -> Inputs:
    """x is a slice of a wider row, dy has other strides; documents begin at random, ids go 0, 1, 0, 1."""
    g = torch.Generator().manual_seed(T)
    x, dy = (torch.randn(2, T, D + 7, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    weight = torch.randn(D, W, generator=g, dtype=torch.float64).to(dtype)
    bias = torch.randn(D, generator=g, dtype=torch.float64).to(dtype)
    doc_ids = (torch.rand(2, T, generator=g) < 0.2).int().cumsum(1).int() % 2
    return x[..., 3 : 3 + D], weight, bias, doc_ids, dy[..., :D]


def reference(x, weight, bias, doc_ids, dy, activation: str) -> tuple[Tensor, ...]:
    forward = causal_conv1d_reference(x, weight, bias, doc_ids, activation)
    return forward, *causal_conv1d_backward_reference(x, weight, bias, doc_ids, dy, activation)


def launched(x, weight, bias, doc_ids, dy, activation: str) -> tuple[Tensor, ...]:
    forward = kernel.causal_conv1d_fwd_kernel(x, weight, bias, doc_ids, activation)
    return forward, *kernel.causal_conv1d_bwd_kernel(x, weight, bias, doc_ids, dy, activation)


@lanes("cpu")
@pytest.mark.parametrize(
    ("T", "W", "activation"),
    [(1, 4, "silu"), (2, 3, "none"), (6, 1, "silu"), (8, 5, "none"), (11, 4, "silu")],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_meet_error_ratio_rule(lane: Lane, dtype: str, T: int, W: int, activation: str):
    inputs = make_inputs(T, W, dtype=DTYPES[dtype])
    oracle = reference(*doubled(inputs), activation)
    assert not outside(launched(*inputs, activation), reference(*inputs, activation), oracle)


@lanes("cpu")
def test_error_ratio_rule_rejects_document_leaks(lane: Lane):
    *inputs, doc_ids, dy = make_inputs(dtype=torch.float16)
    oracle = reference(*doubled((*inputs, doc_ids, dy)), "silu")
    plain = reference(*inputs, doc_ids, dy, "silu")
    leaking = launched(*inputs, torch.zeros_like(doc_ids), dy, "silu")
    assert len({line.split(":")[0] for line in outside(leaking, plain, oracle)}) == 4


@lanes("cpu")
@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_nan_in_another_document_has_no_effect(lane: Lane, poison: float):
    x, weight, bias, _, dy = make_inputs(dtype=torch.float32)
    doc_ids = torch.arange(11, dtype=torch.int32).ge(6).int().repeat(2, 1)
    y, dx, _, _ = launched(x, weight, bias, doc_ids, dy, "silu")
    x, dy = x.clone(), dy.clone()
    x[:, :6] = poison
    dy[:, :6] = poison
    poisoned_y, poisoned_dx, _, _ = launched(x, weight, bias, doc_ids, dy, "silu")
    assert torch.equal(poisoned_y[:, 6:], y[:, 6:])
    assert torch.equal(poisoned_dx[:, 6:], dx[:, 6:])
    assert not poisoned_y[:, :6].isfinite().any()
