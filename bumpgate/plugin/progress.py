"""Progress output of a lane run: finished tests, verdicts so far, the slowest running test, the time left.

On a terminal, one line that is rewritten; elsewhere, one line a minute. A failed test and a red row are printed at
once. It replaces pytest's dots; `-v` and `-q` keep pytest's own output.
A gate reads it from the file $BUMPGATE_PROGRESS.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from bumpgate.core.rows import Judgement, Verdict, write_atomic
from bumpgate.core.text import clock
from bumpgate.plugin.sharing import WAITED_PROPERTY
from bumpgate.process.home import load_durations, save_durations
from bumpgate.process.host import PROGRESS

# Seconds between two lines.
ON_TERMINAL = 0.5
IN_LOG = 60.0
# Assumed seconds of a test that has not been timed here before.
UNTIMED = 0.2


class Progress:
    """Prints the progress of one run of a lane, in the controller.

    judgements: row id -> judgement, filled by the lane's session as tests report. The seconds of each test, without
    those in which it waited for others, are kept for the next run's estimate, in the cache folder of bumpgate.
    """

    def __init__(self, config: pytest.Config, lane: str, judgements: Mapping[str, Judgement]) -> None:
        self.config = config
        self.judgements = judgements
        self.lane = lane
        self.before = load_durations(lane)
        self.now: dict[str, float] = {}
        self.tests: set[str] = set()
        self.finished: set[str] = set()
        self.running: dict[str, float] = {}
        self.failed: set[str] = set()
        self.shown: set[str] = set()
        self.file = Path(os.environ[PROGRESS]) if PROGRESS in os.environ else None
        self.started = self.printed = self.written = time.monotonic()
        self.lock = threading.Lock()
        self.ended = threading.Event()

    @property
    def reporter(self) -> pytest.TerminalReporter:
        """Return pytest's own terminal reporter."""
        reporter: pytest.TerminalReporter | None = self.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        return reporter

    def pytest_sessionstart(self) -> None:
        if not self.config.pluginmanager.hasplugin("terminalreporter"):  # -p no:terminal
            self.config.pluginmanager.unregister(self)
            return
        self.reporter.showfspath = False
        self.reporter._show_progress_info = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.tests.update(ids)

    @pytest.hookimpl(
        tryfirst=True
    )  # the first result ends this hook: xdist's, if its plugin was registered later
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Start the clock of a run whose tests run in workers; within this process, their output is captured."""
        if self.config.pluginmanager.hasplugin("dsession"):
            threading.Thread(target=self._tick, daemon=True).start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Count a passed test as pytest does, without a dot."""
        if report.passed and report.when == "call" and not hasattr(report, "wasxfail"):
            return "passed", "", ""
        return None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running[nodeid] = time.monotonic()

    @pytest.hookimpl(trylast=True)  # after the session has filed the rows
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        waited = sum(
            float(str(x))
            for name, x in report.user_properties
            if name == WAITED_PROPERTY and report.when == "setup"
        )
        self.now[report.nodeid] = self.now.get(report.nodeid, 0.0) + report.duration - waited
        if report.failed and report.nodeid not in self.failed:
            self.failed.add(report.nodeid)
            self._say(f"FAILED {report.nodeid}")
        for id, j in [*self.judgements.items()][len(self.shown) :]:
            self.shown.add(id)
            if j.red and j.verdict is not Verdict.NEW:  # one entry of the table lists them
                self._say(f"{j.label} {id}: {j.reason}")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.running.pop(nodeid, None)
        self.finished.add(nodeid)
        self._show()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self.ended.set()
        if self.reporter.hasmarkup:
            self.reporter.rewrite("", erase=True)
        with contextlib.suppress(OSError):
            # Without the test that ctrl-C interrupted: it took longer than this.
            now = {test: spent for test, spent in self.now.items() if test in self.finished}
            save_durations(self.lane, self.before | now)

    def line(self) -> str:
        """`3:05 of about 12:10; 240 of 1201 tests; 96 rows: 95 PASS, 1 CHANGED; 41 s in suites/a.py::test_b`."""
        spent = time.monotonic() - self.started
        left = self._left(spent)
        total = f" of about {clock(spent + left)}" if left is not None else ""
        rows = list(self.judgements.values())
        counts = ", ".join(f"{n} {verdict.value}" for verdict, n in Counter(j.verdict for j in rows).items())
        parts = [f"{clock(spent)}{total}", f"{len(self.finished)} of {len(self.tests)} tests"]
        parts += [f"{len(rows)} row{'s' * (len(rows) != 1)}: {counts}"] if rows else []
        slowest = min(dict(self.running).items(), key=lambda running: running[1], default=None)
        parts += [f"{time.monotonic() - slowest[1]:.0f} s in {slowest[0]}"] if slowest else []
        return "; ".join(parts)

    def _left(self, spent: float) -> float | None:
        """Estimate the seconds left from the tests' times in earlier runs; None if most tests have none."""
        if len(self.tests & self.before.keys()) < len(self.tests) / 2:
            return None  # tests are ordered by length, so the first ones say nothing about the others
        expected = {test: self.before.get(test, UNTIMED) for test in self.tests}
        done = sum(expected[test] for test in self.finished & self.tests)
        return spent * (sum(expected.values()) - done) / done if done else None

    def _tick(self) -> None:
        while not self.ended.wait(ON_TERMINAL):
            self._show()

    def _show(self) -> None:
        on_terminal = self.reporter.hasmarkup
        with self.lock:
            now = time.monotonic()
            if self.file and now - self.written >= ON_TERMINAL:
                self.written = now
                state = {"finished": len(self.finished), "tests": len(self.tests), "line": self.line()}
                with contextlib.suppress(OSError):  # a full disk is reported at the end
                    write_atomic(self.file, json.dumps(state))
            if self.ended.is_set() or now - self.printed < (ON_TERMINAL if on_terminal else IN_LOG):
                return
            self.printed = now
            if on_terminal:
                self.reporter.rewrite(self.line()[: self.reporter._tw.fullwidth - 1], erase=True)
            else:
                self.reporter.write_line(self.line())
            self.reporter.flush()

    def _say(self, text: str) -> None:
        with self.lock:
            if self.reporter.hasmarkup:
                self.reporter.rewrite("", erase=True)
                self.reporter.rewrite("")
            elif self.reporter._tw.width_of_current_line:
                self.reporter._tw.line()  # after the letters of the tests
            self.reporter.write_line(text)
            self.reporter.flush()
