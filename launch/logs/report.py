"""What a log contains: its records by class, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from launch.logs.classes import LogClass

# Exit codes of the command.
CLEAN, ALERT, USAGE, UNKNOWN = 0, 1, 2, 3


@dataclass(frozen=True)
class LogRecord:
    """Start and first text of a record: line counts from 1, rank is None if no prefix names one."""

    line: int
    rank: int | None
    time: str
    level: str
    source: str
    text: str


@dataclass(frozen=True)
class LogFinding:
    """All records of one class. by_rank counts them per rank, those without a rank prefix under None."""

    log_class: LogClass
    by_rank: Mapping[int | None, int]
    first: LogRecord
    alert: bool

    @property
    def count(self) -> int:
        return sum(self.by_rank.values())


@dataclass(frozen=True)
class Report:
    """lines read, findings in the contract's order, unknown records by text (digits as 0) with the first of each."""

    lines: int
    findings: tuple[LogFinding, ...]
    unknown: Mapping[str, tuple[int, LogRecord]]

    @property
    def unknown_count(self) -> int:
        return sum(count for count, _ in self.unknown.values())

    @property
    def exit_code(self) -> int:
        if any(f.alert for f in self.findings):
            return ALERT
        return UNKNOWN if self.unknown else CLEAN

    def count(self, name: str) -> int:
        """Number of records of the class `name`."""
        return sum(f.count for f in self.findings if f.log_class.name == name)

    def to_json(self) -> dict[str, Any]:
        return {
            "lines": self.lines,
            "findings": [
                asdict(f.log_class)
                | {"count": f.count, "by_rank": {str(r): n for r, n in f.by_rank.items()}}
                | {"alert": f.alert, "first": asdict(f.first)}
                for f in self.findings
            ],
            "unknown": [{"count": n, "first": asdict(first)} for n, first in self.unknown.values()],
            "exit_code": self.exit_code,
        }


def table(report: Report) -> str:
    """Format the report as text, worst first."""
    rows = []
    for f in sorted(report.findings, key=lambda f: not f.alert):
        c = f.log_class
        bound = f"{c.action} <= {c.bound} a rank" if c.action == "count" else c.action
        where = f"line {f.first.line}" + ("" if f.first.rank is None else f" rank {f.first.rank}")
        rows.append((("ALERT" if f.alert else "ok"), c.name, str(f.count), bound, where, c.reason))
    for count, first in report.unknown.values():
        rows.append(("UNKNOWN", "-", str(count), "-", f"line {first.line}", first.text[:100]))
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(5)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[5]]) for row in rows]
    return "\n".join([*lines, f"{report.lines} lines, {report.unknown_count} unknown records"])
