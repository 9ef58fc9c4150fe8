"""Verdict of a gate: a pure function from the measurements of two environments to ADOPT, HOLD or UNKNOWN.

HOLD needs evidence against the candidate: a row that is right in the adopted environment and wrong or missing in a
complete run of the candidate, a row that is right on both sides and worse in the candidate
(bumpgate.gate.compare_rows), a test that only fails there, a slower timed row, drift. UNKNOWN is any gap in the
evidence: a canary that failed, a build that failed, a row missing, open or red on both sides, nothing selected.
Otherwise ADOPT. TABLE has the decision for each pair of row verdicts.

Rows are grouped by cause: one metric whose evidence starts alike is one finding, shown once with both sides.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

from bumpgate.core import census, kernel_code
from bumpgate.core.baseline import accept, investigate, tier, violation
from bumpgate.core.errors import one_line
from bumpgate.core.findings import (
    ADDRESS,
    NO_REGRESSION,
    PEER,
    PRODUCT,
    Decision,
    Finding,
    TimedOutcome,
    group,
)
from bumpgate.core.outcomes import skipped_in_both
from bumpgate.core.rows import (
    Judgement,
    ProblemKind,
    Record,
    Value,
    Verdict,
    is_finite,
    is_time,
    metric,
)
from bumpgate.gate.compare_rows import (
    ValueChange,
    change,
    direction,
    kinds,
    looks_slower,
    slow_in_both,
    with_disturbed,
)
from bumpgate.gate.drift import Drift
from bumpgate.gate.materiality import OF_VARIANT, material_time, other_device, plausible
from bumpgate.gate.sequential import Timed

# Labels, as docs/gate.md explains them.
WORSE, OTHER_WORK, OTHER_KIND, VARIANT = "WORSE", "OTHER WORK", "OTHER KIND", "VARIANT"
NEW, NOT_RUN, SLOW_IN_BOTH, LOGS = "NEW", "NOT RUN", "SLOW IN BOTH", "LOGS"
# Labels that are shown with the metric of their rows.
BY_METRIC = (
    *("FIXED", "WIN", PEER, "KNOWN DEFECT", "RED IN BOTH", SLOW_IN_BOTH, WORSE),
    *(v.value for v in PRODUCT),
)
# Verdicts on a ratio to another implementation that was measured.
RATIO = (Verdict.PASS, Verdict.WIN, Verdict.REGRESSION)


class Reading(Enum):
    """What one side's record says about a row."""

    RIGHT = "PASS, WIN or FIXED, or excused by a review"
    REGRESSION = "REGRESSION"
    CHANGED = "CHANGED"
    INSTRUMENT = "INSTRUMENT"
    INFRA = "INFRA"
    INCONCLUSIVE = "INCONCLUSIVE"
    UNREVIEWED = "MISSING: measured, not reviewed, in a record before NEW"
    NEW = "NEW: measured, not reviewed"
    LOST = "MISSING: reviewed, not measured"
    UNMEASURED = "not measured, for a reason that the row states"
    NO_ROW = "not in the record"


class Cell(Enum):
    """Decision on a row. CANDIDATE, ADOPTED: UNKNOWN, with the verdict of that side as the label."""

    VALUES = "="
    """Right on both sides: the values decide."""
    FIXED = "F"
    """ADOPT: the candidate repairs the row."""
    HOLD = "H"
    """HOLD, with the candidate's verdict."""
    LOST = "L"
    """HOLD if the candidate's run is complete, else UNKNOWN."""
    BOTH = "2"
    """UNKNOWN: red on both sides."""
    NEW = "N"
    """ADOPT: no review has the row, and the adopted side never had it."""
    CANDIDATE = "c"
    ADOPTED = "a"


