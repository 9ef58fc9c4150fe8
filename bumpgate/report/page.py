"""Content of a report, computed once for all formats; HTML, JUnit XML and Markdown only lay it out."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bumpgate.core.baseline import accept_new
from bumpgate.core.errors import one_line
from bumpgate.core.findings import PRODUCT, Decision, Finding, TimedOutcome, group
from bumpgate.core.gate_file import GateFile, GateSide
from bumpgate.core.rows import Judgement, Problem, ProblemKind, Record, Verdict, is_finite
from bumpgate.core.rules import places, sentence
from bumpgate.env.freeze import without_cuda
from bumpgate.gate.view import explained
from bumpgate.table import show, summary

TONE = {Decision.HOLD: "bad", Decision.UNKNOWN: "open", Decision.ADOPT: "good"}
# Parts that differ between rows of one cause: quoted values and numbers.
VALUE = re.compile(r"'[^']*'|(?<![\w.])-?\d+(\.\d+)?(e[+-]?\d+)?(?!\w)")
# Provenance fields that are shown separately.
ELSEWHERE = ("acceptances", "command", "not_run", "rules")
CUT_SHORT = Problem(
    "", ProblemKind.CUT_SHORT, "the gate was cut short: resume it with its command and --resume"
)
UNCOMPARED = "NOT COMPARED"  # the label of a row in a gate that compared none
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class RowView:
    """One line of the table of rows. order: worst first. change: relative, NaN without one.

    adopted: the adopted side's value; empty in the report of one record. tone: bad, open, good or info.
    reviewed, limit: the baseline's value, and the allowed values. rule: its id and sentence. place: in the source.
    """

    id: str
    label: str
    tone: str
    order: int
    candidate: str
    unit: str
    reason: str
    command: str
    adopted: str = ""
    change: float = math.nan
    rule: str = ""
    test: str = ""
    evidence: tuple[str, ...] = ()
    reviewed: str = ""
    limit: str = ""
    place: str = ""

    @property
    def percent(self) -> str:
        return f"{100 * self.change:+.1f} %" if math.isfinite(self.change) else ""


@dataclass(frozen=True)
class Fact:
    """One line of the provenance: the value of each side (for one record, only `candidate`)."""

    name: str
    adopted: str
    candidate: str

    @property
    def differs(self) -> bool:
        return self.adopted != self.candidate


@dataclass(frozen=True)
class Page:
    """One report. word: the verdict, as the banner shows it; failed: whether the run or the gate must stop a CI.

    sides: names of the adopted and the candidate environment; the first is empty for one record.
    notes: effects of baselines/accepted.toml. not_run: rows that only another device can show.
    records: of both sides, None for a side without one. moved: packages whose version differs between the sides.
    meaning: of an UNKNOWN gate, what it says, what was equal, and what to do.
    """

    kind: str
    word: str
    tone: str
    failed: bool
    lane: str
    headline: str
    started: str
    seconds: float
    command: str
    sides: tuple[str, str]
    facts: tuple[Fact, ...]
    findings: tuple[Finding, ...]
    rows: tuple[RowView, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    not_run: tuple[str, ...]
    records: tuple[Record | None, Record | None]
    compare: str = ""
    moved: tuple[str, ...] = ()
    meaning: tuple[str, ...] = ()

    @property
    def paired(self) -> bool:
        return self.kind == "gate"

    @property
    def counts(self) -> list[tuple[str, str, int]]:
        """Return (label, tone, rows), worst first."""
        tally = Counter((row.label, row.tone) for row in self.rows)
        return [(label, tone, n) for (label, tone), n in tally.items()]


def of(found: Record | GateFile) -> Page:
    return of_gate(found) if isinstance(found, GateFile) else of_record(found)


def of_record(record: Record) -> Page:
    """Return the report of one run, complete or cut short."""
    p = record.provenance
    word, tone = ("GREEN", "good") if record.judgements else ("NO ROWS", "open")
    if record.red or not record.complete:
        word, tone = "RED" if record.complete else "NOT COMPLETE", "bad"
    reviewable = all(j.verdict is Verdict.NEW for j in record.judgements if j.red)
    if record.red and record.complete and reviewable and not record.problems:
        word, tone = "NOT REVIEWED", "open"
    rows = sorted((_record_row(j, record) for j in record.judgements), key=lambda r: (r.order, r.id))
    return Page(
        kind="record",
        word=word,
        tone=tone,
        failed=record.red,
        lane=str(p.get("lane")),
        headline=summary(record),
        started=str(p.get("started", "")),
        seconds=float(p["wall_seconds"]) if is_finite(p.get("wall_seconds")) else math.nan,
        command=str(p.get("command", "")),
        sides=("", f"torch {p.get('torch')}"),
        facts=tuple(Fact(k, "", str(v)) for k, v in p.items() if k not in ELSEWHERE and v is not None),
        findings=group(f for j in record.judgements if (f := _record_finding(j, record))),
        rows=tuple(rows),
        problems=record.problems,
        notes=_lines(record, "acceptances"),
        not_run=_lines(record, "not_run"),
        records=(None, record),
    )


def of_gate(gate: GateFile) -> Page:
    """Return the report of a gate. A side without a record is shown by its failure."""
    worst: dict[str, Finding] = {}
    for finding in gate.findings:
        for row in finding.rows:
            worst.setdefault(row, finding)
    sides = (gate.adopted, gate.candidate)
    records = (gate.adopted.record, gate.candidate.record)
    known = [{j.row.id: j for j in record.judgements} if record else {} for record in records]
    ids = dict.fromkeys([*worst, *known[1], *known[0], *gate.timed])
    rows = [_gate_row(gate, id, tuple(side.get(id) for side in known), worst.get(id)) for id in ids]
    broken = [(side.name, line) for side in sides for line in _broken(side)]
    problems = [Problem("", ProblemKind.FAILED, f"{name}: {line}") for name, line in broken]
    return Page(
        kind="gate",
        word=gate.decision.name,
        tone=TONE[gate.decision],
        failed=gate.decision is not Decision.ADOPT,
        lane=gate.lane,
        headline=_headline(gate),
        started=gate.started,
        seconds=gate.wall_seconds,
        command=gate.command,
        sides=(gate.adopted.name, gate.candidate.name),
        facts=tuple(_facts(*sides)),
        findings=gate.findings,
        rows=tuple(sorted(rows, key=lambda r: (r.order, r.id))),
        problems=(*(() if gate.finished else (CUT_SHORT,)), *problems),
        notes=tuple(dict.fromkeys((*gate.accepted, *_lines(records[1], "acceptances")))),
        not_run=_lines(records[1], "not_run"),
        records=records,
        compare=_compare_link(gate),
        moved=tuple(without_cuda(gate.moved)),
        meaning=_meaning(gate),
    )


def _uncompared(gate: GateFile) -> str:
    """Return why a gate did not compare the rows of its sides, "" if it did."""
    if gate.decision is Decision.ADOPT:
        return ""
    if not gate.finished:
        return "the gate was cut short"
    absent = [side.name for side in (gate.adopted, gate.candidate) if side.record is None]
    return f"{' and '.join(absent)} left no record" if absent else ""


def _record_row(j: Judgement, record: Record) -> RowView:
    tone = "good" if j.verdict is Verdict.PASS else "info"
    if j.red:
        tone = "bad" if j.verdict in PRODUCT else "open"
    order = j.verdict.severity + (0 if j.red else 50)
    reason = f"accepted by {j.accepted}; {j.reason}" if j.accepted else j.reason
    shown = {"label": j.label, "tone": tone, "order": order, "reason": reason, "command": j.command}
    return _row(j.row.id, j, record, candidate=_value(j), **shown)


def _gate_row(gate: GateFile, id: str, j: tuple[Judgement | None, ...], finding: Finding | None) -> RowView:
    """Return the line of a row. j: its judgement on the adopted and on the candidate side."""
    adopted, candidate = j
    timed, gap = gate.timed.get(id), "" if finding else _uncompared(gate)
    accepted = candidate.accepted if candidate else ""
    values = {"adopted": _value(adopted), "candidate": _value(candidate)}
    shown = {**values, "change": _change(adopted, candidate)}
    if timed:
        low, high = (f"{x:.4g}" if math.isfinite(x) else "?" for x in timed.interval)
        label, reason = timed.outcome, f"{timed.outcome} in [{low}, {high}] after {timed.sessions} sessions"
        shown = {"adopted": "1", "candidate": f"{timed.ratio:.4g}", "change": timed.ratio - 1}
        shown["unit"] = "ratio of times"
    else:
        label = UNCOMPARED if gap else "PASS"
        known = finding or accepted
        reason = (candidate.reason if candidate else "not measured by the candidate") if known else ""
    if candidate and accepted:
        reason = f"accepted by {accepted}; {reason}"
        label = label if gap and not timed else candidate.label
    decision = finding.decision if finding else Decision.UNKNOWN if gap else Decision.ADOPT
    right = "info" if accepted or finding else "good"
    return _row(
        id,
        candidate or adopted,
        gate.candidate.record or gate.adopted.record,
        label=finding.label if finding else label,
        tone=right if decision is Decision.ADOPT else TONE[decision],
        order=list(Decision).index(decision) * 20 + (0 if finding else 10 if accepted else 15),
        reason=f"not compared: {gap}" if gap else reason,
        command=finding.repro if finding else "",
        **shown,
    )


def _row(id: str, j: Judgement | None, record: Record | None, **shown: Any) -> RowView:
    """Return a line with what a judgement states of its row; `shown` is the rest."""
    if j is None:
        return RowView(**{"id": id, "unit": "ratio", **shown})
    stated = {
        "unit": j.row.unit,
        "rule": sentence(record, j.row.rule),
        "test": j.row.test,
        "evidence": j.row.evidence,
        "reviewed": "" if j.reviewed is None else show(j.reviewed),
        "limit": j.limit,
        "place": places(j),
    }
    return RowView(**{"id": id, **stated, **shown})


def _value(j: Judgement | None) -> str:
    return "-" if j is None or j.row.unmeasured else show(j.row.value)


def _change(adopted: Judgement | None, candidate: Judgement | None) -> float:
    """Return the relative change of a number; NaN without one."""
    before, after = (j.row.value if j and not j.row.unmeasured else None for j in (adopted, candidate))
    return (after - before) / abs(before) if is_finite(before) and is_finite(after) and before else math.nan


def _record_finding(j: Judgement, record: Record) -> Finding | None:
    """Group rows of one record by cause: the same metric, and evidence or a reason with the same start."""
    if j.verdict is Verdict.PASS:
        return None
    if j.verdict is Verdict.NEW and j.red:
        line = f"{j.row.id}: {_value(j)} {j.row.unit}"
        head, command = "measured and never reviewed", accept_new(record)
        return Finding(Decision.UNKNOWN, j.label, "", head, (j.row.id,), (), (line,), command)
    product = j.verdict in PRODUCT
    decision = Decision.ADOPT if not j.red else Decision.HOLD if product else Decision.UNKNOWN
    reason = VALUE.sub("\u2026", j.reason.replace(j.row.test, "its test") if j.row.test else j.reason)
    head = one_line(j.row.evidence[0]) if product and j.row.evidence else one_line(reason)
    metric = j.row.id.rsplit("/", 1)[1] if product else ""
    shown = (f"{j.row.id}: {j.reason}", *j.row.evidence)
    return Finding(decision, j.label, metric, head, (j.row.id,), (), shown, j.command)


def _headline(gate: GateFile) -> str:
    tally = Counter(f.decision for f in gate.findings)
    parts = [f"{gate.adopted.name} \u2192 {gate.candidate.name} on {gate.lane}"]
    if n := tally[Decision.HOLD]:
        parts.append(f"{n} causes hold it" if n > 1 else "1 cause holds it")
    if n := tally[Decision.UNKNOWN]:
        parts.append(f"{n} gap{'s' * (n > 1)} in the evidence")
    if gate.decision is Decision.ADOPT:
        parts.append("nothing holds it")
    return "; ".join(parts)


def _meaning(gate: GateFile) -> tuple[str, ...]:
    """Return what an UNKNOWN gate means, what it compared, and its next command."""
    if gate.decision is not Decision.UNKNOWN:
        return ()
    gap = next((f for f in gate.findings if f.decision is Decision.UNKNOWN), None)
    open_time = (
        gap is not None and gap.label == TimedOutcome.INCONCLUSIVE.value and "--resume" not in gate.command
    )
    more = f"{gate.command} --resume" if open_time or not gate.finished else gap.repro if gap else ""
    return ("UNKNOWN: evidence is missing, so nobody should adopt yet. It is no evidence against the candidate.",
            f"{explained(gate)}.", more)  # fmt: skip


def _facts(adopted: GateSide, candidate: GateSide) -> Iterable[Fact]:
    """Return the facts of both sides, differing ones first; facts that neither side has are left out."""
    known = []
    for side in (adopted, candidate):
        p = dict(side.record.provenance) if side.record else {}
        p |= {f"package {name}": version for name, version in side.packages.items()}
        p |= {f"git version of {name}": commit for name, commit in side.git_version.items()}
        p |= {"environment": side.command}
        known.append({name: value for name, value in p.items() if name not in ELSEWHERE})
    both = {name: [p.get(name) for p in known] for name in (*known[0], *known[1])}
    facts = [Fact(name, *("" if x is None else str(x) for x in values)) for name, values in both.items()]
    return sorted((f for f in facts if f.adopted or f.candidate), key=lambda f: not f.differs)


def _broken(side: GateSide) -> Iterable[str]:
    if side.failure or side.record is None:
        yield side.failure or "it left no record"
    yield from (f"canary {name}: {reason}" for name, reason in side.canaries.items())
    if side.record and not side.record.complete:
        yield "its run was cut short"
    yield from map(str, side.record.problems if side.record else ())


def _compare_link(gate: GateFile) -> str:
    """Return GitHub's compare page of the two builds of torch, if both state their commits."""
    commits = [
        side.git_version.get("torch") or str(side.record.provenance.get("torch_git") if side.record else "")
        for side in (gate.adopted, gate.candidate)
    ]
    if not all(COMMIT.fullmatch(c) for c in commits) or commits[0] == commits[1]:
        return ""
    return f"https://github.com/pytorch/pytorch/compare/{commits[0]}...{commits[1]}"


def _lines(record: Record | None, name: str) -> tuple[str, ...]:
    lines: Sequence[Any] = record.provenance.get(name, ()) if record else ()
    return tuple(str(line) for line in lines)
