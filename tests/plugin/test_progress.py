"""What a lane run prints while it runs: red rows at once, a line of progress, and an estimate from the last run."""

from __future__ import annotations

import io
import json
import re
import types
from pathlib import Path

import pytest
from rich.console import Console

from bumpgate.core.rows import Judgement, Row, Verdict
from bumpgate.gate.view import View
from bumpgate.plugin import progress
from bumpgate.plugin.progress import Progress
from bumpgate.plugin.sharing import WAITED_PROPERTY
from bumpgate.process.home import durations_path, load_durations
from tests.support.project import GOOD, Project, counted

LONG, SHORT = "suites/a.py::long", "suites/a.py::short"


class Reporter:
    """Pytest's terminal output, as a list of lines."""

    hasmarkup = False
    showfspath = True

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._tw = types.SimpleNamespace(width_of_current_line=0, line=lambda: self.lines.append(""))

    def write_line(self, text: str) -> None:
        self.lines.append(text)

    def flush(self) -> None:
        pass


def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: dict[str, float]) -> Progress:
    """Return the progress of a run of two tests that began 60 seconds ago."""
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path))
    (tmp_path / "seconds").mkdir(exist_ok=True)
    (tmp_path / "seconds" / "cpu.json").write_text(json.dumps(before))
    clock = types.SimpleNamespace(monotonic=lambda: 1000.0)
    monkeypatch.setattr(progress, "time", clock)
    reporter = Reporter()
    manager = types.SimpleNamespace(get_plugin=lambda name: reporter, hasplugin=lambda name: False)
    judgements: dict[str, Judgement] = {}
    run = Progress(types.SimpleNamespace(pluginmanager=manager), "cpu", judgements)
    run.pytest_xdist_node_collection_finished([LONG, SHORT])
    clock.monotonic = lambda: 1060.0
    return run


def report(nodeid: str, *, failed: bool = False) -> pytest.TestReport:
    outcome = "failed" if failed else "passed"
    return pytest.TestReport(nodeid, ("a.py", 1, nodeid), {}, outcome, None, "call", duration=2.0)


def test_estimate_uses_the_durations_of_the_last_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = started(monkeypatch, tmp_path, {LONG: 300.0, SHORT: 100.0})
    assert run.line() == "1:00; 0 of 2 tests"
    run.pytest_runtest_logfinish(SHORT)
    run.pytest_runtest_logstart(LONG)
    assert run.line() == f"1:00 of about 4:00; 1 of 2 tests; 0 s in {LONG}"
    durations_path("cpu").write_text("[1, 2]")
    assert load_durations("cpu") == {}
    run = started(monkeypatch, tmp_path, {})
    run.pytest_runtest_logfinish(SHORT)
    assert run.line().startswith("1:00; 1 of 2 tests"), "without durations there is no estimate"


def test_durations_are_saved_for_the_next_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = started(monkeypatch, tmp_path, {LONG: 300.0, SHORT: 100.0})
    run.pytest_runtest_logreport(report(SHORT))
    run.pytest_runtest_logfinish(SHORT)
    run.pytest_runtest_logreport(report(LONG))  # its set-up alone: ctrl-C interrupted it
    run.pytest_sessionfinish()
    assert load_durations("cpu") == {LONG: 300.0, SHORT: 2.0}


def test_seconds_leave_out_the_wait_for_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = started(monkeypatch, tmp_path, {})
    for when in ("setup", "call"):
        phase = report(LONG)
        phase.when, phase.user_properties = when, [(WAITED_PROPERTY, 1.5)]
        run.pytest_runtest_logreport(phase)
    run.pytest_runtest_logfinish(LONG)
    run.pytest_sessionfinish()
    assert load_durations("cpu") == {LONG: 2.0 + 2.0 - 1.5}


# A million seconds pass while a test waits for the machine.
LONG_WAIT = """
from contextlib import contextmanager
from types import SimpleNamespace
from bumpgate.plugin import sharing, timing

clock = SimpleNamespace(now=0.0)
sharing.time = SimpleNamespace(monotonic=lambda: clock.now)
real = timing.machine

@contextmanager
def machine(**given):
    with real(**given):
        clock.now += 1e6
        yield

timing.machine = machine
"""


