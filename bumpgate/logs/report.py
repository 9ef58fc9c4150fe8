"""What a log contains: the first cause, what followed, and everything else by family; as text, Markdown and JSON."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from bumpgate.logs.families import Family, Issue, load_issues

# Exit codes of the command.
CLEAN, ALERT, USAGE, UNKNOWN = 0, 1, 2, 3
SHOWN = 12  # lines of an event in Markdown


@dataclass(frozen=True)
class Event:
    """The start of an event.

    line: counts from 1 in `file`.
    rank: None if neither a prefix nor the file's name has one.
    facts: values that the family's expressions found in the event, such as a function, a guard, a library.
    lines: its texts, without prefixes.
    """

    line: int
    rank: int | None
    time: str
    level: str
    source: str
    text: str
    file: str = ""
    host: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where it began: `rank1.log:20 rank 1 at 06:24:44`."""
        rank = "" if self.rank is None else f" rank {self.rank}"
        host = f" on {self.host}" if self.host else ""
        return f"{self.file + ':' if self.file else 'line '}{self.line}{rank}{host}" + (
            f" at {self.time}" if self.time else ""
        )


@dataclass(frozen=True)
class LogFinding:
    """All events of one family. by_rank: their number per rank, None for lines without a rank."""

    family: Family
    by_rank: Mapping[int | None, int]
    first: Event
    alert: bool

    @property
    def count(self) -> int:
        return sum(self.by_rank.values())

    @cached_property
    def issue(self) -> Issue | None:
        """The known issue that the first event shows."""
        lines = (self.first.text, *self.first.lines)
        return next((i for i in load_issues() if i.family == self.family.name and i.matches(lines)), None)


@dataclass(frozen=True)
class Report:
    """Everything that was found.

    lines: number of lines read.
    findings: in the order of the families.
    unknown: warnings and errors of no family by text (digits as 0), with the number and the first of each.
    """

    lines: int
    findings: tuple[LogFinding, ...]
    unknown: Mapping[str, tuple[int, Event]]

    @property
    def unknown_count(self) -> int:
        return sum(count for count, _ in self.unknown.values())

    @property
    def exit_code(self) -> int:
        if any(f.alert for f in self.findings):
            return ALERT
        return UNKNOWN if self.unknown else CLEAN

    @property
    def alerts(self) -> list[LogFinding]:
        """The alerting findings: the first cause, then what followed.

        A family that other ranks print after a failure comes last; otherwise the time decides, then the line.
        """
        clocks = [clock(f.first.time) for f in self.findings if f.alert]
        timed = all(clocks)
        return sorted(
            (f for f in self.findings if f.alert),
            key=lambda f: (f.family.follows, clock(f.first.time) if timed else "", f.first.line),
        )

    def count(self, name: str) -> int:
        """Return the number of events of the family `name`."""
        return sum(f.count for f in self.findings if f.family.name == name)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "lines": self.lines,
            "cause": self.alerts[0].family.name if self.alerts else None,
            "findings": [
                {k: v for k, v in asdict(f.family).items() if k not in ("patterns", "facts")}
                | {"count": f.count, "by_rank": {str(r): n for r, n in f.by_rank.items()}}
                | {"alert": f.alert, "first": asdict(f.first), "issue": asdict(f.issue) if f.issue else None}
                for f in self.findings
            ],
            "unknown": [{"count": n, "first": asdict(first)} for n, first in self.unknown.values()],
            "exit_code": self.exit_code,
        }


_GLOG = re.compile(r"(\d{1,2})(\d\d) (\d\d:\d\d:\d\d[.\d]*)$")
_DATED = re.compile(r"(?:\d{4}[-/])?(\d\d)[-/](\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d+))?")


def clock(time: str) -> str:
    """Return a time of any logger as "MMDD HH:MM:SS.f", which sorts; "" if it has no date."""
    if found := _GLOG.match(time):
        return f"{int(found[1]):02}{found[2]} {found[3]}"
    if found := _DATED.match(time):
        return f"{found[1]}{found[2]} {found[3]}.{found[4] or 0}"
    return ""


def demangled(symbol: str) -> str:
    """Return the C++ name of a symbol, by binutils' c++filt where it is installed."""
    if not symbol.startswith("_Z") or not (tool := shutil.which("c++filt")):
        return symbol
    done = subprocess.run([tool, symbol], capture_output=True, text=True, timeout=10)
    return done.stdout.strip() or symbol


