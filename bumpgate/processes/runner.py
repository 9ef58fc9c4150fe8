"""Runs pytest of one lane in another interpreter, and says in one line why there is nothing to read from it.

The source tree is on PYTHONPATH and bumpgate itself is not needed there: what comes back is record.json and a log.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bumpgate.environments.interpreter import ChildFault, Interpreter
from bumpgate.processes import supervise
from bumpgate.rows import BumpgateError, Record, one_line, read_record

USAGE, NOTHING_SELECTED = 4, 5  # exit codes of pytest
IMPORT_SECONDS = 300
# How long pytest may take to write its record after ctrl-C or a timeout, before it is killed.
GRACE_SECONDS = 20
MODULES = {"cpu": "torch", "h200": "torch", "v6e": "torch, torch_xla"}
DESCRIBE = """
import importlib.metadata, json
import {modules}
found = {{d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}}
version = getattr(torch, "version", None)
git = {{"torch": version.git_version}} if getattr(version, "git_version", None) else {{}}
print(json.dumps([dict(sorted(found.items())), git]))
"""


@dataclass(frozen=True)
class Installed:
    """packages: installed distributions by name. git_version: of torch, where it tells. failure: why not usable."""

    packages: Mapping[str, str] = field(default_factory=dict)
    git_version: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class LaneRun:
    """code: pytest's exit code, or minus the signal that ended it. record: None where none can be read.

    failure: in one line, why the run is no whole one (it died, it was refused, torch does not import); "" otherwise.
    seconds: wall time. log: what the run printed.
    """

    code: int
    record: Record | None
    failure: str
    seconds: float
    log: Path


def installed(python: Path, root: Path, lane: str, environment: Mapping[str, str] = {}) -> Installed:
    """Imports torch there. One that does not import, crashes or hangs in it comes back with a `failure`."""
    modules = MODULES[lane]
    child = Interpreter(python, root, child_environment(python, root, environment))
    program = ("-X", "faulthandler", "-c", DESCRIBE.format(modules=modules))
    try:
        packages, git_version = child.json(*program, timeout=IMPORT_SECONDS)
    except ChildFault as fault:
        return Installed(failure=f"import {modules}: {fault}")
    return Installed(packages, git_version)


def run_lane(
    python: Path,
    root: Path,
    lane: str,
    selection: Sequence[str],
    record: Path,
    *,
    gate: bool = True,
    environment: Mapping[str, str] = {},
    timeout: float | None = None,
    log: Path | None = None,
    check_import: bool = True,
) -> LaneRun:
    """`pytest -m LANE SELECTION` under `python`, in a process group that ends with this call, whatever ends it.

    selection: paths, node ids and options of pytest. record: where the rows go; an older file there is removed.
    environment: variables beside those of this process. timeout: wall seconds. log: beside `record` by default.
    check_import: import torch in a process before, so that one that crashes costs a line and not a run of crashes.
    Raises KeyboardInterrupt after the run was ended and has left its record.
    """
    log = log or record.with_suffix(".log")
    record.unlink(missing_ok=True)
    started = time.monotonic()
    if check_import:
        found = installed(python, root, lane, environment)
        if found.failure:
            return LaneRun(1, None, found.failure, time.monotonic() - started, log)
    command = [
        str(python),
        "-X",
        "faulthandler",
        "-m",
        "pytest",
        "-m",
        lane,
        "--record",
        str(record.resolve()),
    ]
    command += [*(["--gate"] if gate else []), *selection]
    code, seconds = run_child(command, root, child_environment(python, root, environment), timeout, log)
    found_record, failure = None, ""
    if code != USAGE:
        try:
            found_record = read_record(record)
        except BumpgateError as error:
            failure = _last_words(log) or one_line(error)
    failure = _death(code, seconds, timeout) or failure
    if code == USAGE:
        failure = _last_words(log)
    return LaneRun(code, found_record, failure, time.monotonic() - started, log)


def child_environment(python: Path, root: Path | None, extra: Mapping[str, str] = {}) -> dict[str, str]:
    """As if that interpreter's environment were active; what belongs to ours, or to a pytest around us, is left out.

    root: a source tree to import from; None where the command is not ours.
    """
    ours = ("PYTEST_", "BUMPGATE_GATE", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join([str(python.parent), clean.get("PATH", os.defpath)])
    source = {} if root is None else {"PYTHONPATH": str(root)}
    return clean | {"PATH": path} | source | dict(extra)


def run_child(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout: float | None, log: Path
) -> tuple[int, float]:
    """Exit code (minus the signal, where one ended it) and wall seconds; the output is in `log`.

    The command and its children end with this call, and with this process. Raises KeyboardInterrupt after that.
    """
    started = time.monotonic()
    guarded = [sys.executable, "-I", "-S", supervise.__file__, *command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            guarded,
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # ctrl-C at a terminal comes here alone, and is passed on below
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = _interrupt(process)
        except KeyboardInterrupt:
            _interrupt(process)
            raise
        finally:
            _signal_group(process, signal.SIGKILL)
            process.wait()
            if process.stdin:
                process.stdin.close()
    return (supervise.SIGNALLED - code if code > supervise.SIGNALLED else code), time.monotonic() - started


def _interrupt(process: subprocess.Popen[bytes]) -> int:
    """Ctrl-C, on which pytest writes what it has. -> exit code, minus SIGKILL where it did not end by itself."""
    _signal_group(process, signal.SIGINT)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    return -signal.SIGINT


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _death(code: int, seconds: float, timeout: float | None) -> str:
    """What ended a process that did not end by itself; "" for one that did."""
    if timeout is not None and seconds >= timeout:
        return f"no end within {timeout:.0f} s"
    if code >= 0:
        return ""
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"


def _last_words(log: Path) -> str:
    """The line in which pytest, or Python, said why it ran nothing."""
    lines = [line.strip() for line in _read(log).splitlines() if line.strip()]
    for prefix in ("ERROR: ", "E   "):
        told = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        if told:
            return one_line(told[-1] if prefix == "E   " else told[0])
    return one_line(lines[-1]) if lines else "it printed nothing"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
