"""Commits between two builds: titles and pull requests, from local clones or GitHub's API.

A wheel names its commit (torch.version.git_version). That of a nightly is a commit of the nightly branch, whose title
names the commit of main: `2026-11-02 nightly release (1f2e3d4c)`.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bumpgate.bisect import blame
from bumpgate.bisect.answer import Answer
from bumpgate.bisect.commits import DIGITS, Clone, Commit, CommitError, column, raw
from bumpgate.env.build import Environment
from bumpgate.process.web import GITHUB, WebError, attempts, http, secure

if TYPE_CHECKING:
    import requests

NIGHTLY = re.compile(r"nightly release \(([0-9a-f]{7,40})\)")
HASH = re.compile(r"[0-9a-f]{7,40}")
TRITON = "triton-lang/triton"
TRITON_WHEELS = ("triton", "pytorch-triton")
TRITON_PIN, LLVM_PIN = ".ci/docker/ci_commit_pins/triton.txt", "cmake/llvm-hash.txt"
SHOWN = 20
PAGES, PER_PAGE = 10, 100


class Source(Protocol):
    """Where commits are looked up: a clone, or a repository on GitHub's API. Raises CommitError (one line)."""

    @property
    def github(self) -> str: ...

    def commit(self, name: str) -> Commit: ...

    def log(self, old: Commit, new: Commit) -> list[Commit]: ...

    def file(self, commit: Commit, path: str) -> str: ...


@dataclass(frozen=True)
class GitHubApi:
    """One repository on GitHub's REST API. base: https://api.github.com; github: OWNER/REPOSITORY.

    A token in the environment (BUMPGATE_GITHUB_TOKEN, GITHUB_TOKEN) raises the limit of requests.
    """

    base: str
    github: str

    def commit(self, name: str) -> Commit:
        return _commit(self._get(f"commits/{name}"))

    def log(self, old: Commit, new: Commit) -> list[Commit]:
        """Return the commits of a comparison, oldest first; at most PAGES * PER_PAGE."""
        found: list[Commit] = []
        for page in range(1, PAGES + 1):
            answer = self._get(f"compare/{old.hash}...{new.hash}?per_page={PER_PAGE}&page={page}")
            commits = answer.get("commits") if isinstance(answer, dict) else None
            if not isinstance(commits, list):
                raise CommitError("GitHub's API: the answer is not a comparison of commits")
            found += map(_commit, commits)
            if len(commits) < PER_PAGE:
                break
        return found

    def file(self, commit: Commit, path: str) -> str:
        try:
            content = self._get(f"contents/{path}?ref={commit.hash}")["content"]
        except (CommitError, KeyError, TypeError):
            return ""
        return base64.b64decode(content).decode(errors="replace")

    def _get(self, path: str) -> Any:
        token = next((os.environ[name] for name in GITHUB if os.environ.get(name)), "").strip()

        def sign(request: requests.PreparedRequest) -> requests.PreparedRequest:
            if token:
                request.headers["Authorization"] = f"Bearer {token}"
            return request

        url = f"{self.base.rstrip('/')}/repos/{self.github}/{path}"
        try:
            return attempts(lambda: http(f"github:{self.github}", "GET", url, None, sign)).json()
        except (WebError, ValueError) as error:
            raise CommitError(str(error)) from None


def _commit(answer: Any) -> Commit:
    try:
        content, parents = answer["commit"], tuple(p["sha"] for p in answer["parents"])
        day, title = content["author"]["date"][:10], content["message"].partition("\n")[0]
        return Commit(answer["sha"], answer["sha"][:DIGITS], day, title, parents)
    except (KeyError, TypeError):
        raise CommitError("GitHub's API: the answer is not a commit") from None


def check(repositories: Sequence[str]) -> None:
    """Raise BumpgateError, one line, on a repository that is neither a clone nor an https URL."""
    for place in repositories:
        if "://" in place:
            secure(place, f"--repository {place.partition('://')[0]}://...")
        else:
            Clone(Path(place)).commit("HEAD")


def described(
    found: Answer, environments: tuple[Environment, Environment], repositories: Sequence[str]
) -> Answer:
    """Add the commits between two builds to an answer. environments: of the earlier and the later version.

    repositories: folders of clones, URLs of GitHub's API. Without the commits, a line gives the reason.
    """
    first, last = environments
    lines: list[str] = []
    listed: list[Commit] = []
    pins: tuple[str, ...] = ()
    moved = [n for n in TRITON_WHEELS if first.packages.get(n) != last.packages.get(n)]
    packages = [c.name for c in found.blamed] or [found.range.package]
    for name in dict.fromkeys([*packages, *moved]):
        home = (blame.source(last, name) or blame.source(first, name)).removeprefix("https://github.com/")
        ends: tuple[str, ...] = (blame.commit(first, name), blame.commit(last, name))
        if name in TRITON_WHEELS:
            home, ends = home or TRITON, ends if all(ends) else pins
        if not all(ends) or len(ends) < 2:
            if name in packages:
                lines += column("commits", [f"of {name} not listed: its wheels do not name their commits"])
            continue
        if ends[0] == ends[1]:
            continue
        try:
            source, old, new = _source(repositories, home, *ends)
            commits = source.log(old, new)
        except CommitError as error:
            where = "the compare link" if found.links else f"https://github.com/{home}/commits"
            lines += column("commits", [f"of {name} not listed: {error}; see {where}"])
            continue
        listed += commits
        where = f"https://github.com/{home}/compare/{old.short}...{new.short}" if home else name
        more = [f"and {len(commits) - SHOWN} more in bisect.json"] if len(commits) > SHOWN else []
        lines += column("commits", [f"{len(commits)} of {where}", *commits[:SHOWN], *more])
        if moved and name == "torch":
            pins = tuple(source.file(commit, TRITON_PIN).strip() for commit in (old, new))
            lines += _pin("triton pin", pins, TRITON)
        if name in TRITON_WHEELS:
            llvm = tuple(source.file(commit, LLVM_PIN).strip() for commit in (old, new))
            lines += _pin("llvm", llvm, "llvm/llvm-project")
    return replace(found, ranges=tuple(lines), commits=raw(listed))


def _pin(title: str, pins: tuple[str, ...], repository: str) -> Iterator[str]:
    """Yield the line of a pin that moved."""
    if len(set(pins)) == 2 and all(map(HASH.fullmatch, pins)):
        old, new = (pin[:DIGITS] for pin in pins)
        yield from column(title, [f"https://github.com/{repository}/compare/{old}...{new}"])


def _source(repositories: Sequence[str], home: str, *ends: str) -> tuple[Source, Commit, Commit]:
    """Return the first repository that has both commits, and the corresponding commits of main."""
    why = CommitError("name a clone with --repository DIR")
    for place in repositories:
        if "://" in place and not home:
            continue
        source: Source = GitHubApi(place, home) if "://" in place else Clone(Path(place))
        try:
            old, new = (_of_main(source, source.commit(end)) for end in ends)
            return source, old, new
        except CommitError as error:
            why = error
    raise why


def _of_main(source: Source, commit: Commit) -> Commit:
    """Return the commit of main that a commit of the nightly branch names; any other commit itself."""
    named = NIGHTLY.search(commit.title)
    return source.commit(named[1]) if named else commit