_COLUMNS = tuple(Reading)
# Rows: the adopted side; columns: the candidate, in the order of Reading.
_LINES = {
    #                     RIGHT REGR CHAN INST INFRA INCO UNRE NEW  LOST UNME NO_ROW
    Reading.RIGHT: "        =    H    H    c    c    c    c    =    L    c    c",
    Reading.REGRESSION: "   F    2    2    c    c    c    c    F    c    c    c",
    Reading.CHANGED: "      F    2    2    c    c    c    c    F    c    c    c",
    Reading.INSTRUMENT: "   a    c    c    c    c    c    c    a    c    c    c",
    Reading.INFRA: "        a    c    c    c    c    c    c    a    c    c    c",
    Reading.INCONCLUSIVE: " a    c    c    c    c    c    c    a    c    c    c",
    Reading.UNREVIEWED: "   a    c    c    c    c    c    c    a    c    c    c",
    Reading.NEW: "          =    H    H    c    c    c    c    =    L    c    c",
    Reading.LOST: "         a    a    a    a    a    a    a    a    c    c    c",
    Reading.UNMEASURED: "   a    a    a    a    a    a    a    a    c    c    c",
    Reading.NO_ROW: "       a    a    a    a    a    a    N    N    c    c    c",
}
TABLE = {
    (adopted, candidate): Cell(cell)
    for adopted, line in _LINES.items()
    for candidate, cell in zip(_COLUMNS, line.split(), strict=True)
}


@dataclass(frozen=True)
class Side:
    """One environment of the gate.

    name: as shown, "torch 2.13.0".
    record: its measurements; None if it did not get that far.
    failure: why the record is missing, in one line (the end of the build's log).
    canaries: name -> reason of the failed ones.
    command: rebuilds the environment.
    """

    name: str
    record: Record | None
    failure: str = ""
    canaries: Mapping[str, str] = field(default_factory=dict)
    command: str = ""


@dataclass(frozen=True)
class GateVerdict:
    """Decision of a gate. findings: worst first, then by the number of rows covered."""

    decision: Decision
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        return self.decision.value


def judge_gate(
    lane: str,
    adopted: Side,
    candidate: Side,
    timed: Mapping[str, Timed] | None = None,
    drifts: Mapping[str, Drift] | None = None,
    lost: str = "",
) -> GateVerdict:
    """Judge the candidate (`candidate`) against the adopted environment (`adopted`).

    timed: row id -> result of the paired sessions, for every row selected for them. It replaces the records'
    comparison of that row with a stored time. drifts: row id -> the drift that `drift.find_drift` detected.
    lost: why a session last lost a time.
    Raises ValueError if a record is of another lane, which is the caller's mistake.
    """
    for side in (adopted, candidate):
        found = side.record.provenance.get("lane") if side.record else lane
        if found != lane:
            raise ValueError(f"{side.name}: record of lane {found!r}, not {lane!r}")
    timed, drifts = timed or {}, drifts or {}
    loose = [f for side in (adopted, candidate) for f in _environment(lane, side, side is adopted)]
    tests: dict[str, str] = {}
    read_once: dict[str, tuple[str, str]] = {}
    if adopted.record and candidate.record:
        one = with_disturbed(adopted.record, candidate.record)
        other = with_disturbed(candidate.record, adopted.record)
        before, after = _by_id(one), _by_id(other)
        tests = {row: j.row.test for row, j in (before | after).items()}
        read_once = {row: (_read_once(before.get(row)), _read_once(after.get(row))) for row in timed}
        loose += _of_records(lane, one, other, timed.keys())
    for row, t in sorted(timed.items()):
        loose += of_sessions(lane, row, t, tests.get(row, ""), read_once.get(row, ("", "")), lost)
    loose += [of_drift(lane, row, c, tests.get(row, "")) for row, c in sorted(drifts.items())]
    if adopted.record and candidate.record:
        loose = _of_variants(loose, adopted.record.provenance, candidate.record.provenance)
    findings = group(loose)
    return GateVerdict(findings[0].decision if findings else Decision.ADOPT, findings)


def _of_variants(
    loose: list[Finding], adopted: Mapping[str, Any], candidate: Mapping[str, Any]
) -> list[Finding]:
    """Let rows that the variant of torch decides hold nothing, if the sides are built for different devices."""
    if not other_device(adopted.get("torch"), candidate.get("torch")):
        return loose
    return [
        replace(f, decision=Decision.ADOPT, label=VARIANT)
        if f.decision is not Decision.ADOPT and f.rows and all(map(OF_VARIANT.fullmatch, f.rows))
        else f
        for f in loose
    ]


