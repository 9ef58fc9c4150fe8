"""Noise-aware search for the first bad version; a pure module without clock, files or env_vars.

The state is a posterior over the position of the change and, if the misread rates are not stated, over the rates:
repeats that agree lower them, contradictions raise them. Probes are chosen by expected information about the position
(Horstein 1963; Burnashev & Zigangirov 1974), so a probe is repeated when a repeat gives the most information.

There are n candidates from the early endpoint to the late one. Under hypothesis k (0..n) the first k have the state of
the early endpoint and the others the state of the late one; under 0 and n an endpoint is named wrongly.
`old` is the early endpoint's state and `new` the late one's: GOOD and BAD, or BAD and GOOD when searching for a fix.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from bumpgate.bisect.posterior import Belief, believe, capacity, noises, tail
from bumpgate.core.errors import BumpgateError

# Prior probability that the user named an endpoint wrongly, for each endpoint.
END_DOUBT = 0.05
# Number of readings after which a search that estimates the rates returns its likeliest answer.
PATIENCE = 60
# Number of unanimous readings that override the assumption that the state changes once.
UNANIMOUS = 3
# Number of readings of each endpoint, all contradicting its name, after which the endpoints count as swapped.
SETTLED_ENDS = 2
# Number of UNKNOWN probes after which a candidate is skipped, like one that does not install.
UNKNOWN_LIMIT = 3
# If the readings that contradict the answer are less probable than this under the stated noise, there is no answer.
UNRELIABLE = 1e-3


class SearchError(BumpgateError):
    """Invalid search: unknown endpoints, endpoints in the wrong order, or noise that leaves no information."""


class ProbeOutcome(Enum):
    """Outcome of one probe of one candidate."""

    GOOD = "GOOD"
    BAD = "BAD"
    SKIP = "SKIP"
    """It does not install, or does not exist: it will never be probed again."""
    UNKNOWN = "UNKNOWN"
    """It ran without a verdict: a machine failure, or an interval that contains the limit."""
    OTHER = "OTHER"
    """Another fault than the one searched hides the answer: treated like a candidate that does not install."""


GOOD, BAD, SKIP, UNKNOWN, OTHER = ProbeOutcome


class SearchFailure(Enum):
    """Why a search has no answer."""

    SKIPPED = "skipped"  # an endpoint does not install, or gives no verdict
    ENDPOINT = "endpoint"  # an endpoint reads like the other one
    SWAPPED = "swapped"  # the good endpoint reads BAD and the bad one GOOD
    NOISE = "noise"  # the readings contradict every answer


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    suspects: indices of the candidates one of which is the first bad one (with find_fix, the first good one).
        A single one, unless the candidates just before it could not be probed; empty if the search failed.
    last_old: the candidate before the first suspect; None if the search failed.
    posterior: total posterior of the suspects.
    probes: number of recorded outcomes, with endpoints, repeats and skips.
    misreads: number of GOOD and BAD readings that contradict the answer, without the readings of `earlier`.
    failure: why there is no answer, one line; empty if there is one. cause: its kind.
    confirmed: whether both neighbours of the change were read often enough (Search.confirm).
    earlier: indices that read like the late endpoint before a candidate that reads like the early one again.
    """

    suspects: tuple[int, ...]
    last_old: int | None
    posterior: float
    probes: int
    misreads: int
    failure: str = ""
    confirmed: bool = True
    earlier: tuple[int, ...] = ()
    cause: SearchFailure | None = None

    @property
    def found(self) -> bool:
        return not self.failure

    def sure(self, confidence: float) -> bool:
        """Return whether the answer is confirmed and its posterior reaches `confidence`."""
        return self.found and self.confirmed and self.posterior >= confidence


