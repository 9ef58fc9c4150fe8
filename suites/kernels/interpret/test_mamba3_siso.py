"""The Triton kernels of mamba3_siso under the interpreter, against the reference in fp64.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from kernels.mamba3_siso import kernel, kernel_forward
from kernels.mamba3_siso.eager import mamba3_siso_backward_reference, mamba3_siso_reference
from kernels.mamba3_siso.naive import Mamba3State
from suites.kernels.interpret.ratio import DTYPES, outside
from suites.support.comparison import doubled
from suites.support.lanes import Lane, lanes
from suites.support.operands import OperandsIn
from suites.support.scans import documents

Tensors = tuple[Tensor, ...]
# B T H P N G R and the chunk size
SIZES = [
    (2, 37, 2, 8, 12, 1, 3, 16),
    (1, 66, 2, 5, 8, 2, 0, 64),
    (1, 18, 2, 16, 16, 1, 8, 64),
]
# Here the plain formula computes the gradient of adt without a product, so it has no comparable 16-bit error.
ONE_TOKEN = (2, 1, 8, 16, 16, 2, 8, 64)
PER_TOKEN = (0, 1, 2, 3, 4, 5, 8, 10)  # of the inputs: q k v adt dt trap angles z
OUTPUTS = 5  # y, theta, h, k_prev, v_prev


@pytest.fixture(autouse=True)
def short_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs along every axis, and loops with more than one iteration."""
    for name, size in {
        "PREPARED_HEADS": 1,
        "TURNED_TOKENS": 8,
        "GATED_TOKENS": 16,
        "SUMMED_TOKENS": 16,
    }.items():
        monkeypatch.setattr(kernel, name, size)
    monkeypatch.setattr(kernel_forward, "BEFORE", tl.constexpr(2))


