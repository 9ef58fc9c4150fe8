"""What happened to each test of a run, from pytest's reports of any xdist worker."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bumpgate.core import outcomes
from bumpgate.core.errors import one_line
from bumpgate.plugin.proof import RAISED_PROPERTY
from bumpgate.plugin.rows import EXCUSED_PROPERTY, INFRA_PROPERTY, NOT_RUN_PROPERTY, RED_PROPERTY


@dataclass
class Reports:
    """Outcomes by node id. failed, skipped, infra: the reason; uncollected: of a file; not_run: lines `row: reason`.

    broken: like failed, without those that failed for their red rows alone. finished: through all phases, and called:
    through the test itself, which --setup-only leaves out. excused: its rows may be NOT RUN under --gate. subtests:
    outcome and reason of those that were skipped or xfailed; the test goes on. rerun: a plugin ran it again.
    """

    root: Path
    finished: set[str] = field(default_factory=set)
    called: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    not_run: dict[str, list[str]] = field(default_factory=dict)
    excused: set[str] = field(default_factory=set)
    rerun: set[str] = field(default_factory=set)
    xpassed: set[str] = field(default_factory=set)
    xfailed: set[str] = field(default_factory=set)
    subtests: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    infra: dict[str, str] = field(default_factory=dict)
    uncollected: dict[str, str] = field(default_factory=dict)

    @property
    def ended(self) -> set[str]:
        """Return the tests that ran, were skipped, or failed as expected."""
        return (self.finished & self.called) | self.skipped.keys() | self.xfailed

    @property
    def not_run_lines(self) -> list[str]:
        """Return `row: reason` of each row that this device or environment need not report."""
        return sorted(line for lines in self.not_run.values() for line in lines)

    @property
    def not_run_rows(self) -> set[str]:
        """Return the ids of these rows."""
        return {line.partition(": ")[0] for line in self.not_run_lines}

    def take_collection(self, report: pytest.CollectReport) -> None:
        """Take the report of a file."""
        if report.failed:
            self.uncollected[report.nodeid] = last_line(report)
        elif report.skipped:
            self.skipped[report.nodeid] = last_line(report)

    def take(self, report: pytest.TestReport) -> None:
        """Take the report of one phase of a test."""
        test, for_rows, raised = report.nodeid, False, False
        listed: list[list[str]] = []
        excused = 0
        for name, value in report.user_properties:
            if name == INFRA_PROPERTY:
                self.infra[test] = str(value)
            elif name == NOT_RUN_PROPERTY:
                listed.append(json.loads(str(value)))
            elif name == EXCUSED_PROPERTY:
                excused += 1
            elif name == RED_PROPERTY:
                for_rows |= value == report.when
            elif name == RAISED_PROPERTY:
                raised |= value == report.when
        if listed:
            self.not_run[test] = [line for lines in listed for line in lines]
            if excused == len(listed):
                self.excused.add(test)
            else:
                self.excused.discard(test)
        # xfail(run=False) skips a test, as does an empty list of parameters under empty_parameter_set_mark = xfail.
        xfail = getattr(report, "wasxfail", None)
        expected_failure = xfail is not None and "[NOTRUN]" not in xfail
        if report.when == "call":
            self.called.add(test)
        hidden = raised and not report.failed and xfail is None
        if str(report.outcome) == "rerun":  # pytest-rerunfailures; its last attempt may pass
            self.rerun.add(test)
            self._fail(test, f"{last_line(report)} (a plugin ran the test again)")
        elif hidden:
            self._fail(
                test, f"raised in its {report.when}, and a plugin or conftest reports {report.outcome}"
            )
        elif report.failed:
            why = last_line(report) + _place(report, self.root)
            self._fail(test, why, for_rows=for_rows)
        elif report.skipped and hasattr(report, "context"):
            outcome = outcomes.XFAILED if expected_failure else outcomes.SKIPPED
            self.subtests.setdefault(test, []).append((outcome, last_line(report)))
        elif report.skipped and not expected_failure and test not in self.not_run:
            self.skipped[test] = last_line(report)
        elif expected_failure and (report.skipped or report.when == "call"):
            (self.xfailed if report.skipped else self.xpassed).add(test)
        # xdist files the report of a crashed worker's test under no phase.
        if report.when not in ("setup", "call"):
            self.finished.add(test)

    def _fail(self, test: str, why: str, *, for_rows: bool = False) -> None:
        self.failed.setdefault(test, why)
        if not for_rows:
            self.broken.setdefault(test, why)


def _place(report: pytest.TestReport, root: Path) -> str:
    """Return " (at suites/support/a.py:84)", where the exception was raised; "" if pytest does not report it."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return ""
    path = Path(crash.path)
    return f" (at {path.relative_to(root) if path.is_relative_to(root) else path.name}:{crash.lineno})"


def last_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return why a report did not pass, in one line: the exception's message if pytest kept it."""
    if isinstance(report.longrepr, tuple):
        return one_line(report.longrepr[2].removeprefix("Skipped: "))
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext
    lines = [line for line in text.splitlines() if line.strip()]
    return one_line(lines[0 if crash else -1]) if lines else "no reason given"
