"""What the command prints, kept as files that a reader reviews: suites/self/golden_cli/<name>.txt.

    BUMPGATE_GOLDEN=write pytest suites/self/test_bisect.py suites/self/test_bisect_faults.py

writes them anew; `git diff` is the review. They are never edited by hand.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "golden_cli"
# Read before a test sets the host's variables aside.
WRITING = os.environ.get("BUMPGATE_GOLDEN") == "write"
# What differs from run to run and from machine to machine.
VARYING = (
    (r"\b\d+\.\d s\b", "N s"),
    (r"http://127\.0\.0\.1:\d+", "http://INDEX"),
    (r"\b[0-9a-f]{20}\b", "KEY"),
    (r"Python 3\.\d+", "Python 3.N"),
)


def transcript(arguments: Sequence[str], code: int, out: str, err: str, names: Mapping[str, str] = {}) -> str:
    """A call and what came of it. names: text that varies -> what stands for it."""
    text = f"$ bumpgate {shlex.join(arguments)}\n{out}{err}[exit {code}]\n"
    for found, name in names.items():
        text = text.replace(found, name)
    for pattern, name in VARYING:
        text = re.sub(pattern, name, text)
    return text


def check(name: str, text: str) -> None:
    """Compares with the file of that name, or writes it where BUMPGATE_GOLDEN says so."""
    path = FOLDER / f"{name}.txt"
    if WRITING:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    known = path.read_text(encoding="utf-8") if path.exists() else "(no such file)"
    assert text == known, (
        f"{path.name} differs; review it with: BUMPGATE_GOLDEN=write pytest ... and git diff"
    )