class Search:
    """Search for the first bad candidate between a good and a bad one.

    candidates: labels in order (dates, versions); opaque and unique.
    good, bad: the labels of the two endpoints. With find_fix the bad one comes first, and the first good is found.
    false_bad, false_good: how often a probe of a good candidate reads BAD, and the reverse, each in [0, 0.5);
        None: estimated from the readings. Repeats of a probe are assumed independent.
    confidence: the posterior at which the search stops, in (0.5, 1).
    budget: number of GOOD and BAD readings after which the likeliest answer is returned. None: PATIENCE if a rate is
        estimated, no limit if both are stated.
    confirm: how many more readings of each neighbour of the change must agree with the answer than contradict it.
    Raises SearchError (one line) on invalid arguments.
    """

    def __init__(
        self,
        candidates: Sequence[str],
        good: str,
        bad: str,
        false_bad: float | None = 0.0,
        false_good: float | None = 0.0,
        confidence: float = 0.98,
        *,
        find_fix: bool = False,
        budget: int | None = None,
        confirm: int = 0,
    ) -> None:
        _check(candidates, good, bad, find_fix)
        _check_numbers(false_bad, false_good, confidence, budget)
        self.candidates = tuple(candidates)
        self.find_fix = find_fix
        self.confidence = confidence
        self.budget = PATIENCE if budget is None and None in (false_bad, false_good) else budget
        self.confirm = confirm
        self.history: list[tuple[int, ProbeOutcome]] = []
        early, late = (bad, good) if find_fix else (good, bad)
        self.old, self.new = (BAD, GOOD) if find_fix else (GOOD, BAD)
        self.first, self.last = self.candidates.index(early), self.candidates.index(late)
        self._noises = noises(*((false_good, false_bad) if find_fix else (false_bad, false_good)))
        self._tally = {outcome: Counter[int]() for outcome in ProbeOutcome}
        self._aside: set[int] = set()
        self._belief: Belief | None = None

    def record(self, index: int, outcome: ProbeOutcome) -> None:
        """Record one outcome. Any candidate from endpoint to endpoint may be recorded, not only what next() returns."""
        if not self.first <= index <= self.last:
            raise SearchError(f"candidate {index} does not lie between the ends {self.first} and {self.last}")
        self.history.append((index, outcome))
        self._tally[outcome][index] += 1
        if outcome in (SKIP, OTHER) or self._tally[UNKNOWN][index] >= UNKNOWN_LIMIT:
            self._aside.add(index)
        self._belief = None

    def next(self) -> list[int]:
        """Return what to probe next: first both endpoints (in any order), then one index; empty when finished."""
        if self.result() is not None:
            return []
        if ends := self._unseen_ends():
            return ends
        if doubted := self._doubted_ends():
            return doubted[:1]
        suspects, mass = self._likeliest()
        unconfirmed = self._unconfirmed(suspects)
        return unconfirmed[:1] if mass >= self.confidence and unconfirmed else [self._most_informative()]

    def result(self) -> SearchResult | None:
        """Return the answer or the failure; None while the search continues."""
        posterior = self.posterior()
        if fault := self._end_fault(posterior):
            return self._failed(*fault)
        if self._unseen_ends():
            return None
        suspects, mass = self._likeliest()
        if not self._spent() and (mass < self.confidence or self._unconfirmed(suspects)):
            return None
        return self._answer(suspects, mass)

    def noise(self) -> tuple[float, float]:
        """Return the misread rates (false BAD, false GOOD), stated or estimated from all readings so far."""
        belief = self._believe()
        new, old = (
            math.fsum(p * rate for p, rate in zip(belief.places, rates))
            for rates in (belief.false_new, belief.false_old)
        )
        return (old, new) if self.find_fix else (new, old)

    def _likeliest(self) -> tuple[range, float]:
        """Return the indices of the likeliest suspects, and their posterior."""
        posterior = self.posterior()
        mass, likely = max(self._classes(), key=lambda each: each[0])
        # Readings from before a candidate was skipped may have ruled out part of the class.
        share = (1 - self.confidence) * mass / len(likely)
        kept = [k for k in likely if posterior[k] >= share]
        mass = math.fsum(posterior[k] for k in kept)
        return range(self.first + kept[0], self.first + kept[-1] + 1), mass

    def _unconfirmed(self, suspects: range) -> list[int]:
        """Return the candidates to read again before the answer is certain, the most contradicting first.

        These are the two neighbours of the change until they are confirmed, and any other candidate whose readings
        mostly contradict the answer.
        """
        if not self.confirm:
            return []
        read = {i for i, _ in self.history} - self._aside - {*self._overruled()}
        required = dict.fromkeys((suspects[0] - 1, suspects[-1]), self.confirm)
        margins = sorted((self._margin(i, suspects), i) for i in read)
        return [i for margin, i in margins if margin < required.get(i, 0)]

    def _margin(self, index: int, suspects: range) -> int:
        """Return the number of a candidate's readings that agree with the answer, less the contradicting ones."""
        margin = self._tally[self.new][index] - self._tally[self.old][index]
        return margin if index >= suspects[-1] else -margin

    def _answer(self, suspects: range, mass: float) -> SearchResult:
        earlier = self._overruled()
        misreads = sum(
            (i < suspects[0] and outcome is self.new) or (i >= suspects[-1] and outcome is self.old)
            for i, outcome in self.history
            if i not in earlier
        )
        readings = self._readings()
        if tail(misreads, readings, max(max(pair) for pair, _ in self._noises)) < UNRELIABLE:
            label = self.candidates[suspects[-1]]
            why = f"{misreads} of {readings} readings contradict {label}: the probe is noisier than stated"
            return self._failed(SearchFailure.NOISE, why)
        confirmed = not self._unconfirmed(suspects)
        last_old, probes = suspects[0] - 1, len(self.history)
        return SearchResult(tuple(suspects), last_old, mass, probes, misreads, "", confirmed, earlier)

    def _failed(self, cause: SearchFailure, failure: str) -> SearchResult:
        return SearchResult((), None, 0.0, len(self.history), 0, failure, cause=cause)

    def _readings(self) -> int:
        """Return the number of GOOD and BAD readings."""
        return self._tally[self.old].total() + self._tally[self.new].total()

    def _spent(self) -> bool:
        return self.budget is not None and self._readings() >= self.budget

    def steps_left(self) -> int:
        """Estimate the remaining probes: missing bits divided by the capacity of one probe."""
        if self.result() is not None:
            return 0
        masses = [mass for mass, _ in self._classes()]
        total = math.fsum(masses)
        missing = math.fsum(-m / total * math.log2(m / total) for m in masses if m > 0) if total else 0.0
        noise = self.noise()
        # Under noise the last bits need repeats: the answer must beat its neighbours by the confidence.
        noisy = max(noise)
        closing = math.log2(1 / (1 - self.confidence)) / math.log2((1 - noisy) / noisy) if noisy else 0.0
        if len(self._noises) > 1:
            closing = self.confirm if missing > 1 else len(self._unconfirmed(self._likeliest()[0]))
        steps = math.ceil(round(missing / capacity(*noise) + closing, 9))
        return max(1, len(self._unseen_ends()) + steps)

    def progress(self) -> str:
        """Describe steps_left."""
        steps = self.steps_left()
        return f"about {steps} step{'' if steps == 1 else 's'} left"

    def posterior(self) -> list[float]:
        """Return the probability of each hypothesis 0..n; all zero if noiseless outcomes contradict each other.

        Depends only on the counts per candidate and outcome, not on the order: a replay is bitwise equal.
        """
        return self._believe().places

    def _believe(self) -> Belief:
        if self._belief is None:
            overruled = self._overruled()
            counts = [
                (0, 0) if i in overruled else (self._tally[self.new][i], self._tally[self.old][i])
                for i in range(self.first, self.last + 1)
            ]
            places = self.last - self.first
            end, inner = math.log(END_DOUBT), math.log((1 - 2 * END_DOUBT) / places)
            self._belief = believe([end, *[inner] * places, end], counts, self._noises)
        return self._belief

    def _overruled(self) -> tuple[int, ...]:
        """Return settled `new` candidates before a settled `old` one: the state changes more than once.

        Settled: many readings, all alike. Other candidates before that `old` one with only `new` readings are included.
        """
        if all(p == 0.0 for pair, _ in self._noises for p in pair):
            return ()
        old, new = self._tally[self.old], self._tally[self.new]
        last = max((i for i, count in old.items() if count >= UNANIMOUS and not new[i]), default=-1)
        before = [i for i in new if i < last and not old[i]]
        return tuple(sorted(before)) if any(new[i] >= UNANIMOUS for i in before) else ()

    def _readings_of(self, index: int) -> int:
        """Return the number of GOOD and BAD readings of one candidate."""
        return self._tally[self.old][index] + self._tally[self.new][index]

    def _unseen_ends(self) -> list[int]:
        """Return the endpoints without a verdict. Later, next() treats them like any other candidate."""
        return [i for i in (self.first, self.last) if not self._readings_of(i)]

    def _doubted_ends(self) -> list[int]:
        """Return the endpoints that never read as named, the least read first; they are settled before all others."""
        if not self.confirm:
            return []
        sides = (self.first, self.old, self.new), (self.last, self.new, self.old)
        wrong = {i: self._tally[wrong][i] for i, right, wrong in sides if not self._tally[right][i]}
        return sorted(
            (i for i, count in wrong.items() if count and i not in self._aside), key=wrong.__getitem__
        )

    def _most_informative(self) -> int:
        """Return the probe with the highest expected gain, the first of equals; rounded against libm differences."""
        gains = self._believe().gains()
        left = [i for i in range(self.first, self.last + 1) if i not in self._aside]
        return max(
            left, key=lambda i: round(gains[i - self.first] * self._installs(i), 12), default=self.first
        )

    def _installs(self, index: int) -> float:
        """Estimate the probability that a candidate installs: broken builds come in short runs."""
        return 1 - 0.5 ** min((abs(index - i) for i in self._aside), default=math.inf)

    def _classes(self) -> list[tuple[float, list[int]]]:
        """Group hypotheses 1..n-1 that have only skipped candidates between them, with the posterior of each group."""
        classes = [[1]]
        for k in range(2, self.last - self.first + 1):
            if self.first + k - 1 in self._aside:
                classes[-1].append(k)
            else:
                classes.append([k])
        posterior = self.posterior()
        return [(math.fsum(posterior[k] for k in ks), ks) for ks in classes]

    def _end_fault(self, posterior: list[float]) -> tuple[SearchFailure, str] | None:
        """Return why the endpoints, or the outcomes, allow no answer; None if they do."""
        ends = (
            (self.first, self.old, posterior[0], "an earlier one"),
            (self.last, self.new, posterior[-1], "a later one, or an earlier one if it has changed back"),
        )
        for index, named, doubt, _ in ends:
            if index in self._aside and (not self._readings_of(index) or doubt > (1 - self.confidence) / 2):
                what = "was skipped" if self._tally[SKIP][index] else "gives no verdict"
                why = f"the {named.value.lower()} endpoint {self.candidates[index]} {what}: name another"
                return SearchFailure.SKIPPED, why
        sure = max(posterior) if self._spent() else self.confidence
        doubted = self._doubted_ends()
        if len(doubted) == 2 and all(self._readings_of(i) >= SETTLED_ENDS for i in doubted):
            return self._swapped()
        wrong = [end for end in ends if end[2] >= sure > 0]
        wrong += [end for end in ends if end[0] in doubted and self._readings_of(end[0]) >= UNANIMOUS]
        if wrong:
            index, named, _, other = wrong[0]
            state = self.new if named is self.old else self.old
            why = (
                f"the {named.value.lower()} endpoint {self.candidates[index]} is {state.value}: name {other}"
            )
            return SearchFailure.ENDPOINT, why
        return None if any(posterior) else self._contradiction()

    def _contradiction(self) -> tuple[SearchFailure, str]:
        new = min(i for i, outcome in self.history if outcome is self.new)
        old = max(i for i, outcome in self.history if outcome is self.old)
        names = self.candidates
        if (new, old) == (self.first, self.last):
            return self._swapped()
        return SearchFailure.NOISE, (
            f"{names[new]} reads {self.new.value} but {names[old]} reads {self.old.value}:"
            " the probe is noisy (say how often: --false-bad, --false-good) or the fault comes and goes"
        )

    def _swapped(self) -> tuple[SearchFailure, str]:
        first, last = self.candidates[self.first], self.candidates[self.last]
        why = f"{first} reads {self.new.value} and {last} {self.old.value}: the endpoints look swapped"
        return SearchFailure.SWAPPED, why


