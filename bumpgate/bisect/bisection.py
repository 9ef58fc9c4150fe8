"""Bisect loop: gets the next probes from the search, takes readings, writes the journal, then runs attribution.

All state is on disk, so a killed bisect can resume: it follows the journal and never repeats a finished reading.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from bumpgate.bisect import wheel_metadata
from bumpgate.bisect.attribution import Attribution, Mixture, attribute, changes
from bumpgate.bisect.journal import Journal
from bumpgate.bisect.probe import READING, Build, Cause, ProbeResult, Reading, Test, keep, load, take
from bumpgate.bisect.search import BAD, GOOD, ProbeOutcome, SearchResult
from bumpgate.core.errors import BumpgateError
from bumpgate.core.text import some
from bumpgate.env.build import Environment
from bumpgate.env.request import Request

# uv and pip retry network failures themselves; this covers the failures that remain.
TRIES = 2
# The highest misread rate at which a mixture is still read until it is settled.
MISREADS = 0.4
# Maximum number of packages in the name of a mixture.
SHOWN = 4
# What a mixture has from the request of a candidate.
SOURCES = ("python", "index", "find_links", "offline", "script", "only_wheels")


class MachineError(BumpgateError):
    """Infrastructure failure of an endpoint or of several candidates in a row; no evidence about the candidates."""


class Show(Protocol):
    """Progress callbacks of a watcher."""

    def probing(self, name: str) -> None: ...

    def probed(self, name: str, reading: Reading, result: ProbeResult, left: str) -> None: ...


@dataclass(frozen=True)
class Setup:
    """The environments of a bisect and the test that judges them.

    package: the package whose versions are the candidates.
    request: from a version to the request of its environment.
    build: builds a request, or finds it in the cache.
    test: judges the readings.
    reliable: a probe is a complete sequential test, so that one reading settles a mixture whatever the plan's misread
        rates are, unless earlier readings contradicted each other.
    together: groups the packages of the two neighbours that a mixture takes from the same side.
    follow: packages that `build` selects to fit the others; no mixture pins them, and none is at fault by itself.
    """

    package: str
    request: Callable[[str], Request]
    build: Build
    test: Test
    reliable: bool = False
    together: Callable[[Environment, Environment], list[set[str]]] = wheel_metadata.together
    follow: frozenset[str] = frozenset()


class Bisection:
    """One bisect, continued from the state of its journal. out: the folder of its readings."""

    def __init__(self, state: Journal, setup: Setup, out: Path, show: Show) -> None:
        self.state, self.setup, self.out, self.show = state, setup, out, show
        self.search = state.search
        self.ends = self.search.first, self.search.last
        self._machine_failed = False

    def run(self) -> SearchResult:
        """Probe until the search has its answer. Raises MachineError, ProbeError, KeyboardInterrupt."""
        self._learn()
        while pending := self.state.decide():
            self._read(pending)
        result = self.search.result()
        assert result is not None, "the journal has no further decision only if there is an answer"
        return result

    def steps(self) -> Iterator[tuple[int, ProbeOutcome, Reading]]:
        """Yield the candidate, the outcome and the reading of each recorded step, in order."""
        seen = Counter[int]()
        for index, outcome in self.search.history:
            place = self._place(index, seen[index])
            yield index, outcome, load(place) or Reading(place, Cause.RAN, failure="its files are gone")
            seen[index] += 1

    def reading_of(self, index: int, outcome: ProbeOutcome) -> Reading | None:
        """Return the candidate's first reading with this outcome, or None."""
        return next((reading for i, o, reading in self.steps() if (i, o) == (index, outcome)), None)

    def neighbours(self, result: SearchResult) -> tuple[int, int]:
        """Return the indices of the two candidates around the change, the good one first."""
        assert result.last_old is not None, "a search that failed has no neighbours"
        pair = result.last_old, result.suspects[-1]
        return (pair[1], pair[0]) if self.search.find_fix else pair

    def environments(self, result: SearchResult) -> tuple[Environment, Environment]:
        """Return the environments of the two neighbours, the good one first; both have been built."""
        good, bad = (self.setup.build(self._request(i)) for i in self.neighbours(result))
        return good, bad

    def attribute(self, result: SearchResult) -> Attribution | None:
        """Find the package at fault between the two neighbours' sets; None if the sets are equal."""
        good, bad = (
            replace(e, packages={n: v for n, v in e.packages.items() if n not in self.setup.follow})
            for e in self.environments(result)
        )
        changed = frozenset(change.name for change in changes(good.packages, bad.packages))
        if not changed:
            return None
        sides = dict(zip(self.neighbours(result), (frozenset[str](), changed)))
        known = [(sides[i], outcome) for i, outcome in self.search.history if i in sides]
        # One reading settles a mixture, unless the test has contradicted itself.
        estimated = self.search.noise() if result.misreads else (0.0, 0.0)
        plan = self.state.plan
        once = self.setup.reliable and not result.misreads
        stated = (None, None) if once else (plan.false_bad, plan.false_good)
        false_bad, false_good = (min(e if s is None else s, MISREADS) for s, e in zip(stated, estimated))
        return attribute(
            good.packages,
            bad.packages,
            self._probe_mixture,
            self.setup.together(good, bad),
            noise=(false_bad, false_good),
            confidence=plan.confidence,
            known=[*known, *self.state.mixtures],
            first=self.setup.package,
        )

    def _probe_mixture(self, mixture: Mixture, packages: Mapping[str, str]) -> ProbeOutcome:
        self.state.decide_mixture(mixture)
        digest = hashlib.sha256("\n".join(sorted(mixture)).encode()).hexdigest()[:12]
        attempt = sum(m == mixture for m, _ in self.state.mixtures)
        # The bisected package comes first, libraries that another package pins come last.
        linked = wheel_metadata.LINKED
        named = sorted(mixture, key=lambda n: (n != self.setup.package, bool(linked.fullmatch(n)), n))
        parts = [f"{n} {packages.get(n, '(absent)')}" for n in named]
        name = f"the good set with {some(parts, SHOWN) or 'nothing'}"
        self.show.probing(name)
        place = self.out / "mixtures" / f"{digest}.{attempt}"
        # Dependencies are ignored: the pins contradict each other.
        pins = tuple(f"{n}==={version}" for n, version in sorted(packages.items()))
        like = self._request(self.search.first)
        sources = {name: getattr(like, name) for name in SOURCES}
        reading = self._take(place, Request(pins, **sources, dependencies=False, name="a mixture"))
        result = self.setup.test.judge(reading)
        self.state.record_mixture(mixture, result.outcome)
        self.show.probed(name, reading, result, "")
        return result.outcome

    def _read(self, pending: Sequence[int]) -> None:
        """Take the readings of a decision, and record their outcomes.

        No reading can be judged before the readings of the endpoints, because the deciding rows are those that differ
        between them.
        """
        ends = [end for end in self.ends if self._unjudged(end) and end not in pending]
        before = len(self.search.history)
        jobs = {self._next_place(index): index for index in (*ends, *pending)}
        self._judge(jobs)  # readings of a killed run
        for place, index in jobs.items():
            if load(place) is None:
                self.show.probing(f"{self.setup.package} {self.search.candidates[index]}")
                self._take(place, self._request(index), required=index in self.ends)
                self._judge(jobs)
                if any(i in self.ends and self._unjudged(i) for i, _ in self.search.history[before:]):
                    return  # an endpoint has no verdict: it is read again before all others

    def _take(self, place: Path, request: Request, *, required: bool = False) -> Reading:
        """Return the reading of a request. It is repeated if the machine failed, then kept as such.

        required: a failure ends the bisect.
        Raises MachineError, without keeping the reading, for a required one or for two failures in a row.
        """
        if saved := load(place):
            return saved
        for _ in range(TRIES):
            reading = take(place, request, self.setup.build, self.setup.test)
            if reading.cause is not Cause.MACHINE:
                self._machine_failed = False
                return reading
            (place / READING).unlink()
        if self._machine_failed or required:
            raise MachineError(f"{request.title}: {reading.failure.removeprefix(f'{request.title}: ')}")
        self._machine_failed = True
        keep(reading)
        return reading

    def _judge(self, jobs: Mapping[Path, int]) -> None:
        """Record the outcomes of the readings that are there, once both endpoints are.

        A candidate's readings are recorded in order: their number is part of the next one's place.
        """
        ends = [(end, load(self._next_place(end))) for end in self.ends if self._unjudged(end)]
        for end, reading in ends:
            unusable = self.setup.test.unusable(reading) if reading else None
            if reading and unusable:
                self._record(end, reading, unusable)
                return
        if not all(reading for _, reading in ends):
            return
        if any(index in self.ends for index in jobs.values()):
            self._learn()
        for place, index in jobs.items():
            reading = load(place) if place == self._next_place(index) else None
            if reading:
                self._record(index, reading, self.setup.test.judge(reading))

    def _learn(self) -> None:
        """Pass all saved endpoint readings to the test, so that a resumed bisect learns the same."""
        good, bad = ([r for r in self._kept(end) if r.cause is Cause.RAN] for end in self.ends)
        if self.search.find_fix:
            good, bad = bad, good
        if good and bad:
            self.setup.test.learn(good, bad)

    def _kept(self, index: int) -> Iterator[Reading]:
        attempt = 0
        while reading := load(self._place(index, attempt)):
            yield reading
            attempt += 1

    def _record(self, index: int, reading: Reading, result: ProbeResult) -> None:
        self.state.record(index, result.outcome)
        left = "" if self.search.result() else self.search.progress()
        self.show.probed(f"{self.setup.package} {self.search.candidates[index]}", reading, result, left)

    def _unjudged(self, index: int) -> bool:
        return not any(i == index and o in (GOOD, BAD) for i, o in self.search.history)

    def _request(self, index: int) -> Request:
        return self.setup.request(self.search.candidates[index])

    def _next_place(self, index: int) -> Path:
        return self._place(index, sum(i == index for i, _ in self.search.history))

    def _place(self, index: int, attempt: int) -> Path:
        return self.out / "probes" / f"{self.search.candidates[index]}.{attempt}"
