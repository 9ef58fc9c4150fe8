"""The Triton kernels of ssd_chunk_scan under the interpreter, against the reference in fp64.

B batch, T tokens, H heads, P head dim, N state dim, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from kernels.ssd_chunk_scan import kernel
from kernels.ssd_chunk_scan.eager import ssd_chunk_scan_backward_reference, ssd_chunk_scan_reference
from suites.kernels.interpret.ratio import DTYPES, outside
from suites.kernels.interpret.ssd_inputs import Tensors, make_inputs
from suites.support.comparison import doubled
from suites.support.lanes import Lane, lanes
from suites.support.operands import OperandsIn

SIZES = [
    (2, 37, 6, 8, 12, 2, 16),
    (1, 66, 6, 5, 8, 2, 64),
    (1, 18, 2, 16, 16, 1, 64),
]  # B T H P N G chunk size
PER_TOKEN = (0, 1, 3, 4)  # of the inputs: x dt B C
OUTPUTS = 2


@pytest.fixture(autouse=True)
def short_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs along every axis: the heads of a group in parts, a last block of heads that is not full."""
    monkeypatch.setattr(kernel, "PREPARED_HEADS", 4)
    monkeypatch.setattr(kernel, "ENOUGH_PROGRAMS", 8)


@pytest.fixture(autouse=True)
def unwritten_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.zeros(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def launched(chunk_size: int, *inputs: Tensor) -> Tensors:
    forward = kernel.ssd_chunk_scan_fwd_kernel(*inputs[:8], chunk_size)
    return *forward, *kernel.ssd_chunk_scan_bwd_kernel(*inputs[:8], chunk_size, *inputs[8:])


def reference(chunk_size: int, *inputs: Tensor) -> Tensors:
    forward = ssd_chunk_scan_reference(*inputs[:8], chunk_size)
    return *forward, *ssd_chunk_scan_backward_reference(*inputs[:8], chunk_size, *inputs[8:])


def broken(launch: Callable[..., Tensors], dtype: torch.dtype, sizes: tuple[int, ...]) -> list[str]:
    """Return violations of the ratio rule; 16-bit kernels are compared with the formula with 16-bit operands.

    Pooled over seeds: the gradient of A has only H values, and the maximum of few errors varies.
    """
    problems, chunk_size = [make_inputs(sizes, dtype, seed=seed) for seed in range(3)], sizes[-1]
    oracle = [reference(chunk_size, *doubled(inputs)) for inputs in problems]
    with OperandsIn(dtype) if dtype == torch.float16 else nullcontext():
        plain = [reference(chunk_size, *inputs) for inputs in problems]
    found = [launch(chunk_size, *inputs) for inputs in problems]
    return outside(*([torch.stack(runs) for runs in zip(*side)] for side in (found, plain, oracle)))


@lanes("cpu")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_kernels_meet_error_ratio_rule(lane: Lane, dtype: str, sizes: tuple[int, ...]):
    assert not broken(launched, DTYPES[dtype], sizes)


@lanes("cpu")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_error_ratio_rule_rejects_document_leaks(lane: Lane, dtype: str):
    def leaking(chunk_size: int, *inputs: Tensor) -> Tensors:
        return launched(chunk_size, *inputs[:6], torch.zeros_like(inputs[6]), *inputs[7:])

    found = broken(leaking, DTYPES[dtype], SIZES[-1])
    # Of 9 results one does not depend on the documents: the gradient of D.
    assert len({line.split(":")[0] for line in found}) == 8


@lanes("cpu")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_no_bit_depends_on_another_document(lane: Lane, dtype: str):
    """`other` is finite: its weight is zero but not absent, so NaN would spread, in the reference as in the kernels."""
    sizes, begin = (1, 21, 2, 8, 8, 1, 64), 11
    inputs = make_inputs(sizes, DTYPES[dtype], starts=(begin,))
    other = list(inputs)
    for i in (*PER_TOKEN, 8):
        other[i] = inputs[i].clone()
        other[i][:, :begin] *= 3
    other[7] = inputs[7] + 1
    ours, changed = launched(64, *inputs), launched(64, *other)
    assert not torch.equal(ours[0][:, :begin], changed[0][:, :begin])
    assert torch.equal(ours[0][:, begin:], changed[0][:, begin:])
    assert torch.equal(ours[1], changed[1])
    for i in PER_TOKEN:
        assert torch.equal(ours[OUTPUTS + i][:, begin:], changed[OUTPUTS + i][:, begin:]), i
        assert not torch.equal(ours[OUTPUTS + i][:, :begin], changed[OUTPUTS + i][:, :begin]), i


@lanes("cpu")
def test_dims_above_the_tiles_are_refused(lane: Lane):
    with pytest.raises(ValueError, match="at most 128"):
        launched(64, *make_inputs((1, 2, 1, 129, 8, 1, 64), torch.float32))
