"""The training of dsa_indexer: its scores of the chosen keys, their gradient, and the divergence from the attention.

B batch, T tokens, J index heads, K chosen keys per query. The plain scores are dense, and gathered by the choice; the
oracle is the reference in fp64, which must agree with them in fp64 first.
"""

from __future__ import annotations

import torch

from kernels.dsa_indexer import (
    dsa_choice,
    dsa_chosen_scores,
    dsa_distribution,
    dsa_indexer,
    dsa_indexer_loss,
    dsa_scores,
)
from kernels.dsa_indexer.naive import dsa_chosen_scores_naive, dsa_distribution_naive
from suites.ops.dsa_indexer import make_index_inputs, make_inputs, make_score_inputs
from suites.support.comparison import (
    gradients,
)
from suites.support.custom_ops import check_compiled, refused
from suites.support.lanes import Lane, lanes

ATTENTION = {"scale": 0.4, "softcap": 2.0}


@lanes("cpu", "h200")
def test_fp64_scores_equal_gathered_dense_scores(lane: Lane):
    inputs = make_score_inputs(device=lane.device)
    plain = gradients(dsa_chosen_scores_naive, *inputs)
    for impl in ("op", "eager"):
        for ours, expected in zip(gradients(dsa_chosen_scores, *inputs, impl=impl), plain, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@lanes("cpu", "h200")
def test_fp64_weights_equal_gathered_dense_weights(lane: Lane):
    q, k, _, indices = make_inputs(device=lane.device)
    for impl in ("op", "eager"):
        found = dsa_distribution(q, k, indices, **ATTENTION, impl=impl)
        torch.testing.assert_close(
            found, dsa_distribution_naive(q, k, indices, **ATTENTION), rtol=1e-12, atol=1e-14
        )


@lanes("cpu", "h200")
def test_gradient_below_fp16_range_is_kept(lane: Lane):
    """A mean over B T queries with a loss weight of 1e-3 gives 1e-9 per key; fp16's least number is 6e-8."""
    q, k, weights, indices = make_score_inputs(dtype=torch.float16, device=lane.device)
    leaves = [t.requires_grad_() for t in (q, k, weights.float())]
    scores = dsa_chosen_scores(*leaves, indices)
    size = 2.0**-32
    g = torch.randn(scores.shape, generator=torch.Generator().manual_seed(0)).to(scores)
    large = torch.autograd.grad(scores, leaves, g, retain_graph=True)[2]
    small = torch.autograd.grad(scores, leaves, g * size)[2]
    torch.testing.assert_close(small / size, large, rtol=1e-3, atol=1e-3)


@lanes("cpu", "h200")
def test_gradients_are_bit_repeatable(lane: Lane):
    inputs = make_score_inputs(T=200, K=40, dtype=torch.bfloat16, device=lane.device)
    first, again = (gradients(dsa_chosen_scores, *inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))


@lanes("cpu", "h200")
def test_loss_compiles_to_one_graph_for_every_batch_size(lane: Lane):
    """Nothing on the way reads data on the host: fullgraph would fail."""

    def learn(q, k, index_q, index_k, weights, indices):
        target = dsa_distribution(q, k, indices, **ATTENTION)
        return dsa_indexer_loss(index_q, index_k, weights, indices, target)

    def train(function, inputs):
        return gradients(function, *inputs)

    sizes = [{"B": B, "T": 16, "dtype": torch.float32, "device": lane.device} for B in (2, 3, 5)]
    batches = [(*make_inputs(**size)[:2], *make_score_inputs(**size)) for size in sizes]
    report = check_compiled(
        learn, train, batches, op="dsa_chosen_scores", calls=1, dynamic=range(6), tolerance=1e-6
    )
    (graph,) = report.graphs
    found = [name for name in graph.operators if name.startswith("bumpgate")]
    assert found == ["bumpgate.dsa_distribution_fwd.default", "bumpgate.dsa_chosen_scores_fwd.default"]


@lanes("cpu", "h200")
def test_unselected_keys_are_not_read(lane: Lane):
    q, k, weights, indices = make_score_inputs(T=34, dtype=torch.float32, device=lane.device)
    indices = torch.where(indices % 3 == 0, -1, indices)
    k[:, ::3] = float("nan")
    scores, dq, dk, dweights = gradients(dsa_chosen_scores, q, k, weights, indices)
    assert all(t.isfinite().all() for t in (scores, dq, dweights))
    assert not dk[:, ::3].any()
    assert dk[:, 1::3].abs().max() > 0.1


@lanes("cpu", "h200")
def test_loss_is_kl_divergence_over_selected_keys(lane: Lane):
    """Against the definition cell by cell over all keys, and 0 if the indexer and the attention agree."""
    q, k, _, _ = make_inputs(T=11, device=lane.device)
    index = make_index_inputs(T=11, device=lane.device)
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
    itself = dsa_scores(*index).gather(2, indices.long().clamp(min=0)).masked_fill(indices < 0, -torch.inf)
    assert dsa_indexer_loss(*index[:3], indices, itself.softmax(-1)).abs() < 1e-12


@lanes("cpu", "h200")
def test_indexer_gets_gradients_from_the_loss_only(lane: Lane):
    index = make_index_inputs(B=1, T=7, J=2, width=4, device=lane.device)
    leaves = [t.requires_grad_() for t in index[:3]]
    q, k, _, _ = make_inputs(B=1, T=7, device=lane.device)
    indices = dsa_indexer(*index, top_k=3)
    assert not indices.requires_grad
    target = dsa_distribution(q.requires_grad_(), k, indices)
    assert not target.requires_grad
    assert torch.autograd.gradcheck(lambda *t: dsa_indexer_loss(*t, indices, target), leaves)
    grads = torch.autograd.grad(dsa_indexer_loss(*leaves, indices, target), leaves)
    assert all(g.abs().max() > 1e-4 for g in grads)


@lanes("cpu")
def test_loss_ignores_values_without_a_key(lane: Lane):
    index = make_index_inputs(B=1, T=5, dtype=torch.float32)
    indices = dsa_indexer(*index, top_k=4)
    target = torch.softmax(torch.zeros(1, 5, 4).masked_fill(indices < 0, -torch.inf), -1)
    found = dsa_indexer_loss(*index[:3], indices, target)
    assert torch.equal(found, dsa_indexer_loss(*index[:3], indices, target.masked_fill(indices < 0, 9.0)))
    nothing = torch.full_like(indices, -1)
    assert dsa_indexer_loss(*index[:3], nothing, torch.zeros_like(target)) == 0
    assert dsa_choice(torch.full((1, 2, 2), -torch.inf), 3).eq(-1).all()


@lanes("cpu")
def test_bad_input_raises_one_line_error(lane: Lane):
    q, k, weights, indices = make_score_inputs(T=4, K=3, dtype=torch.float32)
    target = torch.ones(2, 4, 3)
    bad = [
        ((q, k, weights, indices, target[..., :2]), {}, "dsa_indexer_loss", "target has shape"),
        ((q, k, weights, indices, target.int()), {}, "dsa_indexer_loss", "floating point"),
        ((q[0], k, weights, indices, target), {}, "dsa_chosen_scores", "3-d"),
        ((q, k, weights, indices.long(), target), {}, "dsa_chosen_scores", "int32"),
        ((q, k, weights, indices, target), {"impl": "fast"}, "dsa_chosen_scores", "choices are"),
    ]
    for inputs, options, op, words in bad:
        with refused(op, words):
            dsa_indexer_loss(*inputs, **options)
    q, k, _, indices = make_inputs(T=4, dtype=torch.float32)
    with refused("dsa_distribution", "choices are"):
        dsa_distribution(q, k, indices, impl="fast")
