"""baselines/records: compressed records of complete runs of a lane or a suite."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from bumpgate.core.baseline import BUILD, Baseline, Reviewed, load, other_build
from bumpgate.core.hosts import judge_again
from bumpgate.core.rows import Record, Row, read_record
from bumpgate.review.rebaseline import reviewed
from suites.support.lanes import LANES
from tests.support.tree import ROOT

RECORDS = sorted((ROOT / "baselines" / "records").glob("*.json.xz"))
# Rows that have another id since.
RENAMED = {
    "kernels/moe_dispatch-h200-reference/unique_graphs": "kernels/moe_dispatch-h200-eager/unique_graphs",
    "throughput/anchors/copy_bytes_per_second": "calibration/memory/copy_bytes_per_second",
    "throughput/anchors/matmul_flops": "calibration/matmul/matmul_flops",
}
# Rows that a row of another suite states as well, and alone since; and wall seconds next to other tests.
GONE = re.compile(
    r"numerics/moe_combine-(cancelling|random)/error_before_cast|.*/first_call_seconds"
    r"|cache/nam52-full-regional-restart/(warm_over_cold|(cold|warm)_first_step_seconds)"
)
# Rows whose reviewed value a later change of the contract moved, in runs before it.
CONTRACT_SINCE = {"compile/contract/dynamo_lines_at_first_compile": "optimize_ddp=False"}


# Times of kernels that were changed after a run, in all runs but NEWEST.
NEWEST = (
    "h200-hopper-kernels",
    "h200-16-cores",
    "h200-16-cores-2",
    "h200-slower-host",
    "h200-wheels",
    "h100-16-cores",
    "h100-kernels",
)
# Runs whose machine was taken away before their last tests.
INCOMPLETE = ("h100-16-cores", "h200-16-cores-2", "h200-slower-host", "h200-wheels")
CHANGED_SINCE = re.compile(
    r"kernels/(attention|grouped_gemm|mamba3_siso)-.*/(forward|both)_(milliseconds|roofline_fraction|over_peer)"
)
# The test of this row had a tolerance in one run, and has only a limit since.
KIND_SINCE = "release/batched_eigh/time_over_one_by_one"
# Launches of the models that were added after a run, in all runs but NEWEST.
LAUNCHES_SINCE = re.compile(r"throughput/.*/kernels_per_step")
# Red rows of a kept run: single readings that later runs on the same build did not repeat.
EXPLAINED = {
    "h200-whole": {"throughput/nam56r-full-regional-2x4096/tokens_per_second"},
    "h200-kernel-wheels": {"throughput/nam52-full-upstream-2x4096/speedup_over_upstream"},
}


def name_of(path: Path) -> str:
    return path.name.removesuffix(".json.xz")


def baseline_of(record: Record) -> Baseline:
    lane = record.provenance["lane"]
    return load(ROOT / "baselines" / f"{lane}.json", lane)


def of_adopted_build(record: Record) -> bool:
    return not other_build(baseline_of(record).made_with, record.provenance)


def rows_of(record: Record) -> list[Row]:
    """Return the rows of a record under their present ids, with what bounds them by the current baseline."""
    kept = [j.row for j in record.judgements if not (j.row.unmeasured or GONE.fullmatch(j.row.id))]
    bounds = {id: row.bound for id, row in baseline_of(record).rows.items()}
    rows = [replace(row, id=RENAMED.get(row.id, row.id)) for row in kept]
    # A limit for all ops alike, broken by a slow host alone; a cost of each op since.
    cost = {"at_most": None, "better": "lower", "tolerance": 0.5}
    rows = [replace(row, **cost if row.id.endswith("/first_call_cpu_seconds") else {}) for row in rows]
    # Where steps wait for launches, a reviewed time since, without a limit.
    rows = [replace(row, at_least=None) if row.id.endswith("/speedup_over_upstream") else row for row in rows]
    return [replace(row, bound=bounds.get(row.id, "")) for row in rows]


def red(record: Record, baseline: Baseline) -> dict[str, str]:
    """Judge the rows of a record by a baseline, on the record's host -> the red ones with their reasons.

    Rows that the baseline lacks are left out.
    """
    build = {name: record.provenance.get(name) for name in BUILD}
    judged = judge_again(rows_of(record), baseline, record.provenance, build)
    known = (j for j in judged if not j.reason.startswith("not reviewed: "))
    return {j.row.id: j.reason for j in known if j.red}


def explained(red: Mapping[str, str], *runs: str) -> dict[str, str]:
    """Return what the builds of the runs do not explain of their red rows."""
    since = [KIND_SINCE] if NEWEST[0] in runs else []
    if not {*runs} <= {*NEWEST}:
        since += [CHANGED_SINCE.pattern, LAUNCHES_SINCE.pattern]
    return {id: why for id, why in red.items() if not any(re.fullmatch(rule, id) for rule in since)}


@pytest.mark.parametrize("lane", ["h200", "h200x2"])
def test_complete_run_of_the_adopted_build_is_kept(lane: str) -> None:
    """If none is, store the candidate's record of the gate that was adopted."""
    runs = [r for r in map(read_record, RECORDS) if r.provenance["lane"] == lane and r.provenance["full_run"]]
    assert [r for r in runs if of_adopted_build(r)]


