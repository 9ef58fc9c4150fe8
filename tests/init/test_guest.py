"""A repository with lanes keeps its own pytest: the same outcomes and exit codes as without bumpgate."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.foreign import LANE, Foreign

OWN = """
import pytest

def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip(reason="later")
def test_skips(): pass
@pytest.mark.xfail
def test_xfails(): assert False
@pytest.mark.slow
def test_slow(record_property): record_property("own", 1)
"""
ROWS = """
import pytest
from bumpgate.plugin.rows import InfraError

pytestmark = pytest.mark.mine

def test_rows(row):
    row.exact("model/a/loss", 0.25, "loss", seen=1)
    row.count("model/a/breaks", 3, unit="breaks", seen=1, expected=0)
def test_busy(row):
    raise InfraError("none of 9 rounds was quiet")
"""
ARGUMENTS = (
    (),
    ("tests/test_own.py::test_passes",),
    ("tests/test_own.py::test_fails",),
    ("--lf",),
    ("-x", "-q"),
    ("-m", "slow"),
    ("-m", "absent"),
    ("-k", "passes or skips", "-v"),
    ("--collect-only", "-q"),
)


@pytest.fixture
def foreign(tmp_path: Path) -> Foreign:
    made = Foreign(tmp_path)
    made.write("pyproject.toml", '[tool.pytest.ini_options]\ntestpaths = ["tests"]\n')
    made.write("tests/test_own.py", OWN)
    return made


def plain(foreign: Foreign, *options: str) -> tuple[int, str]:
    """Run pytest; return its exit code and its output without durations, plugins and the root."""
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=foreign.root, env=foreign.env, capture_output=True, text=True)
    return done.returncode, re.sub(r"in \d+\.\d+s|^plugins: .*\n", "", done.stdout + done.stderr, flags=re.M)


def test_lanes_change_nothing_of_the_projects_own_tests(foreign: Foreign) -> None:
    before = [plain(foreign, *arguments) for arguments in ARGUMENTS]
    foreign.write("bumpgate.toml", LANE)
    after = [plain(foreign, "-p", "bumpgate.plugin", *arguments) for arguments in ARGUMENTS]
    absent = ARGUMENTS.index(("-m", "absent"))
    code, output = after[absent]
    line = "bumpgate: no marker 'absent'; lanes: mine; "
    assert line in output
    after[absent] = code, "".join(x for x in output.splitlines(keepends=True) if not x.startswith(line))
    assert after == before


def test_a_report_for_ci_has_no_properties_of_ours(foreign: Foreign) -> None:
    foreign.write("bumpgate.toml", LANE)
    assert plain(foreign, "-p", "bumpgate.plugin", "--junitxml=junit.xml")[0] == 1
    found = re.findall('property name="([^"]*)"', (foreign.root / "junit.xml").read_text())
    assert found == ["own"]


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1")], ids=["alone", "xdist"])
def test_rows_without_a_lane_are_shown_and_not_judged(foreign: Foreign, workers: tuple[str, ...]) -> None:
    foreign.write("bumpgate.toml", LANE)
    foreign.write("tests/bumps/test_rows.py", ROWS)
    ran = foreign.pytest(*workers, "tests/bumps/test_rows.py")
    assert ran.code == 0, ran.out + ran.err
    assert "1 passed, 1 skipped" in ran.out
    shown = ran.out[ran.out.index("rows, not judged: no lane; pytest -m mine judges") :]
    assert "model/a/loss: 0.25 loss\nmodel/a/breaks: 3 breaks\n" in shown
    assert not (foreign.root / "record.json").exists()
    judged = foreign.pytest("-m", "mine", "tests/bumps/test_rows.py")
    assert (judged.code, foreign.verdicts()["model/a/breaks"]) == (1, "REGRESSION"), judged.out


def test_an_unknown_lane_is_explained(foreign: Foreign) -> None:
    foreign.write("bumpgate.toml", LANE)
    ran = foreign.pytest("-m", "mien")
    assert (ran.code, "no marker 'mien'; lanes: mine; did you mean -m mine?" in ran.out) == (5, True)
    gated = foreign.pytest("-m", "mien", "--gate")
    assert (gated.code, "did you mean -m mine?" in gated.err) == (4, True)
