"""The router chooses in fp32 and reproducibly: rule C34.

B batch, T tokens, E experts, K choices per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model import preset
from model.moe import MoEBlock
from suites.support.hybrids import build
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

B, T, RERUNS = 4, 64, 5


def router(lane: Lane) -> tuple[MoEBlock, Tensor]:
    """An E block in which groups of four experts differ only by a relative 1e-4 in their weights, and tokens.

    Six of them are chosen, so that the last two come from four near ties.
    """
    config = preset("nam52", "narrow")
    block = build(config, lane.device).blocks[config.letters.index("E")]
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        weight = block.router.weight
        alike = weight[::4].repeat_interleave(4, 0)
        weight.copy_(alike * (1 + 1e-4 * torch.randn(alike.shape, generator=g).to(weight)))
    return block, torch.randn(B, T, config.d_model, generator=g).to(lane.device)


def exact_choice(block: MoEBlock, u: Tensor) -> Tensor:
    """Return the K best experts of each token by logits in fp64, sorted."""
    logits = u.double() @ block.router.weight.double().mT
    return logits.topk(block.choices, dim=-1).indices.sort(-1).values


def moved(found: Tensor, expected: Tensor) -> int:
    """Count the tokens whose set of experts differs."""
    return int((found.sort(-1).values != expected).any(-1).sum())


@lanes("cpu", "h200")
def test_near_ties_are_decided_in_fp32(lane: Lane, row) -> None:
    block, u = router(lane)
    with torch.no_grad(), torch.autocast(lane.device, dtype=torch.bfloat16):
        choices = [block.route(u).expert for _ in range(RERUNS)]
    expected = exact_choice(block, u)
    changed = sum(not torch.equal(choice, choices[0]) for choice in choices)
    for metric, value, seen in (
        ("choices_off_fp64_under_autocast", moved(choices[0], expected), B * T),
        ("reruns_that_differ", changed, RERUNS),
    ):
        row.bound(f"numerics/router-{lane.name}/{metric}", value, "tokens", expected=0, rule="C34", seen=seen)


@lanes("cpu", "h200")
def test_exact_ties_are_decided_consistently(lane: Lane) -> None:
    """With four copies of every expert any choice is valid, but it is the same each time and in each batch row."""
    block, u = router(lane)
    with torch.no_grad():
        block.router.weight.copy_(block.router.weight[::4].repeat_interleave(4, 0))
        same = u[:1].expand(B, -1, -1).contiguous()
        choices = [block.route(same).expert for _ in range(RERUNS)]
    assert all(torch.equal(choice, choices[0]) for choice in choices)
    assert all(torch.equal(choices[0][b], choices[0][0]) for b in range(B))


@lanes("cpu", "h200")
@planted("C34", "a router in bf16")
def test_bf16_router_chooses_other_experts(lane: Lane) -> None:
    block, u = router(lane)
    narrow = (u.bfloat16() @ block.router.weight.bfloat16().mT).topk(block.choices, dim=-1).indices
    assert moved(narrow, exact_choice(block, u)) > B * T // 20
