"""Imports the libraries of an extra; a missing one is a one-line error with the command to install it."""

from __future__ import annotations

import importlib
from types import ModuleType

from bumpgate.core.errors import BumpgateError


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
