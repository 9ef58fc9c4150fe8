"""The result of a measuring process is its last line; a crashed process has no result."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from suites.support.child import ENDING, ChildError, run_json

# What a failed program prints with triton 3.9: nanobind's report comes after the exception.
LEAKS = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
ValueError: P is 9
nanobind: leaked 326 functions!
 - leaked function "create_for_op"
 - ... skipped remainder
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html"""
RESULT = "print('a line before it')\nprint('{\"seconds\": 1.5}')\n"


def run(tmp_path: Path, program: str) -> dict[str, float]:
    (tmp_path / "a_child.py").write_text(f"import os, sys, time\n{program}")
    return run_json("a_child", environment={"PYTHONPATH": str(tmp_path)}, timeout=20)


def crashing(last: str, end: str = "os.abort()") -> str:
    return f"print({last!r}, file=sys.stderr, flush=True)\n{end}\n"


@pytest.mark.parametrize("end", ["", crashing(ENDING)], ids=["exit 0", "an abort while the interpreter ends"])
def test_last_line_of_child_is_the_result(tmp_path: Path, end: str) -> None:
    assert run(tmp_path, RESULT + end) == {"seconds": 1.5}


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (crashing(ENDING), f"a_child: exit -6: {ENDING}"),
        (crashing(ENDING) + RESULT, f"a_child: exit -6: {ENDING}"),
        (RESULT + crashing("free(): invalid pointer"), "a_child: exit -6: free"),
        (RESULT + crashing(ENDING, "os.kill(os.getpid(), 11)"), "a_child: exit -11"),
        (RESULT + crashing(ENDING, "os._exit(1)"), "a_child: exit 1"),
        (RESULT + "raise SystemExit('a reason')", "a_child: exit 1: a reason"),
        ("print('nothing')", "a_child: printed no JSON result"),
        (f"print({LEAKS!r}, file=sys.stderr)\nsys.exit(3)", "a_child: exit 3: ValueError: P is 9"),
    ],
)
def test_crashed_child_is_one_line_without_result(tmp_path: Path, program: str, words: str) -> None:
    with pytest.raises(ChildError) as caught:
        run(tmp_path, program)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_child_environment_excludes_later_exports(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/left/by/a/test")
    program = "import json\nprint(json.dumps({name: os.environ.get(name) for name in sys.argv[1:]}))"
    (tmp_path / "a_child.py").write_text(f"import os, sys\n{program}")
    names = "TRITON_PTXAS_PATH", "TORCHINDUCTOR_CACHE_DIR", "GIVEN"
    reply = run_json("a_child", *names, environment={"PYTHONPATH": str(tmp_path), "GIVEN": "1"}, timeout=20)
    assert reply == {"TRITON_PTXAS_PATH": None, "TORCHINDUCTOR_CACHE_DIR": os.environ[names[1]], "GIVEN": "1"}


def test_hanging_child_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a_child.py").write_text("import time\ntime.sleep(60)")
    with pytest.raises(ChildError, match=r"^a_child: no result within 0 s$"):
        run_json("a_child", environment={"PYTHONPATH": str(tmp_path)}, timeout=0.3)