def _of_records(lane: str, adopted: Record, candidate: Record, timed: Collection[str]) -> list[Finding]:
    """Compare the records of both sides, row by row. timed: rows that the paired sessions measure."""
    before, after = _by_id(adopted), _by_id(candidate)
    new = _new_rows(adopted, candidate)
    spared = candidate.not_run | skipped_in_both(before, after)
    reasons: dict[str, list[str]] = {}
    for row, reason in spared.items():
        reasons.setdefault(reason, []).append(row)
    found = [
        Finding(Decision.ADOPT, NOT_RUN, "", reason, tuple(rows), (), (f"{len(rows)} rows not run",))
        for reason, rows in reasons.items()
    ]
    found += _new_tiers(lane, [after[row] for row in sorted(new)])
    for row in sorted((before.keys() | after.keys()) - new - spared.keys()):
        g, b = _code_of_both(before.get(row), after.get(row))
        if row in timed:
            g, b = _without_stored_times(g), _without_stored_times(b)
        if row in timed and _left_to_sessions(g, b):
            result = None
        elif _peer_faster(g, b, before, after):
            result = Decision.ADOPT, PEER
        else:
            result = compare(g, b, whole=candidate.complete, paired=row in timed)
        found += _finding(lane, g, b, result) if result else []
    found += _problems(lane, adopted, candidate)
    found += _lost_tests(lane, adopted, candidate, spared)
    found += _logged(adopted, candidate)
    if not (before or after.keys() - new or timed):
        head = "no row was selected"
        found.append(Finding(Decision.UNKNOWN, "NOTHING", "", head, repro=f"pytest -m {lane}"))
    return found


def _left_to_sessions(adopted: Judgement | None, candidate: Judgement | None) -> bool:
    """Whether the sessions alone measure a timed row: both sides lack it, or the machine disturbed one."""
    outside = candidate is not None and candidate.red and not _absent(candidate)
    neither = _absent(adopted) and _absent(candidate)
    return neither or _spoiled(candidate) or (_spoiled(adopted) and not outside)


def _by_id(record: Record) -> dict[str, Judgement]:
    return {j.row.id: j for j in record.judgements}


def _new_rows(adopted: Record, candidate: Record) -> set[str]:
    """Return the rows of tiers that the adopted side did not collect, or of kernels that its triton lacks."""
    if not adopted.complete:
        return set()
    collected = {tier(j.row.test) for j in adopted.judgements} | {tier(p.test) for p in adopted.problems}
    found = {j.row.id for j in candidate.judgements if (t := tier(j.row.test)) and t not in collected}
    return found | {j.row.id for j in candidate.judgements if _is_code(j) and j.row.id in adopted.not_run}


def _new_tiers(lane: str, judgements: Iterable[Judgement]) -> list[Finding]:
    """Return one finding per new tier: its rows have nothing to be compared with, so they decide nothing."""
    by_tier: dict[str, list[Judgement]] = {}
    for j in judgements:
        by_tier.setdefault(tier(j.row.test), []).append(j)
    found = []
    for folder, rows in by_tier.items():
        head = f"{folder}: not measured in the adopted environment, so not compared"
        wrong = sum(violation(j.row) is not None for j in rows)
        now = f"{len(rows)} rows, {wrong} of them against what their tests derive"
        ids, repro = tuple(j.row.id for j in rows), f"pytest -m {lane} {folder}"
        found.append(Finding(Decision.ADOPT, NEW, "", head, ids, ("not collected",), (now,), repro))
    return found


def _absent(j: Judgement | None) -> bool:
    return j is None or j.row.unmeasured


def _spoiled(j: Judgement | None) -> bool:
    return j is not None and j.row.unmeasured and j.verdict is Verdict.INFRA


def _environment(lane: str, side: Side, is_good: bool) -> list[Finding]:
    """Return the findings on a side as a whole, which are never evidence against the candidate."""

    def finding(label: str, head: str, repro: str) -> Finding:
        seen = (f"{side.name}: {head}",)
        adopted, candidate = (seen, ()) if is_good else ((), seen)
        return Finding(Decision.UNKNOWN, label, "", head, (), adopted, candidate, repro)

    out = [
        finding("INSTRUMENT", f"instrument {name}: {one_line(reason)}", f"pytest -m {lane}")
        for name, reason in side.canaries.items()
    ]
    if side.record is None or side.failure:
        out.append(finding("INFRA", one_line(side.failure) or "it left no record", side.command))
    elif not (side.record.complete or side.record.problems):
        out.append(finding("INFRA", "the run was cut short", f"pytest -m {lane}"))
    return out


