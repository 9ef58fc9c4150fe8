"""attention against the plain formula with repeated heads: value, gradient, compilation; rope and QK norm.

B batch, T tokens, Hq query heads, Hkv key/value heads, P head dim.
The plain formula repeats K and V, builds its mask cell by cell and takes torch.softmax; the op folds the
heads into one product and rebuilds its softmax from the logsumexp. The oracle is the reference in fp64, which
must agree with the plain formula in fp64 first.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention import attention, qk_norm, rope
from suites.ops.attention import make_inputs
from suites.support.comparison import error
from suites.support.custom_ops import refused
from suites.support.lanes import Lane, lanes

quick = settings(derandomize=True, max_examples=15, deadline=None)


@lanes("cpu", "h200")
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("P", [64, 128])
def test_nan_of_a_key_reaches_the_queries_that_see_it(lane: Lane, P: int, softcap: float):
    """In the masked blocks and in the full ones, at odd and even keys: an SM may compute these in two ways."""
    q, k, v, _ = make_inputs(T=384, P=P, Hq=2, dtype=torch.bfloat16, device=lane.device)
    doc_ids = torch.zeros(q.shape[:2], dtype=torch.int32, device=lane.device)
    for at in range(14, 18):
        poisoned = k.clone()
        poisoned[:, at] = torch.nan
        seen = attention(q, poisoned, v, doc_ids, softcap=softcap).isnan()
        assert seen[:, at:].all()
        assert not seen[:, :at].any()


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), groups=st.sampled_from([1, 2, 3]), shared=st.sampled_from([1, 2, 4]))
def test_grouped_heads_equal_repeated_heads(lane: Lane, seed: int, groups: int, shared: int):
    q, k, v, doc_ids = make_inputs(T=11, Hq=groups * shared, Hkv=groups, P=4, seed=seed, device=lane.device)
    repeated = attention(q, k.repeat_interleave(shared, 2), v.repeat_interleave(shared, 2), doc_ids)
    torch.testing.assert_close(attention(q, k, v, doc_ids), repeated, rtol=1e-13, atol=1e-13)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99))
def test_large_softcap_equals_no_softcap(lane: Lane, seed: int):
    inputs = make_inputs(T=11, P=4, seed=seed, device=lane.device)
    # tanh(x) = x - x^3/3: at c = 1e6 the cubic term of a logit below 20 is under 3e-9
    torch.testing.assert_close(attention(*inputs, softcap=1e6), attention(*inputs), rtol=0, atol=1e-7)
    assert error(attention(*inputs, softcap=1.0), attention(*inputs))[0] > 1e-3


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), T=st.integers(1, 12), extra=st.integers(0, 3))
def test_window_of_all_tokens_equals_no_window(lane: Lane, seed: int, T: int, extra: int):
    inputs = make_inputs(T=T, P=4, seed=seed, device=lane.device)
    assert torch.equal(attention(*inputs, window=T + extra), attention(*inputs))


@lanes("cpu", "h200")
def test_one_token_returns_its_value(lane: Lane):
    q, k, v, doc_ids = make_inputs(T=1, dtype=torch.bfloat16, device=lane.device)
    assert torch.equal(attention(q, k, v, doc_ids, softcap=30.0), v.repeat_interleave(2, 2))


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), shift=st.integers(0, 1000))
def test_rope_rotates_by_position_and_scores_by_distance(lane: Lane, seed: int, shift: int):
    q, k, _, _ = make_inputs(T=9, Hq=2, P=8, seed=seed, device=lane.device)
    positions = torch.arange(9, device=lane.device).expand(2, 9)
    turned = rope(q, positions, 100.0)
    angle = positions[..., None, None] * 100.0 ** (
        -torch.arange(4, device=lane.device, dtype=torch.float64) / 4
    )
    expected = torch.complex(q[..., :4], q[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), -1), rtol=1e-12, atol=1e-12)

    def scores(offset: int) -> Tensor:
        return torch.einsum(
            "bihp,bjhp->bhij", rope(q, positions + offset, 100.0), rope(k, positions + offset, 100.0)
        )

    torch.testing.assert_close(scores(shift), scores(0), rtol=1e-10, atol=1e-10)
    assert error(torch.einsum("bihp,bjhp->bhij", q, k), scores(0))[0] > 1e-2


@lanes("cpu", "h200")
def test_rope_and_qk_norm_compute_in_fp32(lane: Lane):
    q, _, _, _ = make_inputs(T=9, dtype=torch.bfloat16, device=lane.device)
    positions = torch.full((2, 9), 4095, device=lane.device, dtype=torch.int32)
    rounding = 2**-8  # half a unit in the last place of bf16, relative
    turned, wide = rope(q, positions, 500_000.0), rope(q.double(), positions, 500_000.0)
    # fp32 angles of 4095 are off by 4095 * 2^-24 radians, far below the cast; bf16 ones would be off by 16
    torch.testing.assert_close(turned.double(), wide, rtol=rounding, atol=1e-3)
    normed = qk_norm(q, 1e-5)
    assert turned.dtype == normed.dtype == torch.bfloat16
    x = q.double()
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(normed.double(), expected, rtol=rounding, atol=0)
    large = q.half() * 2000  # its mean square overflows fp16
    assert qk_norm(large, 1e-5).isfinite().all()


@lanes("cpu")
def test_odd_head_dim_has_no_rope(lane: Lane):
    with refused("rope", "even"):
        rope(torch.zeros(2, 4, 4, 3), torch.zeros(2, 4), 100.0)
