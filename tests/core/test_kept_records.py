"""baselines/records: compressed records of complete runs of a lane or a suite."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bumpgate.core.baseline import BUILD, Baseline, Reviewed, judge, load, other_build
from bumpgate.core.rows import Judgement, Record, Verdict, read_record
from suites.support.lanes import LANES
from tests.support.tree import ROOT

RECORDS = sorted((ROOT / "baselines" / "records").glob("*.json.xz"))
# Rows that have another id since.
RENAMED = {
    "kernels/moe_dispatch-h200-reference/unique_graphs": "kernels/moe_dispatch-h200-eager/unique_graphs"
}
# Rows that a row of another suite states as well, and alone since.
GONE = {f"numerics/moe_combine-{kind}/error_before_cast" for kind in ("cancelling", "random")}
# Rows whose reviewed value a later change of the contract moved, in runs before it.
CONTRACT_SINCE = {"compile/contract/dynamo_lines_at_first_compile": "optimize_ddp=False"}


# Times of kernels that were changed after a run, in all runs but NEWEST.
NEWEST = "h200-hopper-kernels"
CHANGED_SINCE = re.compile(
    r"kernels/(attention|grouped_gemm|mamba3_siso)-.*/(forward|both)_(milliseconds|roofline_fraction|over_peer)"
)
# Red rows of a kept run: single readings that later runs on the same build did not repeat.
EXPLAINED = {
    "h200-whole": {"throughput/nam56r-full-regional-2x4096/tokens_per_second"},
    "h200-kernel-wheels": {"throughput/nam52-full-upstream-2x4096/speedup_over_upstream"},
    "h200-whole-another-machine": {
        "kernels/mamba3_siso-N128-G1/first_call_seconds",
        "throughput/nam12-full-whole_opaque-2x4096/cold_first_step_seconds",
    },
    NEWEST: {
        "release/batched_eigh/time_over_one_by_one"
    },  # CHANGED: its test had a tolerance then, and has only a limit now
}


def name_of(path: Path) -> str:
    return path.name.removesuffix(".json.xz")


def baseline_of(record: Record) -> Baseline:
    lane = record.provenance["lane"]
    return load(ROOT / "baselines" / f"{lane}.json", lane)


def of_adopted_build(record: Record) -> bool:
    return not other_build(baseline_of(record).made_with, record.provenance)


def rejudged(record: Record) -> list[Judgement]:
    """Judge the rows of a record by the current baseline, under their present ids."""
    build = {name: record.provenance.get(name) for name in BUILD}
    kept = [j.row for j in record.judgements if j.row.id not in GONE]
    rows = (replace(row, id=RENAMED.get(row.id, row.id)) for row in kept)
    return [judge(row, baseline_of(record), failed_instruments={}, build=build) for row in rows]


@pytest.mark.parametrize("lane", ["h200", "h200x2"])
def test_complete_run_of_the_adopted_build_is_kept(lane: str) -> None:
    """If none is, store the candidate's record of the gate that was adopted."""
    runs = [r for r in map(read_record, RECORDS) if r.provenance["lane"] == lane and r.provenance["full_run"]]
    assert [r for r in runs if of_adopted_build(r)]


@pytest.mark.parametrize("path", RECORDS, ids=name_of)
def test_kept_record_passes_the_current_baseline(path: Path) -> None:
    """If the baseline no longer matches a stored run, store a newer run."""
    record = read_record(path)
    assert record.complete
    assert of_adopted_build(record)
    judged = [j for j in rejudged(record) if CONTRACT_SINCE.get(j.row.id, "") in str(j.row.value)]
    red = {j.row.id: j.reason for j in judged if j.verdict not in (Verdict.PASS, Verdict.WIN)}
    if name_of(path) != NEWEST:
        red = {id: reason for id, reason in red.items() if not CHANGED_SINCE.fullmatch(id)}
    if name_of(path) == "h200-kernel-wheels":
        red = {id: reason for id, reason in red.items() if not reason.startswith("not reviewed: ")}
    assert red.keys() == EXPLAINED.get(name_of(path), set()), red


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
    rows = load(ROOT / "baselines" / f"{lane}.json", lane).rows
    assert [id for id, row in rows.items() if unfounded(row)] == []


@pytest.mark.parametrize(
    ("tolerance", "note", "red"),
    [
        (0.1, "", False),
        (0.11, "", True),
        (0.4, "noisy", True),
        (0.4, "sd 3 %, at most 25 %", True),
        (0.35, "sd 3 %, at most 25 %", False),
    ],
)
def test_unfounded_finds_tolerances_without_measurement(tolerance: float, note: str, red: bool) -> None:
    assert unfounded(Reviewed(1.0, "s", "lower", tolerance, note)) is red
