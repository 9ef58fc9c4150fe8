"""What happened to each test of a run: marks on pytest's reports, and their reader in the controller."""

from __future__ import annotations

import errno
import functools
import inspect
import json
import unittest
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core import outcomes
from bumpgate.core.errors import one_line
from bumpgate.plugin.rows import EXCUSED_PROPERTY, NOT_RUN_PROPERTY, RECORDER, InfraError

# Properties of a report: what the machine failed at; the phase that failed for its red rows alone, or raised.
INFRA_PROPERTY = "bumpgate_infra"
RED_PROPERTY = "bumpgate_red"
RAISED_PROPERTY = "bumpgate_raised"
NO_FAILURE = (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)
# Not EMFILE: a process that runs out of file descriptors may leak them.
MACHINE_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENFILE, errno.ENOMEM)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Fail a test whose function was not called. The plugin of an asynchronous one looks at the function itself."""
    function, called = pyfuncitem.obj, []
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return (yield)

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        called.append(True)
        return function(*args, **kwargs)

    pyfuncitem.obj = noted
    try:
        result = yield
    finally:
        pyfuncitem.obj = function
    if not called:
        pytest.fail("a plugin or conftest passed this test without calling its function", pytrace=False)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Mark the report of a phase that raised, before a wrapper of this hook can change its outcome.

    Also mark a test that failed for its red rows alone, or that a machine fault stopped: its rows are INFRA.
    """
    marks = item.user_properties
    marks[:] = [found for found in marks if found[0] != RAISED_PROPERTY]
    error = call.excinfo.value if call.excinfo else None
    if error and not isinstance(error, NO_FAILURE):
        marks.append((RAISED_PROPERTY, call.when))
    recorder = item.stash.get(RECORDER, None)
    if recorder and call.when == "teardown":
        recorder.ended = True
    if error and recorder and error is recorder.failure:
        marks.append((RED_PROPERTY, call.when))
    machine = isinstance(error, (InfraError, MemoryError))
    if machine or (isinstance(error, OSError) and error.errno in MACHINE_FAULTS):
        marks.append((INFRA_PROPERTY, one_line(f"{type(error).__name__}: {error}")))


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
        return sorted(line for lines in self.not_run.values() for line in lines)

    @property
    def not_run_rows(self) -> set[str]:
        return {line.partition(": ")[0] for line in self.not_run_lines}

    def take_collection(self, report: pytest.CollectReport) -> None:
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
