"""`bumpgate reproduce`: a program is inlined, reduced, and proved in two environments.

The environments are this Python with a module named torch, whose `wrong` says which side it is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bumpgate.core.rows import Record, Verdict
from bumpgate.gate.verdict import Side
from bumpgate.reproduce.fault import Shown
from bumpgate.reproduce.reducer import Journal, reduce
from bumpgate.reproduce.standalone import ProgramError, load
from tests.support.lane_files import write_lane
from tests.support.reports import BREAKS, HERE, OTHER, THERE, TIMED, bumpgate, judged, row, write_gate

HELPERS = '''
import math
from shapes import WIDTH

def unused():
    return math.pi

def compared(expected: int, found: int) -> list[str]:
    """Lines of differences."""
    if expected != found:
        return [f"output: {found}, expected {expected}"]
    return []
'''
PROGRAMS = '''
import os
import torch
import checks
from checks import compared as same

def listed() -> list[str]:
    """The sum is off by one."""
    from shapes import WIDTH
    noise = [n for n in range(WIDTH)]
    total = WIDTH
    return same(total, total + torch.wrong)

def by_module():
    return checks.compared(1, 1 + torch.wrong)

def counted():
    """Graph breaks."""
    return 3 + torch.wrong

def raised():
    if torch.wrong:
        raise RuntimeError("no kernel of this name at 0x7f00")
    return []

def right():
    return []

def broken():
    raise KeyError("both")

def fixed():
    return [] if torch.wrong else ["was wrong before"]

def unsteady():
    with open(os.environ["COUNTER"], "a") as file:
        file.write("x")
    return ["wrong"] if torch.wrong and os.path.getsize(os.environ["COUNTER"]) < 4 else []

def seconds():
    return 1.0 + torch.wrong

def close():
    return 1.0 + torch.wrong / 20

def neighbours():
    """The output is wrong."""
    lines = []
    for n in range(2):
        lines = lines + same(4, 4 + torch.wrong)
    return lines + [f"gradient 0: {n}, expected 0" for n in range(torch.wrong)]

def two_places():
    if torch.wrong:
        torch.lowered(4)
    torch.traced(4)
    return []
'''
TORCH = """
wrong = {wrong}
manual_seed = int

def lowered(x):
    raise RuntimeError(f"no kernel of this size: {{x}}")

def traced(x):
    if wrong:
        raise RuntimeError(f"no kernel of this size: {{x}}")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pyproject.toml").write_text("[tool.bumpgate]\n")
    (tmp_path / "bumpgate.toml").write_text("")
    (tmp_path / "checks.py").write_text(HELPERS)
    (tmp_path / "shapes.py").write_text("WIDTH = 64\n")
    (tmp_path / "programs.py").write_text(PROGRAMS)
    for name, wrong in (("adopted", 0), ("candidate", 1)):
        modules = tmp_path / name / "site-packages"
        (modules / "torch").mkdir(parents=True)
        (modules / "torch/__init__.py").write_text(TORCH.format(wrong=wrong))
        (modules / "torch/version.py").write_text(f"__version__ = '2.1{3 + wrong}.0'\n")
        installed = modules / f"torch-2.1{3 + wrong}.0.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch\nVersion: 2.1{3 + wrong}.0\n"
        )
        python = tmp_path / name / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={modules} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COUNTER", str(tmp_path / "counter"))
    return tmp_path


Reproduce = Callable[..., tuple[int, str]]


