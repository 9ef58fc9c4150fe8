"""Tables in GitHub Markdown, printed or written to a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bumpgate.core.rows import write_atomic


def line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [line(cells) for cells in (head, ("---",) * len(head), *rows)]


def publish(text: str, out: Path | None) -> int:
    """Print the text, or replace the file `out`. Return the exit code: 2 with one line if it cannot be written."""
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
