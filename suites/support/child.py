"""Fresh interpreters: what must be true of a new process is measured in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


class ChildError(RuntimeError):
    """A child process crashed, hung or printed no result. The message holds its last line."""


def run_json(module: str, *arguments: str, environment: dict[str, str], timeout: float) -> dict[str, Any]:
    """`python -m module arguments` from the repository root; its last line of output, parsed as JSON.

    `timeout` is in seconds. Raises ChildError with one line on a crash, a hang or output that is not JSON.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise ChildError(f"{module} {' '.join(arguments)}: no result within {timeout:.0f} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise ChildError(f"{module} {' '.join(arguments)}: exit {done.returncode}: {last}")
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        raise ChildError(f"{module} {' '.join(arguments)}: printed no JSON result") from None
