"""Metrics that a command prints as JSON lines, as rows; `bumpgate gate --command` generates the test that calls this.

Each row is compared between the sides of a gate only: exact values as they are, the others in paired sessions.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from bumpgate.core.errors import one_line
from bumpgate.core.rows import is_finite
from bumpgate.plugin.duet import shared_cores
from bumpgate.plugin.rows import RowRecorder

FORMAT = '{"name": "step_seconds", "value": 0.25, "unit": "s", "better": "lower"}'
FIELDS = {"name", "value", "unit", "better"}
BETTER = ("exact", "lower", "higher")


def report(row: RowRecorder, command: str) -> None:
    """Run a shell command in the working directory and report each line of its output as a row.

    Fails the test if the command fails, prints a line that is not a metric, or prints none. `python` on PATH, and
    `{python}` in the command, are the interpreter of the environment that is measured.
    """
    line = command.replace("{python}", shlex.quote(sys.executable))
    with shared_cores():
        done = subprocess.run(line, shell=True, stdout=subprocess.PIPE, text=True, errors="replace")
    print(done.stdout)
    if done.returncode:
        pytest.fail(f"{one_line(command, 80)}: ended with {done.returncode}", pytrace=False)
    lines = [(number, text) for number, text in enumerate(done.stdout.splitlines(), 1) if text.strip()]
    for number, text in lines:
        try:
            _report(row, text)
        except ValueError as error:
            pytest.fail(
                f"line {number} of the output is not a metric: {one_line(text, 36)} ({one_line(error, 110)}); "
                f"expected on stdout: {FORMAT}",
                pytrace=False,
            )
    if not lines:
        pytest.fail(f"the command printed no metric; expected on stdout: {FORMAT}", pytrace=False)


def _report(row: RowRecorder, text: str) -> None:
    """Report one metric. Raises ValueError or RowError on a line that is not a metric."""
    metric = json.loads(text)
    if not isinstance(metric, dict) or metric.keys() != FIELDS:
        raise ValueError(f"its fields must be {', '.join(sorted(FIELDS))}")
    name, value, better = metric["name"], metric["value"], metric["better"]
    if not isinstance(name, str):
        raise ValueError(f"name must be a string, got {name!r}")
    if better not in BETTER:
        raise ValueError(f"better must be one of {', '.join(BETTER)}, got {better!r}")
    if better != "exact" and not (is_finite(value) and value > 0):
        raise ValueError(f"a value that is better {better} must be a finite number above 0, got {value!r}")
    id = name if "/" in name else f"command/metrics/{name}"
    if better == "exact":
        row.exact(id, value, metric["unit"], seen=1, paired=True)
    else:
        row.cost(id, value, metric["unit"], better=better, seen=1, paired=True)
