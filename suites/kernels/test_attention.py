"""What is particular to the three forms of attention: attention, mla and dsa_indexer.

B batch, T tokens, Hq query heads, Hkv key/value heads, P head dim, J index heads, K chosen keys per query.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention import attention, attention_mask, attention_step, qk_norm, rope
from kernels.dsa_indexer import (
    dsa_attention,
    dsa_choice,
    dsa_chosen_scores,
    dsa_distribution,
    dsa_indexer,
    dsa_indexer_loss,
    dsa_scores,
)
from kernels.mla import mla, mla_absorbed
from suites.ops import dsa_indexer as dsa
from suites.ops import mla as mla_op
from suites.ops.attention import make_inputs
from suites.ops.spec import Case
from suites.support.comparison import DTYPES, doubled, error, gradients
from suites.support.custom_ops import check_compiled, refused
from suites.support.lanes import Lane, lanes
from suites.support.properties import quick

FP64 = {"rtol": 1e-12, "atol": 1e-12}


@lanes("cpu", "h200")
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("P", [64, 128])
def test_nan_of_a_key_reaches_the_queries_that_see_it(lane: Lane, P: int, softcap: float) -> None:
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
def test_one_token_returns_its_value(lane: Lane) -> None:
    q, k, v, doc_ids = make_inputs(T=1, dtype=torch.bfloat16, device=lane.device)
    assert torch.equal(attention(q, k, v, doc_ids, softcap=30.0), v.repeat_interleave(2, 2))
    inputs = mla_op.make_inputs(T=1, device=lane.device)
    value = torch.einsum("btc,hvc->bthv", inputs[2], inputs[5])
    torch.testing.assert_close(mla(*inputs, softcap=30.0), value, rtol=1e-14, atol=1e-14)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), shift=st.integers(0, 1000))
def test_rope_rotates_by_position_and_scores_by_distance(lane: Lane, seed: int, shift: int) -> None:
    q, k, _, _ = make_inputs(T=9, Hq=2, P=8, seed=seed, device=lane.device)
    positions = torch.arange(9, device=lane.device).expand(2, 9)
    frequency = 100.0 ** (-torch.arange(4, device=lane.device, dtype=torch.float64) / 4)
    angle = positions[..., None, None] * frequency
    expected = torch.complex(q[..., :4], q[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((expected.real, expected.imag), -1)
    torch.testing.assert_close(rope(q, positions, 100.0), expected, **FP64)

    def scores(offset: int) -> Tensor:
        turned = (rope(t, positions + offset, 100.0) for t in (q, k))
        return torch.einsum("bihp,bjhp->bhij", *turned)

    torch.testing.assert_close(scores(shift), scores(0), rtol=1e-10, atol=1e-10)
    assert error(torch.einsum("bihp,bjhp->bhij", q, k), scores(0))[0] > 1e-2


@lanes("cpu", "h200")
def test_rope_and_qk_norm_compute_in_fp32(lane: Lane) -> None:
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
def test_odd_head_dim_has_no_rope(lane: Lane) -> None:
    with refused("rope", "even"):
        rope(torch.zeros(2, 4, 4, 3), torch.zeros(2, 4), 100.0)


# mla.


@lanes("cpu", "h200")
def test_tensors_saved_for_backward_hold_no_keys_or_values(lane: Lane) -> None:
    """Only c, r, queries, output and logsumexp; the traced reference saves K and V, which checks the count itself."""
    B, T, H = 2, 33, 3
    *floats, doc_ids = mla_op.make_inputs(B=B, T=T, H=H, dtype=torch.float32, device=lane.device)
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


@lanes("cpu")
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_decoding_equals_the_row_of_the_last_token(lane: Lane, scale: float | None, softcap: float) -> None:
    q, k, v, doc_ids = make_inputs(device=lane.device)
    step = attention_step(q[:, -1], k, v, doc_ids == doc_ids[:, -1:], scale=scale, softcap=softcap)
    whole = attention(q, k, v, doc_ids, scale=scale, softcap=softcap)
    torch.testing.assert_close(step, whole[:, -1], **FP64)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), T=st.integers(1, 12), last=st.integers(1, 12), capped=st.booleans())
def test_absorbed_decoding_equals_rows_of_the_last_tokens(
    lane: Lane, seed: int, T: int, last: int, capped: bool
) -> None:
    last, options = min(last, T), {"softcap": 3.0 * capped}
    q_nope, q_rope, *cache = mla_op.make_inputs(T=T, H=2, seed=seed, device=lane.device)
    whole = mla(q_nope, q_rope, *cache, **options)
    step = mla_absorbed(q_nope[:, -last:], q_rope[:, -last:], *cache, **options)
    torch.testing.assert_close(step, whole[:, -last:], **FP64)


@lanes("cpu", "h200")
@pytest.mark.parametrize("case", mla_op.SPEC.cases.values(), ids=mla_op.SPEC.cases)
def test_absorbed_form_in_fp64_equals_the_plain_formula(lane: Lane, case: Case) -> None:
    inputs = mla_op.make_inputs(device=lane.device)
    plain = gradients(mla_op.SPEC.naive, *inputs, **case.options)
    for found, expected in zip(gradients(mla_absorbed, *inputs, **case.options), plain, strict=True):
        torch.testing.assert_close(found, expected, **FP64)


@lanes("cpu")
def test_absorbed_form_refuses_what_the_op_refuses(lane: Lane) -> None:
    inputs = mla_op.SPEC.named(**mla_op.SPEC.bad)
    for changes, words in mla_op.refusals(**inputs):
        with refused("mla_absorbed", words):
            mla_absorbed(**inputs | changes)
    fewer = inputs | {name: inputs[name][:, 1:] for name in ("q_nope", "q_rope")}
    with refused("mla", "mla_absorbed takes fewer"):
        mla(**fewer)
    more = inputs | {name: inputs[name][:, 1:] for name in ("c_kv", "k_rope", "doc_ids")}
    with refused("mla_absorbed", "4 queries for 3 tokens"):
        mla_absorbed(**more)
    with refused("mla", "choices are"):
        mla(**inputs, impl="upstream")


# dsa_indexer: the choice, attention over it, and the indexer's training.


def chosen_one_by_one(scores: Tensor, ids: Tensor, top_k: int) -> Tensor:
    """Apply the rule in plain Python: keys s <= t of the same document, by descending score, ties by position."""
    B, T, _ = scores.shape
    found = torch.full((B, T, top_k), -1, dtype=torch.int32)
    for b in range(B):
        for t in range(T):
            keys = [s for s in range(t + 1) if ids[b, s] == ids[b, t]]
            best = sorted(sorted(keys, key=lambda s: -scores[b, t, s].item())[:top_k])
            found[b, t, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return found


@lanes("cpu", "h200")
@pytest.mark.parametrize("top_k", [1, 7, 40])
def test_selected_keys_follow_the_definition(lane: Lane, top_k: int) -> None:
    inputs = dsa.make_index_inputs(device=lane.device)
    q, k, weights, doc_ids = inputs
    dots = torch.relu(torch.einsum("btji,bsi->bjts", q, k))
    scores = (weights.mT.unsqueeze(-1) * dots).sum(1)
    expected = chosen_one_by_one(scores.cpu(), doc_ids.cpu(), top_k)
    for impl in ("op", "eager"):
        found = dsa_indexer(*inputs, top_k=top_k, impl=impl)
        assert found.dtype == torch.int32
        assert torch.equal(found.cpu(), expected)
    without_relu = torch.einsum("btj,btji,bsi->bts", weights, q, k)
    if top_k == 7:
        assert not torch.equal(chosen_one_by_one(without_relu.cpu(), doc_ids.cpu(), top_k), expected)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), T=st.integers(1, 40), top_k=st.integers(1, 20), levels=st.integers(1, 3))
def test_ties_select_the_earlier_key(lane: Lane, seed: int, T: int, top_k: int, levels: int) -> None:
    """Keys with few distinct values: most scores are equal, whole numbers, and exact in every dtype."""
    g = torch.Generator().manual_seed(seed)
    q = torch.ones(1, T, 2, 16)
    k = torch.randint(-1, levels, (1, T, 1), generator=g).expand(1, T, 16) / 8
    weights = torch.tensor([1.0, -0.5]).expand(1, T, 2)
    ids = torch.randint(0, 2, (1, T), generator=g).int()
    scores = 8 * k.relu()[..., 0].unsqueeze(1).expand(1, T, T)  # 16 dims, weights of 1 - 0.5
    for dtype in (torch.float32, torch.bfloat16):
        inputs = (t.to(lane.device, dtype) for t in (q, k, weights))
        found = dsa_indexer(*inputs, ids.to(lane.device), top_k=top_k).cpu()
        assert torch.equal(found, chosen_one_by_one(scores, ids, top_k))


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_unselected_key_scores_clearly_better(lane: Lane, dtype: str) -> None:
    """In 16 bits a product is exact in fp32 and its sum is not: keys closer than rounding may change places."""
    inputs = dsa.make_index_inputs(T=65, dtype=DTYPES[dtype], device=lane.device)
    indices = dsa_indexer(*inputs, top_k=9)
    scores = dsa_scores(*doubled(inputs))
    taken = torch.zeros(2, 65, 66, dtype=torch.bool, device=lane.device)
    taken = taken.scatter(2, torch.where(indices < 0, 65, indices).long(), True)[..., :65]
    assert not (taken & scores.isneginf()).any()
    assert torch.equal(taken.sum(-1), (~scores.isneginf()).sum(-1).clamp(max=9))
    q, k, weights = doubled(inputs[:3])
    largest = q.norm(dim=-1).max() * k.norm(dim=-1).max() * weights.abs().sum(-1).max()
    worst_in = scores.masked_fill(~taken, torch.inf).amin(-1)
    best_out = scores.masked_fill(taken, -torch.inf).amax(-1)
    assert (best_out - worst_in).max() <= (16 + 3 + 2) * 2**-23 * largest
    assert (best_out - worst_in.roll(1, 1)).max() > 0.1  # the same bound detects another query's choice


def choose_and_attend(q, k, v, index_q, index_k, weights, doc_ids):
    return dsa_attention(q, k, v, dsa_indexer(index_q, index_k, weights, doc_ids, top_k=5))


def learn(q, k, index_q, index_k, weights, indices):
    target = dsa_distribution(q, k, indices, **dsa.SCALED)
    return dsa_indexer_loss(index_q, index_k, weights, indices, target)


# Program -> the batch's own tensors and the indexer's, batch sizes, the op that runs twice, its tolerance, all ops.
COMPILED: dict[str, tuple[Any, ...]] = {
    "choice and attention": (
        choose_and_attend, 3, dsa.make_index_inputs, (2, 3), "dsa_attention", 0.0,
        ["bumpgate.dsa_indexer_fwd.default", "bumpgate.dsa_attention_fwd.default"],
    ),
    "loss": (
        learn, 2, dsa.make_score_inputs, (2, 3, 5), "dsa_chosen_scores", 1e-6,
        ["bumpgate.dsa_distribution_fwd.default", "bumpgate.dsa_chosen_scores_fwd.default"],
    ),
}  # fmt: skip


@lanes("cpu", "h200")
@pytest.mark.parametrize("name", COMPILED)
def test_dsa_programs_compile_to_one_graph(lane: Lane, name: str) -> None:
    """Nothing on the way reads data on the host: fullgraph would fail."""
    program, own, make_index, batch_sizes, op, tolerance, expected = COMPILED[name]
    sizes = [{"B": B, "T": 16, "dtype": torch.float32, "device": lane.device} for B in batch_sizes]
    batches = [(*dsa.make_inputs(**size)[:own], *make_index(**size)) for size in sizes]
    report = check_compiled(
        program, lambda f, inputs: gradients(f, *inputs), batches,
        op=op, calls=1, dynamic=range(len(batches[0])), tolerance=tolerance,
    )  # fmt: skip
    (graph,) = report.graphs
    assert [name for name in graph.operators if name.startswith("bumpgate")] == expected
    if name == "choice and attention":
        assert {name for name in graph.operators if "getitem" not in name} == {*expected}


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), none=st.integers(0, 3))
def test_index_order_and_padding_do_not_matter(lane: Lane, seed: int, none: int) -> None:
    q, k, v, indices = dsa.make_inputs(T=17, seed=seed, device=lane.device)
    more = torch.nn.functional.pad(indices, (none, 0), value=-1)
    shuffled = more[..., torch.randperm(more.shape[-1], generator=torch.Generator().manual_seed(seed))]
    pairs = zip(gradients(dsa_attention, q, k, v, shuffled), gradients(dsa_attention, q, k, v, indices))
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, **FP64)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), at=st.integers(0, 15))
def test_future_and_other_documents_change_no_bit(lane: Lane, seed: int, at: int) -> None:
    """Neither the choice nor the output: a token that is not visible may be nan."""
    sizes = {"T": 16, "dtype": torch.float32, "seed": seed, "device": lane.device}
    q, k, v, _ = dsa.make_inputs(**sizes)
    index_q, index_k, weights, doc_ids = dsa.make_index_inputs(**sizes)
    before = dsa_indexer(index_q, index_k, weights, doc_ids, top_k=5)
    outs = dsa_attention(q, k, v, before)
    index_k[:, at] = k[:, at] = v[:, at] = float("nan")
    after = dsa_indexer(index_q, index_k, weights, doc_ids, top_k=5)
    seen = attention_mask(doc_ids)[:, :, at]
    assert torch.equal(before[~seen], after[~seen])
    assert torch.equal(outs[~seen], dsa_attention(q, k, v, after)[~seen])
    chosen = (before == at).any(-1)
    assert torch.equal(dsa_attention(q, k, v, before).isnan().flatten(2).all(2), chosen)


@lanes("cpu", "h200")
def test_query_without_keys_gives_zeros(lane: Lane) -> None:
    q, k, v, indices = dsa.make_inputs(dtype=torch.float32, device=lane.device)
    indices[:, 5] = -1
    indices[:, :, 0] = torch.where(indices[:, :, 0] == 5, -1, indices[:, :, 0])
    for impl in ("op", "eager"):
        found = gradients(dsa_attention, q, k, v, indices, softcap=2.0, impl=impl)
        assert not any(t[:, 5].any() for t in found[:2])
        assert all(t.isfinite().all() for t in found)


@lanes("cpu", "h200")
def test_fp64_weights_and_scores_equal_gathered_dense_ones(lane: Lane) -> None:
    q, k, _, indices = dsa.make_inputs(device=lane.device)
    inputs = dsa.make_score_inputs(device=lane.device)
    weights, scores = [], []
    for impl in ("naive", "op", "eager"):
        weights.append(dsa_distribution(q, k, indices, **dsa.SCALED, impl=impl))
        scores.append(gradients(dsa_chosen_scores, *inputs, impl=impl))
        torch.testing.assert_close(weights[-1], weights[0], rtol=1e-12, atol=1e-14)
        for found, expected in zip(scores[-1], scores[0], strict=True):
            torch.testing.assert_close(found, expected, **FP64)


@lanes("cpu", "h200")
def test_gradient_below_fp16_range_is_kept(lane: Lane) -> None:
    """A mean over B T queries with a loss weight of 1e-3 gives 1e-9 per key; fp16's least number is 6e-8."""
    q, k, weights, indices = dsa.make_score_inputs(dtype=torch.float16, device=lane.device)
    leaves = [t.requires_grad_() for t in (q, k, weights.float())]
    scores = dsa_chosen_scores(*leaves, indices)
    size = 2.0**-32
    g = torch.randn(scores.shape, generator=torch.Generator().manual_seed(0)).to(scores)
    large = torch.autograd.grad(scores, leaves, g, retain_graph=True)[2]
    small = torch.autograd.grad(scores, leaves, g * size)[2]
    torch.testing.assert_close(small / size, large, rtol=1e-3, atol=1e-3)


