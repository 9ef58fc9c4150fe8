"""Which tests execute each line of the product, from one run of a suite under coverage, child processes included.

    python -m tools.mutation.covered --suite self --out self.json
    python -m tools.mutation --group bumpgate --covered self.json

A child process counts for the test that started it, if it inherits PYTHONPATH. A fixture of a module counts for its
first test, so that a line's test files matter more than its tests. Exit code: pytest's.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import coverage
from coverage.sqldata import CoverageData

from tests.support.tree import ROOT
from tools.mutation.context import FOLDER, NAME
from tools.mutation.trial import SUITES, Suite

PRODUCT = ("bumpgate", "kernels", "launch", "model")
# Of a line, this many tests are kept, the fastest ones; those that run first take at most MOST_SECONDS together.
TESTS_OF_A_LINE = 30
MOST_SECONDS = 40.0
SETTINGS = """[run]
parallel = true
data_file = {folder}/data
context = ${{{name}-}}
source_dirs =
    {sources}
sigterm = true
"""


@dataclass(frozen=True)
class Covered:
    """seconds: test id -> its duration, of tests that passed. lines: path -> line -> ids of the fastest tests that
    execute it. files: path -> line -> all test files with such a test.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    lines: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)

    def fastest(self, path: str, lines: Iterable[int], suite: Suite) -> list[str]:
        """Return the fastest tests of a suite that execute one of the lines: at least one, and within MOST_SECONDS."""
        known = self.lines.get(path, {})
        found = {test for n in lines for test in known.get(str(n), ()) if suite.has(test)}
        chosen: list[str] = []
        total = 0.0
        for test in sorted(found, key=lambda test: (self.seconds[test], test)):
            total += self.seconds[test]
            if chosen and total > MOST_SECONDS:
                break
            chosen.append(test)
        return chosen

    def test_files(self, path: str, lines: Iterable[int], suite: Suite) -> set[str]:
        """Return the files of a suite with a test that executes one of the lines."""
        known = self.files.get(path, {})
        return {file for n in lines for file in known.get(str(n), ()) if suite.has(file)}


def load(paths: Iterable[Path]) -> Covered | None:
    """Read outputs of this module, of different suites, as one; None without any."""
    read = [Covered(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    if not read:
        return None
    seconds = {test: s for each in read for test, s in each.seconds.items()}
    return Covered(seconds, _merged(each.lines for each in read), _merged(each.files for each in read))


def _merged(parts: Iterable[Mapping[str, Mapping[str, list[str]]]]) -> dict[str, dict[str, list[str]]]:
    merged: dict[str, dict[str, list[str]]] = {}
    for part in parts:
        for path, lines in part.items():
            for n, names in lines.items():
                merged.setdefault(path, {}).setdefault(n, []).extend(names)
    return merged


def lines_of(source: str, line: int) -> range:
    """Return the lines whose execution shows that the code at `line` runs: those of its innermost statement.

    Of a compound statement, those before its body; of a function's head (defaults, decorators), those of its body.
    """
    found: ast.stmt | None = None
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and _first(node) <= line <= (node.end_lineno or node.lineno):
            found = node if found is None or _first(node) >= _first(found) else found
    if found is None:
        return range(line, line + 1)
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return range(found.body[0].lineno, (found.end_lineno or line) + 1)
    body = getattr(found, "body", None)
    return range(found.lineno, body[0].lineno if body else (found.end_lineno or line) + 1)


def uses_of(source: str, line: int) -> list[int]:
    """Return the lines in functions that read the constant or field assigned at `line`; none if it assigns neither.

    Every test that imports the module executes the assignment; those that execute its uses can notice a change.
    """
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or id(node) in inside:
            continue
        if node.lineno <= line <= (node.end_lineno or node.lineno):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    found = set()
    for function in functions:
        for node in ast.walk(function):
            name = getattr(node, "id", None) or getattr(node, "attr", None)
            if name in names and isinstance(getattr(node, "ctx", None), ast.Load):
                found |= set(lines_of(source, node.lineno))
    return sorted(found)


def _first(node: ast.stmt) -> int:
    return min((d.lineno for d in getattr(node, "decorator_list", ())), default=node.lineno)


def measure(
    arguments: list[str], env_vars: Mapping[str, str], seconds: float | None = None
) -> tuple[int, Covered]:
    """Run pytest under coverage; return its exit code and what it covered. seconds: interrupt it after so long."""
    with tempfile.TemporaryDirectory(prefix="covered-") as place:
        folder = Path(place)
        (folder / "sitecustomize.py").write_text("import coverage\n\ncoverage.process_startup()\n")
        settings = folder / "coveragerc"
        sources = "\n    ".join(str(ROOT / name) for name in PRODUCT)
        settings.write_text(SETTINGS.format(folder=folder, name=NAME, sources=sources))
        paths = (str(folder), str(ROOT), os.environ.get("PYTHONPATH"))
        variables = {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "COVERAGE_PROCESS_START": str(settings),
            FOLDER: str(folder),
        }
        command = [sys.executable, "-m", "pytest", "-p", "tools.mutation.context", *arguments]
        clean = {n: v for n, v in os.environ.items() if not n.startswith(("PYTEST_", "BUMPGATE_"))}
        with subprocess.Popen(command, cwd=ROOT, env={**clean, **env_vars, **variables}) as run:
            try:
                code = run.wait(seconds)
            except subprocess.TimeoutExpired:
                run.send_signal(signal.SIGINT)
                code = run.wait()
        took: dict[str, float] = {}
        for path in folder.glob("tests-*.jsonl"):
            took.update(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        return code, _covered(folder, took)


def _covered(folder: Path, seconds: Mapping[str, float]) -> Covered:
    combined = coverage.Coverage(data_file=str(folder / "combined"), config_file=False)
    combined.combine([str(path) for path in folder.glob("data.*")], strict=False)
    data: CoverageData = combined.get_data()
    lines: dict[str, dict[str, list[str]]] = {}
    files: dict[str, dict[str, list[str]]] = {}
    for full in data.measured_files():
        path = os.path.relpath(full, ROOT)
        for n, contexts in data.contexts_by_lineno(full).items():
            if tests := sorted({c for c in contexts if c in seconds}, key=lambda c: (seconds[c], c)):
                lines.setdefault(path, {})[str(n)] = tests[:TESTS_OF_A_LINE]
                files.setdefault(path, {})[str(n)] = sorted({test.split("::")[0] for test in tests})
    return Covered(dict(seconds), lines, files)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutation.covered", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--suite", choices=SUITES, required=True, help="which tests run, and how")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--workers", default="2", help="pytest's -n (default 2)")
    parser.add_argument(
        "--seconds", type=float, help="interrupt the tests after so long, and keep what they covered"
    )
    parser.add_argument("tests", nargs="*", help="test files (default: the whole suite)")
    options = parser.parse_args(arguments)
    suite = SUITES[options.suite]
    code, found = measure(
        [*suite.run.arguments, "-n", options.workers, *(options.tests or [suite.folder])],
        suite.run.env_vars,
        options.seconds,
    )
    options.out.write_text(json.dumps(asdict(found), separators=(",", ":")), encoding="utf-8")
    lines = sum(map(len, found.lines.values()))
    print(f"wrote {options.out}: {len(found.seconds)} tests, {lines} lines of {len(found.lines)} files")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
