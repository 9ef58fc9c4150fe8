"""causal_conv1d against torch's own conv1d, document by document: value, gradient, compilation, and the step.

B batch, T tokens, D channels, W conv width.
The op shifts and adds; the plain formula splits each row into its documents and runs F.conv1d on each.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.causal_conv1d import causal_conv1d, causal_conv1d_eager, causal_conv1d_step
from kernels.causal_conv1d.naive import causal_conv1d_naive
from suites.ops.causal_conv1d import make_inputs
from suites.support.comparison import DTYPES, doubled, error_ratios, gradients, report_cases
from suites.support.custom_ops import check_op, strided, turned
from suites.support.lanes import Lane, lanes

quick = settings(derandomize=True, max_examples=15, deadline=None)


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_that_of_the_plain_formula(lane: Lane, dtype: str, row):
    ratios = {}
    for W in (2, 3, 4):
        inputs = make_inputs(D=64, W=W, dtype=DTYPES[dtype], device=lane.device)
        ratios[f"width {W}"] = error_ratios(causal_conv1d, causal_conv1d_naive, causal_conv1d_naive, inputs)
    report_cases(row, f"kernels/causal_conv1d-{lane.name}-{dtype}", ratios, gradient_at_most=2.0)


@lanes("cpu", "h200")
def test_fp32_error_is_rounding_only(lane: Lane):
    """A sum of W products and a bias is off by at most (W + 1) u times the same sum of absolute values; silu scales an
    error by at most 1.1 and adds a few of its own roundings (8 u).
    """
    x, weight, bias, doc_ids = inputs = make_inputs(dtype=torch.float32, device=lane.device)
    oracle = causal_conv1d_naive(*doubled(inputs))
    sizes = causal_conv1d_naive(*(t.abs() for t in doubled(inputs)[:3]), doc_ids, activation="none")
    bound = 2**-24 * (1.1 * 5 * sizes + 8 * oracle.abs())
    assert ((causal_conv1d(*inputs) - oracle).abs() <= bound).all()
    narrow = (
        *(t.bfloat16() for t in inputs[:3]),
        doc_ids,
    )  # fp32 inside and one cast: half a unit of bf16 more
    rounded = causal_conv1d_naive(*doubled(narrow))
    cast = 2**-8 * rounded.abs() + 2 * bound
    assert ((causal_conv1d(*narrow) - rounded).abs() <= cast).all()
    assert ((causal_conv1d_naive(*narrow) - rounded).abs() > cast).any()
    wrong = {
        "taps reversed": causal_conv1d(x, weight.flip(1), bias, doc_ids),
        "documents ignored": causal_conv1d(x, weight, bias, torch.zeros_like(doc_ids)),
        "not causal": causal_conv1d(x.flip(1), weight.flip(1), bias, doc_ids.flip(1)).flip(1),
        "no bias": causal_conv1d(x, weight, bias * 0, doc_ids),
        "no activation": causal_conv1d(*inputs, activation="none"),
    }
    missed = [name for name, y in wrong.items() if ((y - oracle).abs() > bound).float().mean() < 0.2]
    assert not missed


@lanes("cpu", "h200")
def test_op_contract(lane: Lane):
    FWD, BWD = torch.ops.bumpgate.causal_conv1d_fwd, torch.ops.bumpgate.causal_conv1d_bwd
    inputs = strided(make_inputs(D=3, lengths=(5, 2), dtype=torch.float32, device=lane.device))
    dy = turned(FWD(*inputs, "silu"), 0, 2)
    check_op(FWD, (*inputs, "silu"), differentiable=True)
    check_op(BWD, (*inputs, dy, "silu"))


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), W=st.integers(2, 4), T=st.integers(1, 20))
def test_one_document_equals_conv1d(lane: Lane, seed: int, W: int, T: int):
    x, weight, bias, doc_ids = make_inputs(W=W, lengths=(T,), seed=seed, device=lane.device)
    full = F.conv1d(x.mT, weight.unsqueeze(1), bias, padding=W - 1, groups=8)[..., :T].mT
    found = causal_conv1d(x, weight, bias, doc_ids, activation="none")
    torch.testing.assert_close(found, full, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(causal_conv1d(x, weight, bias, doc_ids), F.silu(full), rtol=1e-13, atol=1e-13)


@lanes("cpu", "h200")
@quick
@given(
    seed=st.integers(0, 99), W=st.integers(1, 4), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4)
)
def test_packed_document_equals_document_alone(lane: Lane, seed: int, W: int, lengths: list[int]):
    """Its sums bitwise; with silu up to rounding, because its vectorized and scalar forms round differently."""
    x, weight, bias, doc_ids = make_inputs(
        B=1, W=W, lengths=lengths, dtype=torch.float32, seed=seed, device=lane.device
    )
    sums, packed = (causal_conv1d(x, weight, bias, doc_ids, a) for a in ("none", "silu"))
    for total, y, inside, ids in zip(*(t.split(lengths, 1) for t in (sums, packed, x, doc_ids))):
        assert torch.equal(total, causal_conv1d(inside, weight, bias, ids, "none"))
        torch.testing.assert_close(y, causal_conv1d(inside, weight, bias, ids), rtol=1e-6, atol=1e-7)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), W=st.integers(1, 4), at=st.integers(0, 29))
def test_taps_reach_only_later_tokens_of_their_document(lane: Lane, seed: int, W: int, at: int):
    """A nan at one token reaches the W tokens from it on in its document; no bit of the others changes."""
    x, weight, bias, doc_ids = make_inputs(W=W, seed=seed, device=lane.device)
    before = causal_conv1d(x, weight, bias, doc_ids)
    x[:, at] = torch.nan
    after = causal_conv1d(x, weight, bias, doc_ids)
    seen = after.isnan().any(2)
    lag = torch.arange(30, device=lane.device) - at
    assert torch.equal(seen, (lag >= 0) & (lag < W) & (doc_ids == doc_ids[:, at : at + 1]))
    assert torch.equal(after[~seen], before[~seen])
    assert seen.any()


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), W=st.integers(1, 4))
def test_decode_steps_equal_full_sequence(lane: Lane, seed: int, W: int):
    x, weight, bias, doc_ids = make_inputs(W=W, seed=seed, device=lane.device)
    state, outputs = x.new_zeros(2, W - 1, 8), []
    for t in range(30):
        starts = doc_ids[:, t] != doc_ids[:, max(t - 1, 0)]
        y, state = causal_conv1d_step(
            x[:, t], state.masked_fill(starts[:, None, None], 0), weight, bias, "silu"
        )
        outputs.append(y)
    assert state.shape == (2, W - 1, 8)
    whole = causal_conv1d(x, weight, bias, doc_ids)
    torch.testing.assert_close(torch.stack(outputs, 1), whole, rtol=1e-13, atol=1e-13)


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_slice_of_a_wider_tensor_gives_same_bits(lane: Lane, dtype: str):
    x, weight, bias, doc_ids = make_inputs(dtype=DTYPES[dtype], device=lane.device)
    assert not _embedded(x).is_contiguous()
    found = gradients(lambda x, *rest: causal_conv1d(_embedded(x), *rest), x, weight, bias, doc_ids)
    for ours, theirs in zip(found, gradients(causal_conv1d, x, weight, bias, doc_ids)):
        assert torch.equal(ours, theirs)


def _embedded(x: Tensor) -> Tensor:
    """Return x as the middle of a tensor three times as wide, as in a split of one projection."""
    return torch.cat((x - 1, x, x + 1), -1).split(x.shape[-1], -1)[1]


@lanes("cpu", "h200")
def test_mixed_input_dtypes_are_preserved(lane: Lane):
    """Under autocast the activations are bf16 and the parameters fp32."""
    x, weight, bias, doc_ids = make_inputs(dtype=torch.float32, device=lane.device)
    found = gradients(causal_conv1d, x.bfloat16(), weight, bias, doc_ids)
    assert [t.dtype for t in found] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    wide = causal_conv1d_eager(x.bfloat16().double(), weight.double(), bias.double(), doc_ids)
    torch.testing.assert_close(found[0].double(), wide, rtol=2**-8, atol=1e-6)