def facts_text(facts: Mapping[str, str]) -> str:
    """Return facts as `name value` pairs; symbols are demangled, and an exit code by a signal is named."""
    shown = {k: demangled(v) if k == "symbol" else v for k, v in facts.items()}
    if shown.get("exit_code") == "-9":
        shown["exit_code"] = "-9 (killed: most often for the host's memory)"
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown.items())


def _headline(finding: LogFinding) -> str:
    ranks = [rank for rank in finding.by_rank if rank is not None]
    on = f" on {len(ranks)} ranks" if len(ranks) > 1 else ""
    return f"{finding.family.name}: {finding.count} event{'s' * (finding.count > 1)}{on}, first {finding.first.place}"


def text(report: Report) -> str:
    """Return the report as text: alerts with the first cause on top, then counts, then unknown texts."""
    out = []
    for position, f in enumerate(report.alerts):
        out.append(f"{'ALERT    ' if position == 0 else 'followed '} {_headline(f)}")
        out.append(f"           {f.first.text[:200].strip()}")
        if f.first.facts:
            out.append(f"           {facts_text(f.first.facts)}")
        if position == 0 or not f.family.follows:
            out += [f"           meaning: {f.family.meaning}", f"           look at: {f.family.look}"]
        if f.issue:
            out.append(f"           known:   {f.issue.link} ({f.issue.versions}): {f.issue.workaround}")
    for f in report.findings:
        if not f.alert:
            bound = f" (at most {f.family.bound} a rank)" if f.family.action == "count" else ""
            out.append(f"ok         {_headline(f)}{bound}")
    for count, first in report.unknown.values():
        out.append(f"UNKNOWN    {count} times, first {first.place}: {first.text[:200].strip()}")
    return "\n".join([*out, f"{report.lines} lines, {report.unknown_count} unknown events"])


def markdown(report: Report) -> str:
    """Return the report as Markdown for an issue."""
    out = []
    for position, f in enumerate(report.alerts):
        out += [
            f"### {'First cause' if position == 0 else 'Followed by'}: {f.family.name}",
            "",
            _headline(f) + ".",
        ]
        out += ["", "```", *(line.replace("```", "'''") for line in f.first.lines[:SHOWN]), "```", ""]
        out += [f"* {name.replace('_', ' ')}: `{demangled(value)}`" for name, value in f.first.facts.items()]
        out += [
            f"* meaning: {f.family.meaning}",
            f"* look at: {f.family.look}",
            f"* tested by: {f.family.tested}",
        ]
        if f.issue:
            out.append(f"* known: {f.issue.link} ({f.issue.versions}); {f.issue.workaround}")
        out.append("")
    counted = [
        f"| {f.family.name} | {f.count} | {f.family.bound} |"
        for f in report.findings
        if f.family.action == "count"
    ]
    if counted:
        out += ["| counted | events | bound a rank |", "|---|---|---|", *counted, ""]
    if report.unknown:
        out += ["Unknown warnings and errors:", ""]
        out += [f"* {n} times: `{first.text[:200].strip()}`" for n, first in report.unknown.values()]
    return "\n".join(out or [f"{report.lines} lines: nothing to report."]) + "\n"


@dataclass(frozen=True)
class Difference:
    """A family, or an unknown text, that two runs log differently. label: NEW, GONE, MORE or FEWER."""

    label: str
    name: str
    before: int
    after: int
    first: Event

    def __str__(self) -> str:
        return f"{self.label:6} {self.name}: {self.before} -> {self.after}; {self.first.text[:160].strip()}"


def compare(before: Report, after: Report) -> list[Difference]:
    """Return what two runs log differently: new alerts and texts first.

    Families that are ignored are left out.
    """

    def events(report: Report) -> dict[str, tuple[int, Event]]:
        found = {f.family.name: (f.count, f.first) for f in report.findings if f.family.action != "ignore"}
        return found | {f"unknown: {key[:120]}": value for key, value in report.unknown.items()}

    a, b = events(before), events(after)
    out = []
    for name in [*b, *(name for name in a if name not in b)]:
        (old, gone), (new, first) = a.get(name, (0, None)), b.get(name, (0, None))
        if old != new:
            label = "NEW" if not old else "GONE" if not new else "MORE" if new > old else "FEWER"
            out.append(Difference(label, name, old, new, first or gone))  # type: ignore[arg-type]
    order: Sequence[str] = ("NEW", "MORE", "GONE", "FEWER")
    return sorted(out, key=lambda d: order.index(d.label))
