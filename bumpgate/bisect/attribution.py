"""Finds which changed package turns a set red: delta debugging (ddmin; Zeller & Hildebrandt 2002) over two locks.

The good set is green and the bad set is red. A mixture is the good set with some packages as in the bad one.
Packages that only work together form one part, which comes from one side as a unit. A cause is then checked from the
other side: the bad set without it must be green. The module has no I/O.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from bumpgate.bisect.search import BAD, GOOD, OTHER, SKIP, UNKNOWN, UNKNOWN_LIMIT, ProbeOutcome
from bumpgate.core.errors import BumpgateError

Packages = Mapping[str, str]
Mixture = frozenset[str]
"""Names of the packages that are as in the bad set; all others are as in the good one."""

# Maximum number of independent causes to search for, if the bad set stays red without the first one.
CAUSES = 3
# Attribution starts after the search has verified both sets.
PRIOR_RED = 0.5


class AttributionError(BumpgateError):
    """Invalid attribution: the two sets do not differ, or the misread rates leave no information."""


@dataclass(frozen=True)
class PackageChange:
    """Version change of one package; None means absent."""

    name: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        return f"{self.name} {self.old or '(absent)'} -> {self.new or '(absent)'}"


@dataclass(frozen=True)
class Attribution:
    """Result of delta debugging.

    changes: the packages at fault, by name. With them alone the good set is red, without any one part it is not.
    needed: whether the bad set without these changes was seen green.
    others: further sets of changes that turn the good set red, each alone.
    separable: False if a mixture that could show a smaller cause, or check this one, could not be run.
    probes: number of readings, repeats and failed installs included.
    mixtures: number of different package sets probed.
    unresolved: mixtures that did not install or gave no verdict.
    failure: why there is no answer, one line; empty if there is one.
    """

    changes: tuple[PackageChange, ...]
    probes: int
    mixtures: int
    unresolved: int
    failure: str = ""
    needed: bool = True
    others: tuple[tuple[PackageChange, ...], ...] = ()
    separable: bool = True


def attribute(
    good: Packages,
    bad: Packages,
    probe: Callable[[Mixture, dict[str, str]], ProbeOutcome],
    together: Iterable[Collection[str]] = (),
    *,
    noise: tuple[float, float] = (0.0, 0.0),
    confidence: float = 0.98,
    known: Iterable[tuple[Mixture, ProbeOutcome]] = (),
    first: str = "",
) -> Attribution:
    """Find the smallest changes that turn the good set red, and whether the bad set is green without them.

    good, bad: package name to version. probe: called with a mixture's names and its packages; takes one reading.
    together: groups of names that must come from the same side; groups that share a changed name are merged.
    noise: misread rates, false BAD and false GOOD; under noise a mixture is read until it is settled.
    confidence: as in search.Search.
    known: readings of an interrupted run in order; they are used before the probe is called.
    first: the likeliest package; its part is tried alone before all others.
    Raises AttributionError (one line) if the sets do not differ or a number is out of range.
    """
    if not (all(0 <= rate < 0.5 for rate in noise) and 0.5 < confidence < 1):
        raise AttributionError("false_bad and false_good must lie in [0, 0.5), confidence in (0.5, 1)")
    parts = _parts(good, bad, together)
    # One wrong verdict invalidates the answer, so the error budget is shared: about two mixtures per part + ends.
    readings = _Readings(good, bad, probe, *noise, doubt=(1 - confidence) / (2 * len(parts) + 2))
    for mixture, outcome in known:
        readings.known[mixture].append(outcome)
    everything = _names(parts)
    for named, names in ((GOOD, []), (BAD, everything)):
        read = readings.of(names)
        if read is not named:
            why = f"the {named.value.lower()} set reads {read.value}: nothing to attribute"
            return readings.answer([], why)
    causes, left = [_cause(parts, readings, first)], parts
    while left := [part for part in left if part not in causes[-1]]:
        if len(causes) == CAUSES or not readings.red(left):
            break
        causes.append(_ddmin(left, readings))
    needed = [cause for cause in causes if _needed(cause, parts, readings)]
    cause = needed[0] if len(needed) == 1 else causes[0]
    return readings.answer(_names(cause), "", bool(needed), [_names(c) for c in causes if c is not cause])


def _cause(parts: list[Mixture], readings: _Readings, first: str) -> list[Mixture]:
    """Return a minimal red list of parts. The part of `first` is tried alone, then the others without it."""
    likely = [part for part in parts if first in part]
    if likely and len(parts) > 1:
        if readings.red(likely):
            return likely
        rest = [part for part in parts if part not in likely]
        if readings.red(rest):
            return _ddmin(rest, readings)
    return _ddmin(parts, readings)


def _needed(cause: list[Mixture], parts: list[Mixture], readings: _Readings) -> bool:
    """Return whether the bad set without `cause` is green."""
    return readings.of(_names([part for part in parts if part not in cause])) is GOOD


def _names(parts: Iterable[Mixture]) -> list[str]:
    return [name for part in parts for name in part]


def changes(good: Packages, bad: Packages) -> list[PackageChange]:
    """Return the packages whose versions differ between the two sets, sorted by name."""
    names = sorted(good.keys() | bad.keys())
    return [PackageChange(n, good.get(n), bad.get(n)) for n in names if good.get(n) != bad.get(n)]


def _ddmin(parts: list[Mixture], readings: _Readings) -> list[Mixture]:
    """Reduce a red list of parts until no part can be removed: test each chunk and its complement, then split finer."""
    pieces = 2
    while len(parts) > 1:
        cuts = list(pairwise(len(parts) * i // pieces for i in range(pieces + 1)))
        subsets = [parts[a:b] for a, b in cuts]
        rests = [parts[:a] + parts[b:] for a, b in cuts] if pieces > 2 else []
        if subset := next((s for s in subsets if readings.red(s)), None):
            parts, pieces = subset, 2
        elif rest := next((r for r in rests if readings.red(r)), None):
            parts, pieces = rest, max(pieces - 1, 2)
        elif pieces < len(parts):
            pieces = min(2 * pieces, len(parts))
        else:
            break
    return parts


@dataclass
class _Readings:
    """Verdicts on mixtures, cached; each mixture is read until it is settled.

    doubt: the probability of a wrong verdict at which a mixture is settled. known: readings to use before the probe.
    """

    good: Packages
    bad: Packages
    probe: Callable[[Mixture, dict[str, str]], ProbeOutcome]
    false_bad: float
    false_good: float
    doubt: float
    known: dict[Mixture, deque[ProbeOutcome]] = field(default_factory=lambda: defaultdict(deque))
    verdicts: dict[Mixture, ProbeOutcome] = field(default_factory=dict)
    probes: int = 0

    def red(self, parts: list[Mixture]) -> bool:
        return self.of(_names(parts)) is BAD

    def of(self, names: Iterable[str]) -> ProbeOutcome:
        mixture = frozenset(names)
        if mixture not in self.verdicts:
            self.verdicts[mixture] = self._settle(mixture)
        return self.verdicts[mixture]

    def answer(
        self, names: list[str], failure: str = "", needed: bool = True, others: Iterable[list[str]] = ()
    ) -> Attribution:
        every = changes(self.good, self.bad)
        blamed, *more = (tuple(c for c in every if c.name in part) for part in (names, *others))
        unread = [m for m, v in self.verdicts.items() if v not in (GOOD, BAD)]
        without = frozenset(c.name for c in every).difference(names)
        separable = not any(m < frozenset(names) or m == without for m in unread)
        counts = self.probes, len(self.verdicts), len(unread)
        return Attribution(blamed, *counts, failure, needed, tuple(more), separable)

    def _settle(self, mixture: Mixture) -> ProbeOutcome:
        """Read until a verdict is certain enough (Wald's sequential test). SKIP is final, and so are a few UNKNOWN."""
        seen = dict.fromkeys(ProbeOutcome, 0)
        while True:
            outcome = self._read(mixture)
            seen[outcome] += 1
            if outcome in (SKIP, OTHER) or seen[UNKNOWN] >= UNKNOWN_LIMIT:
                return outcome
            counts = seen[BAD], seen[GOOD]
            if_bad = PRIOR_RED * math.prod(map(pow, (1 - self.false_good, self.false_good), counts))
            if_good = (1 - PRIOR_RED) * math.prod(map(pow, (self.false_bad, 1 - self.false_bad), counts))
            for verdict, other in ((BAD, if_good), (GOOD, if_bad)):
                if any(counts) and other <= self.doubt * (if_bad + if_good):
                    return verdict

    def _read(self, mixture: Mixture) -> ProbeOutcome:
        self.probes += 1
        if self.known[mixture]:
            return self.known[mixture].popleft()
        changed = {n: v for n, v in self.bad.items() if n in mixture}
        kept = {n: v for n, v in self.good.items() if n not in mixture}
        return self.probe(mixture, dict(sorted({**kept, **changed}.items())))


def _parts(good: Packages, bad: Packages, together: Iterable[Collection[str]]) -> list[Mixture]:
    """Group the changed packages into parts that change together, sorted by first name."""
    changed = {change.name for change in changes(good, bad)}
    if not changed:
        raise AttributionError("the good and the bad set hold the same packages: nothing to attribute")
    parts = [frozenset({name}) for name in changed]
    for group in together:
        joined = [part for part in parts if part & set(group)]
        parts = [part for part in parts if part not in joined]
        parts += [frozenset().union(*joined)] if joined else []
    return sorted(parts, key=min)
