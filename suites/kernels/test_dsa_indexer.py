"""dsa_indexer against a choice written out query by query, dsa_attention against dense attention under a mask.

B batch, T tokens, J index heads, K chosen keys per query, Hq and Hkv heads, P head dim.
The plain attention is dense, with a mask of the chosen keys: nothing is gathered or scattered. The oracle is the
reference in fp64, which must agree with it in fp64 first.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.dsa_indexer import (
    dsa_attention,
    dsa_indexer,
    dsa_scores,
)
from suites.ops.dsa_indexer import make_index_inputs, make_inputs
from suites.ops.spec import packed_documents
from suites.support.comparison import (
    DTYPES,
    doubled,
    gradients,
)  # fmt: skip
from suites.support.custom_ops import check_compiled, refused
from suites.support.lanes import Lane, lanes

quick = settings(derandomize=True, max_examples=15, deadline=None)


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
def test_selected_keys_follow_the_definition(lane: Lane, top_k: int):
    inputs = make_index_inputs(device=lane.device)
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
def test_ties_select_the_earlier_key(lane: Lane, seed: int, T: int, top_k: int, levels: int):
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
def test_no_unselected_key_scores_clearly_better(lane: Lane, dtype: str):
    """In 16 bits a product is exact in fp32 and its sum is not: keys closer than rounding may change places."""
    inputs = make_index_inputs(T=65, dtype=DTYPES[dtype], device=lane.device)
    q, k, weights, _ = inputs
    indices = dsa_indexer(*inputs, top_k=9)
    scores = dsa_scores(*doubled(inputs))
    taken = torch.zeros(2, 65, 66, dtype=torch.bool, device=lane.device)
    taken = taken.scatter(2, torch.where(indices < 0, 65, indices).long(), True)[..., :65]
    assert not (taken & scores.isneginf()).any()
    assert torch.equal(taken.sum(-1), (~scores.isneginf()).sum(-1).clamp(max=9))
    largest = (
        q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max() * weights.double().abs().sum(-1).max()
    )
    worst_in = scores.masked_fill(~taken, torch.inf).amin(-1)
    best_out = scores.masked_fill(taken, -torch.inf).amax(-1)
    assert (best_out - worst_in).max() <= (16 + 3 + 2) * 2**-23 * largest
    assert (best_out - worst_in.roll(1, 1)).max() > 0.1  # the same bound detects another query's choice


@lanes("cpu", "h200")
def test_selection_and_attention_compile_together(lane: Lane):
    """Nothing on the way reads data on the host: fullgraph would fail."""

    def choose_and_attend(q, k, v, index_q, index_k, weights, doc_ids):
        return dsa_attention(q, k, v, dsa_indexer(index_q, index_k, weights, doc_ids, top_k=5))

    def train(function, inputs):
        return gradients(function, *inputs)

    sizes = [{"B": B, "T": 16, "dtype": torch.float32, "device": lane.device} for B in (2, 3)]
    batches = [(*make_inputs(**size)[:3], *make_index_inputs(**size)) for size in sizes]
    options = {"op": "dsa_attention", "calls": 1, "dynamic": range(7)}
    report = check_compiled(choose_and_attend, train, batches, **options)
    (graph,) = report.graphs
    found = [name for name in graph.operators if "getitem" not in name]
    assert found == ["bumpgate.dsa_indexer_fwd.default", "bumpgate.dsa_attention_fwd.default"]


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), T=st.integers(1, 20), extra=st.integers(0, 3))
def test_selecting_all_keys_equals_dense_attention(lane: Lane, seed: int, T: int, extra: int):
    q, k, v, _ = make_inputs(T=T, seed=seed, device=lane.device)
    doc_ids = packed_documents(2, T).to(lane.device)
    indices = dsa_indexer(*make_index_inputs(T=T, seed=seed, device=lane.device), top_k=T + extra)
    seen = (doc_ids.unsqueeze(2) == doc_ids.unsqueeze(1)).tril().unsqueeze(1)
    q_, k_, v_ = (t.transpose(1, 2) for t in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
    dense = torch.softmax((q_ @ k_.mT / 4).masked_fill(~seen, -torch.inf), -1) @ v_
    torch.testing.assert_close(dsa_attention(q, k, v, indices), dense.transpose(1, 2), rtol=1e-12, atol=1e-12)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), none=st.integers(0, 3))
def test_index_order_and_padding_do_not_matter(lane: Lane, seed: int, none: int):
    q, k, v, indices = make_inputs(T=17, seed=seed, device=lane.device)
    more = torch.nn.functional.pad(indices, (none, 0), value=-1)
    shuffled = more[..., torch.randperm(more.shape[-1], generator=torch.Generator().manual_seed(seed))]
    pairs = zip(gradients(dsa_attention, q, k, v, shuffled), gradients(dsa_attention, q, k, v, indices))
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), at=st.integers(0, 15))
def test_future_and_other_documents_change_no_bit(lane: Lane, seed: int, at: int):
    """Neither the choice nor the output: a token that is not visible may be nan."""
    q, k, v, _ = make_inputs(T=16, dtype=torch.float32, seed=seed, device=lane.device)
    index_q, index_k, weights, doc_ids = make_index_inputs(
        T=16, dtype=torch.float32, seed=seed, device=lane.device
    )
    before = dsa_indexer(index_q, index_k, weights, doc_ids, top_k=5)
    outs = dsa_attention(q, k, v, before)
    index_k[:, at] = k[:, at] = v[:, at] = float("nan")
    after = dsa_indexer(index_q, index_k, weights, doc_ids, top_k=5)
    seen = (doc_ids.unsqueeze(2) == doc_ids.unsqueeze(1)).tril()[:, :, at]
    assert torch.equal(before[~seen], after[~seen])
    assert torch.equal(outs[~seen], dsa_attention(q, k, v, after)[~seen])
    chosen = (before == at).any(-1)
    assert torch.equal(dsa_attention(q, k, v, before).isnan().flatten(2).all(2), chosen)


@lanes("cpu", "h200")
def test_query_without_keys_gives_zeros(lane: Lane):
    q, k, v, indices = make_inputs(dtype=torch.float32, device=lane.device)
    indices[:, 5] = -1
    indices[:, :, 0] = torch.where(indices[:, :, 0] == 5, -1, indices[:, :, 0])
    for impl in ("op", "eager"):
        out, dq, dk, dv = gradients(dsa_attention, q, k, v, indices, softcap=2.0, impl=impl)
        assert not out[:, 5].any()
        assert not dq[:, 5].any()
        assert all(t.isfinite().all() for t in (out, dq, dk, dv))


@lanes("cpu")
def test_bad_indexer_input_raises_one_line_error(lane: Lane):
    q, k, weights, doc_ids = make_index_inputs(B=2, T=4, dtype=torch.float32)
    bad = [
        ((q[0], k, weights, doc_ids), {}, "3-d"),
        ((q, k[:, :3], weights, doc_ids), {}, "k has shape"),
        ((q, k, weights[..., :1], doc_ids), {}, "weights has shape"),
        ((q, k, weights, doc_ids[:, :3]), {}, "doc_ids has shape"),
        ((q, k, weights, doc_ids.long()), {}, "int32"),
        ((q, k.bfloat16(), weights, doc_ids), {}, "one float dtype"),
        ((q, k, weights.int(), doc_ids), {}, "floating point"),
        ((q, k, weights, doc_ids), {"top_k": 0}, "top_k"),
        ((q, k, weights, doc_ids), {"impl": "fast"}, "choices are"),
    ]
    for inputs, options, words in bad:
        with refused("dsa_indexer", words):
            dsa_indexer(*inputs, **{"top_k": 2} | options)
