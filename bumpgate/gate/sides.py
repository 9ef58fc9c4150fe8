"""The two environments of a gate: their interpreters, compile caches and names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import canonicalize_name

from bumpgate.process.tree_digest import Binding

TITLES = {"adopted": "adopted", "candidate": "candidate", "anchor": "anchor"}
# Rounds that a timed test keeps per process. Enough for a median: the remaining error is per-process bias.
ROUNDS = 15
# Variables that name the folder of a compile cache.
CACHE = re.compile(r"\w+_CACHE_DIR")
# Above pytest's own timeout per test, which names the test; this one only catches what that cannot stop.
TEST_SECONDS = 660


def side_name(title: str, candidate: str, packages: Mapping[str, str]) -> str:
    """Return the name of a side: the package that the candidate names, else torch, with this side's version."""
    named = re.match(r"([A-Za-z0-9][\w.-]*)\s*[=<>~!]", candidate)
    package = str(canonicalize_name(named[1])) if named else "torch"
    package = package if package in packages else "torch"
    return f"{package} {packages[package]} ({title})" if package in packages else title


@dataclass(frozen=True)
class EnvSpec:
    """Interpreter of a side. variables: env_vars of its compile caches. more: independent copies, for timed tests.

    failure: why the interpreter is missing.
    command: rebuilds the environment, or investigates why it could not be built. lock: its resolved lock.
    wheels: of an interpreter without a lock, the digest of the files of each kernel wheel.
    """

    python: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""
    command: str = ""
    lock: Path | None = None
    more: tuple[Mapping[str, str], ...] = ()
    wheels: Mapping[str, str] = field(default_factory=dict)

    @property
    def cache_folders(self) -> dict[str, str]:
        """Return the variables that name the folders of its first pair of compile caches."""
        return {name: folder for name, folder in self.variables.items() if CACHE.fullmatch(name)}

    def empty_caches(self, folder: Path) -> dict[str, str]:
        """Return the env_vars of empty compile caches in a folder."""
        return {name: str(folder / name) for name in self.cache_folders}

    def mark_filled(self, pair: int, tree: Binding | None) -> None:
        """Note next to a pair of compile caches that this work tree has filled them."""
        mark = self._mark(pair)
        if mark.parent.is_dir():
            mark.write_text(tree.tree if tree else "", encoding="utf-8")

    def is_filled(self, pair: int, tree: Binding | None) -> bool:
        """Return whether this work tree has filled them: not if a gate is resumed on another machine."""
        mark = self._mark(pair)
        return mark.is_file() and mark.read_text(encoding="utf-8") == (tree.tree if tree else "")

    def _mark(self, pair: int) -> Path:
        return (
            Path(self.caches(pair).get("TORCHINDUCTOR_CACHE_DIR", "/nonexistent/inductor")).parent / "filled"
        )

    def caches(self, pair: int) -> Mapping[str, str]:
        """Return the env_vars of one pair of compile caches."""
        return (self.variables, *self.more)[pair]
