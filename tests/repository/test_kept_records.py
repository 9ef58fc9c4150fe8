"""baselines/records: compressed records of complete runs of a lane or a suite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bumpgate.core.baseline import BUILD, Reviewed, judge, load, other_build
from bumpgate.core.rows import Judgement, Record, Verdict, read_record
from suites.support.lanes import LANES
from tests.support.tree import ROOT

RECORDS = sorted((ROOT / "baselines" / "records").glob("*.json.xz"))
# Runs of other builds of torch, which docs/h200_newer_torch.md explains.
CANDIDATES = ("h200-torch-2.13.0", "h200-torch-2.14.1", "h200-torch-2.15.0")
COMPLETE_RUNS = ("h200-whole", "h200-whole-another-machine")
# Rows whose reviewed value a later change of the contract moved, in runs before it.
CONTRACT_SINCE = {"compile/contract/dynamo_lines_at_first_compile": "optimize_ddp=False"}


def name_of(path: Path) -> str:
    return path.name.removesuffix(".json.xz")


def kept(name: str) -> Record:
    return read_record(ROOT / "baselines" / "records" / f"{name}.json.xz")


def rejudged(record: Record) -> list[Judgement]:
    """Judge the rows of a record by the current baseline."""
    baseline = load(ROOT / "baselines" / f"{record.provenance['lane']}.json", record.provenance["lane"])
    assert not other_build(baseline.made_with, record.provenance)
    build = {name: record.provenance.get(name) for name in BUILD}
    return [judge(j.row, baseline, failed_instruments={}, build=build) for j in record.judgements]


def test_records_of_complete_runs_exist() -> None:
    """Runs of the H200 lane, and one of the kernel suites only, with fewer concurrent first calls."""
    assert {*COMPLETE_RUNS, "h200-suites-kernels"} <= {name_of(path) for path in RECORDS}
    assert all(kept(name).provenance["full_run"] for name in COMPLETE_RUNS)


def test_run_on_another_machine_has_the_same_verdicts() -> None:
    one, other = ({j.row.id: j.verdict for j in rejudged(kept(name))} for name in COMPLETE_RUNS)
    assert one.keys() ^ other.keys() <= {"cache/layers-h200/variables_exported"}  # newer than that run
    assert {row: (one[row], verdict) for row, verdict in other.items() if one[row] != verdict} == {}


@pytest.mark.parametrize("name", CANDIDATES)
def test_record_of_a_candidate_is_of_another_build(name: str) -> None:
    record = kept(name)
    assert record.complete
    assert record.provenance["torch"].startswith(name.rpartition("-")[2])
    baseline = load(ROOT / "baselines" / "h200.json", "h200")
    assert other_build(baseline.made_with, record.provenance)


WITH_BASELINE = [path for path in RECORDS if name_of(path) not in CANDIDATES]


@pytest.mark.parametrize("path", WITH_BASELINE, ids=name_of)
def test_kept_record_passes_the_current_baseline(path: Path) -> None:
    """If the baseline no longer matches a stored run, store a newer run."""
    record = read_record(path)
    assert record.complete
    judged = [j for j in rejudged(record) if CONTRACT_SINCE.get(j.row.id, "") in str(j.row.value)]
    assert {j.verdict for j in judged} <= {Verdict.PASS, Verdict.WIN}, [
        f"{j.row.id}: {j.reason}" for j in judged if j.verdict not in (Verdict.PASS, Verdict.WIN)
    ]


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