def _problems(lane: str, adopted: Record, candidate: Record) -> list[Finding]:
    """Compare failed tests whose rows do not show why, skips, and files that could not be collected.

    Only their subjects are compared: the messages of one failure may hold different times and addresses in each run.
    """
    out = []
    for subject in dict.fromkeys(p.subject for p in (*candidate.problems, *adopted.problems)):
        before, after = ([p for p in r.problems if p.subject == subject] for r in (adopted, candidate))
        harmless = {ProblemKind.GAP, ProblemKind.INFRA}
        fault = not before and any(p.kind not in harmless for p in after)
        decision = Decision.HOLD if fault and adopted.complete and candidate.complete else Decision.UNKNOWN
        first = (after or before)[0]
        shown = tuple(map(str, before)), tuple(map(str, after))
        tests = (first.test,) if first.test else ()
        repro = investigate(lane, first.test)
        label = "INFRA" if first.kind is ProblemKind.INFRA else "PROBLEM"
        out.append(Finding(decision, label, "", first.why, (), *shown, repro, tests))
    return out


def _lost_tests(lane: str, adopted: Record, candidate: Record, spared: Mapping[str, str]) -> list[Finding]:
    """Report the tests that ran on the adopted side and prove nothing on the candidate's, once for each way.

    spared: rows that the candidate is not required to report. A test whose rows are missing is no second finding.
    """
    before, after = _by_id(adopted), _by_id(candidate)
    missing = {row for row in before if row in spared or _absent(after.get(row))}
    shown = {before[row].row.test for row in missing}
    decision = Decision.HOLD if adopted.complete and candidate.complete else Decision.UNKNOWN
    return [
        Finding(
            decision,
            Verdict.MISSING.value,
            "",
            f"tests that ran in the adopted set: {census.LOST[outcome]}",
            adopted=(f"{test}: {adopted.tests[test]}",),
            candidate=(f"{test}: {outcome}",),
            repro=investigate(lane, test),
            tests=(test,),
        )
        for test, outcome in census.lost(census.ran(adopted.tests), candidate.tests).items()
        if test not in shown and outcome != adopted.tests[test]
    ]


def _logged(adopted: Record, candidate: Record) -> list[Finding]:
    """List the classes of log lines that only the candidate's tests have: they hold nothing, the rows decide."""
    before, after = (record.provenance.get("logged", {}) for record in (adopted, candidate))
    if not (adopted.complete and candidate.complete and adopted.tests and candidate.tests):
        return []
    new = {name: logged for name, logged in after.items() if name not in before}
    texts = {name: f"{count} times: {first}" for name, (count, first) in new.items()}
    rest = tuple(text for name, text in texts.items() if ": " in name)
    found = [
        Finding(Decision.ADOPT, LOGS, "", f"only the candidate logs {name}", candidate=(text,))
        for name, text in texts.items()
        if ": " not in name
    ]
    if rest:
        found.append(Finding(Decision.ADOPT, LOGS, "", "warnings of the candidate alone", candidate=rest))
    return found


def _without_stored_times(j: Judgement | None) -> Judgement | None:
    """Drop a timed row's verdict against the baseline's time; the test's derived expectation still applies."""
    settled = (Verdict.REGRESSION, Verdict.WIN, Verdict.INCONCLUSIVE)
    if j is None or j.verdict not in settled or violation(j.row) is not None:
        return j
    return replace(j, verdict=Verdict.PASS, reason="judged by the paired sessions")


def _code_of_both(
    adopted: Judgement | None, candidate: Judgement | None
) -> tuple[Judgement | None, Judgement | None]:
    """Drop a compiled-code row's verdicts against reviewed versions of triton: the two sides are compared instead."""
    if adopted is None or candidate is None or not (_is_code(adopted) and _is_code(candidate)):
        return adopted, candidate
    passes, reason = Verdict.PASS, "compared between the sides"
    return replace(adopted, verdict=passes, reason=reason), replace(candidate, verdict=passes, reason=reason)


def _is_code(j: Judgement) -> bool:
    """Return whether this is a measured row of compiled code."""
    return j.row.better == "code" and j.row.value is not None and j.verdict is not Verdict.INSTRUMENT