@lanes("cpu", "h200")
def test_gradients_are_bit_repeatable(lane: Lane) -> None:
    inputs = dsa.make_score_inputs(T=200, K=40, dtype=torch.bfloat16, device=lane.device)
    first, again = (gradients(dsa_chosen_scores, *inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))


@lanes("cpu", "h200")
def test_unselected_keys_are_not_read(lane: Lane) -> None:
    q, k, weights, indices = dsa.make_score_inputs(T=34, dtype=torch.float32, device=lane.device)
    indices = torch.where(indices % 3 == 0, -1, indices)
    k[:, ::3] = float("nan")
    scores, dq, dk, dweights = gradients(dsa_chosen_scores, q, k, weights, indices)
    assert all(t.isfinite().all() for t in (scores, dq, dweights))
    assert not dk[:, ::3].any()
    assert dk[:, 1::3].abs().max() > 0.1


@lanes("cpu", "h200")
def test_loss_is_kl_divergence_over_selected_keys(lane: Lane) -> None:
    """Against the definition cell by cell over all keys, and 0 if the indexer and the attention agree."""
    q, k, _, _ = dsa.make_inputs(T=11, device=lane.device)
    index = dsa.make_index_inputs(T=11, device=lane.device)
    indices = dsa_indexer(*index, top_k=4)
    target = dsa_distribution(q, k, indices)
    torch.testing.assert_close(target.sum(-1), torch.ones_like(target[..., 0]), rtol=1e-12, atol=0)
    scores, total = dsa_scores(*index), 0.0
    for b, t in [(b, t) for b in range(2) for t in range(11)]:
        keys = [s for s in indices[b, t].tolist() if s >= 0]
        value = k[b, keys].repeat_interleave(2, 1)
        p = torch.softmax(torch.einsum("hp,shp->hs", q[b, t], value) / 4, -1).mean(0)
        total += (p * (p.log() - torch.log_softmax(scores[b, t, keys], -1))).sum()
    loss = dsa_indexer_loss(*index[:3], indices, target)
    torch.testing.assert_close(loss, total / 22, rtol=1e-12, atol=0)
    assert loss > 1e-2
    itself = scores.gather(2, indices.long().clamp(min=0)).masked_fill(indices < 0, -torch.inf)
    assert dsa_indexer_loss(*index[:3], indices, itself.softmax(-1)).abs() < 1e-12


