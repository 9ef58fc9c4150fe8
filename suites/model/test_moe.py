"""Routing of the E block: null experts, groups and the moving bias, each against a loop over tokens; bitwise equal if
off.

B batch, T tokens, D model dim, E experts, K choices per token, M null slots.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from model import HybridConfig, preset
from model.layers import rms_norm
from model.moe import LOAD_MEMORY, MoEBlock
from suites.support.hybrids import SEED
from suites.support.lanes import Lane, lanes

NULL = {"null_rho": 0.5}
GROUPS = {"expert_groups": 8, "chosen_groups": 3}
SINGLES = {"expert_groups": 64, "chosen_groups": 7}
B, T = 3, 20


def block(lane: Lane, **changes: object) -> tuple[HybridConfig, MoEBlock, Tensor]:
    """Return a block of nam52 narrow in fp64 that drops nothing, and a stream x (B,T,D)."""
    config = preset("nam52", "narrow", capacity_factor=16.0, **changes)
    torch.manual_seed(SEED)
    made = MoEBlock(config).double().to(lane.device)
    g = torch.Generator().manual_seed(1)
    return config, made, torch.randn(B, T, config.d_model, generator=g, dtype=torch.float64).to(lane.device)


def by_loop(config: HybridConfig, made: MoEBlock, u: Tensor) -> list[list[dict[int, float]]]:
    """Return each token's weight of each expert: sorted, chosen and renormalized one token at a time."""
    logits = u @ made.router.weight.T
    null = made.null_logit.sigmoid().item() if config.null_slots else 0.0
    chosen = []
    for row in logits.sigmoid().tolist():
        chosen.append([])
        for scores in row:
            biased = [s + b for s, b in zip(scores, made.expert_bias.tolist())]
            size = config.experts // config.expert_groups
            groups = [biased[g * size : (g + 1) * size] for g in range(config.expert_groups)]
            best = sorted(range(len(groups)), key=lambda g: -sum(sorted(groups[g])[-2:]))[
                : config.chosen_groups
            ]
            slots = [(biased[e], e) for e in range(config.experts) if e // size in best]
            slots += [(null, -1)] * config.null_slots
            taken = [e for _, e in sorted(slots, key=lambda slot: -slot[0])[: config.choices] if e >= 0]
            total = sum(scores[e] for e in taken)
            chosen[-1].append({e: scores[e] / total * config.routed_scale for e in taken})
    return chosen


def aux_by_loop(config: HybridConfig, made: MoEBlock, u: Tensor, share: list[float]) -> Tensor:
    """Return the weighted balance and z-loss (), token by token; only the z-loss sees the null slots."""
    logits = u @ made.router.weight.T
    null = [made.null_logit.item()] * config.null_slots if config.null_slots else []
    balance = z_loss = 0.0
    for token in logits.flatten(0, 1).tolist():
        scores = [1 / (1 + math.exp(-logit)) for logit in token]
        balance += sum(f * score / sum(scores) for f, score in zip(share, scores))
        z_loss += math.log(sum(math.exp(logit) for logit in [*token, *null])) ** 2
    balance, z_loss = config.experts * balance / (B * T), z_loss / (B * T)
    return logits.new_tensor(config.aux_weight * balance + config.z_weight * z_loss)


@lanes("cpu", "h200")
@pytest.mark.parametrize(
    "changes",
    [{}, NULL, GROUPS, {**NULL, **GROUPS}, SINGLES],
    ids=["plain", "null", "groups", "both", "groups_of_one"],
)
def test_routing_equals_the_loop_over_tokens(lane: Lane, changes: dict[str, object]):
    config, made, u = block(lane, **changes)
    torch.nn.init.normal_(made.expert_bias, std=0.1)
    if config.null_slots:
        made.null_logit.data.fill_(0.8)
    routing = made.route(u)
    expected = by_loop(config, made, u)
    counts = torch.zeros(config.experts)
    for b in range(B):
        for t in range(T):
            pairs = zip(routing.expert[b, t].tolist(), routing.weights[b, t].tolist())
            found = {e: w for e, w in pairs if e >= 0}
            assert found.keys() == expected[b][t].keys()
            assert all(math.isclose(found[e], expected[b][t][e], rel_tol=1e-12) for e in found)
            counts[[*found]] += 1
    torch.testing.assert_close(routing.share.cpu(), (counts / counts.sum()).double())
    torch.testing.assert_close(routing.aux, aux_by_loop(config, made, u, (counts / counts.sum()).tolist()))
    sizes = {len(token) for row in expected for token in row}
    assert sizes == {config.top_k} if not config.null_slots else len(sizes) > 1
    assert torch.equal(routing.weights == 0, routing.expert < 0)


@lanes("cpu", "h200")
@pytest.mark.parametrize("changes", [{}, NULL], ids=["plain", "null"])
def test_small_scores_are_weighted_in_full(lane: Lane, changes: dict[str, object]):
    """Weights are relative to the sum of the chosen scores, which may be far below 1."""
    config, made, u = block(lane, **changes)
    with torch.no_grad():
        made.router.weight.copy_(-made.router.weight.abs() - 1)
        if config.null_slots:
            made.null_logit.fill_(-100.0)
    routing = made.route(u.abs() / u.abs().sum(-1, keepdim=True) * 4)
    total = routing.weights.sum(-1)
    torch.testing.assert_close(total, torch.full_like(total, config.routed_scale))


@lanes("cpu", "h200")
def test_token_with_only_null_slots_gets_shared_expert(lane: Lane):
    _, made, x = block(lane, **NULL)
    made.null_logit.data.fill_(50.0)
    y, aux = made(x)
    without = copy.deepcopy(made)
    without.down.data.zero_()
    assert torch.equal(y, without(x)[0])
    assert (made.route(x).expert == -1).all()
    aux.backward()
    assert made.null_logit.grad.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())


