"""Order of a lane's tests, and which of them one worker of xdist runs.

A test marked `long(seconds)` starts before shorter ones, so that no worker is still in it when the others have
finished; a single worker runs it after them, so that most rows are measured early. A test that needs the machine to
itself comes last, and one worker runs all of them, or one for each GPU: in between, it would wait for all others to
end, and they for it. Tests that use a fixture of module scope go to one worker, which makes it once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

# Fixtures that give a test the machine to itself.
ALONE = frozenset({"exclusive_machine", "benchmark"})
ALONE_UNIT = "alone"


def alone(item: pytest.Item) -> bool:
    """Return whether a test needs the machine to itself."""
    return not ALONE.isdisjoint(getattr(item, "fixturenames", ()))


def is_fast(item: pytest.Item) -> bool:
    """Return whether `--fast` selects a test."""
    return not (alone(item) or item.get_closest_marker("long") or item.get_closest_marker("cold"))


def turn(item: pytest.Item) -> tuple[bool, bool, float]:
    """Return the sort key of a test. Those that run alone come last.

    Several workers start with the longest; a single one starts with those that `--fast` selects.
    """
    single = getattr(item.config, "workerinput", {}).get("workercount", 1) == 1
    seconds = 0.0 if alone(item) else _seconds(item) or 0.0
    return (alone(item), single and not is_fast(item), seconds if single else -seconds)


def _seconds(item: pytest.Item) -> float | None:
    """Return the seconds of a test's marker `long`, 0 without one; None if the marker has no number."""
    marker = item.get_closest_marker("long")
    seconds = marker.args[0] if marker and len(marker.args) == 1 else None if marker else 0.0
    return seconds if isinstance(seconds, (int, float)) else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _seconds(item) is None:
        pytest.fail(f"{item.nodeid}: mark it with its seconds, as @pytest.mark.long(40)", pytrace=False)


@pytest.hookimpl(trylast=True)  # after pytest's own, which sorts by the parameters of session fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("fast", False):
        config.hook.pytest_deselected(items=[item for item in items if not is_fast(item)])
        items[:] = [item for item in items if is_fast(item)]
    items.sort(key=turn)


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
    return [file, *(folder / "conftest.py" for folder in file.parents if folder.is_relative_to(root))]
