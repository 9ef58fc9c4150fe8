"""Golden CLI transcripts, kept as files for review: tests/golden_cli/<name>.txt.

    BUMPGATE_GOLDEN=write pytest tests/bisect/test_bisect.py tests/bisect/test_bisect_faults.py

rewrites them; review with `git diff`. Do not edit them by hand.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden_cli"
# Read before a test removes the host's env_vars.
WRITING = os.environ.get("BUMPGATE_GOLDEN") == "write"
# Text that differs between runs or machines.
VARYING = (
    (r"\b\d+\.\d s\b", "N s"),
    (r"http://127\.0\.0\.1:\d+", "http://INDEX"),
    (r"\b(?:[0-9a-f]{16}|[0-9a-f]{20})\b", "KEY"),
    (r"Python 3\.\d+", "Python 3.N"),
)


def transcript(arguments: Sequence[str], code: int, out: str, err: str, names: Mapping[str, str] = {}) -> str:
    """Format a call and its result. names: variable text -> its placeholder."""
    text = f"$ bumpgate {shlex.join(arguments)}\n{out}{err}[exit {code}]\n"
    for found, name in names.items():
        text = text.replace(found, name)
    for pattern, name in VARYING:
        text = re.sub(pattern, name, text)
    return text


def check(name: str, text: str) -> None:
    """Compare with the file of that name, or write it if BUMPGATE_GOLDEN=write."""
    path = FOLDER / f"{name}.txt"
    if WRITING:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    known = path.read_text(encoding="utf-8") if path.exists() else "(no such file)"
    assert text == known, (
        f"{path.name} differs; review it with: BUMPGATE_GOLDEN=write pytest ... and git diff"
    )