@lanes("cpu")
@pytest.mark.parametrize(("rho", "slots", "choices"), [(0.25, 192, 24), (0.75, 21, 8)])
def test_null_slots_follow_from_rho(lane: Lane, rho: float, slots: int, choices: int):
    """Of 64 real experts, rho is their share of all slots, and top-6 the real choices among all at that share."""
    config = preset("nam52", "narrow", null_rho=rho)
    assert (config.null_slots, config.choices) == (slots, choices)


@lanes("cpu", "h200")
def test_null_logit_sets_how_many_experts_work(lane: Lane):
    _, made, x = block(lane, **NULL)
    working = []
    for logit in (-50.0, 0.8, 50.0):
        made.null_logit.data.fill_(logit)
        working.append(int((made.route(x).expert >= 0).sum()))
    assert working[0] == B * T * made.choices
    assert working[0] > working[1] > working[2] == 0


@lanes("cpu", "h200")
def test_bias_moves_toward_uniform_load(lane: Lane):
    config, made, x = block(lane, bias_rate=0.02)
    made.router.weight.data[0] = made.router.weight.data[1] = 0
    made.router.weight.data[0, 0] = 5.0
    x[..., 0] = 3.0  # expert 0 is the first choice of every token
    u = rms_norm(x, config.norm_eps)
    before = made.route(u).share
    assert before[0] == before.max()
    for _ in range(100):
        load = made.load.clone()
        bias = made.expert_bias.clone()
        share = made.route(u).share
        made(x)
        torch.testing.assert_close(made.load, LOAD_MEMORY * load + (1 - LOAD_MEMORY) * share.to(load))
        missing = (1 - config.experts * made.load).clamp(-1, 1)
        moved = made.expert_bias - bias
        torch.testing.assert_close(moved, 0.02 * missing.to(moved), rtol=1e-9, atol=1e-12)
    spread = made.route(u).share - 1 / config.experts
    assert spread.abs().max() < 0.5 * (before - 1 / config.experts).abs().max()
    made.eval()
    bias = made.expert_bias.clone()
    made(x)
    assert torch.equal(made.expert_bias, bias)
    assert {"expert_bias", "load"} <= made.state_dict().keys()
    assert "overflow" not in made.state_dict()


@lanes("cpu", "h200")
def test_disabled_switches_change_no_bit(lane: Lane):
    """rho 1 has no null slot, one group imposes no limit, rate 0 moves nothing: the block equals one without them."""
    _, plain, x = block(lane)
    _, same, _ = block(lane, null_rho=1.0, expert_groups=1, chosen_groups=1)
    assert plain.state_dict().keys() == same.state_dict().keys()
    for ours, theirs in zip(same(x), plain(x)):
        assert torch.equal(ours, theirs)
    assert not torch.equal(block(lane, **NULL)[1](x)[0], plain(x)[0])
