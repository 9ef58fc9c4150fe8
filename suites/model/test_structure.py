"""StructureEmbedding: the formula token by token, absent components, and one graph for all 2^5 presences.

B batch, T tokens, S structure components.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from bumpgate.plugin.instruments import DynamoWatch, dynamo_config
from launch.contract import load
from model import preset
from model.config import StructureConfig
from model.structure import COMPONENTS, StructureEmbedding, stack_columns
from suites.model.programs import PresentOnly, randomize_zero_parameters
from suites.support.hybrids import SEED
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

INSTRUMENTS = ("graphs", "recompile_limit")
B, T = 2, 12
CONFIG = preset("nam12", "narrow", structure=StructureConfig(sizes=(9, 16, 64, 64, 256), dim=16))


def embedding(lane: Lane, dtype: torch.dtype = torch.float64) -> StructureEmbedding:
    torch.manual_seed(SEED)
    module = randomize_zero_parameters(StructureEmbedding(CONFIG))
    nn.init.normal_(module.gate)
    return module.to(lane.device, dtype)


def columns(lane: Lane) -> Tensor:
    """Return ids below, within and above their tables, and rows without any component."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randint(-size // 2, size + 3, (B, T), generator=generator) for size in
                       CONFIG.structure.sizes], dim=-1)  # fmt: skip
    ids[0, 3] = ids[1, 7] = -1
    return ids.to(lane.device)


def by_hand(module: StructureEmbedding, ids: Tensor) -> Tensor:
    """Compute one token at a time, with the components that are present."""
    sizes = CONFIG.structure.sizes
    out = torch.zeros(*ids.shape[:2], CONFIG.d_model, dtype=torch.float64, device=ids.device)
    for b, t in itertools.product(range(ids.shape[0]), range(ids.shape[1])):
        there = [s for s in range(len(sizes)) if ids[b, t, s] >= 0]
        total = sum(math.exp(module.gate[s]) for s in there)
        for s in there:
            row = sum(sizes[:s]) + min(int(ids[b, t, s]), sizes[s] - 1)
            weight = math.exp(module.gate[s]) / total * float(module.scale[s])
            out[b, t] += weight * (module.up.weight @ module.table[row])
    return out


class WithoutMask(StructureEmbedding):
    """Injected fault: absent components contribute zero, yet take their share of the softmax."""

    def weights(self, present: Tensor) -> Tensor:
        return self.gate.expand(present.shape).softmax(-1) * present


class NaiveMask(StructureEmbedding):
    """Injected fault: a token without any component takes the softmax of -inf only."""

    def weights(self, present: Tensor) -> Tensor:
        return self.gate.expand(present.shape).masked_fill(~present, float("-inf")).softmax(-1)


@lanes("cpu", "h200")
def test_structure_equals_the_formula_token_by_token(lane: Lane) -> None:
    module, ids = embedding(lane), columns(lane)
    with torch.no_grad():
        oracle = by_hand(module, ids)
        torch.testing.assert_close(module(ids), oracle, rtol=1e-12, atol=1e-12)
        assert not module(ids)[0, 3].any()
        module.__class__ = WithoutMask
        assert float((module(ids) - oracle).abs().max()) > 1e-3


@lanes("cpu", "h200")
@pytest.mark.parametrize(("kind", "finite"), [(StructureEmbedding, True), (NaiveMask, False)])
def test_tokens_without_components_leave_gradients_finite(lane: Lane, kind: type, finite: bool) -> None:
    module = embedding(lane)
    module.__class__ = kind
    module(columns(lane)).square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in module.parameters()) is finite


@lanes("cpu", "h200")
@planted("X4", "a Python list of the components that are present")
def test_one_graph_for_every_presence(lane: Lane, row, canaries) -> None:
    canaries(*INSTRUMENTS)
    ids = columns(lane).clamp(min=0).minimum(torch.tensor(CONFIG.structure.sizes, device=lane.device) - 1)
    patterns = list(itertools.product((False, True), repeat=len(COMPONENTS)))
    reports = {}
    for name, module in (
        ("static", embedding(lane)),
        ("list", PresentOnly(CONFIG.structure.sizes).to(lane.device)),
    ):
        with dynamo_config(load().dynamo), DynamoWatch() as watch:
            compiled = torch.compile(module, backend=watch.backend("eager"))
            for pattern in patterns:
                given = [ids[..., s].contiguous() if there else None for s, there in enumerate(pattern)]
                if name == "static":
                    compiled(stack_columns(given, like=ids[..., 0]))
                else:
                    compiled(*given)
            reports[name] = watch.refresh()
    assert reports["list"].unique_graphs > 5, "the known-bad form must show"
    row.count(
        f"model/structure-{lane.name}/graphs_over_32_presences", reports["static"].unique_graphs, expected=1,
        rule="X4", seen=reports["static"].calls,
        evidence=(f"a Python list of components: {reports['list'].unique_graphs} graphs",),
    )  # fmt: skip
    assert reports["static"].calls == len(patterns) == 32