@pytest.fixture
def reproduce(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Reproduce:
    """The command for a program: its exit code, and what it printed."""

    def run(program: str, *more: str) -> tuple[int, str]:
        sides = (
            "--adopted",
            str(project / "adopted/python"),
            "--candidate",
            str(project / "candidate/python"),
        )
        where = ("--out", "found.py", "--times", "2", *more)
        code = bumpgate(monkeypatch, "reproduce", "--program", program, *sides, *where)
        return code, "".join(capsys.readouterr())

    return run


def ends(project: Path) -> list[int]:
    """Exit codes of the written file under both sides."""
    return [
        subprocess.run([project / side / "python", "found.py"], capture_output=True).returncode
        for side in ("adopted", "candidate")
    ]


def test_a_function_is_inlined_with_what_it_needs_of_the_project_alone(project: Path) -> None:
    program = load(project, "programs.py:listed")
    assert program.title == "The sum is off by one."
    assert "def compared(expected, found):" in program.text
    assert "WIDTH = 64" in program.text
    for left_out in ("unused", "checks", "shapes", "math", "Lines of"):
        assert left_out not in program.text
    assert "return compared(1, 1 + torch.wrong)" in load(project, "programs.py:by_module").text


@pytest.mark.parametrize(
    ("place", "words"),
    [("none.py:f", "no such file"), ("programs.py:none", "has no function none")],
)
def test_a_program_that_is_not_there_is_named(project: Path, place: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        load(project, place)


@pytest.mark.parametrize("name", ["listed", "counted", "raised", "seconds"])
def test_the_file_separates_the_two_environments(project: Path, reproduce: Reproduce, name: str) -> None:
    code, printed = reproduce(f"programs.py:{name}")
    assert (code, ends(project)) == (0, [0, 1]), printed
    assert re.search("proved: 2 of 2 runs right under .*, 2 of 2 wrong under ", printed)
    text = (project / "found.py").read_text()
    assert "noise" not in text
    assert "checks" not in text
    assert sorted(p.name for p in project.glob("found*")) == ["found.py"]


def test_a_repair_is_right_on_the_candidate(project: Path, reproduce: Reproduce) -> None:
    code, printed = reproduce("programs.py:fixed")
    assert (code, ends(project)) == (0, [1, 0]), printed


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("right", "both environments give the same result"),
        ("broken", "both environments give the same result"),
        ("close", "the numbers of both sides overlap: at most 1 under "),
    ],
)
def test_what_does_not_separate_is_said_and_not_written(
    project: Path, reproduce: Reproduce, name: str, words: str
) -> None:
    code, printed = reproduce(f"programs.py:{name}")
    assert (code, words in printed, (project / "found.py").exists()) == (1, True, False), printed


@pytest.mark.parametrize(
    ("name", "own", "neighbour"),
    [("neighbours", "compared(", "gradient"), ("two_places", "lowered(", "traced(")],
)
def test_a_reduction_keeps_its_own_fault(
    project: Path, reproduce: Reproduce, name: str, own: str, neighbour: str
) -> None:
    """The neighbour alone would separate the two sides as well."""
    code, printed = reproduce(f"programs.py:{name}")
    assert (code, ends(project)) == (0, [0, 1]), printed
    text = (project / "found.py").read_text()
    assert (own in text, neighbour in text) == (True, False), text


@pytest.mark.parametrize(
    ("line", "other", "same"),
    [
        ("output 0: 3 of 4 differ by 0.5", "output 0: 1 of 2 differ by 1e-05", True),
        ("output 0: difference 0.5 at index (0, 1)", "output 0: difference 2.0 at index (0,)", True),
        ("output 0: expected 1.0, got 2.0", "gradient 0: expected 1.0, got 2.0", False),
        ("output 0: expected 1.0, got 2.0", "output 0: expected 1.0, got nan", False),
        ("output 0: difference 1.0", "output 0: the dtypes differ", False),
    ],
)
def test_a_fault_is_recognised_by_its_value_and_kind(line: str, other: str, same: bool) -> None:
    one, two = (Shown("RETURNED", [text]) for text in (line, other))
    assert (one.signature == two.signature) is same


@pytest.fixture
def gate(project: Path) -> Path:
    """A gate that holds for three counts: one without a program, one whose program shows nothing, one that shows it."""
    programs = {BREAKS: "", OTHER: "programs.py:counted", TIMED: "programs.py:right"}
    records = [
        Record(
            provenance,
            tuple(judged(verdict, row(id, value, program=place)) for id, place in programs.items()),
        )
        for provenance, verdict, value in ((HERE, Verdict.PASS, 13), (THERE, Verdict.CHANGED, 17))
    ]
    pythons = str(project / "adopted/python"), str(project / "candidate/python")
    sides = (Side(f"torch {r.provenance['torch']}", r) for r in records)
    return write_gate(project, *sides, pythons=pythons)[0]


