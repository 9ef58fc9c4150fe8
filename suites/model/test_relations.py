"""Chunk relations against a loop over pairs, a graph whose size is independent of C, and the attention bias.

B batch, T tokens, H heads, C chunks, K edges.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from bumpgate.plugin.instruments import DynamoWatch
from model import preset
from model.config import TreeConfig
from model.features import Features
from model.relations import NO_CHUNK, RELATIONS, RelationBias, chunk_of_token, chunk_relations, started
from suites.model.programs import levels_pair_by_pair, program
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

B, T = 2, 64
SPANS = ((0, 24, 1), (24, T, 2))


def documents_and_program(lane: Lane, chunks: int = 24) -> tuple[Tensor, Features]:
    """Return two documents per row, with one call from the first into the second, which must have no effect."""
    config = preset("nam12", "narrow", tree=TreeConfig(chunks=chunks, edges=24))
    known = program(config, B, *SPANS, device=lane.device)
    known.calls[:, -1, 0] = 0
    known.calls[:, -1, 1] = int((known.end[0] > 0).sum()) - 1
    doc_ids = (torch.arange(T, device=lane.device) >= 24).to(torch.int32).expand(B, T)
    return doc_ids, known


def pair_loop(document: Tensor, known: Features, documents: bool = True) -> Tensor:
    """The incorrect form for compilation, and the oracle: every pair of chunks separately, in Python."""
    B, C = document.shape
    mask = torch.zeros(B, len(RELATIONS), C, C, dtype=torch.bool)
    for b, i, j in itertools.product(range(B), range(C), range(C)):
        if document[b, i] < 0 or document[b, j] < 0 or (documents and document[b, i] != document[b, j]):
            continue
        calls, types = ({tuple(e) for e in table[b].tolist()} for table in (known.calls, known.types))
        near = (
            abs(known.level[b, i] - known.level[b, j])
            if min(known.level[b, i], known.level[b, j]) >= 0
            else -1
        )
        preamble, other = int(known.preamble[b, i]), int(known.preamble[b, j])
        holds = (
            i == j, (i, j) in calls, (j, i) in calls, (i, j) in types, (j, i) in types,
            near == 0, near == 1, (preamble, other) == (1, 0), (preamble, other) == (0, 1),
        )  # fmt: skip
        mask[b, :, i, j] = torch.tensor(holds)
    return mask.to(document.device)


def ours(document: Tensor, known: Features) -> Tensor:
    return chunk_relations(document, known.level, known.preamble, known.calls, known.types)


@lanes("cpu", "h200")
def test_relations_equal_the_loop_over_pairs(lane: Lane) -> None:
    doc_ids, known = documents_and_program(lane)
    _, document = chunk_of_token(known.start, known.end, doc_ids)
    mask = ours(document, known)
    assert torch.equal(mask, pair_loop(document, known))
    assert bool(mask.any(0).any(-1).any(-1).all()), "every relation must occur"
    assert not torch.equal(mask, pair_loop(document, known, documents=False)), "the crossing call must show"


@lanes("cpu", "h200")
def test_tokens_find_their_chunks(lane: Lane) -> None:
    doc_ids, known = documents_and_program(lane)
    chunk, document = chunk_of_token(known.start, known.end, doc_ids)
    for b, t in itertools.product(range(B), range(T)):
        inside = [c for c, (s, e) in enumerate(zip(known.start[b], known.end[b])) if s <= t < e]
        assert chunk[b, t] == (inside[0] if inside else known.start.shape[1])
    assert set(document.unique().tolist()) == {-2, 0, 1}
    # A chunk that extends into the next document ends with its own.
    known.end[:, 0] = T
    known.start[:, 1:] = T
    chunk, _ = chunk_of_token(known.start, known.end, doc_ids)
    assert set(chunk[0, 24:].tolist()) == {known.start.shape[1]}


@lanes("cpu")
def test_search_by_comparisons_equals_searchsorted(lane: Lane) -> None:
    start = torch.tensor([[0, 3, 3, 10], [2, 5, NO_CHUNK, NO_CHUNK]])
    token = torch.arange(12).expand(2, 12).contiguous()
    assert started(start, token).equal(torch.searchsorted(start, token, right=True))


def operators(lane: Lane, function, chunks: int) -> int:
    doc_ids, known = documents_and_program(lane, chunks)
    _, document = chunk_of_token(known.start, known.end, doc_ids)
    with DynamoWatch() as watch:
        torch.compile(function, backend=watch.backend("eager"), fullgraph=True)(document, known)
        return watch.refresh().graphs[0].ops


@lanes("cpu", "h200")
@planted("X5", "a statement for each pair of chunks")
def test_graph_does_not_grow_with_the_chunks(lane: Lane, row, canaries) -> None:
    canaries("graphs")
    few, many = (operators(lane, ours, chunks) for chunks in (12, 48))
    pairs = [
        operators(lane, lambda document, known: levels_pair_by_pair(known.level), chunks) for chunks in (4, 8)
    ]
    assert pairs[1] > 3 * pairs[0], "the pair loop must show"
    row.bound(
        f"model/relations-{lane.name}/operators_for_36_more_chunks", many - few, "operators", expected=0,
        rule="X5", seen=few,
        evidence=(f"one relation by pairs: {pairs[0]} operators for 4 chunks, {pairs[1]} for 8",),
    )  # fmt: skip


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float) -> Tensor:
    """Compute plain causal attention (B,H,T,P) with an additive bias (B,H,T,T)."""
    causal = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    logits = q @ k.mT * q.shape[-1] ** -0.5 + bias
    return logits.masked_fill(~causal, float("-inf")).softmax(-1) @ v


@lanes("cpu", "h200")
def test_bias_of_plain_attention(lane: Lane) -> None:
    H, P = 3, 8
    doc_ids, known = documents_and_program(lane)
    chunk, document = chunk_of_token(known.start, known.end, doc_ids)
    relations, C = ours(document, known), known.start.shape[1]
    module = RelationBias(H).to(lane.device).double()
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(B, H, T, P, generator=g, dtype=torch.float64).to(lane.device) for _ in range(3))
    plain = attention(q, k, v, 0.0)
    assert torch.equal(attention(q, k, v, module(relations, chunk)), plain), "zero at the start"
    torch.nn.init.normal_(module.table)
    bias = module(relations, chunk)
    for b, t, s in itertools.product(range(B), range(0, T, 5), range(0, T, 3)):
        i, j = int(chunk[b, t]), int(chunk[b, s])
        holds = relations[b, :, i, j] if C not in (i, j) else torch.zeros(len(RELATIONS), dtype=torch.bool)
        expected = module.table[holds.to(module.table.device)].sum(0)
        torch.testing.assert_close(bias[b, :, t, s], expected, rtol=1e-12, atol=1e-12)
    biased = attention(q, k, v, bias)
    assert not torch.equal(biased, plain)
    biased.square().sum().backward()
    assert bool(module.table.grad.any(-1).all()), "every relation must learn"


@lanes("cpu")
@pytest.mark.parametrize("tokens", [1, 7])
def test_relations_without_chunks(lane: Lane, tokens: int) -> None:
    config = preset("nam12", "narrow", tree=TreeConfig(chunks=4, edges=2))
    known = Features.absent(torch.zeros(B, tokens, dtype=torch.int64), config)
    doc_ids = torch.zeros(B, tokens, dtype=torch.int32)
    chunk, document = chunk_of_token(known.start, known.end, doc_ids)
    assert bool((chunk == 4).all())
    assert not ours(document, known).any()
