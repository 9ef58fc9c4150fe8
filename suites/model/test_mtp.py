"""MTP: the loss against a loop over positions, documents, the detached trunk, and one graph for all steps.

B batch, T tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bumpgate.plugin.instruments import DynamoWatch, dynamo_config
from launch.contract import load
from model import preset
from model.config import MTPConfig
from model.head import IGNORE, LossHead
from model.hybrid import documents, next_token_targets
from model.layers import rms_norm
from model.mtp import MTPHead, documents_of_targets, further
from suites.support.hybrids import SEED, token_batch
from suites.support.lanes import Lane, lanes

INSTRUMENTS = ("graphs", "graph_breaks")
T = 40


def head(lane: Lane, steps: int = 2, kind: type[MTPHead] = MTPHead) -> MTPHead:
    torch.manual_seed(SEED)
    config = preset("nam12", "narrow", mtp=MTPConfig(steps=steps, decay=0.6, weight=0.3))
    return kind(config).to(lane.device).double()


def batch(lane: Lane, head: MTPHead, tokens: int = T) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the stream (B,T,D), embedding (V,D), ids (B,T) with short documents, targets (B,T)."""
    config = preset("nam12", "narrow")
    ids = token_batch(config, 2, tokens, device=lane.device)
    g = torch.Generator().manual_seed(2)
    x, embedding = (
        torch.randn(*shape, config.d_model, generator=g, dtype=torch.float64).to(lane.device)
        for shape in ((2, tokens), (config.vocab_size,))
    )
    return x, embedding, ids, next_token_targets(ids, documents(ids, config.bos_id)[0])


def by_positions(head: MTPHead, x: Tensor, embedding: Tensor, ids: Tensor, doc_ids: Tensor) -> list[Tensor]:
    """Compute the loss of each step, with tokens and targets looked up one position at a time."""
    (B, T), h, losses = ids.shape, x, []
    positions = torch.arange(T, dtype=torch.int32, device=ids.device).expand(B, T)
    for k in range(1, len(head.weights) + 1):
        token = torch.zeros_like(x)
        for b in range(B):
            for t in range(T - k):
                token[b, t] = embedding[ids[b, t + k]]
        pair = torch.cat((rms_norm(h, head.eps), rms_norm(token, head.eps)), dim=-1)
        h = head.block(head.merge(pair), doc_ids, positions)
        log_p = F.log_softmax(head.logits(h, embedding), dim=-1)
        found = [
            -log_p[b, t, ids[b, t + k + 1]]
            for b in range(B)
            for t in range(T - k - 1)
            if doc_ids[b, t] == doc_ids[b, t + k + 1]
        ]
        losses.append(torch.stack(found).mean())
    return losses


class ReductionNone(MTPHead):
    """Injected fault: the unreduced loss has a zero where there is no target, and its mean counts them all."""

    def mean_loss(self, h: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(h, embedding).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="none").mean()


@lanes("cpu", "h200")
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_mtp_equals_the_loop_over_positions(lane: Lane, steps: int) -> None:
    module = head(lane, steps)
    x, embedding, ids, targets = batch(lane, module)
    doc_ids, _ = documents(ids, 2)
    with torch.no_grad():
        future = by_positions(module, x, embedding, ids, doc_ids)
        weights = [0.6**k / sum(0.6**j for j in range(1, steps + 1)) for k in range(1, steps + 1)]
        plain = LossHead(module.softcap, module.eps)(x, embedding, targets)
        oracle = plain + 0.3 * sum(w * loss for w, loss in zip(weights, future))
        torch.testing.assert_close(module(x, embedding, targets), oracle, rtol=1e-12, atol=1e-12)
        wrong = head(lane, steps, ReductionNone)(x, embedding, targets)
    assert float((wrong - oracle).abs()) > 1e-2, "the mean over all positions must show"


@lanes("cpu", "h200")
def test_mtp_gradients_equal_the_loop(lane: Lane) -> None:
    """Of the embedding, too, which the further tokens are read from."""
    module = head(lane)
    x, embedding, ids, targets = batch(lane, module)
    leaves = [embedding.requires_grad_(), *module.parameters()]
    found = torch.autograd.grad(sum(module.future(x, embedding, targets)), leaves)
    doc_ids, _ = documents(ids, 2)
    oracle = torch.autograd.grad(sum(by_positions(module, x, embedding, ids, doc_ids)), leaves)
    for ours, theirs in zip(found, oracle):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


