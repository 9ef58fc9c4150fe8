"""Options of a gate's selection: every later run of its tests has them, since they may choose what is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.core.baseline import Baseline, Reviewed, save
from bumpgate.core.rows import Record
from bumpgate.process.runner import options_of
from tests.support.foreign import ANY_ROUND_IS_QUIET, LANE, Foreign
from tests.support.project import wrapped_python

pytestmark = pytest.mark.long(30)

CONFTEST = (
    ANY_ROUND_IS_QUIET
    + """
def pytest_addoption(parser):
    parser.addoption("--mode", default="bf16")
"""
)
# The candidate is slow in one mode. Each run writes its side and mode.
TEST = """
import os, pytest

@pytest.mark.mine
def test_step(row, request):
    mode, side = request.config.getoption("--mode"), os.environ["SIDE"]
    with open("modes.log", "a") as log:
        print(side, mode, file=log)
    row("speed/step/seconds", 1.5 if side == "candidate" and mode == "fp8" else 1.0, unit="s", witness=1, {kind})
"""
SIDES = ("--python-adopted", ".adopted/python", "--python-candidate", ".candidate/python")
GATE = ("gate", "--lane", "mine", *SIDES, "--sessions", "8")
FP8 = ("--", "--mode", "fp8", "tests")


@pytest.fixture
def project(tmp_path: Path) -> Foreign:
    """A project whose candidate is 1.5 times as slow with --mode fp8."""
    made = Foreign(tmp_path)
    for side in ("adopted", "candidate"):
        python = f".{side}/python"
        made.write(python, wrapped_python(SIDE=side))
        (tmp_path / python).chmod(0o755)
    made.env["BUMPGATE_HOME"] = str(tmp_path / ".home")
    made.write("bumpgate.toml", LANE)
    made.write("torch.py", "")
    made.write("conftest.py", CONFTEST)
    made.write("tests/test_step.py", TEST.format(kind='better="lower", paired=True'))
    return made


def test_sessions_run_with_the_options_of_the_selection(project: Foreign) -> None:
    done = project.bumpgate(*GATE, *FP8)
    assert (done.code, "SLOWER" in done.out) == (1, True), done.out + done.err
    modes = (project.root / "modes.log").read_text().split()[1::2]
    assert len(modes) > 2
    assert set(modes) == {"fp8"}


def test_second_reading_runs_with_the_options(project: Foreign) -> None:
    """A time outside of a bound on one side is read again: in another mode it would pass."""
    project.write("tests/test_step.py", TEST.format(kind="at_most=1.2"))
    reviewed = Reviewed(1.0, "s", "derived", test="tests/test_step.py::test_step")
    (project.root / "baselines").mkdir()
    save(project.root / "baselines/mine.json", Baseline("mine", {}, {"speed/step/seconds": reviewed}))
    done = project.bumpgate(*GATE, *FP8)
    assert (done.code, "REGRESSION" in done.out) == (1, True), done.out + done.err
    assert "still outside: speed/step/seconds" in done.err


def test_resumed_gate_needs_both_environments(project: Foreign) -> None:
    """If one does not start any more, the gate ends with one line and keeps what it measured."""
    first = project.bumpgate(*GATE, "--budget", "0", *FP8)
    assert first.code == 125, first.out + first.err
    python = project.root / ".candidate/python"
    python.write_text("#!/bin/sh\necho libcudart.so.13: cannot open >&2; exit 1\n")
    again = project.bumpgate(*GATE, "--resume", *FP8)
    assert (again.code, again.out) == (4, ""), again.out + again.err
    assert "the candidate environment does not start any more (" in again.err
    assert "Traceback" not in again.err


OPTIONS = {
    "no path": (["--mode=fp8"], [], ["--mode=fp8"]),
    "path": (["--mode", "fp8", "tests/a.py::test_b"], ["tests/a.py::test_b"], ["--mode", "fp8"]),
    "value like a path, first": (["-k", "tests", "tests"], ["tests"], ["-k", "tests"]),
    "value like a path, last": (["tests", "-k", "tests"], ["tests"], ["-k", "tests"]),
    "flag": (["-x", "tests"], ["tests"], ["-x"]),
    "end of options": (["-x", "--", "tests"], ["tests"], ["-x"]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_the_selection_without_its_paths(name: str) -> None:
    selection, paths, options = OPTIONS[name]
    assert options_of(selection, Record({"paths": paths}, ())) == options
