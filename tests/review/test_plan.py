"""Which rows of a candidate's record an adoption writes into the baseline."""

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
from bumpgate.review.candidate_rows import moved_baseline
from suites.support.planted import planted

TEST = "suites/throughput/test_a.py::test_a[cpu]"
ID = "throughput/nam52/seconds"
OLD = Baseline("cpu", {"torch": "2.13.0", "triton": None}, {ID: Reviewed(1.0, "s", "lower", 0.1, test=TEST)})


def reading(value: float, interval: tuple[float, float] | None, torch: str, **facts: str) -> Any:
    """Return a side whose record has one timed row."""
    row = Row(ID, value, "s", 3, "C37", better="lower", interval=interval, tolerance=0.1, test=TEST)
    provenance = {"lane": "cpu", "torch": torch, "triton": None, **facts}
    return SimpleNamespace(record=Record(provenance, (judge(row, OLD, failed_instruments={}),)))


def adopted(
    value: float,
    interval: tuple[float, float] | None,
    outcome: str | None,
    fastest: float = 1.02,
    before: float = 1.0,
) -> tuple[Any, Any, Any]:
    """Return the new baseline's value, the changes and the rows that stay red, of one timed row.

    outcome: of the paired sessions; None without any. fastest: upper end of their interval. before: value of the
    adopted side.
    """
    timed = {ID: SimpleNamespace(outcome=outcome, interval=(0.4, fastest))} if outcome else {}
    sides = {
        "adopted": reading(before, (before, before), "2.13.0"),
        "candidate": reading(value, interval, "2.14.0"),
    }
    gate: Any = SimpleNamespace(**sides, timed=timed, findings=())
    new, changes, left = moved_baseline(gate, OLD, ())
    return new.rows[ID].value, [change.why for change in changes], left


@pytest.mark.parametrize(
    ("label", "expected"), [(PEER, (1.5, [])), ("REGRESSION", (1.0, ["kernels/a/over_peer"]))]
)
def test_ratio_to_a_faster_peer_moves(label: str, expected: tuple[float, list[str]]) -> None:
    ratio = "kernels/a/over_peer"
    row = Row(ratio, 1.5, "ratio", 3, "C37", better="lower", test=TEST, own="kernels/a/milliseconds")
    old = replace(OLD, rows={ratio: Reviewed(1.0, "ratio", "lower", 0.1, test=TEST)})
    record = Record({"lane": "cpu", "torch": "2.14.0"}, (judge(row, old, failed_instruments={}),))
    finding = Finding(Decision.ADOPT if label == PEER else Decision.HOLD, label, "", "", (ratio,))
    sides = {name: SimpleNamespace(record=record) for name in ("adopted", "candidate")}
    gate: Any = SimpleNamespace(**sides, timed={}, findings=[finding])
    new, _, left = moved_baseline(gate, old, ())
    assert (new.rows[ratio].value, left) == expected


@pytest.mark.parametrize(
    ("decision", "value", "expected"),
    [
        (Decision.ADOPT, 1631, (1631, [])),
        (Decision.ADOPT, 1620, (1620, [])),
        (Decision.HOLD, 1700, (1629, ["aot/a/fusions"])),
    ],
)
@pytest.mark.parametrize("better", ["exact", "lower"])
def test_change_too_small_to_hold_moves(
    decision: Decision, value: int, better: str, expected: tuple[int, list[str]]
) -> None:
    row = Row("aot/a/fusions", value, "count", 3, "C37", better=better, test=TEST)
    old = replace(OLD, rows={row.id: Reviewed(1629, "count", better, test=TEST)})
    record = Record({"lane": "cpu", "torch": "2.14.0"}, (judge(row, old, failed_instruments={}),))
    sides = {name: SimpleNamespace(record=record) for name in ("adopted", "candidate")}
    findings = [Finding(decision, "CHANGED", "fusions", "", (row.id,))]
    gate: Any = SimpleNamespace(**sides, timed={}, findings=findings)
    new, _, left = moved_baseline(gate, old, ())
    assert (new.rows[row.id].value, left) == expected