def test_lane_test_reports_its_wait_for_the_machine(project: Project) -> None:
    """It is subtracted from the real seconds of the test, which are fewer."""
    project.baseline(good=counted("test_good"))
    project.tests(GOOD)
    project.write("suites/conftest.py", LONG_WAIT)
    home = project.root / "home"
    assert project.pytest("-m", "cpu", "-n", "0", BUMPGATE_HOME=str(home)).code == 0
    (spent,) = json.loads((home / "seconds/cpu.json").read_text()).values()
    assert spent < 0


def test_failures_and_red_rows_are_printed_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BUMPGATE_PROGRESS", str(tmp_path / "run.progress"))
    run = started(monkeypatch, tmp_path, {})
    row = Row("compile/a/graphs", 3, "count", 1, "C1", better="derived", expected=2, test=SHORT)
    run.judgements["compile/a/graphs"] = Judgement(row, Verdict.CHANGED, "2 -> 3", "")
    run.pytest_runtest_logreport(report(SHORT, failed=True))
    run.pytest_runtest_logreport(report(LONG))
    assert run.reporter.lines == [f"FAILED {SHORT}", "CHANGED compile/a/graphs: 2 -> 3"]
    assert "1 row: 1 CHANGED" in run.line()
    run.reporter._tw.width_of_current_line = 1  # pytest's letter of a failed test
    run.pytest_runtest_logreport(report(LONG, failed=True))
    assert run.reporter.lines[2:] == ["", f"FAILED {LONG}"]
    del run.reporter.lines[:]
    run.pytest_runtest_logfinish(SHORT)
    run.pytest_runtest_logfinish(LONG)
    assert len(run.reporter.lines) == 1, "a line of progress a minute"
    out = io.StringIO()
    with View(Console(file=out, force_terminal=True, width=100)).doing("rows", {"adopted": run.file}):
        pass
    assert "adopted: rows" in out.getvalue()
    assert "1 of 2 tests; 1 row: 1 CHANGED" in out.getvalue(), (
        "the bar of a gate reads the run's own progress"
    )


def test_lane_run_prints_pytests_counts_but_no_dots(lane: Project) -> None:
    """And saves durations, also without workers: a gate's budget is divided by these seconds."""
    for workers in "01":
        home = lane.root / f"home{workers}"
        plain = lane.pytest("-m", "cpu", "-n", workers, "--gate", BUMPGATE_HOME=str(home))
        assert plain.code == 0, plain.out + plain.err
        assert ("2 passed in" in plain.out, "100%" in plain.out) == (True, False)
        tests = json.loads((home / "seconds/cpu.json").read_text())
        assert {*tests} == {
            "suites/compile/test_a.py::test_good[cpu]",
            "suites/model/test_b.py::test_other[cpu]",
        }
    assert "100%" in lane.pytest("-m", "cpu", "-n", "1", "-q").out


# The file `printed` appears once a line names the running test.
SAYS_PRINTED = """
import bumpgate.plugin.progress as p

p.ON_TERMINAL, p.IN_LOG = 0.05, 0.1
line, show, lines = p.Progress.line, p.Progress._show, []

def kept(self):
    lines.append(line(self))
    return lines[-1]

def shown(self):
    show(self)
    if any(" s in " in text for text in lines):
        open("printed", "w").close()

p.Progress.line, p.Progress._show = kept, shown
"""


@pytest.mark.parametrize("plugins", ["xdist.plugin,pytest_timeout", "pytest_timeout,xdist.plugin"])
def test_progress_is_printed_while_a_test_runs(project: Project, plugins: str) -> None:
    project.baseline(good=counted("test_good"))
    waits = '    for _ in range(6000):\n        time.sleep(0.0 if os.path.exists("printed") else 0.01)\n'
    project.tests(GOOD.replace("    row.count(", f"{waits}    row.count("))
    project.write("suites/conftest.py", SAYS_PRINTED)
    ran = project.pytest("-m", "cpu", "-n", "1", PYTEST_PLUGINS=plugins)
    running = r"; 0 of 1 tests; \d+ s in suites/compile/test_a\.py::test_good\[cpu\]"
    assert re.search(running, ran.out), ran.out + ran.err
