"""Commits of a local clone: candidates of a bisect commit by commit, and facts about the culprit."""

from __future__ import annotations

import re
import subprocess
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bumpgate.bisect.candidates import Range
from bumpgate.core.errors import BumpgateError, one_line

PULL = re.compile(r"\(#(\d+)\)\s*$")
GITHUB = re.compile(r"(?:https://|ssh://git@|git@)github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?")
FORMAT = "%H%x00%h%x00%as%x00%P%x00%s"
DIGITS = 12


# Exit code of `git rev-parse --verify --quiet` for a name that the repository does not have.
UNKNOWN_NAME = 1


class CommitError(BumpgateError):
    """A clone, a commit or a range of commits that cannot be used. One line."""

    def __init__(self, text: str, code: int = 0) -> None:
        """code: git's exit code."""
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Commit:
    """hash: 40 digits. short: unique in its clone. day: author date. parents: hashes, of the mainline first."""

    hash: str
    short: str
    day: str
    title: str
    parents: tuple[str, ...] = ()

    @property
    def pull(self) -> int | None:
        """Number of the pull request at the end of the title: `Fix it (#123)`."""
        found = PULL.search(self.title)
        return int(found[1]) if found else None

    def __str__(self) -> str:
        return f"{self.short} {self.day} {self.title}"


def raw(commits: Iterable[Commit]) -> tuple[dict[str, Any], ...]:
    """Return commits in the form of bisect.json."""
    return tuple({"commit": c.hash, "date": c.day, "title": c.title, "pull": c.pull} for c in commits)


@dataclass(frozen=True)
class Clone:
    """A local clone, which is only read. folder: anywhere in its work tree, or a bare repository."""

    folder: Path

    @cached_property
    def github(self) -> str:
        """OWNER/REPOSITORY of its remote origin, or ""."""
        try:
            found = GITHUB.fullmatch(self._git("remote", "get-url", "origin").strip())
        except CommitError:
            return ""
        return found[1] if found else ""

    def commit(self, name: str) -> Commit:
        """Return the commit that a hash, tag or branch names."""
        try:
            found = self._git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        except CommitError as error:
            if error.code != UNKNOWN_NAME:
                raise
            raise CommitError(
                f"{self.folder} has no commit {name!r}: name another, or git -C {self.folder} fetch"
            ) from None
        return self._log("--max-count=1", found.strip())[0]

    def log(self, old: Commit, new: Commit) -> list[Commit]:
        """Return the commits of the mainline of `new` that `old` does not contain, oldest first."""
        return self._log("--first-parent", "--reverse", f"{old.hash}..{new.hash}")

    def contains(self, new: Commit, old: Commit) -> bool:
        """Whether `old` is `new` or one of its ancestors."""
        return self.base(new, old) == old.hash

    def base(self, one: Commit, other: Commit) -> str:
        """Return the hash of the best common ancestor, or "" without one."""
        try:
            return self._git("merge-base", one.hash, other.hash).strip()
        except CommitError:
            return ""

    def file(self, commit: Commit, path: str) -> str:
        """Return the text of a file in a commit, "" if it has none."""
        try:
            return self._git("show", f"{commit.hash}:{path}")
        except CommitError:
            return ""

    def _log(self, *arguments: str) -> list[Commit]:
        printed = self._git("log", f"--format={FORMAT}", f"--abbrev={DIGITS}", *arguments, "--")
        parts = [line.split("\0") for line in printed.splitlines()]
        return [Commit(full, short, day, title, tuple(p.split())) for full, short, day, p, title in parts]

    def _git(self, *arguments: str) -> str:
        try:
            done = subprocess.run(
                ["git", "-C", str(self.folder), *arguments],
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
                check=False,
            )
        except OSError as error:
            raise CommitError(f"git cannot be run: {error.strerror}") from None
        if done.returncode:
            if not self.folder.is_dir():
                raise CommitError(f"--repository {self.folder}: the folder does not exist")
            why = one_line(done.stderr or f"git {arguments[0]} failed", 200)
            raise CommitError(f"{self.folder}: {why}", done.returncode)
        return done.stdout


def between(clone: Clone, package: str, good: str, bad: str, *, find_fix: bool = False) -> Range:
    """Return the commits of the mainline (first parents) between two, as the candidates of a search.

    A merge is one candidate: the commits that it brought in are not. Raises CommitError if the earlier end is not a
    commit of the later one's mainline.
    """
    early, late = map(clone.commit, (bad, good) if find_fix else (good, bad))
    names = ("--bad", "--good") if find_fix else ("--good", "--bad")
    if early.hash == late.hash:
        raise CommitError(f"--good {good} and --bad {bad} are one commit, {early}")
    if not clone.contains(late, early):
        if clone.contains(early, late):
            other = (
                "drop --find-fix to find the first bad one"
                if find_fix
                else "--find-fix finds the first good one"
            )
            raise CommitError(f"{early.short} comes after {late.short}: swap them, or {other}")
        base = clone.base(late, early)
        instead = f"name {names[0]} {base[:DIGITS]}, their merge base" if base else "they share no history"
        raise CommitError(f"{names[0]} {early.short} is not an ancestor of {late.short}: {instead}")
    line = clone.log(early, late)
    if line[0].parents[0] != early.hash:
        merge = line[bisect_left(line, True, key=lambda c: clone.contains(c, early))]
        raise CommitError(
            f"{names[0]} {early.short} is on a branch that {merge.short} merged: name"
            f" {names[0]} {merge.short}, or a commit of the mainline before it"
        )
    labels = tuple(c.short for c in (early, *line))
    ends = (labels[-1], labels[0]) if find_fix else (labels[0], labels[-1])
    return Range(package, labels, *ends, {}, unit="commit")


def column(title: str, lines: Iterable[object]) -> list[str]:
    """Return output lines of which the first one has the title."""
    return [f"{'' if i else title:11} {line}" for i, line in enumerate(lines)]
