"""`--affected BASE`: run only the tests that depend on the files changed since a commit.

The dependencies come from the imports and the file names in the sources.

A Python file depends on

* the modules that it imports, and the `__init__.py` of their packages;
* each tracked file that a string in it names: a module (`"suites.cache.restart"`), a path or a file name
  (`"lane.toml"`), a pattern (`glob("*/op.py")`), or an f-string (`f"kernels.{op}.op"`);
* the conftest.py and `__init__.py` files of its folder and of those above it.

An import is looked for in each folder that is no package, such as `src` or the folder of the test.

Every test depends on a file that no test file depends on in these ways, on pyproject.toml, bumpgate.toml, a
lane.toml, the configuration of pytest and the baselines. For bumpgate itself only the imports count.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import translate
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from bumpgate.core.errors import BumpgateError, one_line

# Files that no test of a lane can read, unless one names them.
PROSE = re.compile(r"(^|/)(LICENSE|\.gitignore|CITATION\.cff)$|\.(md|rst)$")
EVERY = re.compile(r"(pyproject|bumpgate)\.toml$|lanes/[^/]+/lane\.toml$|baselines/[^/]+$")
# File names that each package has: a string with one of them does not identify a file.
COMMON = re.compile(r"__init__\.py$|conftest\.py$|test_\*\.py$")
# This package; strings in it name files of the user's repository, not of its own.
OWN = "bumpgate/"
# Strings shorter than this are not taken for the name of a file or a module.
SHORTEST = 4

Graph = Mapping[str, frozenset[str]]


class AffectedError(BumpgateError):
    """The commit is unknown, or this is not a git repository."""


def changed(root: Path, base: str) -> set[str]:
    """Return the paths that differ from the commit `base` in the work tree, new and deleted files included.

    Raises AffectedError if git cannot compare with it, or if it is a range, whose end is not the work tree.
    """
    _git(root, "rev-parse", "--git-dir")
    try:
        (commit,) = _git(root, "rev-parse", "--verify", "--end-of-options", f"{base}^{{commit}}")
    except (AffectedError, ValueError):
        raise AffectedError(f"--affected {base}: not one commit; name the commit to compare with") from None
    names = _git(root, "diff", "--name-only", "-z", "--no-renames", commit.strip(), "--")
    return {*names, *_git(root, "ls-files", "-z", "--others", "--exclude-standard")}


def affected(root: Path, tests: Iterable[str], paths: Iterable[str]) -> set[str]:
    """Return the test files that depend on one of the changed `paths`; all paths are relative to `root`."""
    tests, graph = set(tests), graph_of(root)
    known = closure(graph, *tests, *filter(_is_test, graph))
    left = {path for path in paths if path in known or not PROSE.search(path)}
    deleted = {path for path in left if not (root / path).exists()}
    own = {path for path in left if _is_test(path) and path not in tests}
    if deleted or any(EVERY.match(path) or path not in known for path in left - own):
        return tests
    return {test for test in tests if left & closure(graph, test)}


def closure(graph: Graph, *paths: str) -> set[str]:
    """Return `paths` and everything that they depend on, directly or not."""
    found, queue = {*paths}, [*paths]
    while queue:
        new = graph.get(queue.pop(), frozenset()) - found
        found |= new
        queue += new
    return found


def graph_of(root: Path) -> Graph:
    """Return path -> the paths that it depends on, of the tracked and new Python files below `root`."""
    files = {*_git(root, "ls-files", "-z"), *_git(root, "ls-files", "-z", "--others", "--exclude-standard")}
    files = {path for path in files if (root / path).is_file()}
    names = _Names(files)
    return {path: names.needs(path, (root / path).read_bytes()) for path in files if path.endswith(".py")}


class _Names:
    """Resolves names in a source file: modules, paths and file names of the repository."""

    def __init__(self, files: set[str]) -> None:
        self.files = files
        self.modules = {_module(path): path for path in files if path.endswith(".py")}
        self.importable: dict[str, set[str]] = {}
        for path in files:
            for name in self._imported_as(path) if path.endswith(".py") else ():
                self.importable.setdefault(name, set()).add(path)
        self.by_name: dict[str, set[str]] = {}
        for path in files:
            self.by_name.setdefault(PurePosixPath(path).name, set()).add(path)

    def needs(self, path: str, source: bytes) -> frozenset[str]:
        try:
            tree = ast.parse(source)
        except SyntaxError:  # it is not loaded, and whatever loads it depends on the file itself
            return frozenset()
        folders, around = PurePosixPath(path).parents, ("__init__.py", "conftest.py")
        found = {str(folder / name) for folder in folders for name in around} & self.files
        package = _module(path) if path.endswith("__init__.py") else _module(path).rpartition(".")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found |= self.module(alias.name)
            elif isinstance(node, ast.ImportFrom):
                parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*parts, *([node.module] if node.module else [])])
                found |= self.module(base)
                for alias in node.names:
                    found |= self.module(f"{base}.{alias.name}")
            elif path.startswith(OWN):
                continue
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= self.text(node.value)
            elif isinstance(node, ast.JoinedStr):
                fixed = (
                    re.escape(str(v.value)) if isinstance(v, ast.Constant) else ".+" for v in node.values
                )
                found |= self.pattern("".join(fixed))
        return frozenset(found - {path})

    def _imported_as(self, path: str) -> Iterator[str]:
        """Yield the names of a module from the root and from each folder above it that is no package."""
        yield _module(path)
        for folder in PurePosixPath(path).parents:
            if str(folder) != "." and f"{folder}/__init__.py" not in self.files:
                yield _module(str(PurePosixPath(path).relative_to(folder)))

    def module(self, name: str) -> set[str]:
        """Return the files of a module and of the packages that contain it."""
        parts = name.split(".")
        around = (self.importable.get(".".join(parts[:n]), set()) for n in range(1, len(parts) + 1))
        return {path for paths in around for path in paths}

    def text(self, text: str) -> set[str]:
        """Return the files that a string names: a module, or paths and file names, with wildcards or not."""
        if text in self.modules or ("." in text and text in self.importable):
            return self.module(text)
        found: set[str] = set()
        for word in text.split() if len(text) < 200 else ():
            if COMMON.search(word):
                continue
            if "*" in word and PurePosixPath(word).suffix:
                found |= self.pattern(f"(.*/)?{translate(word)}")
            elif len(word) >= SHORTEST:
                named = self.by_name.get(PurePosixPath(word).name, set())
                found |= {path for path in named if f"/{path}".endswith(f"/{word.lstrip('./')}")}
        return found

    def pattern(self, pattern: str) -> set[str]:
        """Return the files whose path or module name matches a pattern that is long enough to identify files."""
        if len(re.sub(r"\W|\.\+", "", pattern)) < SHORTEST - 1:
            return set()
        expression = re.compile(pattern)
        found = {path for path in self.files if expression.fullmatch(path)}
        return found | {path for name, path in self.modules.items() if expression.fullmatch(name)}


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_test(path: str) -> bool:
    return bool(re.search(r"(^|/)test_[^/]*\.py$", path))


def _git(root: Path, *arguments: str) -> Iterator[str]:
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)
    except OSError as error:
        raise AffectedError(f"--affected needs git: {error.strerror}") from None
    if done.returncode:
        raise AffectedError(f"--affected: {one_line(done.stderr.strip() or 'git failed')}")
    return (name for name in done.stdout.split("\0") if name)


class Affected:
    """Deselects the tests that do not depend on the changed files.

    The controller reads the changed files once, before the run may change any, and passes them to the workers.
    """

    def __init__(self, config: pytest.Config, base: str) -> None:
        self.config, self.base = config, base
        worker_input = getattr(config, "workerinput", None)
        try:
            self.paths = set(worker_input["affected"]) if worker_input else changed(config.rootpath, base)
        except BumpgateError as error:
            raise pytest.UsageError(str(error)) from None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["affected"] = sorted(self.paths)

    def pytest_report_header(self) -> str:
        return f"affected: tests that depend on the {len(self.paths)} files changed since {self.base}"

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.config.inipath and _relative(self.config.inipath, self.config.rootpath) in self.paths:
            return  # every test depends on the configuration of pytest
        files = {item.nodeid: _relative(item.path, self.config.rootpath) for item in items}
        try:
            chosen = affected(self.config.rootpath, files.values(), self.paths)
        except BumpgateError as error:
            raise pytest.UsageError(str(error)) from None
        left_out = [item for item in items if files[item.nodeid] not in chosen]
        items[:] = [item for item in items if files[item.nodeid] in chosen]
        self.config.hook.pytest_deselected(items=left_out)


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