@lanes("cpu", "h200")
def test_indexer_gets_gradients_from_the_loss_only(lane: Lane) -> None:
    index = dsa.make_index_inputs(B=1, T=7, J=2, width=4, device=lane.device)
    leaves = [t.requires_grad_() for t in index[:3]]
    q, k, _, _ = dsa.make_inputs(B=1, T=7, device=lane.device)
    indices = dsa_indexer(*index, top_k=3)
    target = dsa_distribution(q.requires_grad_(), k, indices)
    assert not indices.requires_grad
    assert not target.requires_grad
    assert torch.autograd.gradcheck(lambda *t: dsa_indexer_loss(*t, indices, target), leaves)
    grads = torch.autograd.grad(dsa_indexer_loss(*leaves, indices, target), leaves)
    assert all(g.abs().max() > 1e-4 for g in grads)


@lanes("cpu")
def test_loss_ignores_values_without_a_key(lane: Lane) -> None:
    index = dsa.make_index_inputs(B=1, T=5, dtype=torch.float32)
    indices = dsa_indexer(*index, top_k=4)
    target = torch.softmax(torch.zeros(1, 5, 4).masked_fill(indices < 0, -torch.inf), -1)
    found = dsa_indexer_loss(*index[:3], indices, target)
    assert torch.equal(found, dsa_indexer_loss(*index[:3], indices, target.masked_fill(indices < 0, 9.0)))
    nothing = torch.full_like(indices, -1)
    assert dsa_indexer_loss(*index[:3], nothing, torch.zeros_like(target)) == 0
    assert dsa_choice(torch.full((1, 2, 2), -torch.inf), 3).eq(-1).all()


@lanes("cpu")
@pytest.mark.parametrize("function", [dsa_indexer, dsa_indexer_loss, dsa_distribution])
def test_bad_dsa_input_raises_one_line_error(lane: Lane, function: Any) -> None:
    """Of the functions that dsa_attention's spec does not call."""
    inputs, refusals = dsa.other_refusals()[function]
    for op, changes, words in refusals:
        with refused(op, words):
            function(**inputs | changes)
