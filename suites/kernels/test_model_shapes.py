"""The ops on an H200 at the model's shapes: their error next to that of the plain formula, then their speed.

The oracle is the reference in fp64. The plain formula is the reference with the operands of its matrix products in
bf16, as on a tensor core. B batch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from suites.kernels.model_shapes import WAYS, compared, keep, report_speed
from suites.kernels.peer_tuning import peer_packages, tuned_case
from suites.ops import timed_cases
from suites.support.absent import not_run
from suites.support.child import run_json
from suites.support.comparison import AT_MOST, ratio_row
from suites.support.gpu_memory import claimed
from suites.support.idle import wait_for_idle_cores
from suites.support.lanes import Lane, lanes

# CPU seconds. Includes compilation and autotuning; upstream's Mamba-3 tunes for 130 s.
LONGEST_FIRST_CALL = 20
SECONDS = 300
# For the other tests to compile; the longest takes 200 s next to 30 others.
OTHERS_COMPILE = 240


@lanes("h200")
@pytest.mark.parametrize("name", timed_cases())
@pytest.mark.long(35)
def test_error(lane: Lane, name: str, row) -> None:
    with claimed(timed_cases()[name].oracle_gib):
        ours, peer, numbers = compared(name)
    for way in AT_MOST:
        found = {f"{way} {i}": ratio for i, ratio in enumerate(ours[way])}
        found_by_peer = [f"peer {ratio:.3f}" for ratio in peer[way]]
        ratio_row(row, f"kernels/{name}/{way}_error_ratio", found, numbers[way], AT_MOST[way], found_by_peer)


@lanes("h200")
@pytest.mark.long(100)
@pytest.mark.cold
@pytest.mark.parametrize("name", timed_cases())
def test_first_call(lane: Lane, name: str, row, tmp_path: Path) -> None:
    """A user waits for it once; measured in a new process, on an empty Triton cache.

    Other tests compile in parallel, so one that takes too long is called once more when they have finished, and the
    faster call counts. The compiled code of op and peer is kept on disk for the timed tests.
    """
    calls, when = [first_call(name, tmp_path / "once")], "in parallel with other tests"
    if calls[0]["cpu_seconds"] > LONGEST_FIRST_CALL:
        when += ", then on idle cores" if wait_for_idle_cores(OTHERS_COMPILE) else ", twice"
        calls.append(first_call(name, tmp_path / "again"))
    fastest = min(calls, key=lambda call: call["cpu_seconds"])
    row.bound(
        f"kernels/{name}/first_call_cpu_seconds", fastest["cpu_seconds"], "s", seen=fastest["kernels"],
        rule="C37", at_most=LONGEST_FIRST_CALL, bound="compiler", measured=fastest["host"],
        evidence=[
            f"{fastest['kernels']} kernels compiled, {when}",
            *(f"{call['cpu_seconds']:.1f} s of CPU" for call in calls),
        ],
    )  # fmt: skip
    keep(tmp_path / "once", Path(os.environ["TRITON_CACHE_DIR"]))


def first_call(name: str, cache: Path) -> dict[str, Any]:
    """Return the CPU seconds, the kernels and the host of suites.kernels.model_shapes on this cache."""
    return run_json(
        "suites.kernels.model_shapes", name, environment={"TRITON_CACHE_DIR": str(cache)}, timeout=SECONDS
    )


@lanes("h200")
@pytest.mark.parametrize("name", timed_cases())
def test_speed(lane: Lane, name: str, row, exclusive_machine) -> None:
    """Without the peer's package, only the rows of the ratio to it are not run."""
    not_run(row, lane, [f"kernels/{name}/{way}_over_peer" for way in WAYS], peer_packages(name))
    report_speed(row, name, tuned_case(name, B=4))
