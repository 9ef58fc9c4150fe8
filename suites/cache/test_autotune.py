"""The autotuning firebreak: a bad candidate neither ends the training nor is chosen, in this process or the next.

Rule C24. The contract disables GEMM autotuning, so these processes enable it: Inductor's C++ templates on cpu, its
Triton templates on an H200. A fault is injected by replacing the benchmark of the template candidates.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launch.contract import load
from suites.cache.search import STEPS
from suites.support.child import ChildError, run_json
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted
from suites.support.shared import made_once

pytestmark = [lanes("cpu", "h200"), pytest.mark.usefixtures("lane")]

FAULTS = {"launcher_without_stream": 32, "infinite": 48, "crash": 64}
BACKENDS = {"cpu": "ATEN,CPP", "cuda": "ATEN,TRITON"}
SECONDS = 300


def search(lane: Lane, directory: Path, *cases: str, **variables: str) -> dict[str, Any]:
    """Run suites.cache.search in a new process, with autotuning in a subprocess unless `variables` override it."""
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(directory),
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
        "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": BACKENDS[lane.device],
        "TORCHINDUCTOR_AUTOTUNE_IN_SUBPROC": "1",
        **variables,
    }
    return run_json("suites.cache.search", lane.device, *cases, environment=environment, timeout=SECONDS)


def templates(search: Mapping[str, float]) -> list[float]:
    """Return the milliseconds of the candidates that are not ATen kernels."""
    return [milliseconds for name, milliseconds in search.items() if name not in ("bmm", "mm", "bmm_dtype")]


def harmed(result: Mapping[str, Any]) -> list[str]:
    """Return the cases in which a bad candidate was chosen, or after which the training did not continue."""

    def trained(losses: list[float]) -> bool:
        return len(losses) == STEPS and all(map(math.isfinite, losses))

    return [case for case, one in result.items() if not (one["aten"] and trained(one["losses"]))]


@pytest.fixture
def broken(lane: Lane, tmp_path: Path, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A cache directory of this test's own, and the first process on it: each search met one kind of bad candidate."""
    cases = [f"{size}={fault}" for fault, size in FAULTS.items()]
    first, result = made_once(tmp_path_factory, "searched", lambda directory: search(lane, directory, *cases))
    return shutil.copytree(first, tmp_path / "inductor"), result


def local_cache(directory: Path) -> Path:
    """Return the one file in which torch stores the search results of this machine."""
    (file,) = (path for path in (directory / "cache").iterdir() if path.is_file())
    return file


@planted(
    "C24", "a candidate that raises TypeError, one of infinite milliseconds, one that crashes its process"
)
@pytest.mark.long(40)
def test_bad_autotune_candidates_are_not_chosen(lane: Lane, broken, row) -> None:
    _, result = broken
    timed = [templates(one) for report in result.values() for one in report["searches"]]
    assert len(timed) >= len(FAULTS)
    assert all(milliseconds and not any(map(math.isfinite, milliseconds)) for milliseconds in timed)
    case = f"cache/autotune-{lane.name}/runs_harmed_by_a_candidate"
    row.count(case, harmed(result), expected=0, rule="C24", seen=timed)


def test_next_process_does_not_choose_bad_candidate(lane: Lane, broken, row) -> None:
    """Run the same programs, and one with the same product in another graph, when the candidate is valid and fast."""
    directory, result = broken
    size = FAULTS["launcher_without_stream"]
    again = search(lane, directory, *(f"{size}=fast" for size in FAULTS.values()), f"{size}=fast=transposed")
    later = again.pop(f"{size}=fast=transposed")["searches"]
    assert not any(report["searches"] for report in again.values()), "their code came from the cache"
    case = f"cache/autotune-{lane.name}"
    row.count(f"{case}/runs_harmed_after_a_restart", harmed(again), expected=0, rule="C24", seen=again)
    remembered = [m for one in later for m in templates(one) if not math.isfinite(m)]
    # torch 2.13 stores the infinite time like any other, so that a single failure excludes a candidate permanently.
    first = result[f"{size}=launcher_without_stream"]["searches"]
    about = {"rule": "C24", "seen": later, "per_build": True}
    about["evidence"] = [f"first process {first}", f"the next {later}"]
    row.exact(f"{case}/accidents_remembered", len(remembered), "candidates", **about)


@planted("C24", "a poisoned entry: ATen's own product at infinite milliseconds")
def test_poisoned_cache_entry_is_detected(lane: Lane, broken) -> None:
    """The stored measurement decides: this candidate is chosen, so the rows above can turn red."""
    directory, _ = broken
    size = FAULTS["infinite"]
    file = local_cache(directory)
    kept = json.loads(file.read_text())
    for entry in (
        times for sizes in kept["cache"].values() for inputs in sizes.values() for times in inputs.values()
    ):
        entry.update({name: math.inf if math.isfinite(time) else 1.0 for name, time in entry.items()})
    file.write_text(json.dumps(kept))
    case = f"{size}=infinite=transposed"
    report = search(lane, directory, case)
    assert harmed(report) == [case], report


@planted("C24", "the firebreak off")
@pytest.mark.parametrize(
    ("fault", "end"),
    [("launcher_without_stream", "multiple values for argument 'stream'"), ("crash", "exit -11")],
)
def test_run_fails_without_autotune_subprocess(lane: Lane, tmp_path: Path, fault: str, end: str) -> None:
    """AUTOTUNE_IN_SUBPROC has an effect: without it torch survives a RuntimeError, but not these two faults."""
    with pytest.raises(ChildError) as caught:
        search(lane, tmp_path, f"{FAULTS[fault]}={fault}", TORCHINDUCTOR_AUTOTUNE_IN_SUBPROC="0")
    assert end in str(caught.value)


def test_contract_benchmarks_no_candidate(lane: Lane, broken, row) -> None:
    """Under the contract's variables the same program benchmarks no candidate."""
    directory, result = broken
    size = FAULTS["crash"]
    (report,) = (done := search(lane, directory, f"{size}=crash", **load().variables)).values()
    assert not harmed(done)
    about = {"expected": 0, "rule": "C24", "seen": result[f"{size}=crash"]["searches"]}
    row.count(f"cache/autotune-{lane.name}/searches_under_the_contract", len(report["searches"]), **about)
