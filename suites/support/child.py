"""Fresh interpreters, for measurements that need a new process."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.children import last_line
from suites.support.environment import ENVIRONMENT as ENVIRONMENT

ENVIRONMENT.update(os.environ)  # at collection, or earlier if a conftest file imports this
ROOT = Path(__file__).resolve().parent.parent.parent
# Last output of a process whose autograd thread outlived the interpreter: Python before 3.14 ends such a thread by
# force, which its C++ frames do not survive (pytorch#38230). The result has already been printed at that point.
ENDING = "terminate called without an active exception"


class ChildError(RuntimeError):
    """A child process crashed, timed out or printed no result. The message holds its exception, or its last line."""


def run_json(module: str, *arguments: str, environment: dict[str, str], timeout: float) -> dict[str, Any]:
    """Run `python -m module arguments` from the repository root and return its last line of output, parsed as JSON.

    The child gets ENVIRONMENT, the variables at collection, updated with `environment`. `timeout` is in seconds. Raises
    ChildError with one line on a crash, a timeout or output that is not JSON. An abort at interpreter shutdown is
    ignored if the result was printed before it.
    """
    what = " ".join((module, *arguments))
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**ENVIRONMENT, "PYTHONUNBUFFERED": "1", **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise ChildError(f"{what}: no result within {timeout:.0f} s") from None
    last = (done.stderr.strip() or "no output").splitlines()[-1]
    crashed = f"{what}: exit {done.returncode}: {last_line(done.stderr.splitlines())}"
    ending = done.returncode == -signal.SIGABRT and last == ENDING
    if done.returncode != 0 and not ending:
        raise ChildError(crashed)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        raise ChildError(crashed if ending else f"{what}: printed no JSON result") from None


def print_result(value: Any) -> None:
    """Print the result of this child process as JSON, as its last act.

    Without garbage collection at its end, which finds nothing to free in torch's objects for a second of CPU time.
    """
    print(json.dumps(value, default=str))
    gc.freeze()
    gc.disable()


class Programs(dict[str, Callable[..., Any]]):
    """Programs of a module by name; `python -m MODULE NAME [ARGUMENT ...]` prints the result of one as JSON."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Add the decorated function."""
        self[function.__name__] = function
        return function

    def main(self) -> None:
        name, *arguments = sys.argv[1:]
        print_result(self[name](*arguments))
