"""mla against the plain formula head by head, and its two forms against each other.

B batch, T tokens, H heads, C latent dim, P, R and Pv head dims of q.k without and with position and of the values.
The plain formula loops over the heads with an explicit mask; the oracle is the reference in fp64, which must agree with
the plain formula in fp64 first.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.mla import mla, mla_absorbed
from kernels.mla.naive import mla_naive
from suites.ops.mla import CASES, SPEC, make_inputs, refusals
from suites.support.comparison import (
    gradients,
)  # fmt: skip
from suites.support.custom_ops import refused
from suites.support.lanes import Lane, lanes

quick = settings(derandomize=True, max_examples=15, deadline=None)


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
