"""Which values and tests of a candidate an adoption reviews: pure functions of a gate."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from bumpgate.core import census
from bumpgate.core.baseline import BUILD, Baseline, comparable, judge
from bumpgate.core.findings import NO_REGRESSION, PEER, Decision
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import Judgement, Record, Verdict, is_time
from bumpgate.process.file_transaction import AdoptionError
from bumpgate.review.rebaseline import BaselineChange, build_of, changed_rows, judged, made_with, reviewed
from bumpgate.wheels.fitting import names

# The paired sessions decide these instead of a stored time.
SETTLED = tuple(outcome.value for outcome in NO_REGRESSION)


def moved_baseline(
    gate: GateFile, old: Baseline, accepted_rows: Collection[str], given_up: Collection[str] = ()
) -> tuple[Baseline, list[BaselineChange], list[str]]:
    """Return the baseline of the candidate, the changes, and the rows that stay red under it.

    These values are taken from the candidate's record:

    * new rows, and values that belong to one build;
    * wins; a timed row's win only if the paired sessions confirm it;
    * ratios to a peer that became faster, and changes too small to hold a bump;
    * times of another class of host than the reviewed value, if the sessions found them no slower.

    Any other time keeps its reviewed value, whatever this machine read. Tolerances and notes are kept.

    accepted_rows: rows of reviewed findings, taken as measured unless sessions alone judge them. A row is dropped if
        its test ran and does not report it any more.
    given_up: rows to drop.
    Raises AdoptionError on a reviewed row that no baseline can excuse.
    """
    record = gate.candidate.record
    assert record is not None
    changes = [BaselineChange(id, old.rows[id], None, "its wheel was given up") for id in sorted(given_up)]
    changes += [c for j in record.judgements if (c := _change(j, old, record, gate, accepted_rows))]
    new = Baseline(old.lane, made_with(record), changed_rows(old, changes))
    return new, changes, [j.row.id for j in record.judgements if _stays_red(j, new, record, gate)]


def _stays_red(j: Judgement, new: Baseline, record: Record, gate: GateFile) -> bool:
    """Return whether a row is red under the new baseline, unless sessions refuted its single reading."""
    refuted = _settled(gate, j) and j.row.interval is None
    other_host = j.explains and j.row.interval is not None and not j.row.bound
    return (j.red or other_host) and not j.row.unmeasured and not refuted and judged(j, new, record).red


def _change(
    j: Judgement, old: Baseline, record: Record, gate: GateFile, accepted_rows: Collection[str]
) -> BaselineChange | None:
    row, was = j.row, old.rows.get(j.row.id)
    named = row.id in accepted_rows
    if named and row.unmeasured and not j.gone:
        raise AdoptionError(
            f"{row.id}: {j.reason}: no review can drop a row whose test did not run to its end, change its test"
        )
    if row.unmeasured:
        return BaselineChange(row.id, was, None, "reviewed: not measured any more") if named and was else None
    verdict = judged(j, old, record).verdict
    new = reviewed(row, was, record)
    then = judge(row, Baseline(old.lane, {}, {row.id: new}), failed_instruments={}, build=build_of(record))
    if named and then.verdict in (Verdict.REGRESSION, Verdict.INSTRUMENT):
        raise AdoptionError(
            f"{row.id} is red whatever the baseline holds ({then.reason}): no review can adopt it, change its test"
        )
    if named and not (row.paired and was is None):
        return BaselineChange(row.id, was, new, "reviewed")
    if was is None:
        # A paired row needs no reviewed value: it passes without one, and sessions judge it.
        return None if verdict is Verdict.PASS else BaselineChange(row.id, None, new, "new")
    settled = _settled(gate, j)
    another = not row.bound and comparable(old.made_with, record.provenance)
    if settled and row.interval and not then.red and another:
        return BaselineChange(row.id, was, new, "other host")
    if verdict is Verdict.WIN:
        # A lucky reading, or a fast machine, would make later runs of the same build red.
        once = row.interval is None and gate.timed.get(row.id) is None and is_time(row)
        accept = _confirmed(gate, j) and not ((settled or once) and _better_in_both(gate, j))
    elif verdict is Verdict.CHANGED:
        accept = (row.per_build and _other_build(old, record)) or row.id in _held_nothing(gate, "CHANGED")
    else:  # a time that is no slower than the adopted build's on the same machine keeps its reviewed value
        shown = _held_nothing(gate, PEER, "CHANGED")
        accept = verdict is Verdict.REGRESSION and not settled and row.id in shown
    if accept:
        return BaselineChange(row.id, was, new, verdict.value.lower())
    if new.values.keys() != was.values.keys():
        return BaselineChange(row.id, was, new, "new triton")
    if was.test != row.test:
        return BaselineChange(row.id, was, replace(was, test=row.test), "test moved")
    return None


def _other_build(old: Baseline, record: Record) -> bool:
    return any(old.made_with.get(name) != record.provenance.get(name) for name in BUILD)


def _held_nothing(gate: GateFile, *labels: str) -> set[str]:
    """Return the rows of findings that held nothing: ratios to a peer that became faster, changes of no weight."""
    found = (f for f in gate.findings if f.label in labels and f.decision is Decision.ADOPT)
    return {row for finding in found for row in finding.rows}


def _settled(gate: GateFile, j: Judgement) -> bool:
    timed = gate.timed.get(j.row.id)
    return timed is not None and timed.outcome in SETTLED


def _better_in_both(gate: GateFile, j: Judgement) -> bool:
    """Return whether the adopted side's reading is a win over the reviewed value as well."""
    before = gate.adopted.record.judgements if gate.adopted.record else ()
    return any(b.row.id == j.row.id and b.verdict is Verdict.WIN for b in before)


def _confirmed(gate: GateFile, j: Judgement) -> bool:
    """Return whether the sessions of a row, if it had any, found it faster with certainty."""
    timed = gate.timed.get(j.row.id)
    return timed is None or timed.interval[1] < 1


def moved_tests(record: Record, old: Collection[str], changes: Iterable[BaselineChange]) -> frozenset[str]:
    """Return the reviewed set of a lane's tests: with those that the candidate ran.

    A test leaves the set only with a row that was reviewed as not measured any more. Any other lost test holds a gate.
    """
    if not record.tests:
        return frozenset(old)
    pruned = {c.old.test for c in changes if c.old and c.new is None} - record.tests.keys()
    return census.reviewed(old, record.tests, whole=False) - pruned


def lost_rows(gate: GateFile, old: Baseline) -> dict[str, str]:
    """Return row id -> why it is NOT RUN, of the reviewed rows that only the adopted side measured.

    A row that the machine cannot show is NOT RUN on both sides, and not included.
    """
    adopted, candidate = (_measured(side.record) for side in (gate.adopted, gate.candidate))
    absent = gate.candidate.record.not_run if gate.candidate.record else {}
    return {row: absent[row] for row in sorted((adopted - candidate) & absent.keys() & old.rows.keys())}


def given_up_rows(lost: Mapping[str, str], without: Collection[str]) -> frozenset[str]:
    """Return the lost rows whose reason names a kernel wheel that is given up."""
    return frozenset(row for row, why in lost.items() if any(names(why, name) for name in without))


def _measured(record: Record | None) -> set[str]:
    return {j.row.id for j in record.judgements if not j.row.unmeasured} if record else set()
