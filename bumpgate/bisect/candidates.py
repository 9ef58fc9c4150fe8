"""Candidates of a bisect: the versions of an index between two endpoints, or prepared environments in a folder."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path

from packaging.version import InvalidVersion, Version

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
    """Range of candidates.

    versions: oldest first, both endpoints included. yanked: versions left out. missing: days without a build.
    """

    package: str
    versions: tuple[str, ...]
    good: str
    bad: str
    dates: Mapping[str, date]
    yanked: tuple[str, ...] = ()
    missing: int = 0

    def summary(self, about: int) -> str:
        """`torch: 17 versions between 2.9.0 (good) and 2.13.0 (bad), about 9 probes`; about: the number of probes."""
        text = f"{self.package}: {len(self.versions) - 2} version{'s' * (len(self.versions) != 3)} between "
        states = ("good", "bad") if self.good == self.versions[0] else ("bad", "good")
        ends = [f"{self.label(v)} ({s})" for v, s in zip((self.versions[0], self.versions[-1]), states)]
        text += f"{' and '.join(ends)}, "
        text += f"about {about} probes if all install and none misreads"
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
        raise RangeError(
            f"{package}: no version here has a date: name versions, such as --good {found[0].version}"
        )
    variant = _variant(early, late)
    listed = _of_variant(found, variant, by_commit=_names_commit(early, late))
    first, last = _resolve(package, listed, early, later=False), _resolve(package, listed, late, later=True)
    if first == last:
        raise RangeError(f"--good {good} and --bad {bad} are one version, {package} {listed[first].version}")
    if first > last:
        other = (
            "drop --find-fix to find the first bad one" if find_fix else "--find-fix finds the first good one"
        )
        order = "after" if find_fix else "before"
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
    except InvalidVersion:
        raise RangeError(
            f"{text!r} is neither a version such as 2.13.0 nor a date such as 2026-10-01"
        ) from None


def _variant(*ends: str) -> str | None:
    """Return the build variant ("cpu", "cu126") that the endpoints name, or None. Raises RangeError if they differ."""
    named = {Version(end).local for end in ends if not DATE.fullmatch(end) and _version(end).local}
    variants = {local for local in named if local and not local.startswith("git")}
    if len(variants) > 1:
        raise RangeError(
            f"the endpoints are of two variants, {' and '.join(sorted(variants))}: name both of one"
        )
    return variants.pop() if variants else None


def _names_commit(*ends: str) -> bool:
    """Return whether an endpoint is a build by commit, such as 3.6.0+git1111111."""
    return any(not DATE.fullmatch(end) and (_version(end).local or "").startswith("git") for end in ends)


def _of_variant(
    found: Sequence[FoundVersion], variant: str | None, *, by_commit: bool = False
) -> list[FoundVersion]:
    """Drop other variants of versions that have a build of the requested one (by default the one without a suffix).

    by_commit: keep builds by commit, also of a version that is released.
    """
    plain = {Version(f.version).public for f in found if Version(f.version).local == variant}
    return [
        f
        for f in found
        if Version(f.version).local == variant
        or (by_commit and (Version(f.version).local or "").startswith("git"))
        or (Version(f.version).public not in plain and (not variant or not Version(f.version).local))
    ]


def _resolve(package: str, found: Sequence[FoundVersion], end: str, *, later: bool) -> int:
    """Return the index of the version that an endpoint names."""
    if DATE.fullmatch(end):
        return _on(package, found, end, later=later)
    target = _version(end)
    exact = [i for i, f in enumerate(found) if Version(f.version) == target]
    public = [
        i for i, f in enumerate(found) if not target.local and Version(f.version).public == target.public
    ]
    matches = exact or public
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise RangeError(f"{package} {end} comes as {', '.join(found[i].version for i in matches)}: name one")
    older = [f.version for f in found if Version(f.version) < target][-1:]
    newer = [f.version for f in found if Version(f.version) > target][:1]
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


def _check_order(package: str, found: Iterable[FoundVersion]) -> None:
    found = list(found)
    loose = [f for f in found if "is not known" in f.note]
    if loose:
        raise RangeError(
            f"{package} {loose[0].version}: {loose[0].note}: name an index that gives upload times"
        )
    # Builds by commit are ordered by date; variants of one version have no order.
    publics = Counter(
        Version(f.version).public for f in found if not (Version(f.version).local or "").startswith("git")
    )
    public, count = publics.most_common(1)[0] if publics else ("", 0)
    if count > 1:
        names = [f.version for f in found if Version(f.version).public == public]
        raise RangeError(f"{package} comes in variants ({', '.join(names)}): name one in both endpoints")


class PreparedError(BumpgateError):
    """A folder without a usable environment, or an interpreter that does not run. One line."""


@dataclass(frozen=True)
class Prepared:
    """The environments FOLDER/NAME, each with its bin/python; a machine without an index has no other ones.

    Of several with the same version of `package`, the first by name is the candidate. The others have it together with
    other versions of its set, and are for attribution alone.
    """

    folder: Path
    package: str

    @cached_property
    def environments(self) -> tuple[Environment, ...]:
        """All environments that have the package, sorted by name. Raises PreparedError if there is none."""
        out = []
        for python in sorted(self.folder.absolute().glob("*/bin/python")):
            name = python.parent.parent.name
            try:
                packages = _installed(python)
            except ChildFault as fault:
                raise PreparedError(f"--environments: {python} does not run: {fault}") from None
            if self.package in packages:
                out.append(Environment(name, python, name, packages))
        if not out:
            raise PreparedError(
                f"--environments {self.folder}: no NAME/bin/python in it has {self.package} installed"
            )
        return tuple(out)

    def versions(self) -> list[FoundVersion]:
        """Return the versions of the package, in order."""
        found = {e.packages[self.package] for e in self.environments}
        return [FoundVersion(version, None, None, "") for version in sorted(found, key=Version)]

    def request(self, version: str) -> Request:
        """Return the request of a candidate."""
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
        mixed = [
            e.packages for e in self.environments if _is_mixture(e.packages, good.packages, bad.packages)
        ]
        groups: dict[tuple[bool, ...], set[str]] = defaultdict(set)
        for name in good.packages.keys() | bad.packages.keys():
            groups[tuple(packages.get(name) == bad.packages.get(name) for packages in mixed)].add(name)
        return list(groups.values())


def _installed(python: Path) -> dict[str, str]:
    """Return the packages of an interpreter, canonical name to version. Raises ChildFault if it does not run."""
    child = Interpreter(python, python.parent, child_environment(python, None))
    packages: dict[str, str] = child.json("-I", "-c", INSTALLED, timeout=IMPORT_SECONDS)
    return packages


def _is_mixture(packages: Mapping[str, str], good: Mapping[str, str], bad: Mapping[str, str]) -> bool:
    """Return whether each package has its version of one of the two sides."""
    names = packages.keys() | good.keys() | bad.keys()
    return all(packages.get(name) in (good.get(name), bad.get(name)) for name in names)