def test_a_gate_names_the_program_and_both_interpreters(
    project: Path, gate: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a row, the worst finding that has a program is written."""
    assert bumpgate(monkeypatch, "reproduce", str(gate), "--out", "found.py") == 0, capsys.readouterr()
    assert ends(project) == [0, 1]
    assert "Graph breaks" in (project / "found.py").read_text()
    assert bumpgate(monkeypatch, "reproduce", str(gate), BREAKS) == 4
    assert f"{BREAKS}: its test names no program" in capsys.readouterr().err


def test_a_record_needs_the_row_and_both_interpreters(
    project: Path, gate: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = str(gate.with_name("candidate.json"))
    assert bumpgate(monkeypatch, "reproduce", record) == 4
    assert "a record needs the ROW to reproduce" in capsys.readouterr().err
    assert bumpgate(monkeypatch, "reproduce", record, OTHER, "--candidate", "candidate/python") == 4
    assert "the adopted side has no interpreter: name it with --adopted PYTHON" in capsys.readouterr().err
    sides = ("--adopted", "adopted/python", "--candidate", "candidate/python")
    assert bumpgate(monkeypatch, "reproduce", record, OTHER, *sides, "--out", "found.py") == 0
    assert ends(project) == [0, 1]


@pytest.mark.parametrize("name", ["found.py", "found.md", "test_found.py"])
def test_a_file_of_the_user_is_kept(name: str, project: Path, reproduce: Reproduce) -> None:
    (project / name).write_text("mine")
    code, printed = reproduce("programs.py:counted", "--issue", "--row")
    assert (code, f"{name}: this file is no earlier output of this command" in printed) == (4, True), printed
    assert (project / name).read_text() == "mine"


CORPUS = '''
@regression("tracing", 4711, bad="2.14.1", good="2.13.0", error="no kernel of this name")
def lowering():
    """A kernel is lowered."""
'''


def test_an_issue_has_the_template_the_bisect_and_what_may_be_known(
    project: Path, reproduce: Reproduce
) -> None:
    (project / "suites/corpus").mkdir(parents=True)
    (project / "suites/corpus/cases.py").write_text(CORPUS)
    bisected = {"suspects": ["2.14.0"], "package": "torch", "first": "2.14.0", "last": "2.13.0"}
    (project / "bisect.json").write_text(
        json.dumps(bisected | {"compare": ["https://github.com/a/b/compare/c"]})
    )
    (project / "changed.md").write_text("-old kernel\n+new kernel\n")
    more = ("--issue", "--bisect", "bisect.json", "--changed", "changed.md")
    code, printed = reproduce("programs.py:raised", *more)
    text = (project / "found.md").read_text()
    assert code == 0, printed
    assert "may be known: https://github.com/pytorch/pytorch/issues/4711 (its error is" in printed
    assert (
        "an issue for https://github.com/pytorch/pytorch/issues: [2.14.0 regression] raised; it is not"
        in printed
    )
    assert text.startswith("# [2.14.0 regression] raised\n")
    headings = re.findall("^### .*", text, re.MULTILINE)
    assert headings == ["### 🐛 Describe the bug", "### Changed code", "### Error logs", "### Versions"]
    for part in (
        "First bad version: torch 2.14.0, after 2.13.0.",
        "Commits between them: https://github.com/a/b/compare/c",
        (project / "found.py").read_text().strip(),
        "+new kernel",
        "RuntimeError: no kernel of this name",
    ):
        assert part in text
    code, printed = reproduce("programs.py:counted", "--issue")
    assert "no known issue has its signature" in printed
    code, printed = reproduce("programs.py:counted", "--issue", "--bisect", "programs.py")
    assert (code, "no bisect.json; name the file that `bumpgate bisect` writes" in printed) == (4, True), (
        printed
    )


@pytest.mark.parametrize("name", ["listed", "counted", "raised"])
def test_a_defect_row_is_red_on_one_side_and_green_on_the_other(
    project: Path, reproduce: Reproduce, name: str
) -> None:
    write_lane(project, "cpu")
    code, printed = reproduce(f"programs.py:{name}", "--row")
    assert code == 0, printed
    assert "red under torch 2.14.0, green under torch 2.13.0, each without its range" in printed
    text = (project / "test_found.py").read_text()
    assert f"def test_{name}(row):" in text
    assert "known_in='torch==2.14.0'" in text


def test_a_result_that_does_not_repeat_is_not_proved(project: Path, reproduce: Reproduce) -> None:
    code, printed = reproduce("programs.py:unsteady", "--minutes", "0")
    assert code == 1, printed
    assert "ended with 0, expected 1" in printed
    assert not (project / "found.py").exists()
    assert (project / "found.best.py").exists(), "the best so far is kept"


def test_any_other_exception_of_the_file_is_no_verdict(project: Path, reproduce: Reproduce) -> None:
    reproduce("programs.py:raised")
    text = (project / "found.py").read_text()
    (project / "found.py").write_text(text.replace("no kernel of this name at 0x7f00", "another fault"))
    assert ends(project) == [0, 125]


def test_a_script_has_its_own_exit_codes(project: Path, reproduce: Reproduce) -> None:
    (project / "mine.py").write_text(
        "import sys, torch\nx = 1\nprint('seen', torch.wrong)\nsys.exit(torch.wrong)\n"
    )
    code, printed = reproduce("mine.py")
    assert (code, ends(project)) == (0, [0, 1]), printed
    assert "x = 1" not in (project / "found.py").read_text()


def test_an_environment_that_is_gone_is_named(project: Path, reproduce: Reproduce) -> None:
    (project / "candidate/python").unlink()
    code, printed = reproduce("programs.py:listed")
    assert code == 4
    assert (
        "the candidate environment is gone; build it again, or name an interpreter with --candidate"
        in printed
    )


def test_the_reducer_keeps_what_the_predicate_needs(tmp_path: Path) -> None:
    text = "import os\ndef f(x):\n    y = 4\n    if x:\n        for n in x:\n            print(n)\n    return y\nf(1)\n"
    found = reduce(
        text, lambda t: "print" in t and "f(1)" in t, Journal(tmp_path / "j"), time.monotonic() + 60
    )
    assert found == "def f(x):\n    for n in x:\n        print(n)\nf(1)"


SETTINGS = """
class Dense: pass
class Routed: pass
BLOCKS = {"dense": Dense, "routed": Routed}

def built(kinds=("dense", "routed"), width=64):
    return [BLOCKS[kind](width) for kind in kinds]
"""


def test_settings_shrink_first_and_take_their_blocks_along(tmp_path: Path) -> None:
    asked: list[str] = []

    def predicate(text: str) -> bool:
        asked.append(text)
        kept = "kinds=('dense', 'routed')" in text or "kinds=('routed',)" in text
        return kept and "Routed}" in text and "width=" in text

    found = reduce(SETTINGS, predicate, Journal(tmp_path / "j"), time.monotonic() + 60, frozenset({"built"}))
    assert "kinds=('routed',), width=1" in found
    assert "Dense" not in found
    assert "kinds=('dense',), width=64" in asked[0]


def test_what_registers_on_an_op_comes_with_it(project: Path) -> None:
    (project / "ops.py").write_text(
        "def op(x):\n    return x\nop.register = print\nop.register(1)\n@op.fake\ndef _(x):\n    return x\n"
        "def other():\n    pass\nother.register(2)\n"
    )
    (project / "uses.py").write_text("from ops import op\ndef used():\n    return op(1)\n")
    text = load(project, "uses.py:used").text
    assert "op.register(1)" in text
    assert "@op.fake" in text
    assert "other" not in text


def test_a_continued_reduction_asks_nothing_twice(tmp_path: Path) -> None:
    asked: list[str] = []

    def predicate(text: str) -> bool:
        asked.append(text)
        return "a = 1" in text

    text = "a = 1\nb = 2\nc = 3\n"
    first = reduce(text, predicate, Journal(tmp_path / "j"), time.monotonic() + 60)
    count = len(asked)
    assert reduce(text, predicate, Journal(tmp_path / "j"), time.monotonic() + 60) == first == "a = 1"
    assert len(asked) == count > 0


def test_no_try_begins_after_the_time_limit(tmp_path: Path) -> None:
    text = "a = 1\nb = 2\n"
    assert reduce(text, lambda _: True, Journal(tmp_path / "j"), time.monotonic()) == text
