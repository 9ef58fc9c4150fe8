"""What a bisect needs to know of two environments to name the package at fault: pins, commits, where the source is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from bumpgate.environments.build import Environment
from bumpgate.environments.request import Request

COMMIT = re.compile(
    r"""^git_(?:version|revision)\s*(?::[^=\n]*)?=\s*['"]([0-9a-f]{7,40})['"]""", re.MULTILINE
)
SOURCE = re.compile(r"https://(?:github|gitlab)\.com/[\w.-]+/[\w.-]+")
# Libraries that a package is linked against; by name, for their wheels say no more.
LINKED = re.compile(r"nvidia-.*|cuda-.*")


def mixture_request(packages: Mapping[str, str], like: Request) -> Request:
    """Exactly these packages, from where `like` takes its own. Their pins contradict each other: that is the point."""
    return Request(
        tuple(f"{name}==={version}" for name, version in sorted(packages.items())),
        python=like.python,
        index=like.index,
        find_links=like.find_links,
        offline=like.offline,
        dependencies=False,
        script=like.script,
        only_wheels=like.only_wheels,
        name="a mixture",
    )


def together(*environments: Environment) -> list[set[str]]:
    """Each package with the CUDA libraries that it pins, directly or through cuda-toolkit."""
    groups: dict[str, set[str]] = {}
    for environment in environments:
        for name in environment.packages:
            if linked := _linked(environment, name):
                groups.setdefault(name, {name}).update(linked)
    return list(groups.values())


def _linked(environment: Environment, package: str) -> set[str]:
    """CUDA libraries that a package pins (==2.1, ==2.1.*), and those that they require in turn, with their extras."""
    found: set[tuple[str, frozenset[str]]] = set()
    pending = [(canonicalize_name(package), frozenset[str]())]
    while pending:
        name, extras = pending.pop()
        for requirement in _requirements(environment, name, extras):
            pinned = any(s.operator in ("==", "===") for s in requirement.specifier)
            wanted = canonicalize_name(requirement.name), frozenset(requirement.extras)
            # A library of a library moves with it, however loosely it is required.
            follow = LINKED.fullmatch(wanted[0]) and (pinned or LINKED.fullmatch(name))
            if follow and wanted not in found:
                found.add(wanted)
                pending.append(wanted)
    return {name for name, _ in found}


def commit(environment: Environment, package: str) -> str:
    """The commit that a wheel was built from: its version.py, else the local part of its version; "" if neither."""
    for site in _sites(environment):
        path = site / package.replace("-", "_") / "version.py"
        if path.is_file() and (found := COMMIT.search(path.read_text(encoding="utf-8", errors="replace"))):
            return found[1]
    local = Version(environment.packages.get(package, "0")).local or ""
    named = re.search(r"(?:^|\.)git([0-9a-f]{7,40})", local)
    return named[1] if named else ""


def source(environment: Environment, package: str) -> str:
    """The repository that a package's own metadata names, without a slash at its end; "" where it names none."""
    told = _metadata(environment, package)
    if told is None:
        return ""
    urls = [*(told.get_all("Project-URL") or ()), *(told.get_all("Home-page") or ())]
    found = next((m for url in urls if (m := SOURCE.search(url))), None)
    return found[0].removesuffix(".git") if found else ""


def compare_link(old: Environment, new: Environment, package: str) -> str:
    """Of the two commits, made up from the wheels' own words; "" where they do not say enough."""
    where = source(new, package) or source(old, package)
    commits = commit(old, package), commit(new, package)
    if not (where and all(commits)) or commits[0] == commits[1]:
        return ""
    return f"{where}/compare/{commits[0]}...{commits[1]}"


def is_nightly(version: str | None) -> bool:
    """Whether its commit is one of a branch of nightlies, whose message names the commit of main."""
    return version is not None and Version(version).is_devrelease


def _requirements(environment: Environment, package: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """What a package requires with these extras, on this platform."""
    found = _metadata(environment, package)
    for text in (found.get_all("Requires-Dist") or ()) if found else ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
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
