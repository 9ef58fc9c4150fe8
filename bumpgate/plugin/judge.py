"""The beginning of a lane run, before a conftest is loaded, and its judge under --gate: a parent process.

A test, a conftest or a library can end the process that runs it with exit code 0. The parent then finds a record that
is not complete.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from bumpgate.core.errors import BumpgateError, loads
from bumpgate.core.rows import RECORD_KEYS, read_record, write_record
from bumpgate.process.host import PARENT

DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
FROM_KERNEL = 128  # si_code of a signal that a terminal sent to the whole process group
SIGNALS = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
NO_RUN = ("collectonly", "help", "version", "showfixtures", "show_fixtures_per_test", "markers", "setupplan")


def record_path(config: pytest.Config) -> Path:
    """Return the output path of the rows."""
    named = config.known_args_namespace.record
    return config.invocation_params.dir / (named or config.rootpath / "record.json")


def begin(config: pytest.Config, lane: str) -> None:
    """Replace an older record by one that is not complete, and under --gate go on in a child process.

    Raises UsageError if the record would replace another file, and SystemExit in the parent once the child has ended.
    """
    options = config.known_args_namespace
    # A worker of xdist has no other sign yet.
    if "PYTEST_XDIST_WORKER" in os.environ or any(getattr(options, n, False) for n in NO_RUN):
        return
    path = record_path(config)
    if not _replaceable(path):
        raise pytest.UsageError(
            f"--record={options.record or path.name}: this file is not a record: name another"
        )
    try:
        write_record(path, {"lane": lane}, (), complete=False)
    except OSError as error:
        raise pytest.UsageError(f"--record {path}: {error.strerror}") from None
    # Other systems cannot end the child with its parent: there the run judges itself, as far as it gets.
    if options.gate and sys.platform == "linux" and not started_by_bumpgate():
        _judge(path)


def started_by_bumpgate() -> bool:
    """Whether the bumpgate that the environment names has started this run; it judges the record itself."""
    named = os.environ.get(PARENT)
    found = [process for process in psutil.Process().parents() if str(process.pid) == named]
    # Process 1 is an ancestor of every process; in a container it may be bumpgate.
    return any(process.pid != 1 or "bumpgate" in " ".join(process.cmdline()) for process in found)


def _replaceable(path: Path) -> bool:
    """Whether a file is absent, empty, or a record. What is not a file is refused when it is written."""
    if not path.is_file() or path.stat().st_size == 0:
        return True
    try:
        raw = loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and raw.keys() >= RECORD_KEYS


def _judge(path: Path) -> None:
    """Return in a child process, which runs the tests; exit in the parent with the child's code or a worse one."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if os.getppid() != parent:
            os._exit(1)
        return
    code = _wait(child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(parent, -code)
    raise SystemExit(code or _verdict(path))


def _wait(child: int) -> int:
    """Return the exit code of the child, or minus its signal. Signals to the parent alone are passed on."""
    while True:
        caught = signal.sigwaitinfo(SIGNALS)
        if caught.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        elif caught.si_code != FROM_KERNEL:
            os.kill(child, caught.si_signo)


def _verdict(path: Path) -> int:
    """Return 0 if the record of a child that ended with 0 is complete and green."""
    try:
        record = read_record(path)
    except BumpgateError as error:
        why, code = str(error), pytest.ExitCode.INTERNAL_ERROR
    else:
        if not record.red:
            return 0
        why = "its record is red" if record.complete else f"{path.name} is not complete"
        code = pytest.ExitCode.TESTS_FAILED if record.complete else pytest.ExitCode.INTERNAL_ERROR
    print(f"ERROR: --gate: the run ended with exit code 0, but {why}", file=sys.stderr)
    return int(code)