def _finding(
    lane: str, adopted: Judgement | None, candidate: Judgement | None, result: tuple[Decision, str]
) -> list[Finding]:
    shown = candidate if candidate and (candidate.red or not (adopted and adopted.red)) else adopted
    if shown is None:
        return []
    decision, label = result
    metric, head = "", ""
    if label == NEW and decision is Decision.ADOPT:
        where = "equal on both sides" if adopted else "not in the adopted set"
        head = f"not reviewed, {where}; to accept: pytest -m {lane}; {accept(lane)}"
    elif label in BY_METRIC:
        metric, head = shown.row.id.rsplit("/", 1)[1], _head(adopted, candidate)
    elif adopted and candidate and label in (OTHER_WORK, OTHER_KIND):
        differs = kinds(adopted.row, candidate.row).items()
        head = f"{shown.row.id}: {', '.join(f'{name} {a!r} and {b!r}' for name, (a, b) in differs)}"
    else:
        # Without the name of its test, which is not part of the cause.
        reason = shown.reason.replace(shown.row.test, "its test") if shown.row.test else shown.reason
        once = (
            "measured on one side only"
            if _absent(adopted) or _absent(candidate)
            else "read once on each side"
        )
        head = one_line(reason) or once
    repro = investigate(lane, shown.row.test)
    if decision is Decision.UNKNOWN and shown.command:
        again = shown.command.startswith("bumpgate rebaseline")  # needs a record of the whole lane
        repro = f"pytest -m {lane}; {shown.command}" if again else shown.command
    both = _shown(adopted, candidate), _shown(candidate, adopted)
    return [Finding(decision, label, metric, head, (shown.row.id,), *both, repro)]


def reading_of(j: Judgement | None, *, alone: bool = False) -> Reading:
    """Return what a record says about a row. alone: the adopted side lacks the row, so no review can excuse it."""
    if j is None:
        return Reading.NO_ROW
    if j.row.unmeasured:
        return Reading.LOST if j.verdict is Verdict.MISSING else Reading.UNMEASURED
    if j.verdict in (Verdict.MISSING, Verdict.NEW) and (alone or j.red):
        return Reading.NEW if j.verdict is Verdict.NEW else Reading.UNREVIEWED
    return Reading[j.verdict.name] if j.red else Reading.RIGHT


def compare(
    adopted: Judgement | None, candidate: Judgement | None, *, whole: bool, paired: bool = False
) -> tuple[Decision, str] | None:
    """Return decision and label of one row of both records; None if there is nothing to show.

    whole: the candidate's run is complete.
    paired: the sessions compare its values.
    """
    cell = TABLE[reading_of(adopted), reading_of(candidate, alone=adopted is None)]
    if adopted and candidate and not (_absent(adopted) or _absent(candidate)):
        if _is_defect(adopted) and _is_defect(candidate):
            return _compare_defect(adopted, candidate)
        if candidate.row.work != adopted.row.work:
            return Decision.UNKNOWN, OTHER_WORK
        if not paired and looks_slower(adopted, candidate):
            return Decision.UNKNOWN, Verdict.INCONCLUSIVE.value
        if cell is Cell.VALUES:
            return _compare_values(adopted, candidate, paired=paired)
        if cell is Cell.HOLD and not paired and _is_small(adopted, candidate):
            return Decision.ADOPT, Verdict.CHANGED.value
        if cell is Cell.BOTH and slow_in_both(adopted, candidate, paired=paired):
            return Decision.ADOPT, SLOW_IN_BOTH
        excused = candidate.explains and not candidate.accepted and not paired
        repaired = excused and cell in (Cell.FIXED, Cell.ADOPTED)
        if repaired and change(adopted.row, candidate.row) is ValueChange.WORSE:
            return Decision.HOLD, WORSE
    of_adopted = adopted.verdict.value if adopted else Verdict.MISSING.value
    of_candidate = candidate.verdict.value if candidate else Verdict.MISSING.value
    return {
        Cell.FIXED: (Decision.ADOPT, "FIXED"),
        Cell.HOLD: (Decision.HOLD, of_candidate),
        Cell.LOST: (Decision.HOLD if whole else Decision.UNKNOWN, of_candidate),
        Cell.BOTH: (Decision.UNKNOWN, "RED IN BOTH"),
        Cell.NEW: (Decision.ADOPT, NEW),
        Cell.CANDIDATE: (Decision.UNKNOWN, of_candidate),
        Cell.ADOPTED: (Decision.UNKNOWN, of_adopted),
    }[cell]


def _is_small(adopted: Judgement, candidate: Judgement) -> bool:
    """Whether a value that differs from the reviewed one is too near to the adopted side's to hold a bump.

    A count that is better holds only if an instrument may have lost a part of it.
    """
    moved = change(adopted.row, candidate.row)
    gain = moved is ValueChange.BETTER and plausible(adopted.row, candidate.row)
    right = violation(candidate.row) is None and not kinds(adopted.row, candidate.row)
    return right and (moved is ValueChange.SMALL or gain)


