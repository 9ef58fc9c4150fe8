"""Candidates of a bisect: the versions of an index between two endpoints, or prepared environments in a folder."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path

from packaging.version import Version

from bumpgate.core.errors import BumpgateError
from bumpgate.env.build import Environment, NotInstallable
from bumpgate.env.request import Request
from bumpgate.env.versions import FoundVersion, missing_days
from bumpgate.process.child import ChildFault, Interpreter
from bumpgate.process.runner import IMPORT_SECONDS, child_environment

DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
INSTALLED = """
import importlib.metadata, json, re
found = reversed([*importlib.metadata.distributions()])
print(json.dumps({re.sub("[-_.]+", "-", d.metadata["Name"]).lower(): d.version for d in found}))
"""


class RangeError(BumpgateError):
    """Endpoints that do not span a searchable range. One line: the reason, and what to name instead."""


@dataclass(frozen=True)
class Range:
    """Versions from the early endpoint to the late one. yanked: those left out. missing: days without a build."""

    package: str
    versions: tuple[str, ...]
    good: str
    bad: str
    dates: Mapping[str, date]
    yanked: tuple[str, ...] = ()
    missing: int = 0

    def summary(self, about: int) -> str:
        """`torch: 17 versions between 2.9.0 (good) and 2.13.0 (bad), about 9 probes`; about: the number of probes."""
        first, *inside, last = self.versions
        states = ("good", "bad") if self.good == first else ("bad", "good")
        ends = " and ".join(f"{self.label(v)} ({s})" for v, s in zip((first, last), states))
        text = f"{self.package}: {len(inside)} version{'s' * (len(inside) != 1)} between {ends},"
        text += f" about {about} probes if all install and none misreads"
        left_out = [f"{len(self.yanked)} yanked ({', '.join(self.yanked)})"] if self.yanked else []
        left_out += [f"{self.missing} day{'s' * (self.missing != 1)} without a build"] if self.missing else []
        return f"{text}; left out: {', '.join(left_out)}" if left_out else text

    def label(self, version: str) -> str:
        """Return the version with its build date, if that is known and not part of the version."""
        day = self.dates.get(version)
        return f"{version} of {day}" if day and f"{day:%Y%m%d}" not in version else version


def needs_prereleases(*ends: str) -> bool:
    """Return whether the range includes prereleases: a date means nightlies, two releases mean releases only."""
    return any(DATE.fullmatch(end) or _version(end).is_prerelease for end in ends)


def between(
    package: str, found: Sequence[FoundVersion], good: str, bad: str, *, find_fix: bool = False
) -> Range:
    """Return the range between --good and --bad. found: all versions in order, as `versions.versions` returns them.

    A date as the earlier endpoint is the last build on or before that day; as the later one, the first build on or
    after it. Raises RangeError if an endpoint does not exist, if both are the same or in the wrong order, or if the
    order or the variant of the builds between them is unknown.
    """
    early, late = (bad, good) if find_fix else (good, bad)
    if any(DATE.fullmatch(end) for end in (early, late)) and not any(f.date for f in found):
        why = f"no version here has a date: name versions, such as --good {found[0].version}"
        raise RangeError(f"{package}: {why}")
    listed = _of_variant(found, early, late)
    first, last = _resolve(package, listed, early, later=False), _resolve(package, listed, late, later=True)
    if first == last:
        raise RangeError(f"--good {good} and --bad {bad} are one version, {package} {listed[first].version}")
    if first > last:
        order, other = "before", "--find-fix finds the first good one"
        if find_fix:
            order, other = "after", "drop --find-fix to find the first bad one"
        raise RangeError(f"good {good} does not come {order} bad {bad}: swap them, or {other}")
    inside = listed[first : last + 1]
    kept = [f for f in inside if f.yanked is None or f in (inside[0], inside[-1])]
    _check_order(package, kept)
    names = [f.version for f in kept]
    ends = (names[-1], names[0]) if find_fix else (names[0], names[-1])
    nightly = any(Version(v).is_devrelease for v in names)
    return Range(
        package,
        tuple(names),
        *ends,
        dates={f.version: f.date for f in kept if f.date},
        yanked=tuple(f.version for f in inside if f not in kept),
        missing=len(missing_days(kept)) if nightly else 0,
    )


def _version(text: str) -> Version:
    try:
        return Version(text)
    except ValueError:
        why = "is neither a version such as 2.13.0 nor a date such as 2026-10-01"
        raise RangeError(f"{text!r} {why}") from None


def _of_variant(found: Sequence[FoundVersion], *ends: str) -> list[FoundVersion]:
    """Drop other variants ("cpu", "cu126") of versions that have a build of the one that the endpoints name.

    Without a named variant, the build without a suffix is kept. If an endpoint is a build by commit, such as
    3.6.0+git1111111, such builds are kept, also of a version that is released. Raises RangeError for two variants.
    """
    named = {_version(end).local or "" for end in ends if not DATE.fullmatch(end)} - {""}
    variants = sorted(local for local in named if not local.startswith("git"))
    if len(variants) > 1:
        raise RangeError(f"the endpoints are of two variants, {' and '.join(variants)}: name both of one")
    variant = variants[0] if variants else None
    by_commit = len(named) > len(variants)
    plain = {Version(f.version).public for f in found if Version(f.version).local == variant}
    return [
        f
        for f in found
        if Version(f.version).local == variant
        or (by_commit and _is_by_commit(f))
        or (Version(f.version).public not in plain and (not variant or not Version(f.version).local))
    ]


def _is_by_commit(found: FoundVersion) -> bool:
    return (Version(found.version).local or "").startswith("git")


def _resolve(package: str, found: Sequence[FoundVersion], end: str, *, later: bool) -> int:
    """Return the index of the version that an endpoint names."""
    if DATE.fullmatch(end):
        return _on(package, found, end, later=later)
    target, listed = _version(end), [Version(f.version) for f in found]
    matches = [i for i, version in enumerate(listed) if version == target]
    if not matches and not target.local:
        matches = [i for i, version in enumerate(listed) if version.public == target.public]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise RangeError(f"{package} {end} comes as {', '.join(found[i].version for i in matches)}: name one")
    older = [f.version for f, version in zip(found, listed) if version < target][-1:]
    newer = [f.version for f, version in zip(found, listed) if version > target][:1]
    near = ", ".join(older + newer)
    raise RangeError(f"{package} {end} is not among the {len(found)} versions here; next to it: {near}")


def _on(package: str, found: Sequence[FoundVersion], end: str, *, later: bool) -> int:
    try:
        day = date.fromisoformat(end)
    except ValueError:
        raise RangeError(f"{end!r} is not a valid date") from None
    every = [(f.date, i) for i, f in enumerate(found) if f.date]
    # A date names no build, so a yanked one is left out, as inside the range.
    dated = [(d, i) for d, i in every if found[i].yanked is None] or every
    fitting = [(d, i) for d, i in dated if (d >= day if later else d <= day)]
    if fitting:
        return (min if later else max)(fitting)[1]
    edge, i = (max if later else min)(dated)
    side, which = ("later", "newest") if later else ("earlier", "oldest")
    raise RangeError(f"{package}: no build of {day} or {side}; the {which} is {found[i].version} of {edge}")


def _check_order(package: str, found: Sequence[FoundVersion]) -> None:
    if loose := next((f for f in found if "is not known" in f.note), None):
        raise RangeError(f"{package} {loose.version}: {loose.note}: name an index that gives upload times")
    # Builds by commit are ordered by date; variants of one version have no order.
    variants: dict[str, list[str]] = defaultdict(list)
    for f in found:
        if not _is_by_commit(f):
            variants[Version(f.version).public].append(f.version)
    if names := next((names for names in variants.values() if len(names) > 1), None):
        raise RangeError(f"{package} comes in variants ({', '.join(names)}): name one in both endpoints")


class PreparedError(BumpgateError):
    """A folder without a usable environment, or an interpreter that does not run. One line."""


@dataclass(frozen=True)
class Prepared:
    """The environments FOLDER/NAME, each with its bin/python.

    Of several with the same version of `package`, the first by name is the candidate; the others are mixtures, for
    attribution alone.
    """

    folder: Path
    package: str

    @cached_property
    def environments(self) -> tuple[Environment, ...]:
        """All environments that have the package, sorted by name. Raises PreparedError if there is none."""
        out = []
        for python in sorted(self.folder.absolute().glob("*/bin/python")):
            name = python.parent.parent.name
            child = Interpreter(python, python.parent, child_environment(python, None))
            try:
                packages = child.json("-I", "-c", INSTALLED, timeout=IMPORT_SECONDS)
            except ChildFault as fault:
                raise PreparedError(f"--environments: {python} does not run: {fault}") from None
            if self.package in packages:
                out.append(Environment(name, python, name, packages))
        if not out:
            why = f"no NAME/bin/python in it has {self.package} installed"
            raise PreparedError(f"--environments {self.folder}: {why}")
        return tuple(out)

    def versions(self) -> list[FoundVersion]:
        found = {e.packages[self.package] for e in self.environments}
        return [FoundVersion(version, None, None, "") for version in sorted(found, key=Version)]

    def request(self, version: str) -> Request:
        return Request((f"{self.package}==={version}",), name=f"{self.package} {version}")

    def __call__(self, request: Request) -> Environment:
        """Return the first environment with the requested packages; of a mixture, it has these and no others.

        Raises NotInstallable if there is none.
        """
        packages = dict(requirement.split("===") for requirement in request.requirements)
        for environment in self.environments:
            exact = request.dependencies or len(packages) == len(environment.packages)
            if exact and packages.items() <= environment.packages.items():
                return environment
        raise NotInstallable(f"{request.title}: no environment of {self.folder} has it", self.folder, "")

    def together(self, good: Environment, bad: Environment) -> list[set[str]]:
        """Group the packages that no prepared environment separates: each one has all of a group from the same side."""
        sides = good.packages, bad.packages

        def is_mixture(packages: Mapping[str, str]) -> bool:
            names = packages.keys() | sides[0].keys() | sides[1].keys()
            return all(packages.get(name) in [side.get(name) for side in sides] for name in names)

        mixed = [e.packages for e in self.environments if is_mixture(e.packages)]
        groups: dict[tuple[bool, ...], set[str]] = defaultdict(set)
        for name in good.packages.keys() | bad.packages.keys():
            groups[tuple(packages.get(name) == bad.packages.get(name) for packages in mixed)].add(name)
        return list(groups.values())
