"""Children of a launcher: output is kept, failures are reported in seconds, paths are compared resolved. Rule C38."""

from __future__ import annotations

import os
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from launch import children
from launch.children import KEPT, LINE, Child, ChildError, moved, places, run, same_place
from suites.support.lanes import lanes
from suites.support.planted import planted
from suites.support.processes import eventually, gone

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane")]

SOON = 10.0  # seconds: the rule's bound for an import that fails
# Python 3.12 and later add a suggestion.
MISSING_IMPORT = "rank0: exit 1: NameError: name 'os' is not defined"
HANGS = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"


def python(name: str, program: str, **variables: str) -> Child:
    return Child(name, [sys.executable, "-S", "-c", program], {**os.environ, **variables})


def module(directory: Path, text: str) -> Child:
    """Return a program whose import of `model_code` runs `text`."""
    (directory / "model_code.py").write_text(text)
    return python("rank0", f"import sys; sys.path.insert(0, {str(directory)!r}); import model_code")


@planted("C38", "os is used and not imported, in a rank that others wait for")
def test_import_failure_is_reported_in_seconds(tmp_path: Path, row) -> None:
    broken = module(tmp_path, 'DEVICE = os.environ.get("PJRT_DEVICE")\n')
    began = time.monotonic()
    with pytest.raises(ChildError) as caught:
        run([python("rank1", HANGS), broken, python("rank2", HANGS)], seconds=120, log=tmp_path / "log")
    seconds = time.monotonic() - began
    message = str(caught.value)
    told = message.startswith(MISSING_IMPORT) and seconds < SOON
    about = {"seen": caught.value.tail, "rule": "C38", "evidence": [f"{message!r}, bound {SOON:.0f} s"]}
    row.bound("launch/children/import_failure_told", told, "bool", expected=True, **about)
    assert any("model_code.py" in line for line in caught.value.tail), "the traceback names the file"


@planted(
    "C38", "a warning of torch's C++ follows the line with the reason; torch's own tag before a rank's lines"
)
def test_reason_is_the_last_line_without_warnings_and_tags(tmp_path: Path) -> None:
    """With a process group, torch begins each line of a rank's traceback and log with the rank."""
    warning = (
        "[rank0]:[W1124 17:09:27.2 ProcessGroupNCCL.cpp:1575] Warning: destroy_process_group() was not called"
    )
    assert children.last_line(["disk full: state.pt", warning, ""]) == "disk full: state.pt"
    leaks = ["nanobind: leaked 3 functions!", ' - leaked function "f"', "See https://nanobind.readthedocs.io"]
    assert children.last_line(["disk full: state.pt", *leaks]) == "disk full: state.pt"
    assert children.last_line([warning.removeprefix("[rank0]:")]) == warning.removeprefix("[rank0]:")
    lines = ["[rank0]: Traceback (most recent call last):", "[rank0]:   File 'a'", "[rank0]: ValueError: b"]
    program = f"for line in {lines}: print(line)\nprint('[rank0]:[W1124 17:09:27.2 x.cpp:1] c'); raise SystemExit(1)"
    with pytest.raises(ChildError, match=r"^rank0: exit 1: ValueError: b$") as caught:
        run([python("rank0", program)], seconds=60, log=tmp_path / "log")
    assert caught.value.tail[0] == "Traceback (most recent call last):"
    assert (tmp_path / "log").read_text().splitlines()[:3] == lines


def test_lines_of_several_children_are_complete_and_tagged(tmp_path: Path) -> None:
    """Standard output and error of four children at once: 2000 lines, each with its own tag, none torn or lost."""
    program = "import sys\nfor i in range(250): print('out', i); print('err', i, file=sys.stderr)"
    names = [f"rank{n}" for n in range(4)]
    log = tmp_path / "log"
    tails = run([python(name, program) for name in names], seconds=60, log=log)
    lines = log.read_text().splitlines()
    for name in names:
        mine = [line for line in lines if line.startswith(f"[{name}]: ")]
        assert mine == [f"[{name}]: {kind} {i}" for i in range(250) for kind in ("out", "err")]
        assert list(tails[name]) == [line.removeprefix(f"[{name}]: ") for line in mine[-KEPT:]]
    assert len(lines) == 2000


def test_child_output_uses_bounded_memory(tmp_path: Path) -> None:
    """64 MiB, half of it one line without an end, pass through in less than 4 MiB of memory.

    The last line, which may be a run's summary in JSON, is not split.
    """
    program = (
        "import sys; w = sys.stdout.write\n"
        "for _ in range(1 << 15): w('x' * 1023 + '\\n')\n"
        "for _ in range(1 << 15): w('y' * 1024)\n"
        "w('\\nlast\\n')"
    )
    tracemalloc.start()
    try:
        tail = run([python("a", program)], seconds=120, log=tmp_path / "log")["a"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tail[-1], len(tail), max(map(len, tail))) == ("last", KEPT, LINE)
    assert peak < 4 << 20, peak
    assert (tmp_path / "log").stat().st_size > 64 << 20
    program = f"print('a'); print('b' * {3 * LINE + 5})"
    assert run([python("rank0", program)], seconds=60)["rank0"] == ("a", "b" * (3 * LINE + 5))