class OneDocument(MTPHead):
    """Injected fault: attention of the shared block over all documents of the row."""

    def future(self, x: Tensor, embedding: Tensor, targets: Tensor) -> list[Tensor]:
        attend = self.block.forward
        self.block.forward = lambda h, doc_ids, positions: attend(h, torch.zeros_like(doc_ids), positions)
        return super().future(x, embedding, targets)


@lanes("cpu", "h200")
def test_loss_is_additive_over_documents(lane: Lane) -> None:
    """The loss of [A|B] is that of A and of B, weighted by their number of targets: documents are isolated."""
    split, steps = 17, 3

    def apart_and_together(kind: type[MTPHead]) -> list[tuple[Tensor, Tensor]]:
        module = head(lane, steps, kind)
        x, embedding, ids, _ = batch(lane, module)
        ids[ids == 2] = 9
        ids[:, 0] = ids[:, split] = 2
        both = next_token_targets(ids, documents(ids, 2)[0])
        parts = [(x[:, s], both[:, s]) for s in (slice(0, split), slice(split, T))]
        together = module.future(x, embedding, both)
        apart = [module.future(part, embedding, targets) for part, targets in parts]
        pairs = []
        for k in range(1, steps + 1):
            counts = [2 * (targets.shape[1] - 1 - k) for _, targets in parts]
            summed = sum(n * losses[k - 1] for n, losses in zip(counts, apart))
            pairs.append((together[k - 1], summed / sum(counts)))
        return pairs

    with torch.no_grad():
        for together, apart in apart_and_together(MTPHead):
            torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)
        assert any(float((a - b).abs()) > 1e-6 for a, b in apart_and_together(OneDocument))


@lanes("cpu", "h200")
def test_documents_are_recovered_from_targets(lane: Lane) -> None:
    ids = torch.tensor([[2, 9, 8, 2, 7, 2], [9, 9, 2, 6, 5, 4]])
    doc_ids, _ = documents(ids, 2)
    targets = next_token_targets(ids, doc_ids)
    counted = documents_of_targets(targets)
    assert torch.equal(counted - counted[:, :1], doc_ids - doc_ids[:, :1])
    assert further(targets).tolist() == [[8, -1, -1, -1, -1, -1], [-1, -1, 5, 4, -1, -1]]


@lanes("cpu", "h200")
def test_trunk_is_detached_and_short_rows_are_finite(lane: Lane) -> None:
    module = head(lane, steps=3)
    x, embedding, _, targets = batch(lane, module, tokens=3)
    x.requires_grad_()
    embedding.requires_grad_()
    losses = module.future(x, embedding, targets)
    assert float(losses[-1].detach()) == 0.0, "no token is three steps on"
    sum(losses).backward()
    assert x.grad is None
    assert embedding.grad.any()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@lanes("cpu", "h200")
def test_mtp_is_one_graph_for_all_steps(lane: Lane, row, canaries) -> None:
    canaries(*INSTRUMENTS)
    graphs, calls = {}, 0
    for steps in (1, 2, 3):
        module = head(lane, steps)
        x, embedding, _, targets = batch(lane, module)
        with dynamo_config(load().dynamo), DynamoWatch() as watch:
            compiled = torch.compile(module, backend=watch.backend("eager"))
            loss = compiled(x, embedding, targets)
            torch.testing.assert_close(loss, module(x, embedding, targets), rtol=1e-12, atol=1e-12)
            report = watch.refresh()
        graphs[steps] = report.unique_graphs + len(report.breaks)
        calls += report.calls
    row.count(
        f"model/mtp-{lane.name}/graphs", max(graphs.values()), expected=1, rule="C27", seen=calls,
        evidence=[f"{steps} steps: {n} graphs and breaks" for steps, n in graphs.items()],
    )  # fmt: skip
    assert min(graphs.values()) == 1
