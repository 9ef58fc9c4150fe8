"""Which mutants there are, which of them change nothing, and a sample of them by seed."""

from __future__ import annotations

import ast
import difflib
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names


@dataclass(frozen=True, order=True)
class Mutation:
    """One edit: the `occurrence`-th place in `path` where `operator` applies, in function or class `definition`."""

    path: str
    line: int
    column: int
    operator: str
    occurrence: int
    definition: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.column} {self.operator}"

    def apply(self, source: str) -> str:
        """Return the mutated source. Raises ValueError if the operator does not apply there (the file has changed)."""
        try:
            mutated = mutate_code(source, get_operator(f"core/{self.operator}")(), self.occurrence)
        except AttributeError:
            mutated = None  # cosmic-ray 8.7 cannot edit `except (KeyError, os.error)`
        if mutated is None:
            raise ValueError(f"{self.name}: does not apply to this version of the file")
        return mutated


@cache
def mutations(path: str, source: str) -> list[Mutation]:
    """Return every mutation of a source file by the operators of cosmic-ray that take no arguments."""
    nodes = [(node, ASTQuery(node).get_definition_name() or "") for node in ast_nodes(get_ast(source))]
    found = []
    for full in sorted(operator_names()):
        if get_operator(full).arguments():
            continue
        operator, occurrence = get_operator(full)(), 0
        for node, definition in nodes:
            for (line, column), _ in operator.mutation_positions(node):
                found.append(Mutation(path, line, column, full.removeprefix("core/"), occurrence, definition))
                occurrence += 1
    return found


class _Stripped(ast.NodeTransformer):
    """Removes what is never executed: annotations (all modules postpone them) and bodies of `if TYPE_CHECKING`."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
        return self.generic_visit(node)


def equivalent(source: str, mutated: str) -> bool:
    """Return whether a mutant executes the same code, or does not compile, so that no test has to find it."""
    try:
        after = ast.dump(_Stripped().visit(ast.parse(mutated)))
    except SyntaxError:
        return True
    return after == ast.dump(_Stripped().visit(ast.parse(source)))


def sample(sources: Mapping[str, str], number: int, seed: int) -> list[Mutation]:
    """Return `number` mutations of path -> source, without equivalent ones, the same for the same seed and sources.

    A place in the source is drawn first and one mutation of it second: `+` has eleven replacements and `not` one.
    """
    places: dict[tuple[str, int, int], list[Mutation]] = {}
    for path in sorted(sources):
        for mutation in mutations(path, sources[path]):
            places.setdefault((path, mutation.line, mutation.column), []).append(mutation)
    rng, chosen = random.Random(seed), []
    for place in rng.sample(sorted(places), len(places)):
        if len(chosen) == number:
            break
        source = sources[place[0]]
        for mutation in rng.sample(places[place], len(places[place])):
            with suppress(ValueError):
                if not equivalent(source, mutation.apply(source)):
                    chosen.append(mutation)
                    break
    return chosen


def shares(sizes: Mapping[str, int], number: int) -> dict[str, int]:
    """Divide `number` among groups in proportion to their sizes, each at least one; largest remainders first."""
    total = sum(sizes.values())
    exact = {name: number * size / total for name, size in sizes.items() if size}
    found = {name: max(1, int(share)) for name, share in exact.items()}
    for name in sorted(exact, key=lambda n: (int(exact[n]) - exact[n], n)):
        if sum(found.values()) >= number:
            break
        found[name] += 1
    return found


def read(root: Path, patterns: Iterable[str], but: Sequence[str] = ()) -> dict[str, str]:
    """Return path -> source of the files below root that match a pattern and none of `but`."""
    found = {p for pattern in patterns for p in root.glob(pattern)} - {
        p for pattern in but for p in root.glob(pattern)
    }
    return {p.relative_to(root).as_posix(): p.read_text(encoding="utf-8") for p in sorted(found)}


def changed_lines(source: str, mutant: str) -> str:
    """Return the changed lines as `old => new`, without indentation."""
    diff = [d for d in difflib.ndiff(source.splitlines(), mutant.splitlines()) if d[:2] in ("- ", "+ ")]
    old, new = ("; ".join(d[2:].strip() for d in diff if d.startswith(sign)) for sign in "-+")
    return f"{old} => {new}"
