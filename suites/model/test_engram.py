"""Engram: the branch token by token, its documents, and the layers that it is allowed on.

B batch, T tokens, D model dim, W bottleneck width.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model import preset
from model.config import EngramConfig, HyperConfig
from model.engram import EngramBlock, EngramBranch, trailing_means
from model.hybrid import BLOCKS, documents
from model.layers import rms_norm
from suites.model.programs import randomize_zero_parameters
from suites.support.hybrids import SEED, token_batch
from suites.support.lanes import Lane, lanes

T = 24
CONFIG = preset("nam12", "narrow", engram=EngramConfig(layers=(0,)))


def branch(lane: Lane) -> EngramBranch:
    torch.manual_seed(SEED)
    return randomize_zero_parameters(EngramBranch(CONFIG)).to(lane.device).double()


def stream(lane: Lane) -> tuple[Tensor, Tensor]:
    """Return x (B,T,D) and the doc_ids of short documents."""
    ids = token_batch(CONFIG, 2, T, device=lane.device)
    ids[:, 9] = CONFIG.bos_id
    g = torch.Generator().manual_seed(8)
    x = torch.randn(2, T, CONFIG.d_model, generator=g, dtype=torch.float64).to(lane.device)
    return x, documents(ids, CONFIG.bos_id)[0]


def means_by_hand(z: Tensor, doc_ids: Tensor, order: int, over_present: bool = False) -> Tensor:
    """Compute the means in a loop. `over_present` is the fault: the mean over the document's tokens, not over N."""
    out = torch.zeros_like(z)
    for b in range(z.shape[0]):
        for t in range(z.shape[1]):
            seen = [s for s in range(max(0, t - order + 1), t + 1) if doc_ids[b, s] == doc_ids[b, t]]
            out[b, t] = z[b, seen].sum(0) / (len(seen) if over_present else order)
    return out


def by_hand(module: EngramBranch, x: Tensor, doc_ids: Tensor, **fault: bool) -> Tensor:
    """Compute the branch from its formula, the convolution tap by tap."""
    z, D, eps = module.input(x), x.shape[-1], module.eps
    means = [means_by_hand(z, doc_ids, order, **fault) for order in module.orders]
    y = sum(mean @ mix for mean, mix in zip(means, module.mix)) / len(means)
    gate = torch.sigmoid((rms_norm(x, eps) * rms_norm(module.key(y), eps)).sum(-1, keepdim=True) / D**0.5)
    value = rms_norm(gate * module.value(y), eps)
    out = module.conv_bias.expand_as(value).clone()
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for tap in range(4):
                if t >= tap and doc_ids[b, t - tap] == doc_ids[b, t]:
                    out[b, t] += module.conv_weight[:, 3 - tap] * value[b, t - tap]
    return F.silu(out)


@lanes("cpu", "h200")
def test_engram_equals_the_formula_token_by_token(lane: Lane) -> None:
    module, (x, doc_ids) = branch(lane), stream(lane)
    with torch.no_grad():
        out, oracle = module(x, doc_ids), by_hand(module, x, doc_ids)
        torch.testing.assert_close(out, oracle, rtol=1e-11, atol=1e-11)
        assert float((by_hand(module, x, doc_ids, over_present=True) - oracle).abs().max()) > 1e-3


@lanes("cpu", "h200")
def test_means_restart_in_each_document(lane: Lane) -> None:
    x, doc_ids = stream(lane)
    start = 9
    orders = (4, 2, 3)  # in any order
    packed = trailing_means(x, doc_ids, orders)
    alone = trailing_means(x[:, start:], doc_ids[:, start:], orders)
    for together, apart, order in zip(packed, alone, orders):
        torch.testing.assert_close(together, means_by_hand(x, doc_ids, order), rtol=1e-12, atol=1e-12)
        assert torch.equal(together[:, start:], apart)
        torch.testing.assert_close(together[:, start], x[:, start] / order)


@lanes("cpu", "h200")
def test_mixed_branches_start_as_their_sum(lane: Lane) -> None:
    mixed = CONFIG.replace(hyper=HyperConfig(mix_branches=True))
    x, doc_ids = stream(lane)
    positions = torch.arange(T, dtype=torch.int32, device=lane.device).expand_as(doc_ids)
    built = []
    for config in (CONFIG, mixed):
        torch.manual_seed(SEED)
        block = EngramBlock("A", BLOCKS["A:gqa"](config), config)
        randomize_zero_parameters(block.engram)
        built.append(block.to(lane.device).double())
    plain, block = built
    with torch.no_grad():
        torch.testing.assert_close(
            block(x, doc_ids, positions), plain(x, doc_ids, positions), rtol=1e-12, atol=1e-12
        )
        randomize_zero_parameters(block)
        moved = block(x, doc_ids, positions) - plain(x, doc_ids, positions)
        assert float(moved.abs().max()) > 1e-4


@lanes("cpu")
def test_mixed_branches_equal_the_formula(lane: Lane) -> None:
    """Token by token: x + sum_i w_i b_i with w = 2 softmax of tanh(norm(b_i) . score_i / sqrt D)."""
    config = CONFIG.replace(hyper=HyperConfig(mix_branches=True))
    torch.manual_seed(SEED)
    block = EngramBlock("A", BLOCKS["A:gqa"](config), config).double()
    randomize_zero_parameters(block.engram)
    torch.nn.init.normal_(block.score, std=2.0)
    x, doc_ids = stream(lane)
    positions = torch.arange(T, dtype=torch.int32).expand_as(doc_ids)
    with torch.no_grad():
        found = block(x, doc_ids, positions)
        branches = block.block(x, doc_ids, positions) - x, by_hand(block.engram, x, doc_ids)
        for b in range(x.shape[0]):
            for t in range(T):
                terms = [branch[b, t] for branch in branches]
                powers = []
                for term, score in zip(terms, block.score):
                    normed = term / (term.square().mean() + config.norm_eps).sqrt()
                    powers.append(math.exp(math.tanh(float(normed @ score) / config.d_model**0.5)))
                assert abs(powers[0] / powers[1] - 1) > 1e-3
                mixed = sum(2 * power / sum(powers) * term for power, term in zip(powers, terms))
                torch.testing.assert_close(found[b, t], x[b, t] + mixed, rtol=1e-10, atol=1e-10)


@lanes("cpu")
@pytest.mark.parametrize("letter", ["M", "E", "R"])
def test_engram_around_other_blocks_is_refused(lane: Lane, letter: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be on a layer '{letter}'"):
        EngramBlock(
            letter, next(block for kind, block in BLOCKS.items() if kind[0] == letter)(CONFIG), CONFIG
        )
