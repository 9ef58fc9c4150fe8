"""Base exception and one-line messages. Imported at each start of pytest, so it imports nothing."""

from __future__ import annotations


class BumpgateError(ValueError):
    """Bad input. The message is one line and names the fix. exit_code: of a command that ends with it."""

    exit_code = 4


class RefusedError(Exception):
    """The command is refused and nothing is written; args are the reasons, one line each."""


# Lines of the report of leaked objects that nanobind, which triton 3.9 uses, prints when a failed program ends.
LEAKS = ("nanobind: ", " - leaked ", " - ... skipped", "See https://nanobind.")


def text_lines(text: str) -> list[str]:
    """Return the lines with text, without nanobind's report of leaked objects: the last one is then the error."""
    return [line for line in text.splitlines() if line.strip() and not line.startswith(LEAKS)]


def one_line(text: object, width: int = 300) -> str:
    """Reduce arbitrary text to one line of at most `width` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= width else line[: width - 3] + "..."
