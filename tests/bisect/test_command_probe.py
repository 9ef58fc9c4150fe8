"""A user's command as the test of a bisect: what each end of it means."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bumpgate.bisect import probe
from bumpgate.bisect.probe import Cause, CommandTest, ProbeError, Reading
from bumpgate.bisect.search import ProbeOutcome
from bumpgate.env.build import Environment

ENVIRONMENT: Any = SimpleNamespace(python=Path(sys.executable), packages={"torch": "2.13.0", "numpy": "2.0"})
MISSING = "{python} -c 'import no_such_module'"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a command in an environment whose packages import."""
    monkeypatch.setattr(probe, "import_fault", lambda environment, *packages: "")

    def run(command: str, **options: Any) -> tuple[CommandTest, Reading]:
        test = CommandTest(command, "torch", tmp_path, **options)
        return test, test.run(ENVIRONMENT, tmp_path)

    return run


@pytest.mark.parametrize(
    ("command", "cause", "outcome"),
    [
        ("true", Cause.RAN, ProbeOutcome.GOOD),
        ("exit 1", Cause.RAN, ProbeOutcome.BAD),
        ("exit 124", Cause.RAN, ProbeOutcome.BAD),
        ("exit 125", Cause.RAN, ProbeOutcome.SKIP),
        ("kill -SEGV $$", Cause.RAN, ProbeOutcome.BAD),
        ("kill -ABRT $$", Cause.RAN, ProbeOutcome.BAD),
        ("kill -KILL $$", Cause.MACHINE, None),
        ("kill -TERM $$", Cause.MACHINE, None),
        (MISSING, Cause.BROKEN, ProbeOutcome.SKIP),
        ("test {version} = 2.13.0", Cause.RAN, ProbeOutcome.GOOD),
    ],
)
def test_end_of_a_command_is_its_verdict(
    run: Any, command: str, cause: Cause, outcome: ProbeOutcome | None
) -> None:
    test, reading = run(command)
    assert reading.cause is cause
    if outcome:
        assert test.judge(reading).outcome is outcome
        assert bool(test.unusable(reading)) == (outcome is ProbeOutcome.SKIP)


def test_crash_of_a_build_that_does_not_import_is_no_verdict(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "import_fault", lambda environment, *packages: f"{packages}: gone")
    _, reading = run("kill -SEGV $$")
    assert (reading.cause, reading.failure) == (Cause.BROKEN, "('torch', 'torch'): gone")


def test_package_that_ends_the_process_does_not_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(0)\n")
    monkeypatch.setattr(probe, "IMPORT", f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{probe.IMPORT}")
    environment = Environment("", Path(sys.executable), "", dict.fromkeys(("json", "ends", "missing"), "1"))
    assert probe.import_fault(environment, "json", "missing") == ""
    fault = probe.import_fault(environment, "json", "ends")
    assert fault == "import json, ends: ended with exit code 0 before it had done its work"


def test_slow_command_has_no_verdict(run: Any) -> None:
    assert run("sleep 60", timeout=0.5)[1].cause is Cause.MACHINE


@pytest.mark.parametrize("code", [126, 127, 255])
def test_code_of_the_shell_itself_is_refused(run: Any, code: int) -> None:
    with pytest.raises(ProbeError, match=f"--command ended with {code} .*: 0 is good, 1-124 bad, 125 skip"):
        run(f"exit {code}")


def test_interrupted_command_interrupts_the_bisect(run: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        run("kill -INT $$")


@pytest.mark.parametrize(
    "end",
    [
        "raise AssertionError('nan')",
        "raise type('Unsupported', (Exception,), {})('nan')",
        "print('LossError: nan'); sys.exit(1)",
    ],
)
def test_logged_import_of_an_optional_module_is_no_end(run: Any, tmp_path: Path, end: str) -> None:
    """Many programs log the traceback of an optional import and go on: BAD candidates must stay BAD."""
    program = "import sys, traceback\ntry: import no_such_module\nexcept ImportError: traceback.print_exc()\n"
    (tmp_path / "program.py").write_text(program + end)
    test, reading = run("{python} program.py")
    assert (reading.cause, test.judge(reading).outcome) == (Cause.RAN, ProbeOutcome.BAD)


def test_last_missing_module_is_named(run: Any) -> None:
    _, reading = run(f"{{python}} -c 'import no_other_module'; {MISSING}")
    assert reading.failure == "no module no_such_module in this environment; add --with no_such_module"
    _, reading = run("echo \"ModuleNotFoundError: No module named 'numpy'\" >&2; exit 1")
    assert reading.cause is Cause.RAN, "a module of an installed package is missing for another reason"
