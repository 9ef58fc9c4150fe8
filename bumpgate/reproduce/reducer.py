"""Makes a program smaller while a predicate holds: delta debugging over its statements."""

from __future__ import annotations

import ast
import builtins
import copy
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BODIES = ("body", "orelse", "finalbody")
Place = tuple[tuple[str, int], ...]


@dataclass
class Journal:
    """Answers of the predicate, one a line of a file, so that a killed reduction repeats no try.

    about: what the answers depend on besides the program: environments, and the fault.
    """

    path: Path
    about: str = ""

    def __post_init__(self) -> None:
        self.answers: dict[str, bool] = {}
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            try:
                self.answers.update(json.loads(line))
            except ValueError:
                continue  # the last line of a killed process

    def ask(self, text: str, predicate: Callable[[str], bool]) -> bool:
        key = hashlib.sha256(f"{self.about}\n{text}".encode()).hexdigest()[:24]
        if key not in self.answers:
            self.answers[key] = predicate(text)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({key: self.answers[key]}) + "\n")
        return self.answers[key]


def reduce(
    text: str,
    predicate: Callable[[str], bool],
    journal: Journal,
    until: float,
    keep: frozenset[str] = frozenset(),
) -> str:
    """Return the smallest program found for which the predicate holds, as it does for `text`.

    until: time.monotonic() after which no further try begins.
    keep: names of functions that stay.
    """
    best, size = text, _size(ast.unparse(ast.parse(text)))
    progress = True
    while progress:
        progress = False
        for attempt in _attempts(best, keep):
            while time.monotonic() < until:
                smaller = attempt(ast.parse(best))
                if smaller is None:
                    break
                tried = _tidy(smaller, keep)
                if tried is None or _size(tried) >= size or not journal.ask(tried, predicate):
                    break
                best, size, progress = tried, _size(tried), True
    return best


def _attempts(text: str, keep: frozenset[str]) -> Iterator[Callable[[ast.Module], ast.Module | None]]:
    """Yield edits, the largest first: settings, tables, runs of statements, bodies of compound ones, details.

    Settings are the defaults of the functions that stay. An edit that succeeded is tried again at once, on what then
    stands at its place.
    """
    tree = ast.parse(text)
    for setting, default in enumerate(_settings(tree, keep)):
        for index in reversed(range(len(getattr(default, "elts", "1")))):
            yield lambda tree, at=(setting, index): _smaller_setting(tree, keep, *at)  # type: ignore[misc]
    yield from _entries(tree, ast.Dict)
    places = list(_statements(tree))
    run = len(places)
    while run:
        for begin in range(len(places) - run, -1, -max(1, run)):
            chosen = places[begin : begin + run]
            yield lambda tree, chosen=chosen: _without(tree, chosen, keep)  # type: ignore[misc]
        run //= 2
    for place in places:
        yield lambda tree, place=place: _unwrapped(tree, place, keep)  # type: ignore[misc]
    yield from _entries(tree, ast.Tuple | ast.List)
    for kind in (
        _drop_keyword,
        _inline_name,
        _first_operand,
        _smaller_number,
    ):
        for number in range(len(list(ast.walk(ast.parse(text))))):
            yield lambda tree, kind=kind, number=number: kind(tree, number)  # type: ignore[misc]


def _settings(tree: ast.Module, keep: frozenset[str]) -> list[ast.expr]:
    """The defaults of the parameters of the functions that stay, in their order."""
    stay = [s for s in tree.body if isinstance(s, ast.FunctionDef) and s.name in keep]
    return [default for function in stay for default in function.args.defaults]


def _smaller_setting(tree: ast.Module, keep: frozenset[str], setting: int, index: int) -> ast.Module | None:
    """Drop an entry of a setting that is a tuple or a list, halve a number."""
    default = _settings(tree, keep)[setting]
    if isinstance(default, ast.Tuple | ast.List) and len(default.elts) > max(1, index):
        del default.elts[index]
    elif isinstance(default, ast.Constant) and type(default.value) is int and default.value > 1:
        default.value //= 2
    else:
        return None
    return tree


def _entries(tree: ast.Module, kind: Any) -> Iterator[Callable[[ast.Module], ast.Module | None]]:
    """Yield edits that drop an entry of a dictionary, a list or a tuple, the last one first."""

    def without(tree: ast.Module, number: int, index: int) -> ast.Module | None:
        node = _node(tree, number)
        fields: list[list[Any]] = (
            [node.keys, node.values] if isinstance(node, ast.Dict) else [getattr(node, "elts", [])]
        )
        if len(fields[0]) <= max(1, index) or isinstance(getattr(node, "ctx", None), ast.Store):
            return None
        for entries in fields:
            del entries[index]
        return tree

    for number, node in enumerate(ast.walk(tree)):
        if isinstance(node, kind):
            count = len(node.keys if isinstance(node, ast.Dict) else node.elts)
            for index in reversed(range(count)):
                yield lambda tree, at=(number, index): without(tree, *at)  # type: ignore[misc]


