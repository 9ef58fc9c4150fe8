"""Bisect loop: gets the next probe from the search, takes readings, writes the journal, then runs attribution.

All state is on disk, so a killed bisect can resume: it follows the journal and never repeats a finished reading.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from bumpgate.bisect import blame
from bumpgate.bisect.attribution import Attribution, Mixture, attribute, changes
from bumpgate.bisect.journal import Journal
from bumpgate.bisect.probe import (
    READING,
    BackError,
    Build,
    Cause,
    Hosts,
    ProbeResult,
    Reading,
    Test,
    exactly,
    keep,
    load,
    take,
)
from bumpgate.bisect.search import ProbeOutcome, Search, SearchResult
from bumpgate.core.errors import BumpgateError
from bumpgate.env.build import Environment
from bumpgate.env.request import Request

# uv and pip retry network failures themselves; this covers the failures that remain.
TRIES = 2
# The highest misread rate at which a mixture is still read until it is settled.
MISREADS = 0.4
# Maximum number of packages in the name of a mixture.
SHOWN = 4


class MachineError(BumpgateError):
    """Infrastructure failure of an endpoint or of several candidates in a row; no evidence about the candidates."""


class Ahead(Protocol):
    """Background builder of the next environments."""

    def start(self, requests: Sequence[Request]) -> None: ...

    def stop(self) -> None: ...


class Show(Protocol):
    """Progress callbacks of a watcher."""

    def probing(self, name: str) -> None: ...

    def probed(self, name: str, reading: Reading, result: ProbeResult, left: str) -> None: ...


@dataclass(frozen=True)
class BisectContext:
    """Dependencies of a bisect. request: from a version to its request. out: the folder of the readings.

    reliable: a probe is a complete sequential test, so that one reading settles a mixture whatever the plan's misread
    rates are, unless earlier readings contradicted each other.
    follow: packages that `build` selects to fit the others; no mixture pins them, and none is at fault by itself.
    recall: returns an environment that was built before, where candidates are commits and `build` keeps only one.
    together: groups the packages of the two neighbours that a mixture takes from the same side.
    hosts: take the readings instead of this process, several at once.
    """

    package: str
    out: Path
    request: Callable[[str], Request]
    build: Build
    test: Test
    show: Show
    ahead: Ahead | None = None
    reliable: bool = False
    recall: Build | None = None
    together: Callable[[Environment, Environment], list[set[str]]] = blame.together
    hosts: Hosts | None = None
    follow: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Step:
    """One reading recorded in the search."""

    version: str
    outcome: ProbeOutcome
    reading: Reading


class Bisection:
    """One bisect, continued from the state of its journal."""

    def __init__(self, state: Journal, context: BisectContext) -> None:
        self.state = state
        self.context = context
        self._machine_failed = False

    @property
    def search(self) -> Search:
        return self.state.search

    def run(self) -> SearchResult:
        """Probe until the search has its answer. Raises MachineError, ProbeError, KeyboardInterrupt."""
        try:
            self._learn()
            while pending := self._due():
                try:
                    if self.context.hosts:
                        self._read_batch(self.context.hosts, pending)
                    elif any(self._unjudged(end) for end in self._ends()):
                        self._read_ends()
                    else:
                        self._read(pending[0])
                except BackError:
                    self._back()
        finally:
            if self.context.ahead:
                self.context.ahead.stop()
        result = self.search.result()
        assert result is not None, "the journal has no further decision only if there is an answer"
        return result

    def _due(self) -> list[int]:
        return self.state.decide(self.context.hosts.number() if self.context.hosts else 1)

    def steps(self) -> Iterator[Step]:
        """Yield all recorded readings, in order."""
        seen = Counter[int]()
        for index, outcome in self.search.history:
            place = self._place(index, seen[index])
            gone = Reading(place, Cause.RAN, failure="its files are gone")
            yield Step(self.search.candidates[index], outcome, load(place) or gone)
            seen[index] += 1

    def reading_of(self, index: int, outcome: ProbeOutcome) -> Reading | None:
        """Return the candidate's first reading with this outcome, or None."""
        version = self.search.candidates[index]
        return next((s.reading for s in self.steps() if (s.version, s.outcome) == (version, outcome)), None)

    def neighbours(self, result: SearchResult) -> tuple[int, int]:
        """Return the indices of the two candidates around the change, the good one first."""
        assert result.last_old is not None, "a search that failed has no neighbours"
        pair = result.last_old, result.suspects[-1]
        return (pair[1], pair[0]) if self.search.find_fix else pair

    def environments(self, result: SearchResult) -> tuple[Environment, Environment]:
        """Return the environments of the two neighbours, the good one first; both have been built."""
        build = self.context.recall or self.context.build
        good, bad = (build(self._request(i)) for i in self.neighbours(result))
        return good, bad

    def in_order(self, result: SearchResult) -> tuple[Environment, Environment]:
        """Return the environments of the two neighbours, the earlier version first."""
        good, bad = self.environments(result)
        return (bad, good) if self.search.find_fix else (good, bad)

    def attribute(self, result: SearchResult) -> Attribution | None:
        """Find the package at fault between the two neighbours' sets; None if the sets are equal."""
        good, bad = (
            replace(e, packages={n: v for n, v in e.packages.items() if n not in self.context.follow})
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
        once = self.context.reliable and not result.misreads
        stated = (None, None) if once else (plan.false_bad, plan.false_good)
        false_bad, false_good = (e if s is None else s for s, e in zip(stated, estimated))
        return attribute(
            good.packages,
            bad.packages,
            self._probe_mixture,
            self.context.together(good, bad),
            false_bad=min(false_bad, MISREADS),
            false_good=min(false_good, MISREADS),
            confidence=plan.confidence,
            known=[*known, *self.state.mixtures],
            first=self.context.package,
        )

    def _probe_mixture(self, mixture: Mixture, packages: Mapping[str, str]) -> ProbeOutcome:
        self.state.decide_mixture(mixture)
        digest = hashlib.sha256("\n".join(sorted(mixture)).encode()).hexdigest()[:12]
        attempt = sum(m == mixture for m, _ in self.state.mixtures)
        parts = [f"{n} {packages.get(n, '(absent)')}" for n in self._by_importance(mixture)]
        more = f" and {len(parts) - SHOWN} more" if len(parts) > SHOWN else ""
        name = f"the good set with {', '.join(parts[:SHOWN]) or 'nothing'}{more}"
        self.context.show.probing(name)
        like = self._request(self.search.first)
        place = self.context.out / "mixtures" / f"{digest}.{attempt}"
        reading = self._retried(place, blame.mixture_request(packages, like), self.context.build)
        result = self.context.test.judge(reading)
        self.state.record_mixture(mixture, result.outcome)
        self.context.show.probed(name, reading, result, "")
        return result.outcome

    def _by_importance(self, mixture: Mixture) -> list[str]:
        """Sort a mixture's names: the bisected package first, libraries that another package pins last."""
        return sorted(mixture, key=lambda n: (n != self.context.package, bool(blame.LINKED.fullmatch(n)), n))

    def _read_ends(self) -> None:
        """Read both endpoints before judging either: the deciding rows are those that differ between them."""
        readings = {}
        for end in self._ends():
            if not self._unjudged(end):
                continue
            reading = self._reading(end)
            unusable = self.context.test.unusable(reading)
            if unusable is not None:
                self._record(end, reading, unusable)
                return
            readings[end] = reading
        self._learn()
        for end, reading in readings.items():
            self._record(end, reading, self.context.test.judge(reading))

    def _read_batch(self, hosts: Hosts, pending: Sequence[int]) -> None:
        """Take the readings of a batch on several hosts. Each is saved as it arrives, so that a kill does not lose it.

        Raises MachineError, after the others have been judged, for a reading that a host could not take.
        """
        # No reading can be judged before those of the endpoints.
        ends = [end for end in self._ends() if self._unjudged(end) and end not in pending]
        counts = Counter(i for i, _ in self.search.history)
        jobs: list[tuple[int, Path]] = []
        for index in (*ends, *pending):
            jobs.append((index, self._place(index, counts[index])))
            counts[index] += 1
        names = ", ".join(self.search.candidates[index] for index, _ in jobs)
        self.context.show.probing(f"{self.context.package} {names}")
        self._judge(jobs)
        failed: dict[Path, Reading] = {}
        for _ in range(TRIES):
            missing = [(place, self._request(index)) for index, place in jobs if load(place) is None]
            for reading in hosts.take(missing) if missing else ():
                failed.pop(reading.place, None)
                if reading.cause is Cause.MACHINE:
                    (reading.place / READING).unlink()
                    failed[reading.place] = reading
                else:
                    self._judge(jobs)
        for place, reading in failed.items():
            index = next(index for index, its in jobs if its == place)
            if self._machine_failed or index in self._ends():
                raise MachineError(
                    f"{self.context.package} {self.search.candidates[index]}: {reading.failure}"
                )
            self._machine_failed = True
            keep(reading)
        self._machine_failed = bool(failed)
        self._judge(jobs)

    def _judge(self, jobs: Sequence[tuple[int, Path]]) -> None:
        """Record the outcomes of the readings that are there, once both endpoints are.

        A candidate's readings are recorded in order: their number is that of the place of the next one.
        """
        ends = [load(self._next_place(end)) for end in self._ends() if self._unjudged(end)]
        for index, place in jobs:
            reading = load(place) if place == self._next_place(index) and self._unjudged(index) else None
            unusable = self.context.test.unusable(reading) if reading and index in self._ends() else None
            if reading and unusable:
                self._record(index, reading, unusable)
                return
        if not all(ends):
            return
        self._learn()
        for index, place in jobs:
            reading = load(place) if place == self._next_place(index) else None
            if reading:
                self._record(index, reading, self.context.test.judge(reading))

    def _read(self, index: int) -> None:
        reading = self._reading(index)
        if index in self._ends():
            self._learn()
        self._record(index, reading, self.context.test.judge(reading))

    def _back(self) -> None:
        """Forget the last reading: its file first, so that a kill in between leaves the outcome in place."""
        if not self.search.history:
            for end in self._ends():
                (self._place(end, 0) / READING).unlink(missing_ok=True)
            return
        index, _ = self.search.history[-1]
        attempt = sum(i == index for i, _ in self.search.history) - 1
        (self._place(index, attempt) / READING).unlink(missing_ok=True)
        self.state.back()

    def _learn(self) -> None:
        """Pass all saved endpoint readings to the test, so that a resumed bisect learns the same."""
        good, bad = ([r for r in self._kept(end) if r.cause is Cause.RAN] for end in self._ends())
        if self.search.find_fix:
            good, bad = bad, good
        if good and bad:
            self.context.test.learn(good, bad)

    def _kept(self, index: int) -> Iterator[Reading]:
        attempt = 0
        while reading := load(self._place(index, attempt)):
            yield reading
            attempt += 1

    def _reading(self, index: int) -> Reading:
        version = self.search.candidates[index]
        self.context.show.probing(f"{self.context.package} {version}")

        def build(request: Request) -> Environment:
            checked = exactly(self.context.build, self.context.package, version)
            environment = (self.context.build if self.context.recall else checked)(request)
            # Only now: the prefetch in progress may have been building this environment.
            later = [*(i for i in self.state.decide() if i != index), *self.search.prefetch()]
            if self.context.ahead:
                self.context.ahead.start([self._request(i) for i in dict.fromkeys(later)])
            return environment

        return self._retried(self._next_place(index), self._request(index), build, index in self._ends())

    def _retried(self, place: Path, request: Request, build: Build, end: bool = False) -> Reading:
        """Take a reading; retry if the machine failed. If it fails again, keep the reading and skip the candidate.

        Raises MachineError, without keeping the reading, for an endpoint or for two skipped candidates in a row.
        """
        for _ in range(TRIES):
            reading = self._taken(place, request, build)
            if reading.cause is not Cause.MACHINE:
                self._machine_failed = False
                return reading
            (place / READING).unlink()
        if self._machine_failed or end:
            raise MachineError(f"{request.title}: {reading.failure.removeprefix(f'{request.title}: ')}")
        self._machine_failed = True
        keep(reading)
        return reading

    def _taken(self, place: Path, request: Request, build: Build) -> Reading:
        if self.context.hosts:
            return load(place) or next(iter([*self.context.hosts.take([(place, request)])]))
        return take(place, request, build, self.context.test)

    def _record(self, index: int, reading: Reading, result: ProbeResult) -> None:
        version = self.search.candidates[index]
        self.state.record(index, result.outcome)
        left = "" if self.search.result() else self.search.progress()
        self.context.show.probed(f"{self.context.package} {version}", reading, result, left)

    def _unjudged(self, index: int) -> bool:
        return not any(
            i == index and o in (ProbeOutcome.GOOD, ProbeOutcome.BAD) for i, o in self.search.history
        )

    def _ends(self) -> tuple[int, int]:
        return self.search.first, self.search.last

    def _request(self, index: int) -> Request:
        return self.context.request(self.search.candidates[index])

    def _next_place(self, index: int) -> Path:
        return self._place(index, sum(i == index for i, _ in self.search.history))

    def _place(self, index: int, attempt: int) -> Path:
        return self.context.out / "probes" / f"{self.search.candidates[index]}.{attempt}"
