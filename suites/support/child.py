"""Fresh interpreters: what must be true of a new process is measured in one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
# The last words of a process whose autograd thread found the interpreter gone: Python before 3.14 ends such a thread by
# force, which its C++ frames do not survive (pytorch#38230). It has said and done all by then.
ENDING = "terminate called without an active exception"
# When the tests are collected. Nobody's fresh process has what later tests, and what torch compiled in them, leave in
# os.environ: torch 2.11.0+cu130 names its own ptxas to Triton once it compiles, and each key of Triton's and of
# Inductor's templates has the ptxas in it (pytorch#163988).
ENVIRONMENT = dict(os.environ)


class ChildError(RuntimeError):
    """A child process crashed, hung or printed no result. The message holds its last line."""


def run_json(module: str, *arguments: str, environment: dict[str, str], timeout: float) -> dict[str, Any]:
    """`python -m module arguments` from the repository root; its last line of output, parsed as JSON.

    Its environment is the one that this process was given, and `environment`.
    `timeout` is in seconds. Raises ChildError with one line on a crash, a hang or output that is not JSON. An abort
    while the interpreter ends is no crash of what was measured, where the result stands before it.
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
    crashed = f"{what}: exit {done.returncode}: {last}"
    ending = done.returncode == -signal.SIGABRT and last == ENDING
    if done.returncode != 0 and not ending:
        raise ChildError(crashed)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        raise ChildError(crashed if ending else f"{what}: printed no JSON result") from None
