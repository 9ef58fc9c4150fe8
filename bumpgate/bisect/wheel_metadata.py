"""What installed wheels say about themselves: CUDA libraries that they pin, commit, source repository."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from bumpgate.env.build import Environment

COMMIT = re.compile(
    r"""^git_(?:version|revision)\s*(?::[^=\n]*)?=\s*['"]([0-9a-f]{7,40})['"]""", re.MULTILINE
)
SOURCE = re.compile(r"https://(?:github|gitlab)\.com/[\w.-]+/[\w.-]+")
# Libraries that a package is linked against; matched by name, since their wheels hold no other information.
LINKED = re.compile(r"nvidia-.*|cuda-.*")


def together(*environments: Environment) -> list[set[str]]:
    """Group each package with the CUDA libraries that it pins, directly or through cuda-toolkit."""
    groups: dict[str, set[str]] = {}
    for environment in environments:
        for name in environment.packages:
            if linked := _linked(environment, name):
                groups.setdefault(name, {name}).update(linked)
    return list(groups.values())


def pinned(packages: Collection[str], *environments: Environment) -> set[str]:
    """Return the CUDA libraries among `packages` that another of the packages pins: they changed as one part."""
    pinning = [name for name in packages if not LINKED.fullmatch(name)]
    return {found for e in environments for name in pinning for found in _linked(e, name)} & set(packages)


def _linked(environment: Environment, package: str) -> set[str]:
    """Return the CUDA libraries that a package pins (==2.1, ==2.1.*), and those they require in turn, with extras."""
    found: set[tuple[str, frozenset[str]]] = set()
    pending = [(canonicalize_name(package), frozenset[str]())]
    while pending:
        name, extras = pending.pop()
        for requirement in _requirements(environment, name, extras):
            pinned = any(s.operator in ("==", "===") for s in requirement.specifier)
            library = canonicalize_name(requirement.name), frozenset(requirement.extras)
            # A library required by a library belongs to its group even if it is not pinned.
            follow = LINKED.fullmatch(library[0]) and (pinned or LINKED.fullmatch(name))
            if follow and library not in found:
                found.add(library)
                pending.append(library)
    return {name for name, _ in found}


def commit(environment: Environment, package: str) -> str:
    """Return the commit that a wheel was built from (version.py, else the local part of its version), or ""."""
    for site in _sites(environment):
        path = site / package.replace("-", "_") / "version.py"
        if path.is_file() and (found := COMMIT.search(path.read_text(encoding="utf-8", errors="replace"))):
            return found[1]
    local = Version(environment.packages.get(package, "0")).local or ""
    named = re.search(r"(?:^|\.)git([0-9a-f]{7,40})", local)
    return named[1] if named else ""


def source(environment: Environment, package: str) -> str:
    """Return the repository URL in a package's metadata, without a trailing slash, or ""."""
    info = _metadata(environment, package)
    if info is None:
        return ""
    urls = [*(info.get_all("Project-URL") or ()), *(info.get_all("Home-page") or ())]
    found = next((m for url in urls if (m := SOURCE.search(url))), None)
    return found[0].removesuffix(".git") if found else ""


def compare_link(old: Environment, new: Environment, package: str) -> str:
    """Return the URL that compares the two wheels' commits, or "" if the wheels do not name both."""
    where = source(new, package) or source(old, package)
    commits = commit(old, package), commit(new, package)
    if not (where and all(commits)) or commits[0] == commits[1]:
        return ""
    return f"{where}/compare/{commits[0]}...{commits[1]}"


def _requirements(environment: Environment, package: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """Yield the requirements of a package with these extras, on this platform."""
    found = _metadata(environment, package)
    for text in (found.get_all("Requires-Dist") or ()) if found else ():
        try:
            requirement = Requirement(text)
        except ValueError:
            continue
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (extras or {""})):
            yield requirement


def _metadata(environment: Environment, package: str) -> metadata.PackageMetadata | None:
    places = [str(site) for site in _sites(environment)]
    found = next(iter(metadata.distributions(name=package, path=places)), None)
    return found.metadata if found else None


def _sites(environment: Environment) -> list[Path]:
    return sorted(environment.python.parent.parent.glob("lib/python*/site-packages"))