def _statements(tree: ast.AST, place: Place = ()) -> Iterator[Place]:
    """Yield the places of all statements: paths of (field, index), outer ones first."""
    for name in (*BODIES, "handlers"):
        for index, child in enumerate(getattr(tree, name, None) or ()):
            here = (*place, (name, index))
            if isinstance(child, ast.stmt):
                yield here
            yield from _statements(child, here)


def _at(tree: ast.AST, place: Place) -> ast.AST | None:
    for name, index in place:
        children = getattr(tree, name, None) or []
        if index >= len(children):
            return None
        tree = children[index]
    return tree


def _without(tree: ast.Module, places: list[Place], keep: frozenset[str]) -> ast.Module | None:
    """Delete statements. Later places first, so that the earlier ones stay valid."""
    changed = False
    for place in sorted(places, reverse=True):
        *outer, (name, index) = place
        holder, statement = _at(tree, tuple(outer)), _at(tree, place)
        if holder is None or statement is None or getattr(statement, "name", "") in keep:
            continue
        if isinstance(statement, ast.Pass):
            continue
        body = getattr(holder, name)
        del body[index]
        if not body and name == "body" and not isinstance(holder, ast.Module):
            body.append(ast.Pass())
        changed = True
    return tree if changed else None


def _unwrapped(tree: ast.Module, place: Place, keep: frozenset[str]) -> ast.Module | None:
    """Put the body of a `with`, `if`, `for` or `try` in its place."""
    *outer, (name, index) = place
    statement, holder = _at(tree, place), _at(tree, tuple(outer))
    if not isinstance(statement, ast.With | ast.If | ast.For | ast.While | ast.Try):
        return None
    getattr(holder, name)[index : index + 1] = statement.body
    return tree


def _node(tree: ast.Module, number: int) -> ast.AST | None:
    nodes = list(ast.walk(tree))
    return nodes[number] if number < len(nodes) else None


def _drop_keyword(tree: ast.Module, number: int) -> ast.Module | None:
    node = _node(tree, number)
    if not (isinstance(node, ast.Call) and node.keywords):
        return None
    node.keywords.pop()
    return tree


def _inline_name(tree: ast.Module, number: int) -> ast.Module | None:
    """Put the value of a conditional expression, of a generator's call or of a sum's first term in its place."""
    node = _node(tree, number)
    for field, value in ast.iter_fields(node) if node else ():
        if isinstance(value, ast.IfExp):
            setattr(node, field, value.body)
            return tree
        if isinstance(value, ast.BoolOp):
            setattr(node, field, value.values[0])
            return tree
    return None


def _first_operand(tree: ast.Module, number: int) -> ast.Module | None:
    node = _node(tree, number)
    for field, value in ast.iter_fields(node) if node else ():
        if isinstance(value, ast.BinOp):
            setattr(node, field, value.left)
            return tree
    return None


def _smaller_number(tree: ast.Module, number: int) -> ast.Module | None:
    """Halve an integer above 2: sizes, tokens, repeats."""
    node = _node(tree, number)
    if not (isinstance(node, ast.Constant) and type(node.value) is int and node.value > 2):
        return None
    node.value //= 2
    return tree


def _tidy(tree: ast.Module, keep: frozenset[str]) -> str | None:
    """Return the source without imports and definitions that nothing names.

    None if it does not parse, or names what nothing in it binds: such a try needs no run.
    """
    tree = copy.deepcopy(tree)
    while True:
        used = {
            n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        } | keep
        left = [s for s in tree.body if not _unused(s, used)]
        if len(left) == len(tree.body):
            break
        tree.body = left
    if used - keep - _bound(tree):
        return None
    try:
        text = ast.unparse(ast.fix_missing_locations(tree))
        compile(text, "program", "exec")
    except (SyntaxError, ValueError):
        return None
    return text


def _bound(tree: ast.Module) -> set[str]:
    """Every name that the program binds somewhere, and Python's own."""
    bound = set(dir(builtins)) | {"__file__", "__name__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(
            node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar
        ):
            bound.add(node.name or "")
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
    return bound


def _unused(statement: ast.stmt, used: set[str]) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return statement.name not in used and not statement.decorator_list
    if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
        return False
    if isinstance(statement, ast.Import | ast.ImportFrom):
        statement.names = [a for a in statement.names if (a.asname or a.name.partition(".")[0]) in used]
        return not statement.names
    return isinstance(statement, ast.Pass)


def _size(text: str) -> tuple[int, int, int]:
    """Lines, then characters, then the sum of the numbers."""
    return len(text.splitlines()), len(text), sum(map(int, re.findall(r"\d{1,9}", text)))
