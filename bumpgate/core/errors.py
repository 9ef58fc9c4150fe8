"""Base exceptions, one-line messages, and text that UTF-8 can encode.

A byte of a file name or variable that is not UTF-8 is a lone surrogate in a string.
"""

from __future__ import annotations

import importlib
import json
import re
from types import ModuleType
from typing import Any

LONE = re.compile("[\ud800-\udfff]")
ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")


class BumpgateError(ValueError):
    """Bad input. The message is one line and names the fix. exit_code: of a command that ends with it."""

    exit_code = 4


class RefusedError(Exception):
    """The command is refused and nothing is written; args are the reasons, one line each."""


class ExtraMissingError(BumpgateError):
    """A command needs libraries that a plain install of bumpgate lacks."""


def need(*modules: str, command: str, extra: str = "report") -> ModuleType:
    """Import modules of an extra and return the last one. Raises ExtraMissingError if one is not installed."""
    try:
        return [importlib.import_module(name) for name in modules][-1]
    except ModuleNotFoundError as error:
        raise ExtraMissingError(
            f"{command} needs {error.name}; install it with: pip install 'bumpgate[{extra}]'"
        ) from None


# Lines of the report of leaked objects that nanobind, which triton 3.9 uses, prints when a failed program ends.
LEAKS = ("nanobind: ", " - leaked ", " - ... skipped", "See https://nanobind.")


def text_lines(text: str) -> list[str]:
    """Return the lines with text, without nanobind's report of leaked objects: the last one is then the error."""
    return [line for line in text.splitlines() if line.strip() and not line.startswith(LEAKS)]


def one_line(text: object, width: int = 300) -> str:
    """Reduce arbitrary text to one line of at most `width` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= width else line[: width - 3] + "..."


def encodable(text: str) -> str:
    """Return the text with each lone surrogate as its escape, so that it can be printed, written and stored."""
    return LONE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def loads(text: str | bytes) -> Any:
    """Parse JSON, and make all of its texts encodable."""
    raw = json.loads(text)
    if not ESCAPED.search(text if isinstance(text, str) else text.decode("latin-1")):
        return raw
    plain = json.dumps(raw, ensure_ascii=False)  # a surrogate is outside of ASCII, so only texts have one
    return json.loads(LONE.sub(lambda found: f"\\\\u{ord(found[0]):04x}", plain))


def is_line(text: object) -> bool:
    """Return whether a value is one line of text that UTF-8 can encode."""
    if not isinstance(text, str) or LONE.search(text):
        return False
    return bool(text.strip()) and len(text.splitlines()) == 1
