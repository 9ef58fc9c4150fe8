"""What one worker of xdist runs: a test, a module that shares a fixture, or all tests that need the machine alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Fixtures that give a test the machine to itself.
ALONE = frozenset({"exclusive_machine", "benchmark"})
ALONE_UNIT = "alone"


class Function(NamedTuple):
    """A test or fixture. arguments: names of its arguments. shared: whether it is a fixture of module scope."""

    arguments: frozenset[str]
    shared: bool


@cache
def functions(file: Path) -> dict[str, Function]:
    """Return the functions of a file by name. Parsed from the text: the process that assigns tests imports none."""
    if file.suffix != ".py" or not file.is_file():  # a test may be of a text file
        return {}
    nodes = ast.walk(ast.parse(file.read_bytes()))
    found = (n for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return {f.name: Function(frozenset(a.arg for a in f.args.args), _shared(f)) for f in found}


def _shared(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    calls = (decorator for decorator in function.decorator_list if isinstance(decorator, ast.Call))
    values = (word.value for call in calls for word in call.keywords if word.arg == "scope")
    return any(isinstance(value, ast.Constant) and value.value == "module" for value in values)


@cache
def unit(root: Path, nodeid: str) -> str:
    """Return the name of what one worker runs: "alone", a module, or a single test.

    Fixtures are those that a test names as arguments, and theirs, in its file and the conftest files above it.
    """
    file, _, test = nodeid.partition("::")
    names = [test.partition("[")[0].rpartition("::")[2]]
    seen: set[str] = set()
    shared = False
    while names:
        name = names.pop()
        if name in ALONE:
            return ALONE_UNIT
        if name not in seen:
            seen.add(name)
            for function in _definitions(root / file, root, name):
                shared |= function.shared
                names += function.arguments
    return file if shared else nodeid


def _definitions(file: Path, root: Path, name: str) -> Iterator[Function]:
    return (found[name] for place in _places(file, root) if name in (found := functions(place)))


@cache
def _places(file: Path, root: Path) -> list[Path]:
    """Return a test file and the conftest files that apply to it."""
    return [file, *(folder / "conftest.py" for folder in file.parents if folder.is_relative_to(root))]