def test_no_process_outlives_the_call(monkeypatch) -> None:
    """Children that ignore SIGTERM, and one that has ended but left a process holding its pipe."""
    monkeypatch.setattr(children, "GRACE", 2.0)
    leaves = (
        "import subprocess, sys\n"
        "left = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "print(left.pid)"
    )
    (pid,) = run([python("leaves", leaves)], seconds=60)["leaves"]
    assert eventually(lambda: gone(int(pid)))
    started = time.monotonic()
    with pytest.raises(ChildError, match=r"^deaf0: not ended in 1 s: \d+$") as caught:
        run([python(f"deaf{i}", DEAF) for i in range(6)], seconds=1)
    assert gone(int(caught.value.tail[0]))
    assert time.monotonic() - started < 9, "killed one after the other, not two seconds after the request"


def test_child_failure_is_reported_in_one_line() -> None:
    dies = "import os, signal; print('step 3', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    chained = "try: 1 / 0\nexcept Exception as e: raise RuntimeError('no\\nsecond line') from e"
    for program, line in (
        (dies, "a: killed by SIGKILL: step 3"),
        ("raise SystemExit(7)", "a: exit 7: no output"),
        (chained, "a: exit 1: RuntimeError: no"),
        ("print('refused: x'); raise SystemExit(3)", "a: exit 3: refused: x"),
    ):
        with pytest.raises(ChildError) as caught:
            run([python("a", program)], seconds=60)
        assert str(caught.value) == line
    with pytest.raises(ChildError, match=r"^b: not started: .*No such file"):
        run([python("a", HANGS), Child("b", ["/no/such/program"])], seconds=60)


def test_cause_among_failed_ranks_is_reported() -> None:
    """A rank that loses another one ends with 1 or is aborted as well, before it or after it."""
    lost, aborted, cause = "raise SystemExit(1)", "import os; os.abort()", "raise SystemExit(5)"
    for first, second, line in (
        (lost, cause, "b: exit 5"),
        (cause, lost, "a: exit 5"),
        (aborted, cause, "b: exit 5"),
        (lost, aborted, "b: killed by SIGABRT"),
        (aborted, "import time; time.sleep(1); raise SystemExit(5)", "b: exit 5"),
    ):
        together = "import time; time.sleep(max(0, float({!r}) - time.time())); "
        start = together.format(str(time.time() + 0.3))
        with pytest.raises(ChildError) as caught:
            run([python("a", start + first), python("b", start + second)], seconds=60)
        assert str(caught.value).startswith(line), (first, second)


@pytest.fixture
def linked(tmp_path: Path) -> tuple[Path, Path]:
    """A checkout and a venv reached through links, next to the real ones."""
    for name in ("checkout", "venv/bin"):
        (tmp_path / "real" / name).mkdir(parents=True)
    (tmp_path / "real/venv/bin/python").symlink_to(sys.executable)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    return tmp_path / "real", tmp_path / "link"


@planted("C38", "only one side of a comparison is resolved")
def test_paths_are_resolved_on_both_sides(linked: tuple[Path, Path], row) -> None:
    real, link = linked
    pairs = [(real / name, link / name) for name in ("checkout", "venv", "venv/bin/python")]
    sides = [(a, b) for pair in pairs for a, b in (pair, pair[::-1])]
    agree = sum(same_place(a, b) for a, b in sides)
    row.count("launch/children/linked_paths_that_agree", agree, expected=len(sides), seen=sides, rule="C38")
    one_sided = [a.resolve() == b for a, b in sides]
    assert one_sided.count(False) >= 3, "resolving one side fails on these paths, so the row can"
    assert not same_place(real / "checkout", real / "venv")


def test_child_of_another_installation_is_reported(linked: tuple[Path, Path], monkeypatch) -> None:
    """Two venvs link one interpreter: compared by its resolved path they would be the same."""
    real, link = linked
    assert same_place(real / "venv/bin/python", sys.executable)
    assert list(moved(places())) == []
    monkeypatch.setattr(sys, "prefix", str(link / "venv"))
    assert list(moved({**places(), "environment": str(real / "venv")})) == []
    (line,) = moved({**places(), "environment": str(real / "checkout")})
    assert line.startswith("the child's environment is ")


@planted("C38", "a log on a full disk")
def test_child_outlives_a_log_on_a_full_disk(capsys) -> None:
    """The output is read on: else the pipe closes, and the child fails at its next line."""
    program = "import time\nfor i in range(5): print(i); time.sleep(0.05)"
    tails = run([python("rank0", program)], seconds=60, log=Path("/dev/full"))
    assert tails["rank0"] == ("0", "1", "2", "3", "4")
    assert capsys.readouterr().err == "rank0: lines are lost: /dev/full: No space left on device\n"
