"""Child processes end with their group and their limit, and their end is one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from bumpgate.process.child import (
    TOKEN,
    ChildFault,
    Interpreter,
    LoggedChild,
    describe_end,
    end_group,
    ending,
    last_line,
    run_children,
    start,
)

# Starts a process that outlives it, and prints that process's id.
LEAVES_ONE = (
    "import subprocess, sys; "
    "print(subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)']).pid, flush=True)"
)


def gone(pid: int) -> bool:
    """Wait until a process has ended: a killed one that nobody waits for is a zombie."""
    status = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def python(tmp_path: Path) -> Interpreter:
    return Interpreter(Path(sys.executable), tmp_path)


def test_what_a_child_has_started_is_killed(python: Interpreter, tmp_path: Path) -> None:
    assert gone(int(python.run("-S", "-c", LEAVES_ONE, timeout=60)))
    logs = [tmp_path / name for name in "ab"]
    command = [sys.executable, "-S", "-c", LEAVES_ONE]
    ended = run_children([LoggedChild(command, tmp_path, os.environ, log) for log in logs], 60)
    assert [code for code, _ in ended] == [0, 0]
    assert all(gone(int(log.read_text())) for log in logs)


def test_supervised_child_ends_with_its_starter() -> None:
    program = f"{LEAVES_ONE}; import time; time.sleep(60)"
    child = start([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE, supervised=True)
    assert child.stdin
    assert child.stdout
    left = int(child.stdout.readline())
    child.stdin.close()  # as the kernel does when this process dies
    assert gone(left)
    end_group(child)
    child.stdout.close()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise SystemExit('no such lane')", "exit 1: no such lane"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import time; time.sleep(60)", "no answer in 2 s"),
        ("print('a line')", "printed no result: a line"),
        ("pass", "printed no result"),
    ],
)
def test_fault_of_a_child_is_one_line(python: Interpreter, program: str, words: str) -> None:
    with pytest.raises(ChildFault) as fault:
        python.json("-S", "-c", program, timeout=2 if "sleep" in program else 60)
    assert str(fault.value) == words


@pytest.mark.parametrize(
    ("end", "fault"),
    [
        ("print(token('a', 'b')); print('more')", ""),
        ("print(token('a')); print(token('b'))", "before it had done"),
        ("os._exit(0)", "before it had done"),
        ("raise SystemExit(0)", "before it had done"),
        ("print(token('a', 'b')); raise SystemExit('wrong')", "exit 1: wrong"),
    ],
)
def test_exit_code_alone_proves_nothing(python: Interpreter, end: str, fault: str) -> None:
    program = f"import os\n{TOKEN}\n{end}"
    with pytest.raises(ChildFault, match=fault) if fault else nullcontext():
        python.prove("-S", "-c", program, did=("a", "b"), timeout=60)


def test_missing_program_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ChildFault, match="nothing: No such file or directory"):
        Interpreter(tmp_path / "nothing", tmp_path).run(timeout=5)


@pytest.mark.parametrize(
    ("code", "seconds", "timeout", "words", "crash"),
    [
        (0, 1.0, None, "", False),
        (None, 0.0, None, "", False),
        (1, 1.0, 60.0, "", False),
        (-signal.SIGSEGV, 1.0, 60.0, "died of SIGSEGV", True),
        (-signal.SIGKILL, 1.0, 60.0, "died of SIGKILL", False),
        (-99, 1.0, 60.0, "died of signal 99", False),
        (-signal.SIGINT, 60.0, 60.0, "no end within 60 s", False),
    ],
)
def test_ending(code: int | None, seconds: float, timeout: float | None, words: str, crash: bool) -> None:
    found = ending(code, seconds, timeout)
    assert (str(found), found.crash) == (words, crash)


def test_error_is_the_fatal_line_and_not_the_list_after_it(tmp_path: Path) -> None:
    text = "Fatal Python error: Segmentation fault\n\nExtension modules: torch._C (total: 1)\n"
    assert describe_end(-11, text) == "killed by SIGSEGV: Fatal Python error: Segmentation fault"
    assert describe_end(3, "") == "exit 3"
    assert last_line(tmp_path / "absent") == "it printed nothing"
    (tmp_path / "log").write_text("the error\n\nnanobind: leaked 3 types!\n - leaked type x\n")
    assert last_line(tmp_path / "log") == "the error"
