"""Base exception and one-line messages. Imported at each start of pytest, so it imports nothing."""

from __future__ import annotations


class BumpgateError(ValueError):
    """Bad input. The message is one line and names the fix. exit_code: of a command that ends with it."""

    exit_code = 4


class RefusedError(Exception):
    """The command is refused and nothing is written; args are the reasons, one line each."""


def one_line(text: object, width: int = 300) -> str:
    """Reduce arbitrary text to one line of at most `width` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= width else line[: width - 3] + "..."