def _compare_values(adopted: Judgement, candidate: Judgement, *, paired: bool) -> tuple[Decision, str] | None:
    """Compare the values of a row that is right on both sides."""
    if kinds(adopted.row, candidate.row):
        return Decision.UNKNOWN, OTHER_KIND
    won = candidate.verdict is Verdict.WIN and adopted.verdict is not Verdict.WIN
    moved = None if paired else change(adopted.row, candidate.row)
    if moved in (None, ValueChange.BETTER):
        unreviewed = (Decision.ADOPT, NEW) if candidate.verdict is Verdict.NEW else None
        return (Decision.ADOPT, Verdict.WIN.value) if moved or won else unreviewed
    by_adopted = adopted.accepted and moved is not ValueChange.WORSE
    of_build = moved is ValueChange.OTHER and candidate.row.per_build
    reviewed = candidate.accepted or by_adopted or of_build or moved is ValueChange.SMALL
    label = WORSE if moved is ValueChange.WORSE else Verdict.CHANGED.value
    return (Decision.ADOPT if reviewed else Decision.HOLD), label


def _peer_faster(
    adopted: Judgement | None,
    candidate: Judgement | None,
    before: Mapping[str, Judgement],
    after: Mapping[str, Judgement],
) -> bool:
    """Return whether a ratio to another implementation is worse, and both sides have the own time that is judged."""
    if adopted is None or candidate is None or not candidate.row.own:
        return False
    if adopted.row.own != candidate.row.own or kinds(adopted.row, candidate.row):
        return False
    own = [side.get(candidate.row.own) for side in (before, after)]
    if any(j is None or _absent(j) or not is_finite(j.row.value) for j in (*own, adopted, candidate)):
        return False
    if not all(j and is_time(j.row) and direction(j.row) for j in own):
        return False  # nothing judges it
    if adopted.red or candidate.verdict not in RATIO or violation(candidate.row) is not None:
        return False
    return candidate.verdict is Verdict.REGRESSION or change(adopted.row, candidate.row) is ValueChange.AGAIN


def _is_defect(j: Judgement) -> bool:
    """Return whether this is a defect row whose reproducer ran and gave a result."""
    return j.row.better == "defect" and j.row.value is not None and j.verdict is not Verdict.INSTRUMENT


def _compare_defect(adopted: Judgement, candidate: Judgement) -> tuple[Decision, str] | None:
    """Compare a known upstream defect by its presence on each side.

    On both sides it is still shown if the candidate is outside its version range: a lane run there is red.
    """
    if adopted.row.value == candidate.row.value:
        return (Decision.ADOPT, "KNOWN DEFECT") if candidate.red else None
    return (Decision.HOLD, Verdict.REGRESSION.value) if candidate.row.value else (Decision.ADOPT, "FIXED")


def _only(j: Judgement | None, other: Judgement | None) -> list[str]:
    """Return the evidence lines of one side that the other lacks (multiset difference)."""
    mine = [ADDRESS.sub("0x_", line) for line in j.row.evidence] if j else []
    spare = Counter(ADDRESS.sub("0x_", line) for line in other.row.evidence) if other else Counter[str]()
    out = []
    for line in mine:
        if spare[line]:
            spare[line] -= 1
        else:
            out.append(line)
    return out


def _head(adopted: Judgement | None, candidate: Judgement | None) -> str:
    """Return the first new line of the candidate's evidence, else the first one that disappeared, else "".

    For compiled code, return the names of the worse counts, so that kernels with the same loss share one finding.
    """
    if adopted and candidate and _is_code(adopted) and _is_code(candidate):
        return ", ".join(
            kernel_code.worse(kernel_code.parse(adopted.row.value), kernel_code.parse(candidate.row.value))
        )
    came, went = _only(candidate, adopted), _only(adopted, candidate)
    return one_line(came[0]) if came else f"gone: {one_line(went[0])}" if went else ""


def _shown(j: Judgement | None, other: Judgement | None) -> tuple[str, ...]:
    if j is None or _absent(j):
        return (f"{other.row.id}: not measured" if other else "not measured", *([j.reason] if j else []))
    review = ""
    if j.red and j.verdict in (Verdict.REGRESSION, Verdict.CHANGED):
        parts = [j.row.rule, f"reviewed {_number(j.reviewed)}" if j.reviewed is not None else ""]
        parts += [f"limit {j.limit}" if j.limit else ""]
        review = f" ({', '.join(filter(None, parts))})"
    first = f"{j.row.id}: {_number(j.row.value)} {j.row.unit}{review}"
    return (first, *(one_line(line) for line in _only(j, other)))


