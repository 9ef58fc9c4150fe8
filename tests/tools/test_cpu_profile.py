"""The CPU profile of a lane: phases and places of the folded stacks of py-spy."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tools.cpu_profile import RATE, REST, main, program, read, tables

LANE = 'process 10:"/env/bin/python -m pytest -m cpu";main (_pytest/main.py:1)'
TEST = f"{LANE};test_counts (suites/compile/test_policies.py:9)"
COMPILE = "_compile (torch/_dynamo/convert_frame.py:2)"
AOT = "aot_stage2_compile (torch/_functorch/_aot_autograd/graph_compile.py:3)"


@pytest.mark.parametrize(
    ("stack", "phase", "place"),
    [
        (f"{TEST};step (launch/step.py:1)", REST, "suites/compile/test_policies.py::test_counts"),
        (f"{TEST};{COMPILE}", "Dynamo", "suites/compile/test_policies.py::test_counts"),
        (f"{TEST};{COMPILE};{AOT}", "AOTAutograd", "suites/compile/test_policies.py::test_counts"),
        (
            f"{TEST};{COMPILE};{AOT};codegen (torch/_inductor/scheduler.py:4)",
            "Inductor",
            "suites/compile/test_policies.py::test_counts",
        ),
        (
            f"{TEST};__call__ (torch/_inductor/output_code.py:5);call (/tmp/c.py:6)",
            REST,
            "suites/compile/test_policies.py::test_counts",
        ),
        (f"{LANE};pytest_collection (_pytest/main.py:7)", "collection", "process -m pytest"),
        (
            f'{LANE};process 11:"/env/bin/python -m suites.cache.programs cpu same";<module> (x.py:1);'
            "_load_unlocked (<frozen importlib._bootstrap>:690)",
            "import",
            "process -m suites.cache.programs",
        ),
    ],
)
def test_stack_has_phase_and_place(stack: str, phase: str, place: str) -> None:
    profile = read([f"{stack} {RATE}\n", "a cut line"])
    assert profile.phases == {phase: 1.0}
    assert profile.places == {place: {phase: 1.0}}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/env/bin/python -X faulthandler -m pytest -m cpu", "process -m pytest"),
        ("/env/bin/python /env/bin/pytest -m cpu -n 2", "process pytest"),
        ("/env/bin/python -u -c import sys;exec(1)", "process -c import sys;exec(1)"),
        ("/env/bin/python", "process"),
    ],
)
def test_program_of_a_command_line(command: str, name: str) -> None:
    assert program(command) == name


def test_command_lines_of_several_lines_are_one_record() -> None:
    script = 'process 7:"/env/bin/python -c import a\ncode = 8\n";f (a.py:1) 5\n'
    profile = read([*script.splitlines(keepends=True), f'process 7:"/env/bin/python -c b" {RATE}\n'])
    assert profile.places == {
        "process -c import a code = 8": {REST: 0.5},
        "process -c b": {"start and end of Python": 1.0},
    }


def test_tables_add_up_to_the_total() -> None:
    profile = read([f"{TEST};{COMPILE} {3 * RATE}", f"{TEST} {RATE}"])
    profile.total, profile.wall = 5.0, 2.5
    text = tables(profile)
    assert "| Dynamo | 3 | 60% |" in text
    assert "| not sampled | 1 | 20% |" in text
    assert "| total | 5 | in 2 s of wall time |" in text


def test_command_runs_under_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A py-spy that records one stack, then runs the command, whose exit status is the result."""
    spy, out = tmp_path / "py-spy", tmp_path / "build/profile.md"
    spy.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\nout = sys.argv[sys.argv.index('-o') + 1]\n"
        f"open(out, 'w').write({TEST + f';{COMPILE} {RATE}'!r})\n"
        "sys.exit(subprocess.run(sys.argv[sys.argv.index('--') + 1 :]).returncode)\n"
    )
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert main(["--out", str(out), "--", sys.executable, "-c", "raise SystemExit(3)"]) == 3
    assert "| Dynamo | 1 |" in out.read_text()


def test_missing_py_spy_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--out", str(tmp_path / "p.md"), "--", "true"]) == 4
    assert capsys.readouterr().err == "py-spy is not installed: pip install 'bumpgate[profile]'\n"


def test_folded_file_becomes_tables(tmp_path) -> None:
    folded, out = tmp_path / "stacks", tmp_path / "profile.md"
    folded.write_text(f"{TEST};{COMPILE} {RATE}\n")
    assert main(["--folded", str(folded), "--out", str(out)]) == 0
    assert "| `suites/compile/test_policies.py::test_counts` | 1 | 1 |" in out.read_text()