@pytest.mark.parametrize("path", [p for p in RECORDS if of_adopted_build(read_record(p))], ids=name_of)
def test_kept_record_passes_the_current_baseline(path: Path) -> None:
    """If the baseline no longer matches a stored run, store a newer run."""
    record, name = read_record(path), name_of(path)
    assert record.complete or name in INCOMPLETE
    judged = {j.row.id: j.row.value for j in record.judgements}
    other_contract = {id for id, now in CONTRACT_SINCE.items() if now not in str(judged.get(id, now))}
    left = explained(red(record, baseline_of(record)), name, "now").keys() - other_contract
    assert left <= EXPLAINED.get(name, set())


def as_baseline(record: Record) -> Baseline:
    """Return the baseline that accepts a record."""
    facts = {name: None if x is None else str(x) for name, x in record.provenance.items() if name != "rules"}
    rows = {row.id: reviewed(row, None, record) for row in rows_of(record) if not row.paired}
    return Baseline(record.provenance["lane"], facts, rows)


def class_of(path: Path) -> tuple[bool, object]:
    """Return what two runs share whose rows compare: the number of GPUs, and torch."""
    return name_of(path).startswith("h200x2"), read_record(path).provenance["torch"]


PAIRS = [pair for pair in permutations(RECORDS, 2) if len({*map(class_of, pair)}) == 1]


@pytest.mark.parametrize(("reviewed_run", "run"), PAIRS, ids=name_of)
def test_run_on_another_host_is_red_for_its_build_alone(reviewed_run: Path, run: Path) -> None:
    """Each kept run as the baseline of each other one: no time of a host that differs is blamed on the build."""
    names = name_of(reviewed_run), name_of(run)
    left = explained(red(read_record(run), as_baseline(read_record(reviewed_run))), *names)
    assert left.keys() <= set().union(*(EXPLAINED.get(name, set()) for name in names)), left


def scaled(record: Record, pattern: str, factor: float) -> Record:
    """Return a record in which the times or rates of some rows are worse by a factor."""

    def changed(row: Row) -> Row:
        by = factor if row.better == "lower" else 1 / factor
        interval = row.interval and (row.interval[0] * by, row.interval[1] * by)
        return replace(row, value=row.value * by, interval=interval)  # type: ignore[operator]

    rows = [changed(j.row) if re.fullmatch(pattern, j.row.id) else j.row for j in record.judgements]
    return replace(record, judgements=tuple(replace(j, row=row) for j, row in zip(record.judgements, rows)))


@pytest.mark.parametrize(
    ("name", "pattern", "factor", "found"),
    [
        ("h200-16-cores", r"kernels/moe_combine-E64-K6/forward_milliseconds", 1.1, True),
        ("h200-16-cores", r"throughput/nam56r-full-regional-2x4096/tokens_per_second", 1.06, True),
        ("h200-16-cores", r"throughput/nam52-full-regional-2x4096/device_milliseconds_per_step", 1.13, True),
        ("h100-16-cores", r"kernels/moe_combine-E64-K6/forward_milliseconds", 1.1, False),
    ],
)  # fmt: skip
def test_slower_build_is_found_where_the_host_is_calibrated(
    name: str, pattern: str, factor: float, found: bool
) -> None:
    """On a host with other memory the lane shows the time, and a gate compares it."""
    record = read_record(RECORDS[[name_of(path) for path in RECORDS].index(name)])
    slower = red(scaled(record, pattern, factor), baseline_of(record))
    assert [id for id in slower if re.fullmatch(pattern, id)] == [pattern] * found


# A tolerance above this needs a note with the measurement that requires it, in percent.
UNEXPLAINED = 0.1
PERCENT = re.compile(r"(\d+(?:\.\d+)?) %")


def unfounded(row: Reviewed) -> bool:
    """Whether a tolerance is more than 10 points above the largest percentage that its note measured."""
    if row.tolerance <= UNEXPLAINED:
        return False
    measured = max(map(float, PERCENT.findall(row.note)), default=0.0)
    return not measured or round(100 * row.tolerance - measured, 6) > 10


@pytest.mark.parametrize("lane", LANES)
def test_wide_tolerance_cites_a_measurement(lane: str) -> None:
    rows = load(ROOT / "baselines" / f"{lane}.json", lane, missing_ok=True).rows
    assert [id for id, row in rows.items() if unfounded(row)] == []
