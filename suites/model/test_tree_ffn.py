"""TreeFFN against membership masks of (C,T), and work that is linear in T.

B batch, T tokens, D model dim, C chunks, W width of a chunk's state.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from model import preset
from model.config import TreeConfig
from model.layers import rms_norm
from model.relations import chunk_of_token, chunk_relations
from model.tree_ffn import CARRIERS, TreeFFN
from suites.model.programs import program, randomize_zero_parameters
from suites.support.hybrids import SEED
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

B, T = 2, 64


def tree(lane: Lane, chunks: int = 24, **changes) -> TreeFFN:
    torch.manual_seed(SEED)
    config = preset("nam12", "narrow", tree=TreeConfig(chunks=chunks, edges=24, **changes))
    return randomize_zero_parameters(TreeFFN(config)).to(lane.device).double()


def arguments(lane: Lane, tokens: int = T, chunks: int = 24) -> tuple[Tensor, ...]:
    """Return the stream, two documents per row, chunk tables and edges."""
    config = preset("nam12", "narrow", tree=TreeConfig(chunks=chunks, edges=24))
    split = 3 * tokens // 8
    _, *known = program(config, B, (0, split, 1), (split, tokens, 2), device=lane.device)
    doc_ids = (torch.arange(tokens, device=lane.device) >= split).to(torch.int32).repeat(B, 1)
    g = torch.Generator().manual_seed(6)
    x = torch.randn(B, tokens, config.d_model, generator=g, dtype=torch.float64).to(lane.device)
    return x, doc_ids, *known


def by_masks(module: TreeFFN, x: Tensor, doc_ids: Tensor, *known: Tensor, causal: bool) -> Tensor:
    """The quadratic form, and the oracle: a (C,T) membership mask, multiplied with all tokens both ways."""
    start, end, level, preamble, calls, types = known
    token = torch.arange(x.shape[1], device=x.device)
    _, document = chunk_of_token(start, end, doc_ids)
    member = (
        (token >= start[..., None]) & (token < end[..., None]) & (document[..., None] == doc_ids[:, None])
    )
    member = member.to(x.dtype)  # (B,C,T)
    mean = member / member.sum(-1, keepdim=True).clamp(min=1)
    state = mean @ module.input(rms_norm(x, module.eps))
    relations = chunk_relations(document, level, preamble, calls, types)[:, CARRIERS].to(x.dtype)
    if causal:
        relations = relations * (end[:, None, None, :] <= start[:, None, :, None])
    for _ in range(module.steps):
        total = torch.zeros_like(state)
        for r in range(relations.shape[1]):
            degree = relations[:, r].sum(-1, keepdim=True).clamp(min=1)
            total = total + (relations[:, r] / degree) @ state @ module.relation[r]
        heard = F.silu(total)
        state = state + heard
    return x + module.output(member.mT @ (heard if causal else state))


@lanes("cpu", "h200")
@pytest.mark.parametrize("causal", [False, True])
def test_tree_ffn_equals_the_membership_masks(lane: Lane, causal: bool) -> None:
    module, (x, *rest) = tree(lane, causal=causal), arguments(lane)
    out = module(x.requires_grad_(), *rest)
    oracle, other = (by_masks(module, x, *rest, causal=flag) for flag in (causal, not causal))
    torch.testing.assert_close(out, oracle, rtol=1e-12, atol=1e-12)
    assert float((out - other).abs().max()) > 1e-3
    assert float((out - x).abs().max()) > 1e-3, "it must change the stream"
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype).to(x.device)
    leaves = [x, *module.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad((y * weight).sum(), leaves) for y in (out, oracle))):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@lanes("cpu", "h200")
def test_tokens_outside_chunks_are_unchanged(lane: Lane) -> None:
    module, given = tree(lane, causal=False), arguments(lane)
    x, doc_ids, start, end, *_ = given
    chunk, _ = chunk_of_token(start, end, doc_ids)
    outside = chunk == start.shape[1]
    assert bool(outside.any())
    assert torch.equal(module(*given)[outside], x[outside])


def flops(lane: Lane, function, tokens: int, chunks: int) -> int:
    """Count the multiply-adds of forward and backward; writes of single elements are excluded."""
    module, given = tree(lane, chunks), arguments(lane, tokens, chunks)
    with FlopCounterMode(display=False) as counter:
        function(module, *given).sum().backward()
    return counter.get_total_flops()


@lanes("cpu", "h200")
@planted("X5", "membership masks of all chunks by all tokens")
def test_work_grows_linearly_with_tokens(lane: Lane, row) -> None:
    """A chunk for each 32 tokens, so that C grows with T and a (C,T) mask is quadratic.

    Counts floating-point operations and not seconds, because they are exact. Between 256 and 4096 tokens the count
    includes the chunks' own exchange, C^2, a sixteenth of the rest.
    """
    short, long = 256, 4096
    counted = {
        name: [flops(lane, function, tokens, tokens // 32) for tokens in (short, long)]
        for name, function in (
            ("ours", lambda module, *given: module(*given)),
            ("masks", lambda module, *given: by_masks(module, *given, causal=True)),
        )
    }
    exponent = {name: math.log(b / a) / math.log(long / short) for name, (a, b) in counted.items()}
    assert exponent["masks"] > 1.2, "the masks must show"
    row.bound(
        f"model/tree_ffn-{lane.name}/flop_exponent", exponent["ours"], "exponent of T", at_most=1.2,
        rule="X5", seen=counted["ours"][1], evidence=(f"membership masks: {exponent['masks']:.2f}",),
    )  # fmt: skip