@pytest.mark.parametrize(
    ("value", "interval", "outcome", "expected"),
    [
        (1.5, (1.45, 1.55), "SAME", (1.0, [], [ID])),
        (1.5, (1.45, 1.55), "SLOWER", (1.0, [], [ID])),
        (1.5, (1.45, 1.55), None, (1.0, [], [ID])),
        (1.5, None, "NOT SLOWER", (1.0, [], [])),
        (1.5, None, None, (1.0, [], [ID])),
        (0.5, (0.45, 0.55), None, (0.5, ["win"], [])),
        (1.05, (1.0, 1.08), "SAME", (1.0, [], [])),
    ],
)
def test_time_that_the_sessions_found_no_slower_stays(
    value: float, interval: tuple[float, float] | None, outcome: str | None, expected: tuple[Any, Any, Any]
) -> None:
    """Seen on an H200 with a busy host: 158,000 tokens/s for a reviewed 281,000, SAME by the sessions."""
    assert adopted(value, interval, outcome) == expected


@pytest.mark.parametrize(
    ("outcome", "fastest", "expected"),
    [
        ("FASTER", 0.6, (0.5, ["win"], [])),
        ("NOT SLOWER", 0.99, (0.5, ["win"], [])),
        ("NOT SLOWER", 1.0, (1.0, [], [])),
        ("SAME", 1.02, (1.0, [], [])),
    ],
)
def test_win_moves_a_time_if_the_sessions_confirm_it(
    outcome: str, fastest: float, expected: tuple[Any, Any, Any]
) -> None:
    """Seen on an H200: tokens/s of a small model read 42 % higher once, and +4 % in [-25 %, +56 %] by sessions."""
    assert adopted(0.5, (0.45, 0.55), outcome, fastest) == expected


def test_time_that_stays_names_the_test_that_reports_it_now() -> None:
    side = reading(1.5, (1.45, 1.55), "2.14.0")
    timed = {ID: SimpleNamespace(outcome="SAME", interval=(0.99, 1.01))}
    gate: Any = SimpleNamespace(adopted=side, candidate=side, timed=timed, findings=())
    old = replace(OLD, rows={ID: replace(OLD.rows[ID], test="suites/old.py::test_a[cpu]")})
    new, changes, left = moved_baseline(gate, old, ())
    assert (new.rows[ID].value, new.rows[ID].test) == (1.0, TEST)
    assert ([change.why for change in changes], left) == (["test moved"], [ID])


def test_win_of_both_sides_does_not_move_a_time() -> None:
    """Their machine is faster than that of the reviewed value."""
    assert adopted(0.5, (0.45, 0.55), "FASTER", 0.9, before=0.6) == (1.0, [], [])


@pytest.mark.parametrize("value", [1.5, 1.05])
def test_time_of_another_host_moves(value: float) -> None:
    """The baseline then states the host of the gate."""
    side = reading(value, (value, value), "2.14.0", cpu="B")
    timed = {ID: SimpleNamespace(outcome="SAME", interval=(0.99, 1.01))}
    gate: Any = SimpleNamespace(adopted=side, candidate=side, timed=timed, findings=())
    new, changes, left = moved_baseline(gate, replace(OLD, made_with={"cpu": "A"}), ())
    assert (new.rows[ID].value, new.made_with["cpu"]) == (value, "B")
    assert ([change.why for change in changes], left) == (["other host"], [])


def of_candidate(record: Record, timed: dict[str, Paired] | None = None) -> Any:
    """Return a gate whose adopted side left no record."""
    sides = {"adopted": SimpleNamespace(record=None), "candidate": SimpleNamespace(record=record)}
    return SimpleNamespace(**sides, timed=timed or {}, findings=())


def unreported(reason: str, *, gone: bool) -> Judgement:
    row = Row(ID, None, "s", 0, "", better="lower", test=TEST)
    return Judgement(row, Verdict.MISSING, reason, gone=gone)


