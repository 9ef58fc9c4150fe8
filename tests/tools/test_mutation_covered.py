"""Which tests execute a mutated line, and that these judge it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bumpgate.affected import graph_of
from tests.support.tree import ROOT
from tools.mutation import covered as covered_file
from tools.mutation import sample
from tools.mutation.__main__ import work_of
from tools.mutation.covered import MOST_SECONDS, Covered, lines_of, uses_of
from tools.mutation.trial import SUITES

COMPOUND = """import os

LIMIT = max(
    1, 2)

@cache
def total(prices, tax=3):
    if (prices and
            tax):
        return 0
    return sum(
        prices)
"""


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        (1, [1]),
        (4, [3, 4]),
        (6, range(8, 13)),
        (7, range(8, 13)),
        (9, [8, 9]),
        (10, [10]),
        (12, [11, 12]),
        (5, [5]),
    ],
)
def test_lines_that_show_that_a_place_is_executed(line: int, lines: list[int]) -> None:
    assert list(lines_of(COMPOUND, line)) == list(lines)


CONSTANTS = """LIMIT = 3

class Options:
    size: int = 1

    def check(self):
        if self.size > LIMIT:
            raise ValueError

def double(options):
    size = 2
    return options.size * size
"""


@pytest.mark.parametrize(("line", "lines"), [(1, [7]), (4, [7, 12]), (7, []), (11, [])])
def test_uses_of_a_constant_or_field(line: int, lines: list[int]) -> None:
    assert uses_of(CONSTANTS, line) == lines


def test_fastest_tests_of_a_line_fit_into_the_time() -> None:
    seconds = {
        "tests/a.py::x": MOST_SECONDS,
        "tests/a.py::y": 1.0,
        "tests/b.py::z": 2.0,
        "suites/c.py::w": 0.1,
    }
    covered = Covered(
        seconds, {"p.py": {"4": [*seconds], "5": ["tests/a.py::x"]}}, {"p.py": {"4": ["tests/a.py"]}}
    )
    own = SUITES["self"]
    assert covered.fastest("p.py", [3, 4], own) == ["tests/a.py::y", "tests/b.py::z"]
    assert covered.fastest("p.py", [5], own) == ["tests/a.py::x"]
    assert covered.fastest("p.py", [6], own) == covered.fastest("q.py", [4], own) == []
    assert covered.fastest("p.py", [4], SUITES["lane"]) == ["suites/c.py::w"]
    assert covered.test_files("p.py", [4], own) == {"tests/a.py"}


def test_only_files_whose_tests_execute_the_line_judge_a_mutant() -> None:
    source = (ROOT / "bumpgate/core/code.py").read_text(encoding="utf-8")
    made = next(m for m in sample.mutations("bumpgate/core/code.py", source) if m.definition)
    line = str(lines_of(source, made.line)[0])
    test = "tests/core/test_code.py::test_x"
    covered = Covered(
        {test: 2.0}, {made.path: {line: [test]}}, {made.path: {line: ["tests/core/test_code.py"]}}
    )
    graph = graph_of(ROOT)
    work = work_of(ROOT, "bumpgate", made, graph, covered)
    assert (work.files, work.nearest, work.seconds) == (["tests/core/test_code.py"], [test], 2.0)
    everything = work_of(ROOT, "bumpgate", made, graph)
    assert len(everything.files) > 5
    assert work_of(ROOT, "bumpgate", made, graph, Covered()).files == everything.files, "no test executes it"


def test_covered_names_the_tests_of_each_line(tmp_path: Path) -> None:
    out = tmp_path / "covered.json"
    tests = ["tests/core/test_code.py", "tests/core/test_comparable.py"]
    command = [sys.executable, "-m", "tools.mutation.covered", "--suite", "self", "--out", str(out), *tests]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = covered_file.load([out])
    assert found
    files = {file for known in found.files["bumpgate/core/code.py"].values() for file in known}
    assert "tests/core/test_code.py" in files
    assert {test.split("::")[0] for test in found.seconds} == set(tests)
