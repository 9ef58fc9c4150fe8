"""Collectives of two ranks: compiled against eager, a rank that never joins, and the flight record.

Rules C5, R1.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from bumpgate.logs import classify
from launch.children import Child, ChildError, run
from suites.distributed.nccl import killed_by
from suites.distributed.ranks import run_shared, sound
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

# Seconds. NCCL's group needs some to start.
TIMEOUTS = {"cpu": 3, "cuda": 10}
WAITED = {"cpu": 10, "cuda": 25}
GROUP_ARGUMENT = ">=2.13"  # torch whose custom ops take a ProcessGroup, of the versions tried
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# gloo implements reduce_scatter as an all_reduce, and records it as one; NCCL's barrier is an all_reduce.
RECORDED = {
    "cpu": {"gloo:barrier", "gloo:all_reduce"},
    "cuda": {
        "nccl:all_reduce_barrier",
        "nccl:all_reduce",
        "nccl:_reduce_scatter_base",
        "nccl:reduce_scatter_tensor_coalesced",  # compiled
    },
}
UNNAMED_GROUP = "torch>=2.13,<2.16"  # seen on 2.13.0, 2.14.1, 2.15.0


def analyzed(dumps: Path, place: Path) -> list[Any]:
    """Return the collectives that torch's analyzer of flight records finds in the dumps of all ranks.

    Raises ChildError if it fails.
    """
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(dumps), "-o"]
    run([Child("fr_trace", [*command, str(place / "database")])], seconds=60)
    _, database = pickle.loads((place / "database").read_bytes())
    return database.collectives


def mismatched(collective: Any) -> bool:
    """Return whether a collective of the analyzer lacks a rank, or differs between ranks."""
    return bool(collective.missing_ranks or collective.type_of_mismatch or not collective.pass_check)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def results(lane: Lane, dumps: Path) -> dict[str, list[dict]]:
    """The results of one start of the ranks for all tests of this file."""
    same = {"program": "divergent", "diverge": False}
    divergent = same | {"diverge": True}
    timeout = {"group_timeout": TIMEOUTS[lane.device], "log": f"{dumps}-errors"}
    return run_shared(
        {
            "collectives": {"program": "collectives", "dumps": str(dumps)},
            "same guards": same,
            "divergent": divergent | timeout,
            "without a timeout": {**divergent, "within": WAITED[lane.device]},
        },
        lane.device,
    )


@lanes("cpu", "h200x2")
def test_compiled_collectives_equal_eager(lane: Lane, results, row) -> None:
    """reduce_scatter_tensor; a functional operator and a custom op that take a ProcessGroup; each is one graph."""
    ranks = sound(results, "collectives")
    programs = 2 + SpecifierSet(GROUP_ARGUMENT).contains(Version(torch.__version__).base_version)
    equal = [same for one in ranks for same in one["equal"].values()]
    about = {"expected": 2 * programs, "seen": equal, "rule": "R1"}
    about["evidence"] = [f"rank {rank}: {one['equal']}" for rank, one in enumerate(ranks)]
    case = f"distributed/{BACKENDS[lane.device]}_2_ranks/compiled_collectives_equal_to_eager"
    row.count(case, sum(equal), **about)
    for one in ranks:
        assert one["by_hand"], "two ranks that reduce nothing would agree, too"
        assert one["graphs"] == programs
        operators = " ".join(one["operators"])
        assert all(name in operators for name in ("reduce_scatter_tensor", "all_reduce", "summed")[:programs])


@lanes("cpu", "h200x2")
@planted("C5", "one rank's guards lead past a collective, under torch's own timeout")
def test_divergent_guards_time_out_with_a_reason(lane: Lane, results, dumps: Path, row) -> None:
    """Rank 1's graph has no collective: rank 0 stops at the group's timeout and reports it in one line.

    gloo raises it; NCCL's watchdog writes it to the rank's log and aborts the process.
    """
    reason, waited = results["divergent"][0]["error"], 1000 * TIMEOUTS[lane.device]
    if lane.device == "cuda":
        assert reason == "ended with -6"
        reason = killed_by(f"{dumps}-errors-0")
    found = " ".join(finding.family.name for finding in classify([f"{reason}\n"]).findings)
    about = {"expected": "collective_timeout", "seen": results["divergent"], "evidence": [reason]}
    row.bound("distributed/divergent_guards/reason", found, "log class", rule="C5", **about)
    assert "\n" not in reason
    assert (f"waiting {waited}ms" if lane.device == "cpu" else f"Timeout(ms)={waited}") in reason
    assert "sum" in results["divergent"][1], "the rank that skipped the collective has no error"
    assert len({one["sum"] for one in results["same guards"]}) == 1, "here both ranks enter it"
    assert results["without a timeout"][0] == {"error": f"no answer in {WAITED[lane.device]} s"}


@lanes("cpu", "h200x2")
def test_flight_records_agree_between_ranks(lane: Lane, results, dumps: Path, canaries, row) -> None:
    """Two groups: the recorder numbers each group's collectives alike on both ranks."""
    canaries("flight_record")
    kept = [pickle.loads((dumps / f"rank_{rank}").read_bytes())["entries"] for rank in range(2)]
    fields = ("process_group", "collective_seq_id", "profiling_name")
    first, second = (
        [(group[0], *rest) for group, *rest in (map(e.get, fields) for e in entries)] for entries in kept
    )
    about = {"seen": first, "rule": "R1", "instruments": ("flight_record",)}
    about["evidence"] = [" ".join(map(str, entry)) for entry in first]
    different = len(set(first) ^ set(second))
    row.count("distributed/flight_recorder/collectives_of_one_rank_only", different, expected=0, **about)
    assert len(set(first)) == len(kept[0])
    assert {group for group, _, _ in first} == {"0", "1"}
    assert {name for _, _, name in first} == RECORDED[lane.device]


@lanes("h200x2")
def test_flight_record_analyzer_matches_nccl_dumps(
    lane: Lane, results, dumps: Path, tmp_path: Path, row
) -> None:
    """torch's own analyzer pairs the collectives of both ranks, and names the rank that lacks one."""
    found = analyzed(dumps, tmp_path)
    about = {"seen": found, "rule": "R1"}
    about["evidence"] = [f"{c.collective_name} {c.collective_seq_id}: {c.collective_state}" for c in found]
    wrong = sum(map(mismatched, found))
    row.count("distributed/flight_recorder/nccl_mismatches", wrong, expected=0, **about)
    assert len(found) == len(pickle.loads((dumps / "rank_0").read_bytes())["entries"])
    lacking = tmp_path / "lacking"
    lacking.mkdir()
    for path in dumps.iterdir():
        dump = pickle.loads(path.read_bytes())
        if path.name == "rank_1":
            del dump["entries"][-1]
        (lacking / path.name).write_bytes(pickle.dumps(dump))
    cut = analyzed(lacking, tmp_path)
    assert [one.missing_ranks for one in cut if mismatched(one)] == [{1}], cut


@lanes("cpu")
def test_flight_record_analyzer_finds_gloo_group(
    lane: Lane, results, dumps: Path, tmp_path: Path, row
) -> None:
    """Defect present: torch's own analyzer does not find the group of a gloo dump."""
    signature = ""
    try:
        analyzed(dumps, tmp_path)
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
