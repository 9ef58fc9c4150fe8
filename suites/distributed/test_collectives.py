"""Collectives of two ranks on gloo: compiled against eager, a rank that never joins, and the flight record.

Rules C5, R1.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from launch.children import Child, ChildError, run
from launch.logs import classify
from suites.distributed.ranks import run_cases
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

UNNAMED_GROUP = "torch>=2.13,<2.16"  # seen on 2.13.0, 2.14.1, 2.15.0


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def results(dumps: Path) -> dict[str, list[dict]]:
    """The results of one start of the ranks for all tests of this file."""
    divergent = {"program": "divergent", "diverge": True}
    return run_cases(
        {
            "collectives": {"program": "collectives", "dumps": str(dumps)},
            "same guards": {"program": "divergent", "diverge": False},
            "divergent": {**divergent, "group_timeout": 3, "within": 60},
            "without a timeout": {**divergent, "within": 10},
        }
    )


@lanes("cpu")
def test_compiled_collectives_equal_eager(lane: Lane, results, row) -> None:
    """reduce_scatter_tensor; a functional operator and a custom op that take a ProcessGroup; each is one graph."""
    ranks = results["collectives"]
    assert not any("error" in one for one in ranks), ranks
    row(
        "distributed/gloo_2_ranks/compiled_collectives_equal_to_eager",
        sum(equal for one in ranks for equal in one["equal"].values()),
        unit="count",
        witness=sum(len(one["equal"]) for one in ranks),
        rule="R1",
        expected=6,
        evidence=[f"rank {rank}: {one['equal']}" for rank, one in enumerate(ranks)],
    )
    for one in ranks:
        assert one["by_hand"], "two ranks that reduce nothing would agree, too"
        assert one["graphs"] == 3
        operators = " ".join(one["operators"])
        assert all(name in operators for name in ("reduce_scatter_tensor", "all_reduce", "summed"))


@lanes("cpu")
@planted("C5", "one rank's guards lead past a collective, under torch's own timeout")
def test_divergent_guards_time_out_with_a_reason(lane: Lane, results, row) -> None:
    """Rank 1's graph has no collective: rank 0 stops at the group's timeout and reports it in one line."""
    reason = results["divergent"][0]["error"]
    found = [finding.log_class.name for finding in classify([f"{reason}\n"]).findings]
    row(
        "distributed/divergent_guards/reason",
        " ".join(found),
        unit="log class",
        witness=len(results["divergent"]),
        rule="C5",
        expected="collective_timeout",
        evidence=[reason],
    )
    assert "\n" not in reason
    assert "Timed out waiting 3000ms" in reason
    assert "sum" in results["divergent"][1], "the rank that skipped the collective has no error"
    assert len({one["sum"] for one in results["same guards"]}) == 1, (
        "with the same guards both ranks enter it"
    )
    assert results["without a timeout"][0] == {"error": "no answer in 10 s"}


@lanes("cpu")
def test_flight_records_agree_between_ranks(lane: Lane, results, dumps: Path, canaries, row) -> None:
    """Two groups on gloo: the recorder numbers each group's collectives alike on both ranks."""
    canaries("flight_record")
    kept = [pickle.loads((dumps / f"rank_{rank}").read_bytes())["entries"] for rank in range(2)]
    named = [
        [(e["process_group"][0], e["collective_seq_id"], e["profiling_name"]) for e in entries]
        for entries in kept
    ]
    row(
        "distributed/flight_recorder/collectives_of_one_rank_only",
        len(set(named[0]) ^ set(named[1])),
        unit="count",
        witness=len(named[0]),
        rule="R1",
        expected=0,
        evidence=[" ".join(map(str, entry)) for entry in named[0]],
        instruments=("flight_record",),
    )
    assert len(set(named[0])) == len(kept[0])
    assert {group for group, _, _ in named[0]} == {"0", "1"}
    # gloo implements reduce_scatter as an all_reduce, and records it as one.
    assert {name for _, _, name in named[0]} == {"gloo:barrier", "gloo:all_reduce"}


@lanes("cpu")
def test_flight_record_analyzer_finds_gloo_group(lane: Lane, results, dumps: Path, row) -> None:
    """Defect present: torch's own analyzer does not find the group of a gloo dump."""
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(dumps)]
    signature = ""
    try:
        run([Child("fr_trace", command)], seconds=60)
    except ChildError as error:
        signature = str(error)
        if "KeyError: ('0', 0)" not in signature:
            raise
    row.defect(
        "distributed/flight_recorder/gloo_group_unnamed",
        bool(signature),
        known_in=UNNAMED_GROUP,
        reason="ProcessGroupGloo records its ranks before it has a name: the dump's pg_config has one group '' and the "
        "analyzer looks for '0' (torch/distributed/flight_recorder/components/builder.py)",
        witness=len(list(dumps.iterdir())),
        rule="R1",
        evidence=[signature] if signature else [],
    )
