"""The cost of a changed condition under each policy, and what must not change at all.

Rules C4 (a new length is one more set of static graphs), C7 (declared disable points), C10 (routing is fixed when the
model is built), C13 (a guard miss stays in its region).
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bumpgate.plugin.instruments import dynamo_config
from launch.contract import load
from launch.policies import apply, disable
from model import preset
from suites.compile.expectations import expected
from suites.support.hybrids import Watched, build, token_batch, watched_hybrid
from suites.support.instruments import disabled_functions
from suites.support.lanes import lanes
from suites.support.planted import planted

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane")]

INSTRUMENTS = ("graphs", "recompiles")


def graphs_after_a_miss_in_one_expert_block(hybrid: Watched) -> tuple[int, int, tuple[str, ...]]:
    """Return the graphs and operators recompiled after one E block's bucket was raised, and the reasons."""
    ids = token_batch(hybrid.config, 2)
    hybrid.compiled.warm_up(ids)
    hybrid.forward(ids)
    before = hybrid.report().unique_graphs
    block = hybrid.model.blocks[hybrid.config.letters.index("E")]
    block.min_bucket = 2 * block.capacity(hybrid.config.seq_len)
    hybrid.forward(ids)
    report = hybrid.report()
    added = report.graphs[before:]
    return len(added), sum(graph.ops for graph in added), tuple(str(r) for r in report.recompiles)


def test_guard_miss_recompiles_only_its_region(row, canaries) -> None:
    """One raised bucket: under regional only the E region is compiled again, under whole_opaque all 52 layers."""
    canaries(*INSTRUMENTS)
    ops = {}
    for policy in ("regional", "whole_opaque"):
        with watched_hybrid("nam52", policy, backend="eager") as hybrid:
            graphs, ops[policy], causes = graphs_after_a_miss_in_one_expert_block(hybrid)
            calls = hybrid.report().calls
        row.count(
            f"compile/nam52-{policy}-guard_miss/graphs_recompiled", graphs, expected=1, rule="C13",
            seen=calls, evidence=[f"{ops[policy]} operators", *causes],
        )  # fmt: skip
        if policy == "regional":
            assert causes
            assert all("moe.py" in cause for cause in causes), causes
    row.bound(
        "compile/nam52-guard_miss/operators_regional_over_whole", ops["regional"] / ops["whole_opaque"],
        "ratio", at_most=2 / 52, rule="C13", seen=ops["whole_opaque"],
    )  # fmt: skip


@planted("C13", "one graph for the whole model")
def test_guard_miss_recompiles_whole_model_graph(canaries) -> None:
    canaries(*INSTRUMENTS)
    with watched_hybrid("nam12", "whole_opaque", backend="eager") as hybrid:
        graphs, _, causes = graphs_after_a_miss_in_one_expert_block(hybrid)
    assert graphs == 1
    assert not any("moe.py" in cause.split(":")[0] for cause in causes), causes


@planted("C4", "automatic dynamic shapes")
def test_promotion_to_dynamic_length_is_detected(canaries) -> None:
    """The second new length compiles nothing: the first one's graph was made dynamic, but the rule requires static."""
    canaries(*INSTRUMENTS)
    counts = {}
    for automatic in (False, True):
        with (
            watched_hybrid("nam12", "regional", backend="eager") as hybrid,
            dynamo_config({"automatic_dynamic_shapes": automatic}),
        ):
            hybrid.compiled.warm_up(token_batch(hybrid.config, 2))
            counts[automatic] = []
            for tokens in (hybrid.config.seq_len // 2, hybrid.config.seq_len * 3 // 4):
                before = hybrid.report().unique_graphs
                hybrid.forward(token_batch(hybrid.config, 2, tokens))
                counts[automatic].append(hybrid.report().unique_graphs - before)
            want = expected(hybrid.config.kinds, "regional").unique_graphs
    assert counts[False] == [want, want]
    assert counts[True][1] < want


@planted("C7", "a block disabled and not declared")
def test_undeclared_disable_point_is_detected() -> None:
    contract = load()
    model = build(preset("nam12"))
    apply(model, "regional", contract, "eager")
    known = disabled_functions(model)
    disable(model.blocks[model.config.letters.index("A")])
    assert disabled_functions(model) - known == {"model.attention.AttentionBlock.forward"}


ROUTING = {"top_k": 1, "capacity_factor": 8.0, "routed_scale": 0.0, "experts": 2}


def moved_by_the_config(model, ids: torch.Tensor) -> list[str]:
    """Return the routing fields whose change in the live config changes the loss."""
    want = model(ids)
    moved = []
    for name, value in ROUTING.items():
        known = getattr(model.config, name)
        object.__setattr__(model.config, name, value)
        if not torch.equal(model(ids), want):
            moved.append(name)
        object.__setattr__(model.config, name, known)
    return moved


def test_routing_is_fixed_when_model_is_built(row) -> None:
    model = build(preset("nam12"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.config.top_k = 1
    moved = moved_by_the_config(model, token_batch(model.config, 2))
    row.count("compile/nam12-routing/fields_read_in_a_forward", moved, expected=0, rule="C10", seen=ROUTING)


@planted("C10", "a forward that reads the live configuration")
def test_forward_reading_live_config_is_detected() -> None:
    model = build(preset("nam12"))
    block = model.blocks[model.config.letters.index("E")]
    inner = block.forward

    def reading(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        block.routed_scale = model.config.routed_scale
        return inner(x)

    block.forward = reading
    assert moved_by_the_config(model, token_batch(model.config, 2)) == ["routed_scale"]