@planted("C39", "a test that crashes in the candidate before it reports a derived row")
@pytest.mark.parametrize("old", [OLD, Baseline("cpu", {}, {})])
def test_row_of_a_failed_test_cannot_be_reviewed_away(old: Baseline) -> None:
    record = Record({"lane": "cpu"}, (unreported(f"not reported by {TEST}: no torch.x", gone=False),))
    gate = of_candidate(record)
    with pytest.raises(AdoptionError) as caught:
        moved_baseline(gate, old, [ID])
    assert str(caught.value) == (
        f"{ID}: not reported by {TEST}: no torch.x: no review can drop a row whose test did not run to its end,"
        " change its test"
    )
    assert moved_baseline(gate, old, ())[0].rows == old.rows


def test_row_that_its_test_reports_no_more_is_dropped() -> None:
    record = Record({"lane": "cpu"}, (unreported(f"{TEST} no longer reports it", gone=True),))
    gate = of_candidate(record)
    baseline, changes, left = moved_baseline(gate, OLD, [ID])
    assert (baseline.rows, [c.why for c in changes], left) == ({}, ["reviewed: not measured any more"], [])


def test_reviewed_row_without_a_reviewed_value_stays_paired() -> None:
    """Sessions alone judge such a row: a value in the baseline would bound it with a tolerance of 0."""
    row = Row("throughput/start/seconds", 1.6, "s", 1, "C18", better="lower", test="t.py::test", paired=True)
    record = Record({"lane": "cpu"}, (Judgement(row, Verdict.PASS, ""),))
    gate = of_candidate(record)
    baseline, changes, left = moved_baseline(gate, Baseline("cpu", {}, {}), [row.id])
    assert (baseline.rows, changes, left) == ({}, [], [])


def test_reading_that_the_sessions_refuted_is_not_adopted() -> None:
    """One start next to a neighbour: its value as the reviewed one would let a start of twice the time pass."""
    was = Reviewed(76.0, "s", "lower", tolerance=0.5, test="t.py::test")
    row = Row(
        "throughput/nam52/cold_seconds",
        118.0,
        "s",
        1,
        "C13",
        better="lower",
        test="t.py::test",
        tolerance=0.5,
    )
    record = Record({"lane": "cpu"}, (Judgement(row, Verdict.REGRESSION, "", tolerance=0.5),))
    same = Paired("SAME", 1.0, (0.99, 1.01), 12)
    gate = of_candidate(record, {row.id: same})
    baseline, changes, left = moved_baseline(gate, Baseline("cpu", {}, {row.id: was}), [])
    assert (baseline.rows[row.id].value, changes, left) == (76.0, [], [])


def test_win_of_both_sides_read_once_does_not_move_a_time() -> None:
    sides = {"adopted": reading(0.5, None, "2.13.0"), "candidate": reading(0.5, None, "2.14.0")}
    gate: Any = SimpleNamespace(**sides, timed={}, findings=())
    new, changes, left = moved_baseline(gate, OLD, ())
    assert (new.rows[ID].value, changes, left) == (1.0, [], [])


def test_time_of_another_host_that_stays_red_is_listed() -> None:
    """Its interval is wider than the tolerance, and the baseline states the host of the gate afterwards."""
    facts = {"device": "cpu", "cpu": "B", "cores": "2"}
    old = replace(OLD, made_with={**OLD.made_with, **facts, "cpu": "A"})
    side = reading(1.5, (1.2, 1.9), "2.14.0", **facts)
    (judgement,) = side.record.judgements
    side.record = replace(side.record, judgements=(on_this_host(judgement, old, facts, {}),))
    timed = {ID: Paired("SAME", 1.0, (0.99, 1.01), 6)}
    gate: Any = SimpleNamespace(adopted=side, candidate=side, timed=timed, findings=())
    new, _, left = moved_baseline(gate, old, ())
    assert (new.made_with["cpu"], left) == ("B", [ID])