@pytest.fixture(autouse=True)
def unwritten_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.zeros(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make_inputs(sizes: tuple[int, ...], dtype: torch.dtype, starts: tuple[int, ...] = (5, 6, 27)) -> Tensors:
    """Return the op's inputs without chunk_size, then the gradients of its results; q and k are slices of one row."""
    B, T, H, P, N, G, R, _ = sizes
    wide = torch.promote_types(dtype, torch.float32)
    g = torch.Generator().manual_seed(T)

    def draw(*shape: int, to: torch.dtype = wide) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(to)

    q, k = draw(B, T, G, 2 * N, to=dtype).split(N, -1)
    v, z, dy = (draw(B, T, H, P, to=dtype) for _ in range(3))
    dt = F.softplus(draw(B, T, H))
    adt = -dt * (0.05 + torch.rand(B, T, H, generator=g))
    theta = 2 * math.pi * torch.rand(B, H, R, generator=g)
    per_head = draw(B, T, H), draw(H, N), draw(H, N), draw(B, T, H, R, to=dtype), draw(H, to=dtype)
    state = theta, draw(B, H, P, N), draw(B, H, N), draw(B, H, P)
    dstate = draw(B, H, R), draw(B, H, P, N), draw(B, H, N), draw(B, H, P)
    return q, k, v, adt, dt, *per_head, z, documents(B, T, starts), *state, dy, *dstate


def launched(chunk_size: int, *inputs: Tensor) -> Tensors:
    given, dresults = inputs[:16], inputs[16:]
    forward = kernel.mamba3_siso_fwd_kernel(*given, chunk_size)
    return *forward, *kernel.mamba3_siso_bwd_kernel(*given, chunk_size, *dresults)


def reference(chunk_size: int, *inputs: Tensor) -> Tensors:
    tensors, state, dy, dstate = (
        inputs[:12],
        Mamba3State(*inputs[12:16]),
        inputs[16],
        Mamba3State(*inputs[17:]),
    )
    y, final = mamba3_siso_reference(*tensors, state, chunk_size)
    gradients = [*mamba3_siso_backward_reference(*tensors, state, chunk_size, dy, dstate)]
    gradients[10] = gradients[10].to(dy.dtype)
    return y, *final, *gradients


def broken(launch: Callable[..., Tensors], dtype: torch.dtype, sizes: tuple[int, ...]) -> list[str]:
    """Return violations of the ratio rule; 16-bit kernels are compared with the formula with 16-bit operands."""
    inputs, chunk_size = make_inputs(sizes, dtype), sizes[-1]
    oracle = reference(chunk_size, *doubled(inputs))
    if dtype == torch.float32:
        plain = reference(chunk_size, *inputs)
    else:
        with OperandsIn(dtype):
            plain = reference(chunk_size, *inputs)
    results = zip(launch(chunk_size, *inputs), plain, oracle, strict=True)
    return outside(*zip(*(three for three in results if three[0].numel())))


@lanes("cpu")
@pytest.mark.parametrize(
    ("dtype", "sizes"), [*product(["fp32", "fp16"], SIZES), ("fp32", ONE_TOKEN)], ids=str
)
def test_kernels_meet_error_ratio_rule(lane: Lane, dtype: str, sizes: tuple[int, ...]):
    assert not broken(launched, DTYPES[dtype], sizes)


@lanes("cpu")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_error_ratio_rule_rejects_document_leaks(lane: Lane, dtype: str):
    def leaking(chunk_size: int, *inputs: Tensor) -> Tensors:
        return launched(chunk_size, *inputs[:11], torch.zeros_like(inputs[11]), *inputs[12:])

    found = broken(leaking, DTYPES[dtype], SIZES[-1])
    # Of 20 results two do not depend on the documents: v_prev and the gradient of D.
    assert len({line.split(":")[0] for line in found}) == 18


@lanes("cpu")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_no_bit_depends_on_another_document(lane: Lane, dtype: str):
    """`other` is finite: its weight is zero but not absent, so NaN would spread, in the reference as in the kernels."""
    sizes, begin = (1, 21, 2, 8, 8, 1, 3, 64), 11
    inputs = make_inputs(sizes, DTYPES[dtype], starts=(begin,))
    other = list(inputs)
    for i in (*PER_TOKEN, 16):
        other[i] = inputs[i].clone()
        other[i][:, :begin] *= 3
    for i in range(12, 16):
        other[i] = inputs[i] + 1
    ours, changed = launched(64, *inputs), launched(64, *other)
    assert not torch.equal(ours[0][:, :begin], changed[0][:, :begin])
    assert torch.equal(ours[0][:, begin:], changed[0][:, begin:])
    assert all(torch.equal(a, b) for a, b in zip(ours[1:OUTPUTS], changed[1:OUTPUTS]))
    for i in PER_TOKEN:
        assert torch.equal(ours[OUTPUTS + i][:, begin:], changed[OUTPUTS + i][:, begin:]), i
        assert not torch.equal(ours[OUTPUTS + i][:, :begin], changed[OUTPUTS + i][:, :begin]), i


@lanes("cpu")
def test_expanded_gradient_equals_a_contiguous_one(lane: Lane):
    """The gradient of y.sum() is one number with strides of 0, here with a single head."""
    *inputs, dtheta, dh, dk, dv = make_inputs((1, 18, 1, 16, 16, 1, 8, 64), torch.float32)
    ones = torch.ones(()).expand(inputs.pop().shape)
    expanded, contiguous = (launched(64, *inputs, dy, dtheta, dh, dk, dv) for dy in (ones, ones.contiguous()))
    assert all(torch.equal(a, b) for a, b in zip(expanded, contiguous, strict=True))


@lanes("cpu")
def test_dims_above_the_tiles_are_refused(lane: Lane):
    with pytest.raises(ValueError, match="at most 128"):
        launched(64, *make_inputs((1, 2, 1, 129, 8, 1, 2, 64), torch.float32))