def _check(candidates: Sequence[str], good: str, bad: str, find_fix: bool) -> None:
    twice = [label for label, count in Counter(candidates).items() if count > 1]
    if twice:
        raise SearchError(f"candidate {twice[0]!r} is listed {candidates.count(twice[0])} times")
    for name, label in (("good", good), ("bad", bad)):
        if label not in candidates:
            raise SearchError(f"the {name} endpoint {label!r} is not one of the {len(candidates)} candidates")
    if good == bad:
        raise SearchError(f"{good!r} is named as good and as bad")
    if (candidates.index(good) > candidates.index(bad)) != find_fix:
        order = "after" if find_fix else "before"
        other = "drop --find-fix to find the first bad" if find_fix else "--find-fix finds the first good"
        raise SearchError(f"good {good} does not come {order} bad {bad}: swap them, or {other}")


def _check_numbers(
    false_bad: float | None, false_good: float | None, confidence: float, budget: int | None
) -> None:
    for name, rate in (("false_bad", false_bad), ("false_good", false_good)):
        if rate is not None and not 0 <= rate < 0.5:
            raise SearchError(
                f"{name} must lie in [0, 0.5), got {rate!r}: at 0.5 a probe carries no information"
            )
    if not 0.5 < confidence < 1:
        raise SearchError(f"confidence must lie in (0.5, 1), got {confidence!r}")
    if budget is not None and budget < 2:
        raise SearchError(f"a budget of {budget} does not reach both endpoints")
