"""Queries another interpreter in child processes, so that its crash, hang or invalid output only loses the result."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bumpgate.core.errors import BumpgateError, one_line, text_lines


class ChildFault(BumpgateError):  # noqa: N818 - a fault of the child, not of the caller
    """A child crashed, hung or gave no result. The message is one line: "killed by SIGSEGV", its last error line."""


@dataclass(frozen=True)
class Interpreter:
    """python: the executable. root: the source tree, every child's working directory. environment: every child's."""

    python: Path
    root: Path
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def run(self, *arguments: str, timeout: float, extra: Mapping[str, str] = {}) -> str:
        """Return the standard output of `python *arguments`; `extra` is added to its env_vars.

        timeout: seconds, after which the child and its own children are killed. Raises ChildFault.
        """
        return run([str(self.python), *arguments], self.root, {**self.environment, **extra}, timeout)

    def json(self, *arguments: str, timeout: float, extra: Mapping[str, str] = {}) -> Any:
        """Parse the last line that the child prints as JSON. Raises ChildFault."""
        printed = self.run(*arguments, timeout=timeout, extra=extra).strip().splitlines()
        try:
            return json.loads(printed[-1])
        except (IndexError, json.JSONDecodeError):
            last = f": {one_line(printed[-1], 80)}" if printed else ""
            raise ChildFault(f"printed no result{last}") from None


def run(command: list[str], cwd: Path, environment: Mapping[str, str], timeout: float) -> str:
    """Return the standard output of a command that exits with 0 within `timeout` seconds.

    Raises ChildFault (one line).

    Output goes to files: a grandchild that holds a pipe open would keep the caller waiting for it.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                command,
                cwd=cwd,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            raise ChildFault(f"{command[0]}: {error.strerror}") from None
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ChildFault(f"no answer in {timeout:.0f} s") from None
        finally:
            end_group(child)
        out.seek(0)
        err.seek(0)
        if code:
            raise ChildFault(describe_end(code, err.read().decode(errors="replace")))
        return out.read().decode(errors="replace")


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the remaining process group of a child that leads one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def describe_end(code: int, stderr: str) -> str:
    """Describe how a process ended, in one line: signal name or exit code, then the last line of stderr."""
    if code < 0:
        try:
            end = f"killed by {signal.Signals(-code).name}"
        except ValueError:
            end = f"killed by signal {-code}"
    else:
        end = f"exit {code}"
    lines = text_lines(stderr)
    # Under faulthandler the last line is a list of loaded extensions; the first line has the error.
    last = next((line for line in lines if line.startswith("Fatal Python error")), lines[-1] if lines else "")
    return f"{end}: {one_line(last, 200)}" if last else end
