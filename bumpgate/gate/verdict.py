"""Verdict of a gate: a pure function from the measurements of two environments to ADOPT, HOLD or UNKNOWN.

HOLD needs evidence against the candidate: a row that is right in the adopted environment and wrong or missing in a
complete run of the candidate, a row that is right on both sides and worse in the candidate (bumpgate.gate.between), a
test that only fails there, a slower timed row, drift. UNKNOWN is any gap in the evidence: a canary that failed, a build
that failed, a row missing, open or red on both sides, nothing selected. Otherwise ADOPT.

Rows are grouped by cause: one metric whose evidence starts alike is one finding, shown once with both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from bumpgate.core import kernel_code
from bumpgate.core.baseline import investigate, tier, violation
from bumpgate.core.errors import one_line
from bumpgate.core.findings import (
    ADDRESS,
    PEER,
    PRODUCT,
    Decision,
    Finding,
    group,
)
from bumpgate.core.outcomes import skipped_in_both
from bumpgate.core.rows import Judgement, ProblemKind, Record, Value, Verdict, is_finite, is_time
from bumpgate.gate.between import ValueChange, change, direction, kinds, looks_slower, slow_in_both
from bumpgate.gate.disturbed import with_disturbed
from bumpgate.gate.drift import Drift
from bumpgate.gate.sequential import Timed
from bumpgate.gate.timed_findings import of_drift, of_sessions

# Right on both sides, but worse on the candidate side by more than the kind of row allows.
WORSE = "WORSE"
ONE_SIDE = "measured on one side only"
# The sides ran another pattern, dtype, batch or number of tokens, so their values are not comparable.
OTHER_WORK = "OTHER WORK"
# The sides report the row with another unit, direction or kind.
OTHER_KIND = "OTHER KIND"
# Rows that only the candidate can measure, such as those of a capability that its release adds.
NEW = "NEW"
# Rows that the candidate is not required to report: no kernel wheel fits it.
NOT_RUN = "NOT RUN"
# Times that miss their limit on both sides, and are not worse in the candidate.
SLOW_IN_BOTH = "SLOW IN BOTH"
# Labels that are shown with the metric of their rows.
BY_METRIC = (
    "FIXED",
    "WIN",
    NEW,
    PEER,
    "KNOWN DEFECT",
    "RED IN BOTH",
    SLOW_IN_BOTH,
    WORSE,
    *(v.value for v in PRODUCT),
)
# Verdicts on a ratio to another implementation that was measured.
RATIO = (Verdict.PASS, Verdict.WIN, Verdict.REGRESSION)


@dataclass(frozen=True)
class Side:
    """One environment of the gate.

    name: as shown, "torch 2.13.0". record: its measurements; None if it did not get that far.
    failure: why the record is missing, in one line (the end of the build's log). canaries: name -> reason of the
    failed ones. command: rebuilds the environment.
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
) -> GateVerdict:
    """Judge the candidate (`candidate`) against the adopted environment (`adopted`).

    timed: row id -> result of the paired sessions, for every row selected for them. It replaces the records'
    comparison of that row with a stored time. drifts: row id -> the drift that `drift.find_drift` detected.
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
        before_record = with_disturbed(adopted.record, candidate.record)
        after_record = with_disturbed(candidate.record, adopted.record)
        before, after = _by_id(before_record), _by_id(after_record)
        tests = {row: j.row.test for row, j in (before | after).items()}
        read_once = {row: (_read_once(before.get(row)), _read_once(after.get(row))) for row in timed}
        new = _new_rows(before_record, after_record)
        spared = after_record.not_run | skipped_in_both(before, after)
        loose += _not_run_findings(spared)
        loose += _new_tiers(lane, [after[row] for row in sorted(new)])
        for row in sorted(tests.keys() - new - spared.keys()):
            g, b = _code_of_both(before.get(row), after.get(row))
            if row in timed:
                g, b = _without_stored_times(g), _without_stored_times(b)
                outside = b is not None and b.red and not _absent(b)
                if (_absent(g) and _absent(b)) or _spoiled(b) or (_spoiled(g) and not outside):
                    continue  # the sessions alone measure it
            if _peer_faster(g, b, before, after):
                loose += _finding(lane, g, b, (Decision.ADOPT, PEER))
                continue
            loose += _row(lane, g, b, whole=after_record.complete, paired=row in timed)
        loose += _problems(lane, before_record, after_record)
        if not (before or after.keys() - new or timed):
            head = "no row was selected"
            loose.append(Finding(Decision.UNKNOWN, "NOTHING", "", head, repro=f"pytest -m {lane}"))
    for row, t in sorted(timed.items()):
        loose += of_sessions(lane, row, t, tests.get(row, ""), read_once.get(row, ("", "")))
    loose += [of_drift(lane, row, c, tests.get(row, "")) for row, c in sorted(drifts.items())]
    findings = group(loose)
    return GateVerdict(findings[0].decision if findings else Decision.ADOPT, findings)


def _by_id(record: Record) -> dict[str, Judgement]:
    return {j.row.id: j for j in record.judgements}


def _new_rows(adopted: Record, candidate: Record) -> set[str]:
    """Return the rows of tiers that the candidate alone has.

    They are of a tier that the adopted side did not collect, since it lacks the dependencies, or of kernels that its
    triton does not launch.
    """
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
        wrong = sum(violation(j.row) is not None for j in rows)
        found.append(
            Finding(
                Decision.ADOPT,
                NEW,
                "",
                f"{folder}: not measured in the adopted environment, so not compared",
                tuple(j.row.id for j in rows),
                ("not collected",),
                (f"{len(rows)} rows, {wrong} of them against what their tests derive",),
                f"pytest -m {lane} {folder}",
            )
        )
    return found


def _not_run_findings(spared: Mapping[str, str]) -> list[Finding]:
    """Return one finding per reason: listed, but not evidence in either direction."""
    reasons: dict[str, list[str]] = {}
    for row, reason in spared.items():
        reasons.setdefault(reason, []).append(row)
    return [
        Finding(Decision.ADOPT, NOT_RUN, "", reason, tuple(rows), (), (f"{len(rows)} rows not run",))
        for reason, rows in reasons.items()
    ]


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


def _row(
    lane: str, adopted: Judgement | None, candidate: Judgement | None, *, whole: bool, paired: bool
) -> list[Finding]:
    result = _compare(adopted, candidate, whole, paired)
    return _finding(lane, adopted, candidate, result) if result else []


def _finding(
    lane: str, adopted: Judgement | None, candidate: Judgement | None, result: tuple[Decision, str]
) -> list[Finding]:
    shown = candidate if candidate and (candidate.red or not (adopted and adopted.red)) else adopted
    if shown is None:
        return []
    decision, label = result
    product = label in BY_METRIC
    metric = shown.row.id.rsplit("/", 1)[1] if product else ""
    twice = not (_absent(adopted) or _absent(candidate))
    if adopted and candidate and label in (OTHER_WORK, OTHER_KIND):
        differs = ", ".join(
            f"{name} {a!r} and {b!r}" for name, (a, b) in kinds(adopted.row, candidate.row).items()
        )
        shown = replace(shown, reason=f"{shown.row.id}: {differs}")
    head = (
        _head(adopted, candidate)
        if product
        else _reason(shown, "read once on each side" if twice else ONE_SIDE)
    )
    repro = investigate(lane, shown.row.test)
    if decision is Decision.UNKNOWN:
        repro = shown.command or repro
    return [
        Finding(
            decision,
            label,
            metric,
            head,
            (shown.row.id,),
            _shown(adopted, candidate),
            _shown(candidate, adopted),
            repro,
        )
    ]


def _reason(j: Judgement, otherwise: str) -> str:
    """Return why a row could not be judged, without the name of its test, which is not part of the cause."""
    text = j.reason.replace(j.row.test, "its test") if j.row.test else j.reason
    return one_line(text) or otherwise


def _compare(
    adopted: Judgement | None, candidate: Judgement | None, whole: bool, paired: bool = False
) -> tuple[Decision, str] | None:
    """Return decision and label of one row of both records; None if there is nothing to show.

    whole: the candidate's run is complete. paired: the sessions compare its values.
    """
    right = adopted is not None and not _absent(adopted) and not adopted.red
    if candidate is None or _absent(candidate):
        lost = candidate is not None and candidate.verdict is Verdict.MISSING and whole and right
        label = candidate.verdict.value if candidate else Verdict.MISSING.value
        return (Decision.HOLD if lost else Decision.UNKNOWN), label
    if adopted is None and candidate.verdict is Verdict.MISSING:
        return Decision.ADOPT, NEW  # no baseline has it and the adopted run never had it: nothing was lost
    if adopted is None or _absent(adopted):
        return Decision.UNKNOWN, adopted.verdict.value if adopted else Verdict.MISSING.value
    if _is_defect(adopted) and _is_defect(candidate):
        return _compare_defect(adopted, candidate)
    if candidate.row.work != adopted.row.work:
        return Decision.UNKNOWN, OTHER_WORK
    if not paired and looks_slower(adopted, candidate):
        return Decision.UNKNOWN, Verdict.INCONCLUSIVE.value
    if candidate.red:
        if right and candidate.verdict in PRODUCT:
            return Decision.HOLD, candidate.verdict.value
        if slow_in_both(adopted, candidate, paired=paired):
            return Decision.ADOPT, SLOW_IN_BOTH
        both = adopted.verdict in PRODUCT and candidate.verdict in PRODUCT
        return Decision.UNKNOWN, "RED IN BOTH" if both else candidate.verdict.value
    if adopted.red:
        excused = candidate.explains and not candidate.accepted
        if excused and not paired and change(adopted.row, candidate.row) is ValueChange.WORSE:
            return Decision.HOLD, WORSE
        return (
            (Decision.ADOPT, "FIXED")
            if adopted.verdict in PRODUCT
            else (Decision.UNKNOWN, adopted.verdict.value)
        )
    if kinds(adopted.row, candidate.row):
        return Decision.UNKNOWN, OTHER_KIND
    won = candidate.verdict is Verdict.WIN and adopted.verdict is not Verdict.WIN
    moved = None if paired else change(adopted.row, candidate.row)
    if moved in (None, ValueChange.BETTER):
        return (Decision.ADOPT, Verdict.WIN.value) if moved or won else None
    by_good = adopted.accepted and moved is not ValueChange.WORSE
    reviewed = candidate.accepted or by_good or (moved is ValueChange.OTHER and candidate.row.per_build)
    label = WORSE if moved is ValueChange.WORSE else Verdict.CHANGED.value
    return (Decision.ADOPT if reviewed else Decision.HOLD), label


def _peer_faster(
    adopted: Judgement | None,
    candidate: Judgement | None,
    before: Mapping[str, Judgement],
    after: Mapping[str, Judgement],
) -> bool:
    """Return whether a ratio to another implementation is worse, and both sides have the own time that is judged."""
    if (
        adopted is None
        or candidate is None
        or not candidate.row.own
        or adopted.row.own != candidate.row.own
        or kinds(adopted.row, candidate.row)
    ):
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

    A defect on both sides is not a difference. It is still shown if the candidate is outside its version range:
    a lane run under the candidate is red until the range is widened.
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
