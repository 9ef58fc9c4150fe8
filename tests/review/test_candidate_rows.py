"""Which rows and tests of a candidate an adoption reviews."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bumpgate.core.baseline import Baseline, Reviewed, judge
from bumpgate.core.findings import PEER, Decision, Finding
from bumpgate.core.gate_file import Paired
from bumpgate.core.hosts import on_this_host
from bumpgate.core.rows import Judgement, Record, Row, Verdict
from bumpgate.process.file_transaction import AdoptionError
from bumpgate.review.candidate_rows import given_up_rows, lost_rows, moved_baseline, moved_tests
from bumpgate.review.rebaseline import BaselineChange
from suites.support.planted import planted

TEST = "suites/throughput/test_a.py::test_a[cpu]"
ID = "throughput/nam52/seconds"
OLD = Baseline("cpu", {"torch": "2.13.0", "triton": None}, {ID: Reviewed(1.0, "s", "lower", 0.1, test=TEST)})
NEVER = Baseline("cpu", {}, {})
HERE = {"lane": "cpu", "torch": "2.14.0", "triton": None}

Interval = tuple[float, float] | None


def timed(value: float, interval: Interval = None, **fields: Any) -> Row:
    made = {"better": "lower", "interval": interval, "tolerance": 0.1, "test": TEST}
    return Row(ID, value, "s", 3, "C37", **made | fields)


def gate_of(candidate: Any, adopted: Any = None, timed: Any = (), *findings: Finding) -> Any:
    """Return a gate of two records. timed: row id -> its sessions."""
    sides = {"adopted": SimpleNamespace(record=adopted), "candidate": SimpleNamespace(record=candidate)}
    return SimpleNamespace(**sides, timed=dict(timed), findings=findings)


def record_of(row: Row, old: Baseline = OLD, **facts: str) -> Record:
    return Record(HERE | facts, (judge(row, old, failed_instruments={}),))


def moved(
    gate: Any, old: Baseline = OLD, named: tuple[str, ...] = (), id: str = ID
) -> tuple[Any, list[str], list[str]]:
    """Return the new value of a row, why rows changed, and the rows that stay red."""
    new, changes, left = moved_baseline(gate, old, named)
    return new.rows[id].value if id in new.rows else None, [change.why for change in changes], left


def sessions(outcome: str | None, fastest: float = 1.02) -> dict[str, Any]:
    """Return the paired sessions of ID, if it had any. fastest: upper end of their interval."""
    return {ID: SimpleNamespace(outcome=outcome, interval=(0.4, fastest))} if outcome else {}


@pytest.mark.parametrize(
    ("value", "interval", "outcome", "fastest", "before", "expected"),
    [
        # A busy host read 158,000 tokens/s for a reviewed 281,000, and the sessions found the two the same.
        (1.5, (1.45, 1.55), "SAME", 1.02, 1.0, (1.0, [], [ID])),
        (1.5, (1.45, 1.55), "SLOWER", 1.02, 1.0, (1.0, [], [ID])),
        (1.5, (1.45, 1.55), None, 1.02, 1.0, (1.0, [], [ID])),
        (1.5, None, "NOT SLOWER", 1.02, 1.0, (1.0, [], [])),
        (1.5, None, None, 1.02, 1.0, (1.0, [], [ID])),
        (1.05, (1.0, 1.08), "SAME", 1.02, 1.0, (1.0, [], [])),
        # One reading was 42 % faster, and the sessions read +4 % in [-25 %, +56 %].
        (0.5, (0.45, 0.55), None, 1.02, 1.0, (0.5, ["win"], [])),
        (0.5, (0.45, 0.55), "FASTER", 0.6, 1.0, (0.5, ["win"], [])),
        (0.5, (0.45, 0.55), "NOT SLOWER", 0.99, 1.0, (0.5, ["win"], [])),
        (0.5, (0.45, 0.55), "NOT SLOWER", 1.0, 1.0, (1.0, [], [])),
        (0.5, (0.45, 0.55), "SAME", 1.02, 1.0, (1.0, [], [])),
        # Both sides are faster than the reviewed value: their machine is.
        (0.5, (0.45, 0.55), "FASTER", 0.9, 0.6, (1.0, [], [])),
        (0.5, None, None, 1.02, 0.5, (1.0, [], [])),
    ],
)  # fmt: skip
def test_time_moves_only_if_the_sessions_confirm_a_win(
    value: float, interval: Interval, outcome: str | None, fastest: float, before: float, expected: Any
) -> None:
    was = timed(before, (before, before) if interval else None)
    gate = gate_of(
        record_of(timed(value, interval)), record_of(was, torch="2.13.0"), sessions(outcome, fastest)
    )
    assert moved(gate) == expected


@pytest.mark.parametrize(
    ("id", "better", "values", "decision", "label"),
    [
        ("kernels/a/over_peer", "lower", (1.0, 1.5), Decision.ADOPT, PEER),
        ("kernels/a/over_peer", "lower", (1.0, 1.5), Decision.HOLD, "REGRESSION"),
        ("aot/a/fusions", "exact", (1629, 1631), Decision.ADOPT, "CHANGED"),
        ("aot/a/fusions", "exact", (1629, 1620), Decision.ADOPT, "CHANGED"),
        ("aot/a/fusions", "exact", (1629, 1700), Decision.HOLD, "CHANGED"),
        ("aot/a/fusions", "lower", (1629, 1631), Decision.ADOPT, "CHANGED"),
        ("aot/a/fusions", "lower", (1629, 1620), Decision.ADOPT, "CHANGED"),
        ("aot/a/fusions", "lower", (1629, 1700), Decision.HOLD, "CHANGED"),
    ],
)
def test_row_whose_finding_holds_nothing_moves(
    id: str, better: str, values: tuple[float, float], decision: Decision, label: str
) -> None:
    """A ratio to a peer that became faster, or a change too small to hold a bump."""
    before, now = values
    peer = {"own": "kernels/a/milliseconds"} if id.endswith("over_peer") else {}
    unit = "ratio" if peer else "count"
    row = Row(id, now, unit, 3, "C37", better=better, test=TEST, **peer)
    old = replace(OLD, rows={id: Reviewed(before, unit, better, 0.1 if peer else 0.0, test=TEST)})
    record = record_of(row, old)
    gate = gate_of(record, record, (), Finding(decision, label, "", "", (id,)))
    value, _, left = moved(gate, old, id=id)
    assert (value, left) == ((now, []) if decision is Decision.ADOPT else (before, [id]))


def test_time_that_stays_names_the_test_that_reports_it_now() -> None:
    record = record_of(timed(1.5, (1.45, 1.55)))
    old = replace(OLD, rows={ID: replace(OLD.rows[ID], test="suites/old.py::test_a[cpu]")})
    gate = gate_of(record, record, sessions("SAME"))
    assert moved(gate, old) == (1.0, ["test moved"], [ID])
    assert moved_baseline(gate, old, ())[0].rows[ID].test == TEST


@pytest.mark.parametrize("value", [1.5, 1.05])
def test_time_of_another_host_moves(value: float) -> None:
    """The baseline then states the host of the gate."""
    record = record_of(timed(value, (value, value)), cpu="B")
    gate, old = gate_of(record, record, sessions("SAME")), replace(OLD, made_with={"cpu": "A"})
    assert moved(gate, old) == (value, ["other host"], [])
    assert moved_baseline(gate, old, ())[0].made_with["cpu"] == "B"


def test_time_of_another_host_that_stays_red_is_listed() -> None:
    """Its interval is wider than the tolerance, and the baseline states the host of the gate afterwards."""
    facts = {"device": "cpu", "cpu": "B", "cores": "2"}
    old = replace(OLD, made_with={**OLD.made_with, **facts, "cpu": "A"})
    record = record_of(timed(1.5, (1.2, 1.9)), **facts)
    record = replace(record, judgements=(on_this_host(record.judgements[0], old, facts, {}),))
    assert moved(gate_of(record, record, sessions("SAME")), old)[2] == [ID]


def missing(reason: str, *, gone: bool) -> Record:
    row = Row(ID, None, "s", 0, "", better="lower", test=TEST)
    return Record(HERE, (Judgement(row, Verdict.MISSING, reason, gone=gone),))


@planted("C39", "a test that crashes in the candidate before it reports a derived row")
@pytest.mark.parametrize("old", [OLD, NEVER])
def test_row_of_a_failed_test_cannot_be_reviewed_away(old: Baseline) -> None:
    gate = gate_of(missing(f"not reported by {TEST}: no torch.x", gone=False))
    with pytest.raises(AdoptionError) as caught:
        moved_baseline(gate, old, [ID])
    assert str(caught.value) == (
        f"{ID}: not reported by {TEST}: no torch.x: no review can drop a row whose test did not run to its end,"
        " change its test"
    )
    assert moved_baseline(gate, old, ())[0].rows == old.rows


def test_derived_row_cannot_be_reviewed_away() -> None:
    row = Row("a/b/breaks", 14, "breaks", 3, "C6", better="derived", expected=13, test=TEST)
    words = r"a/b/breaks is red whatever the baseline holds \(expected 13 \(derived\), measured 14\)"
    with pytest.raises(AdoptionError, match=words):
        moved_baseline(gate_of(record_of(row)), OLD, [row.id])


def test_row_that_its_test_reports_no_more_is_dropped() -> None:
    gate = gate_of(missing(f"{TEST} no longer reports it", gone=True))
    assert moved(gate, named=(ID,)) == (None, ["reviewed: not measured any more"], [])


def test_reviewed_row_without_a_reviewed_value_stays_paired() -> None:
    """Sessions alone judge such a row: a value in the baseline would bound it with a tolerance of 0."""
    record = Record(HERE, (Judgement(timed(1.6, paired=True), Verdict.PASS, ""),))
    assert moved(gate_of(record), NEVER, (ID,)) == (None, [], [])


def test_reading_that_the_sessions_refuted_is_not_adopted() -> None:
    """One start next to a neighbour: its value as the reviewed one would let a start of twice the time pass."""
    old = replace(OLD, rows={ID: Reviewed(76.0, "s", "lower", tolerance=0.5, test=TEST)})
    record = Record(HERE, (Judgement(timed(118.0, tolerance=0.5), Verdict.REGRESSION, "", tolerance=0.5),))
    gate = gate_of(record, None, {ID: Paired("SAME", 1.0, (0.99, 1.01), 12)})
    assert moved(gate, old) == (76.0, [], [])


def test_lost_rows_are_those_that_only_the_adopted_side_has() -> None:
    def side(*not_run: str, **rows: int | None) -> Record:
        measured = (Row(f"a/b/{name}", value, "n", 1, "C1", test="t.py::t") for name, value in rows.items())
        judged = tuple(Judgement(row, Verdict.PASS, "") for row in measured)
        return Record({"not_run": [f"a/b/{row}: why" for row in not_run]}, judged)

    names = ("peer", "tpu", "own", "lost")
    old = Baseline("h200", {}, {f"a/b/{name}": Reviewed(1, "n", "exact") for name in names})
    adopted = side("tpu", peer=1, own=1, new=1, lost=1, gone=None)
    candidate = side("peer", "tpu", "new", "own", "gone", own=1)
    assert lost_rows(gate_of(candidate, adopted), old) == {"a/b/peer": "why"}
    assert lost_rows(gate_of(candidate), old) == {}


@pytest.mark.parametrize(
    ("reason", "own"),
    [
        ("flash-attn is not installed (--without)", True),
        ("flash_attn is not installed", True),
        ("mamba_ssm is not installed; flash_attn is not installed", True),
        ("lane h200 has given flash-attn up (lanes/h200/lane.toml)", True),
        ("flash-attn 2.8.3 is built for torch 2.11, not 2.15.0", True),
        ("flash_attn-2.8.3+cu130-cp312-cp312-linux_x86_64.whl: sha256 aaaa, expected bbbb", True),
        ("not built: bumpgate wheels build --lane h200 --torch 2.15.0 --package flash-attn", True),
        ("no wheel of flash-attn 2.8.3 was found", True),
        ("flash-attn: flash_attn_2_cuda.so needs libc10_cuda.so, which torch 2.15.0 does not have", True),
        ("liger_kernel is not installed", False),
        ("flash-attn-3 is not installed", False),
        ("flash is not installed", False),
        ("no allocator here", False),
    ],
)
def test_rows_are_given_up_if_their_reason_names_the_wheel(reason: str, own: bool) -> None:
    lost = {"a/b/one": reason, "a/b/two": "liger_kernel is not installed"}
    assert given_up_rows(lost, ("flash-attn",)) == ({"a/b/one"} if own else frozenset())
    assert given_up_rows(lost, ()) == frozenset()


GONE = BaselineChange(
    "a/b/c", Reviewed(1, "n", "exact", test="t.py::gone"), None, "reviewed: not measured any more"
)


@pytest.mark.parametrize(
    ("ran", "changes", "expected"),
    [
        ({"t.py::new": "passed", "t.py::skip": "skipped", "t.py::x": "xfailed"}, (), "gone new skip was"),
        ({"t.py::was": "passed"}, (GONE,), "was"),
        ({"t.py::gone": "passed"}, (GONE,), "gone was"),  # it runs, and reports another row
        ({}, (GONE,), "gone was"),  # a record without its tests
    ],
)  # fmt: skip
def test_reviewed_tests_gain_what_ran_and_lose_only_reviewed_rows(
    ran: dict[str, str], changes: tuple[BaselineChange, ...], expected: str
) -> None:
    found = moved_tests(Record({}, (), tests=ran), {"t.py::was", "t.py::gone"}, changes)
    assert found == {f"t.py::{name}" for name in expected.split()}