def _read_once(j: Judgement | None) -> str:
    """Return value and unit; "" if there is none."""
    return "" if j is None or _absent(j) else f"{_number(j.row.value)} {j.row.unit}"


def _number(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def of_sessions(
    lane: str, row: str, t: Timed, test: str, read_once: tuple[str, str] = ("", ""), lost: str = ""
) -> list[Finding]:
    """Return the finding on a row that sessions measured; empty if it is SAME.

    read_once: value and unit of both sides in the run of the lane; "" if it has none.
    lost: why a session last lost a time.
    """
    if t.outcome is TimedOutcome.SAME:
        return []
    red = t.outcome in (TimedOutcome.SLOWER, TimedOutcome.SLOW_MODE)
    small = t.outcome is TimedOutcome.SLOWER and not material_time(row, t.ratio)
    known = small or t.outcome in NO_REGRESSION
    decision = Decision.ADOPT if known else Decision.HOLD if red else Decision.UNKNOWN
    found = partial(Finding, decision, t.outcome.value, rows=(row,), repro=investigate(lane, test))
    if not t.sessions:  # all such rows have one cause: the budget, or only lost sessions
        head = f"no paired session gave a time{f' ({lost})' if lost else ''}"
        return [found(metric="", head=head, candidate=(f"{row}: not measured",))]
    change = f"{100 * (t.ratio - 1):+.1f} %"
    if all(map(math.isfinite, t.interval)):
        change += " in [{:+.1f} %, {:+.1f} %]".format(*(100 * (x - 1) for x in t.interval))
    once, first = (f"{value} in the run of the lane" if value else "" for value in read_once)
    change += f" after {t.sessions} session{'s' * (t.sessions != 1)}"
    change += f", adjusted p {t.p:.2g}" if red else ""
    head = ""
    if decision is Decision.UNKNOWN:
        head = f"more sessions would decide it{f'; last lost: {lost}' if lost else ''}"
    seen = f"{row}: {first}; {change}" if first else f"{row}: {change}"
    if any(t.slow):
        seen += f"; slow processes: {t.slow[0]} of the candidate, {t.slow[1]} of the adopted build"
    metric = row.rsplit("/", 1)[1]
    return [found(metric=metric, head=head, adopted=(f"{row}: {once or 1}",), candidate=(seen,))]


def of_drift(lane: str, row: str, c: Drift, test: str) -> Finding:
    """Return the finding on a row that became slower over weeks."""
    adopted = f"{row}: 1 at its anchor, the build adopted a month before"
    candidate = f"{row}: {100 * (c.ratio - 1):+.1f} %, rising since {c.since}, called {c.called}"
    metric = row.rsplit("/", 1)[1]
    return Finding(
        Decision.HOLD, "CREEP", metric, "", (row,), (adopted,), (candidate,), investigate(lane, test)
    )


def small_changes(findings: Iterable[Finding]) -> list[str]:
    """Return the rows whose change held nothing because it is small."""
    label, shown = Verdict.CHANGED.value, Decision.ADOPT
    return [row for f in findings if (f.label, f.decision) == (label, shown) for row in f.rows]


def added_up(
    lane: str, findings: Iterable[Finding], candidate: Record | None, oldest: Mapping[str, float]
) -> list[Finding]:
    """Report small changes that add up, since the oldest value in the history, to one that a person would hold."""
    rows = _by_id(candidate) if candidate else {}
    found = []
    for id in small_changes(findings):
        j = rows.get(id)
        if j is None or id not in oldest or j.accepted:
            continue
        before = replace(j.row, value=oldest[id])
        if change(before, j.row) in (ValueChange.WORSE, ValueChange.OTHER) and not j.row.per_build:
            seen = (f"{id}: {_number(oldest[id])} {j.row.unit}, the oldest value in the history",)
            now = (f"{id}: {_number(j.row.value)} {j.row.unit}",)
            repro = investigate(lane, j.row.test)
            found.append(Finding(Decision.HOLD, "CREEP", metric(j.row), "", (id,), seen, now, repro))
    return found
