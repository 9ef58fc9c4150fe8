"""DDP and FSDP2 on two ranks: gradients, experts' counters and buffers equal one process's. Rules C8, C14.

The narrow nam12, one batch per rank, bitwise equal to the mean of both batches' gradients in one eager process.
"""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import FSDPModule

from model import preset
from suites.compile.expectations import expected
from suites.distributed.ranks import run_shared, sound
from suites.distributed.training import FAULTS
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted
from suites.support.reduce import largest

STYLES = ("ddp", "fsdp2")
*_, OWN_ROWS = FAULTS
MUON_DIFFERENCE = 3e-4  # of fp32 Muon over devices, the project's threshold
REGIONAL = expected(preset("nam12", "narrow").kinds, "regional")


def case(style: str, policy: str, branch: bool, unused: bool) -> dict[str, object]:
    """Return a case of programs.gradients. branch: one on rank 0 only. unused: whether that is declared."""
    return {"program": "gradients", "style": style, "policy": policy, "branch": branch, "unused": unused}


@pytest.fixture(scope="module")
def results(lane: Lane) -> dict[str, list[dict]]:
    """The results of one start of the ranks for all tests of this file."""
    cases: dict[str, dict] = {"buffers": {"program": "buffers", "synced": False}}
    cases["DDP's buffers"] = {"program": "buffers", "synced": True}
    for style in STYLES:
        branch = style == "ddp" or hasattr(FSDPModule, "set_reduce_scatter_unused_params")
        cases[f"{style}, eager"] = case(style, "eager", branch=False, unused=False)
        cases[f"{style}, regional"] = case(style, "regional", branch=branch, unused=branch)
        if lane.device == "cpu":
            undeclared = case(style, "eager", branch=True, unused=False)
            cases[f"{style}, undeclared"] = undeclared | {"group_timeout": 4, "within": 60}
    # On a GPU in fp64: fp32 gradients are orthogonalized in bf16 there, which enlarges rounding errors.
    muon = {"program": "compare", "division": "fsdp2", "optimizer": "muon", "pattern": "AEM", "steps": 3}
    muon["wide"] = lane.device == "cuda"
    cases |= {"muon": muon, "muon, own rows": {**muon, "fault": OWN_ROWS}}
    return run_shared(cases, lane.device)


@lanes("cpu", "h200x2")
@pytest.mark.parametrize("style", STYLES)
def test_gradients_equal_single_process(lane: Lane, style: str, results, row) -> None:
    """Eager; and regional, with a branch for which rank 1 has no gradient at all (FSDP2: since torch 2.13)."""
    regional = sound(results, f"{style}, regional")
    compared = [*sound(results, f"{style}, eager"), *regional]
    about = {"seen": sum(one["tensors"] - one["zero"] for one in compared), "rule": "C14"}
    about["evidence"] = [name for one in compared for name in one["names"]]
    different = sum(one["different"] for one in compared)
    row.count(f"distributed/nam12-{style}/gradients_that_differ", different, expected=0, **about)
    for one in regional:
        assert one["order"] == ["build", "compile", style]
        # The branched block is a separate kind.
        graphs = REGIONAL.unique_graphs + one["branch"]
        expected = (REGIONAL.graph_breaks, REGIONAL.compiled_calls, graphs)
        assert (one["breaks"], one["calls"], one["graphs"]) == expected
    assert [one["zero"] for one in compared] == [0] * 4, "a gradient of 0 would prove nothing"


@lanes("cpu")
@planted("C14", "one rank has no gradient for a parameter, which is not declared to DDP or FSDP2")
def test_unused_parameters_must_be_declared(lane: Lane, results) -> None:
    ddp, fsdp2 = (results[f"{style}, undeclared"] for style in STYLES)
    assert "Timed out waiting 4000ms" in ddp[0]["error"]
    # DDP's other rank continues with what it has, and detects the error only in its next forward.
    assert ddp[1]["different"] > 0
    # FSDP2's ranks reduce buffers of different lengths: gloo aborts the process that receives too much.
    assert all("error" in one for one in fsdp2)


@lanes("cpu", "h200x2")
@planted("C8", "DDP broadcasts rank 0's buffers, and its overflow counts with them")
def test_buffers_across_ranks(lane: Lane, results, row) -> None:
    """Each rank counts its own dropped tokens; load and bias, which are model state, are averaged after a step."""
    ours, theirs = sound(results, "buffers"), sound(results, "DDP's buffers")
    alone = [one["alone"] for one in ours]
    about = {"seen": min(alone), "rule": "C8"}
    about["evidence"] = [f"rank {rank}: {one}" for rank, one in enumerate(ours)]
    row.count("distributed/nam12-ddp/overflow_of_all_ranks", ours[0]["total"], expected=sum(alone), **about)
    for one in ours:
        assert (one["apart"], one["saved"], one["buffers"]) == ([], [], 4)
    lost = alone[1] - alone[0]
    assert lost > 0
    assert ours[1]["after_two"] - theirs[1]["after_two"] == lost, "rank 1 continues from rank 0's count"
    assert ours[0]["after_two"] == theirs[0]["after_two"]


@lanes("cpu", "h200x2")
@planted("C14", OWN_ROWS)
def test_muon_over_a_mesh_equals_single_process(lane: Lane, results, row) -> None:
    """Muon's update of a matrix needs all its rows: FSDP2 shards them over the mesh."""
    whole, own = ([one["weights"] for one in sound(results, name)] for name in ("muon", "muon, own rows"))
    about = {"at_most": MUON_DIFFERENCE, "seen": sum(one["tensors"] for one in whole), "rule": "C14"}
    apart = largest(one["farthest"] for one in whole)
    row.bound("distributed/nam12-fsdp2-muon/weight_difference", apart, "weight", **about)
    assert all(one["farthest"] > MUON_DIFFERENCE for one in own), own
