"""mla against the plain formula head by head, and its two forms against each other.

B batch, T tokens, H heads, C latent dim, P, R and Pv head dims of q.k without and with position and of the values.
The plain formula loops over the heads with an explicit mask; the oracle is the reference in fp64, which must agree with
the plain formula in fp64 first.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.mla import mla, mla_absorbed, mla_eager
from kernels.mla.naive import mla_naive, seen_by
from suites.ops.mla import CASES, NAMES, SPEC, make_inputs, refusals
from suites.support.comparison import (
    AT_MOST,
    DTYPES,
    Named,
    doubled,
    error,
    error_ratios,
    gradients,
    pooled,
    report_pooled,
)  # fmt: skip
from suites.support.custom_ops import check_op, refused, strided, turned
from suites.support.lanes import Lane, lanes

quick = settings(derandomize=True, max_examples=15, deadline=None)


def rounding_bound(q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, scale: float) -> float:
    """Bound the rounding error of `out` in fp32.

    A key is off by C u of its size and a logit by P + R + C + 4 of them, a weight exp(s - lse) by twice that, and the
    weighted mean of v adds T + C + 8 roundings: all of it relative to the largest |v|.
    """
    C, T = c_kv.shape[2], c_kv.shape[1]
    widest = q_nope.shape[3] + q_rope.shape[3] + C + 4
    c = c_kv.double().norm(dim=-1).max()
    nope = q_nope.double().norm(dim=-1).max() * c * W_uk.double().flatten(1).norm(dim=-1).max()
    rope = q_rope.double().norm(dim=-1).max() * k_rope.double().norm(dim=-1).max()
    largest = c * W_uv.double().norm(dim=-1).max()
    return float((2 * widest * scale * (nope + rope) + T + C + 8) * 2**-24 * largest)


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_that_of_the_plain_formula(lane: Lane, dtype: str, row):
    """Over several seeds: a row with one key has a gradient of 0, and the rounding noise of either side is random."""

    def run(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Named:
        return pooled(
            dict(zip(("out", *NAMES.split()), gradients(function, *inputs, **CASES[case]))) for case in CASES
        )

    problems = [make_inputs(dtype=DTYPES[dtype], device=lane.device, seed=seed) for seed in range(8)]
    oracle = pooled(run(mla_eager, doubled(inputs)) for inputs in problems)
    plain = pooled(run(mla_naive, inputs) for inputs in problems)
    found = pooled(run(mla, inputs) for inputs in problems)
    assert all(t.dtype == DTYPES[dtype] for t in found.values())
    report_pooled(row, f"kernels/mla-{lane.name}-{dtype}", found, plain, oracle, inputs=NAMES.split())


@lanes("cpu", "h200")
@pytest.mark.parametrize(
    "size",
    [{"P": 128, "R": 64, "Pv": 128}, {"B": 1, "T": 1035, "H": 1}],
    ids=["wide heads", "many blocks"],
)
def test_other_tiles_are_as_accurate(lane: Lane, size: dict[str, int]):
    """1035 tokens: a block of queries has full blocks of keys, in a document that begins inside a block."""
    inputs = make_inputs(dtype=torch.bfloat16, device=lane.device, **size)
    ratios = error_ratios(mla, mla_naive, mla_eager, inputs, softcap=2.0)
    assert ratios.forward <= AT_MOST["forward"]
    assert ratios.gradient <= AT_MOST["gradient"]


@lanes("cpu", "h200")
def test_fp32_error_is_rounding_only(lane: Lane):
    inputs = make_inputs(dtype=torch.float32, device=lane.device)
    q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids = inputs
    options = {"scale": 0.2, "softcap": 2.0}
    oracle = mla_eager(*doubled(inputs), **options)
    bound = rounding_bound(*inputs[:-1], 0.2)
    assert bound < 5e-3
    assert error(mla(*inputs, **options), oracle)[0] <= bound
    assert error(mla_absorbed(*inputs, **options), oracle)[0] <= bound
    wrong = {
        "softcap before scale": mla(*inputs, **options | {"softcap": 2.0 / 0.2}),
        "no softcap": mla(*inputs, **options | {"softcap": 0.0}),
        "not causal": mla(*inputs, **options, causal=False),
        "scale of P alone": mla(*inputs, softcap=2.0, scale=16**-0.5),
        "documents ignored": mla(*inputs[:-1], torch.zeros_like(doc_ids), **options),
        "no positions": mla(q_nope, q_rope, c_kv, torch.zeros_like(k_rope), W_uk, W_uv, doc_ids, **options),
        "keys of other heads": mla(q_nope, q_rope, c_kv, k_rope, W_uk.roll(1, 0), W_uv, doc_ids, **options),
        "values of other heads": mla(q_nope, q_rope, c_kv, k_rope, W_uk, W_uv.roll(1, 0), doc_ids, **options),
        "a transposed W_uk": mla(q_nope, q_rope, c_kv, k_rope, W_uk.mT, W_uv, doc_ids, **options),
    }
    missed = [name for name, out in wrong.items() if error(out, oracle)[0] <= bound]
    assert not missed


@lanes("cpu")
@pytest.mark.parametrize("case", CASES)
def test_bf16_is_computed_in_fp32_and_cast_once(lane: Lane, case: str):
    """Only the plain-torch forms: a tensor-core kernel rounds its keys, its values and its weights."""
    inputs = make_inputs(dtype=torch.bfloat16)
    oracle = mla_eager(*doubled(inputs), **CASES[case])
    bound = 2**-8 * oracle.abs() + rounding_bound(*inputs[:-1], CASES[case].get("scale", 0.25))
    for form in (mla, mla_absorbed):
        assert ((form(*inputs, **CASES[case]) - oracle).abs() <= bound).all()
    assert ((mla_naive(*inputs, **CASES[case]) - oracle).abs() > bound).any()


@lanes("cpu", "h200")
def test_op_contract(lane: Lane):
    FWD, BWD = torch.ops.bumpgate.mla_fwd, torch.ops.bumpgate.mla_bwd
    inputs = make_inputs(B=2, T=9, H=2, C=4, P=4, R=4, Pv=8, dtype=torch.float32, device=lane.device)
    gapped, options = strided(inputs), (0.5, 2.0, True)
    out, lse = FWD(*gapped, *options)
    assert lse.dtype == torch.float32
    assert torch.equal(out, FWD(*inputs, *options)[0])
    leaves = [t.clone().requires_grad_() for t in gapped[:-1]]
    assert [t.requires_grad for t in FWD(*leaves, gapped[-1], *options)] == [True, False]
    check_op(FWD, (*gapped, *options), differentiable=True)
    check_op(BWD, (*(t.detach() for t in gapped), out, lse, turned(out, 1, 2), *options))


@lanes("cpu", "h200")
def test_tensors_saved_for_backward_hold_no_keys_or_values(lane: Lane):
    """Only c, r, queries, output and logsumexp; the traced reference saves K and V, which checks the count itself."""
    B, T, H = 2, 33, 3
    *floats, doc_ids = make_inputs(B=B, T=T, H=H, dtype=torch.float32, device=lane.device)
    leaves = [t.requires_grad_() for t in floats]

    def kept(impl: str) -> int:
        sizes: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            sizes[t.data_ptr()] = t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = mla(*leaves, doc_ids, impl=impl)
        expected = sum(t.numel() for t in (*leaves, doc_ids, out)) + B * H * T
        return sum(sizes.values()) - expected

    assert kept("op") == 0
    assert kept("eager") > B * H * T * T


@lanes("cpu", "h200")
@quick
@given(
    seed=st.integers(0, 99),
    T=st.integers(1, 12),
    last=st.integers(1, 12),
    softcap=st.sampled_from([0.0, 3.0]),
)
def test_absorbed_decoding_equals_rows_of_the_last_tokens(
    lane: Lane, seed: int, T: int, last: int, softcap: float
):
    last = min(last, T)
    q_nope, q_rope, *cache = make_inputs(T=T, H=2, seed=seed, device=lane.device)
    whole = mla(q_nope, q_rope, *cache, softcap=softcap)
    step = mla_absorbed(q_nope[:, -last:], q_rope[:, -last:], *cache, softcap=softcap)
    torch.testing.assert_close(step, whole[:, -last:], rtol=1e-12, atol=1e-12)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), first=st.integers(1, 12), second=st.integers(1, 12))
def test_packed_document_equals_document_alone(lane: Lane, seed: int, first: int, second: int):
    q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, _ = make_inputs(
        T=first + second, H=2, seed=seed, device=lane.device
    )
    doc_ids = torch.tensor([[0] * first + [1] * second] * 2, dtype=torch.int32, device=lane.device)
    packed = mla(q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids)[:, first:]
    b = slice(first, None)
    alone = mla(q_nope[:, b], q_rope[:, b], c_kv[:, b], k_rope[:, b], W_uk, W_uv, doc_ids[:, b])
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-12)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), at=st.integers(0, 15))
def test_future_and_other_documents_change_no_bit(lane: Lane, seed: int, at: int):
    inputs = make_inputs(T=16, H=2, dtype=torch.float32, seed=seed, device=lane.device)
    before = mla(*inputs)
    inputs[2][:, at] += 1
    inputs[3][:, at] -= 1
    changed = (mla(*inputs) != before).flatten(2).any(2)
    assert torch.equal(changed, seen_by(inputs[-1])[:, :, at])


@lanes("cpu", "h200")
def test_one_token_returns_its_value(lane: Lane):
    inputs = make_inputs(T=1, device=lane.device)
    expected = torch.einsum("btc,hvc->bthv", inputs[2], inputs[5])
    torch.testing.assert_close(mla(*inputs, softcap=30.0), expected, rtol=1e-14, atol=1e-14)


@lanes("cpu", "h200")
@pytest.mark.parametrize("case", CASES)
def test_absorbed_form_in_fp64_equals_the_plain_formula(lane: Lane, case: str):
    inputs = make_inputs(device=lane.device)
    plain = gradients(mla_naive, *inputs, **CASES[case])
    for found, expected in zip(gradients(mla_absorbed, *inputs, **CASES[case]), plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@lanes("cpu")
def test_absorbed_form_refuses_what_the_op_refuses(lane: Lane):
    inputs = SPEC.named(**SPEC.bad)
    for changes, words in refusals(**inputs):
        with refused("mla_absorbed", words):
            mla_absorbed(**inputs | changes)


@lanes("cpu")
def test_number_of_queries_selects_the_form(lane: Lane):
    inputs = SPEC.named(**SPEC.bad)
    fewer = inputs | {name: inputs[name][:, 1:] for name in ("q_nope", "q_rope")}
    with refused("mla", "mla_absorbed takes fewer"):
        mla(**fewer)
    more = inputs | {name: inputs[name][:, 1:] for name in ("c_kv", "k_rope", "doc_ids")}
    with refused("mla_absorbed", "4 queries for 3 tokens"):
        mla_absorbed(**more)
    with refused("mla", "choices are"):
        mla(**inputs, impl="upstream")
