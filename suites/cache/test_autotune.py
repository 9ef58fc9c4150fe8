"""The autotuning firebreak: a bad candidate neither ends the training nor is taken, here or in the next process.

Rule C24. The contract searches for no GEMM, so these processes turn the search on: Inductor's C++ templates on cpu,
its Triton templates on an H200. A candidate's behaviour is planted in what times it.
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

FAULTS = {"launcher_without_stream": 32, "infinite": 48, "crash": 64}
BACKENDS = {"cpu": "ATEN,CPP", "cuda": "ATEN,TRITON"}
SECONDS = 300


def search(lane: Lane, directory: Path, *cases: str, **variables: str) -> dict[str, Any]:
    """suites.cache.search in a process of its own, searching behind the firebreak unless `variables` say otherwise."""
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(directory),
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
        "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": BACKENDS[lane.device],
        "TORCHINDUCTOR_AUTOTUNE_IN_SUBPROC": "1",
        **variables,
    }
    return run_json("suites.cache.search", lane.device, *cases, environment=environment, timeout=SECONDS)


def templates(search: Mapping[str, float]) -> list[float]:
    """Milliseconds of the candidates that are no kernel of ATen's."""
    return [milliseconds for name, milliseconds in search.items() if name not in ("bmm", "mm", "bmm_dtype")]


def harmed(result: Mapping[str, Any]) -> list[str]:
    """Cases in which a bad candidate was taken, or after which the training did not go on."""
    return [
        case
        for case, told in result.items()
        if not told["aten"] or len(told["losses"]) != STEPS or not all(map(math.isfinite, told["losses"]))
    ]


@pytest.fixture
def broken(lane: Lane, tmp_path: Path, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A cache directory of this test's own, and the first process on it: each search met one kind of bad candidate."""
    cases = [f"{size}={fault}" for fault, size in FAULTS.items()]
    first, result = made_once(tmp_path_factory, "searched", lambda directory: search(lane, directory, *cases))
    return shutil.copytree(first, tmp_path / "inductor"), result


def local_cache(directory: Path) -> Path:
    """The one file in which torch keeps what its searches have measured on this machine."""
    (file,) = (path for path in (directory / "cache").iterdir() if path.is_file())
    return file


@lanes("cpu", "h200")
@planted(
    "C24", "a candidate that raises TypeError, one of infinite milliseconds, one that crashes its process"
)
def test_a_bad_candidate_is_passed_over(lane: Lane, broken, row) -> None:
    _, result = broken
    timed = [templates(one) for told in result.values() for one in told["searches"]]
    assert len(timed) >= len(FAULTS)
    assert all(milliseconds and not any(map(math.isfinite, milliseconds)) for milliseconds in timed)
    row(
        f"cache/autotune-{lane.name}/runs_harmed_by_a_candidate",
        len(harmed(result)),
        unit="count",
        witness=len(timed),
        rule="C24",
        expected=0,
        evidence=harmed(result),
    )


@lanes("cpu", "h200")
def test_the_next_process_does_not_take_it(lane: Lane, broken, row) -> None:
    """The same programs, and one with the same product in another graph: the candidate is sound and fast by now."""
    directory, result = broken
    size = FAULTS["launcher_without_stream"]
    again = search(lane, directory, *(f"{size}=fast" for size in FAULTS.values()), f"{size}=fast=transposed")
    other = again.pop(f"{size}=fast=transposed")
    assert [told["searches"] for told in again.values()] == [[]] * len(FAULTS), (
        "their code came from the cache"
    )
    row(
        f"cache/autotune-{lane.name}/runs_harmed_after_a_restart",
        len(harmed(again)),
        unit="count",
        witness=len(again),
        rule="C24",
        expected=0,
        evidence=harmed(again),
    )
    remembered = [m for one in other["searches"] for m in templates(one) if not math.isfinite(m)]
    # torch 2.13 writes the infinite time beside the others, so that one accident rules a candidate out for good.
    row(
        f"cache/autotune-{lane.name}/accidents_remembered",
        len(remembered),
        unit="candidates",
        witness=len(other["searches"]),
        rule="C24",
        per_build=True,
        evidence=[
            f"first process {result[f'{size}=launcher_without_stream']['searches']}",
            f"the next {other['searches']}",
        ],
    )


@lanes("cpu", "h200")
@planted("C24", "a poisoned entry: ATen's own product at infinite milliseconds")
def test_a_poisoned_entry_is_seen(lane: Lane, broken) -> None:
    """What a search has measured decides: this candidate is taken, so that the rows above can turn red."""
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
    told = search(lane, directory, case)
    assert harmed(told) == [case], told


@lanes("cpu", "h200")
@planted("C24", "the firebreak off")
@pytest.mark.parametrize(
    ("fault", "end"),
    [("launcher_without_stream", "multiple values for argument 'stream'"), ("crash", "exit -11")],
)
def test_without_the_firebreak_the_run_ends(lane: Lane, tmp_path: Path, fault: str, end: str) -> None:
    """So AUTOTUNE_IN_SUBPROC has its effect. A RuntimeError torch survives without it; these two it does not."""
    with pytest.raises(ChildError) as caught:
        search(lane, tmp_path, f"{FAULTS[fault]}={fault}", TORCHINDUCTOR_AUTOTUNE_IN_SUBPROC="0")
    assert end in str(caught.value)


@lanes("cpu", "h200")
def test_the_contract_searches_nothing(lane: Lane, broken, row) -> None:
    """The same program under the contract's variables: no candidate is timed."""
    directory, result = broken
    size = FAULTS["crash"]
    (told,) = (done := search(lane, directory, f"{size}=crash", **load().variables)).values()
    assert not harmed(done)
    row(
        f"cache/autotune-{lane.name}/searches_under_the_contract",
        len(told["searches"]),
        unit="count",
        witness=len(result[f"{size}=crash"]["searches"]),
        rule="C24",
        expected=0,
    )
