"""Tables in GitHub Markdown, for whoever asks: on standard output or in a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from bumpgate.rows import write_atomic


def line(cells: Iterable[str]) -> str:
    """One line of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def publish(text: str, out: Path | None) -> int:
    """Prints the text, or replaces the file `out` -> the exit code: 2 and one line where it cannot be written."""
    if out is None:
        print(text, end="")
        return 0
    try:
        write_atomic(out, text)
    except OSError as error:
        print(
            f"--out {out}: {error.strerror}; name a file in a directory that can be written", file=sys.stderr
        )
        return 2
    return 0
