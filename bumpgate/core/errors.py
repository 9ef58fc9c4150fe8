"""Base exceptions, one-line messages, and JSON whose texts can be printed."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from bumpgate.core.text import UNPRINTABLE, printable, redacted

# Escapes of JSON that may stand for an unprintable character.
ESCAPED = re.compile(r"\\[bfr]|\\u(?:00[01789]|20[0-6]|[dD][89a-fA-F])")


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
    """Reduce arbitrary text to one printable line of at most `width` characters, without secrets."""
    line = printable(" ".join(redacted(str(text)).split()))
    return line if len(line) <= width else line[: width - 3] + "..."


def loads(text: str | bytes) -> Any:
    """Parse JSON, and make all of its texts printable."""
    raw = json.loads(text)
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return _printable(raw) if ESCAPED.search(text) or UNPRINTABLE.search(text) else raw


def _printable(raw: Any) -> Any:
    if isinstance(raw, dict):
        return {printable(name): _printable(value) for name, value in raw.items()}
    if isinstance(raw, list):
        return [_printable(value) for value in raw]
    return printable(raw) if isinstance(raw, str) else raw


@contextmanager
def one_fault(what: str, kind: type[BumpgateError] = BumpgateError, fix: str = "") -> Iterator[None]:
    """Report any fault of a foreign input in one line: `what (the fault); fix`. A BumpgateError passes unchanged.

    Parsers raise many types on damaged input, such as zlib.error, csv.Error, IndexError and NotImplementedError.
    """
    try:
        yield
    except BumpgateError:
        raise
    except Exception as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, KeyError):
            why = f"{error.args[0]} is missing" if " " not in str(error.args[0]) else str(error.args[0])
        raise kind(one_line(f"{what} ({one_line(why, 120)}){fix and '; '}{fix}", 600)) from None


def check_number(option: str, value: float, most: float) -> None:
    """Raise BumpgateError if the number of an option is not from 0 to `most`, as inf and NaN are not."""
    if not 0 <= value <= most:
        raise BumpgateError(f"{option} {value:g}: must be a number from 0 to {most:g}")


def is_line(text: object) -> bool:
    """Return whether a value is one line of printable text."""
    if not isinstance(text, str) or UNPRINTABLE.search(text):
        return False
    return bool(text.strip()) and len(text.splitlines()) == 1
