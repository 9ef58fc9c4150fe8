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

from kernels.attention import attention, attention_eager, attention_mask, qk_norm, rope
from kernels.attention.naive import attention_naive
from suites.ops.attention import CASES, make_inputs
from suites.support.comparison import DTYPES, doubled, error, error_ratios, report_cases
from suites.support.custom_ops import check_op, refused, strided, turned
from suites.support.lanes import Lane, lanes

# A softcap above 32, and fp16, follow the largest logit through all blocks; a smaller one through the masked ones only.
WHOLE_TILES = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "large softcap": {"softcap": 40.0},
    "softcap, large logits": {"softcap": 30.0, "scale": 4.0},
    "window": {"window": 150, "softcap": 2.0},
    "not causal": {"causal": False},
    "not causal, window": {"causal": False, "window": 150},
}
quick = settings(derandomize=True, max_examples=15, deadline=None)


def rounding_bound(q: Tensor, k: Tensor, v: Tensor, scale: float) -> float:
    """Bound the rounding error of `out` in fp32.

    A logit is off by (P + 4) u times its largest size, a weight exp(s - lse) by twice that plus the same of lse, and
    the weighted mean of v adds T + 8 roundings: all of it relative to max |v|.
    """
    T, P = q.shape[1], q.shape[3]
    logit = scale * q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()
    return float((2 * (P + 4) * logit + T + 8) * 2**-24 * v.double().abs().max())


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_that_of_the_plain_formula(lane: Lane, dtype: str, row):
    inputs = make_inputs(dtype=DTYPES[dtype], device=lane.device)
    ratios = {
        case: error_ratios(attention, attention_naive, attention_eager, inputs, **options)
        for case, options in CASES.items()
    }
    report_cases(row, f"kernels/attention-{lane.name}-{dtype}", ratios)


def report_whole_tiles(lane: Lane, P: int, dtype: str, row) -> None:
    """Report the error at shapes that hopper.py computes: three blocks of 128, documents that end inside them."""
    narrow = torch.bfloat16 if dtype == "bf16" else torch.float16
    inputs = make_inputs(T=384, P=P, Hq=6, dtype=narrow, device=lane.device)
    ratios = {
        case: error_ratios(attention, attention_naive, attention_eager, inputs, **options)
        for case, options in WHOLE_TILES.items()
    }
    report_cases(row, f"kernels/attention-P{P}-whole_tiles-{str(narrow).removeprefix('torch.')}", ratios)


@lanes("h200")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_error_of_whole_tiles_at_head_dim_64(lane: Lane, dtype: str, row):
    report_whole_tiles(lane, 64, dtype, row)


@lanes("h200")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_error_of_whole_tiles_at_head_dim_128(lane: Lane, dtype: str, row):
    report_whole_tiles(lane, 128, dtype, row)


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
def test_fp32_error_is_rounding_only(lane: Lane):
    q, k, v, doc_ids = inputs = make_inputs(dtype=torch.float32, device=lane.device)
    options = {"scale": 0.4, "softcap": 2.0, "window": 7}
    oracle = attention_eager(*doubled(inputs), **options)
    bound = rounding_bound(q, k, v, 0.4)
    assert bound < 1e-3
    assert error(attention(*inputs, **options), oracle)[0] <= bound
    wrong = {
        "softcap before scale": attention(*inputs, **options | {"softcap": 2.0 / 0.4}),
        "no softcap": attention(*inputs, **options | {"softcap": 0.0}),
        "window one too wide": attention(*inputs, **options | {"window": 8}),
        "documents ignored": attention(q, k, v, torch.zeros_like(doc_ids), **options),
        "heads interleaved": attention(q, k.flip(2), v.flip(2), doc_ids, **options),
        "not causal": attention(*inputs, **options, causal=False),
    }
    missed = [name for name, out in wrong.items() if error(out, oracle)[0] <= bound]
    assert not missed


@lanes("cpu")
@pytest.mark.parametrize("case", CASES)
def test_bf16_is_computed_in_fp32_and_cast_once(lane: Lane, case: str):
    """Only the plain-torch form: a tensor-core kernel may round its weights before they are multiplied with v."""
    q, k, v, _ = inputs = make_inputs(dtype=torch.bfloat16)
    oracle = attention_eager(*doubled(inputs), **CASES[case])
    bound = 2**-8 * oracle.abs() + rounding_bound(q, k, v, CASES[case].get("scale", 0.25))
    assert ((attention(*inputs, **CASES[case]) - oracle).abs() <= bound).all()
    assert ((attention_naive(*inputs, **CASES[case]) - oracle).abs() > bound).any()


@lanes("cpu", "h200")
def test_op_contract(lane: Lane):
    FWD, BWD = torch.ops.bumpgate.attention_fwd, torch.ops.bumpgate.attention_bwd
    inputs = make_inputs(B=2, T=9, P=4, dtype=torch.float32, device=lane.device)
    q, k, v, doc_ids = strided(inputs)
    options = (0.5, 2.0, 4, True)
    out, lse = FWD(q, k, v, doc_ids, *options)
    assert lse.dtype == torch.float32
    assert torch.equal(out, FWD(*inputs, *options)[0])
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    assert [t.requires_grad for t in FWD(*leaves, doc_ids, *options)] == [True, False]
    check_op(FWD, (q, k, v, doc_ids, *options), differentiable=True)
    check_op(BWD, (q, k, v, doc_ids, out, lse, turned(out, 1, 2), *options))


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
@given(
    seed=st.integers(0, 99),
    first=st.integers(1, 12),
    second=st.integers(1, 12),
    window=st.sampled_from([0, 3]),
)
def test_packed_document_equals_document_alone(lane: Lane, seed: int, first: int, second: int, window: int):
    """With positions that restart at each document. Equal to rounding and not bitwise: a row's sum runs over other keys
    (at weight 0) and in other blocks.
    """
    T = first + second
    q, k, v, _ = make_inputs(T=T, P=8, seed=seed, device=lane.device)
    start = torch.tensor([0] * first + [first] * second, device=lane.device)
    doc_ids = (start > 0).int().expand(2, T)
    positions = (torch.arange(T, device=lane.device) - start).expand(2, T)

    def turned(t: Tensor, at: Tensor) -> Tensor:
        return rope(t, at, 10_000.0)

    packed = attention(turned(q, positions), turned(k, positions), v, doc_ids, window=window)
    b = slice(first, None)
    at = torch.arange(second, device=lane.device).expand(2, second)
    alone = attention(turned(q[:, b], at), turned(k[:, b], at), v[:, b], doc_ids[:, b], window=window)
    torch.testing.assert_close(packed[:, b], alone, rtol=1e-13, atol=1e-13)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), at=st.integers(0, 15))
def test_future_and_other_documents_change_no_bit(lane: Lane, seed: int, at: int):
    q, k, v, doc_ids = make_inputs(T=16, dtype=torch.float32, seed=seed, device=lane.device)
    before = attention(q, k, v, doc_ids, window=6)
    k[:, at] += 1
    v[:, at] -= 1
    changed = (attention(q, k, v, doc_ids, window=6) != before).flatten(2).any(2)
    sees = attention_mask(doc_ids, window=6)[:, :, at]
    assert torch.equal(changed, sees)
    assert not sees[:, :at].any()
    assert sees[:, at].all()


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
