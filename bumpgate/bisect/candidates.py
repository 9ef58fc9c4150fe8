"""Turns two endpoints (versions or dates) into the list of candidates: oldest first, one build per version. No I/O."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from packaging.version import InvalidVersion, Version

from bumpgate.core.errors import BumpgateError
from bumpgate.env.versions import FoundVersion, missing_days

DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


class RangeError(BumpgateError):
    """Endpoints that do not span a searchable range. One line: the reason, and what to name instead."""


@dataclass(frozen=True)
class Range:
    """Range of candidates.

    versions: oldest first, both endpoints included. yanked: versions left out. missing: days without a build.
    unit: what a candidate is, "version" or "commit".
    """

    package: str
    versions: tuple[str, ...]
    good: str
    bad: str
    dates: Mapping[str, date]
    yanked: tuple[str, ...] = ()
    missing: int = 0
    unit: str = "version"

    def summary(self, about: int) -> str:
        """`torch: 17 versions between 2.9.0 (good) and 2.13.0 (bad), about 9 probes`; about: the number of probes."""
        text = (
            f"{self.package}: {len(self.versions) - 2} {self.unit}{'s' * (len(self.versions) != 3)} between "
        )
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


def one(package: str, found: Sequence[FoundVersion], name: str) -> str:
    """Return the version that a version or a date names: the last build on or before that day."""
    listed = _of_variant(found, _variant(name), by_commit=_names_commit(name))
    return listed[_resolve(package, listed, name, later=False)].version


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
