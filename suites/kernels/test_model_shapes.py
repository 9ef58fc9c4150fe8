"""The ops on an H200 at the model's shapes: their error next to that of the plain formula, then their speed.

The oracle is the reference in fp64. The plain formula is the reference with the operands of its matrix products in
bf16, as on a tensor core. B batch.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from suites.kernels.model_shapes import WAYS, compared, keep, report_speed
from suites.kernels.peer_tuning import peer_packages, tuned_case
from suites.ops import timed_cases
from suites.support.absent import not_run
from suites.support.child import run_json
from suites.support.comparison import AT_MOST, ratio_row
from suites.support.gpu_memory import claimed
from suites.support.lanes import Lane, lanes

# Next to other compiles: up to 47 % between three hosts, up to 8 % between two calls on one.
FIRST_CALL_TOLERANCE = 0.5
SECONDS = 300


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
    """A user waits for it once; measured in a new process, on an empty Triton cache, next to tests that compile, too.

    The compiled code of op and peer is kept on disk for the timed tests.
    """
    call = run_json(
        "suites.kernels.model_shapes", name, environment={"TRITON_CACHE_DIR": str(tmp_path)}, timeout=SECONDS
    )
    row.cost(
        f"kernels/{name}/first_call_cpu_seconds", call["cpu_seconds"], "s", tolerance=FIRST_CALL_TOLERANCE,
        bound="compiler", measured=call["host"], rule="C37", seen=call["kernels"],
        evidence=[f"{call['kernels']} kernels compiled"],
    )  # fmt: skip
    keep(tmp_path, Path(os.environ["TRITON_CACHE_DIR"]))


@lanes("h200")
@pytest.mark.parametrize("name", timed_cases())
def test_speed(lane: Lane, name: str, row, exclusive_machine) -> None:
    """Without the peer's package, only the rows of the ratio to it are not run."""
    not_run(row, lane, [f"kernels/{name}/{way}_over_peer" for way in WAYS], peer_packages(name))
    report_speed(row, name, tuned_case(name, B=4))
