"""Noise-aware search for the first bad version: pure, no clock, no files, no environment.

The state is a posterior over where the change lies; a probe is chosen by the bits that it is expected to tell
(Horstein 1963; Burnashev & Zigangirov 1974), so a repeat of an earlier probe is made where a repeat tells most.

n candidates lie from the early end to the late one. Hypothesis k (0..n) says: the first k of them are still as
the early end is, all later ones as the late end is. 0 and n are the two ways in which an end was named wrongly.
`old` is the early end's state and `new` the late end's: GOOD and BAD, or BAD and GOOD when a fix is searched.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from bumpgate.rows import BumpgateError

# How probable it is, before any probe, that the person at the keyboard named one end wrongly. Each end.
END_DOUBT = 0.05
# A candidate that so many probes could not judge is set aside, as one that does not install.
UNKNOWN_LIMIT = 3
# Readings that contradict the answer, as improbable as this under the stated noise, leave no answer.
UNRELIABLE = 1e-3


class SearchError(BumpgateError):
    """A search that cannot be: unknown ends, ends in the wrong order, noise without information."""


class Outcome(Enum):
    """What one probe of one candidate said."""

    GOOD = "GOOD"
    BAD = "BAD"
    SKIP = "SKIP"
    """It does not install, or does not exist: it will never be probed again."""
    UNKNOWN = "UNKNOWN"
    """It ran and gave no verdict: the machine's fault, or an interval over the limit."""


@dataclass(frozen=True)
class Result:
    """How a search ended.

    suspects: indices of the candidates one of which is the first bad one (with find_fix, the first good one).
        One, unless its neighbours before it could not be probed; none where the search failed.
    last_old: the candidate before the first suspect; None where the search failed.
    posterior: of the suspects together.
    probes: outcomes recorded, ends, repeats and skips included.
    misreads: GOOD and BAD readings that the answer calls false.
    failure: why there is no answer, one line; empty where there is one.
    """

    suspects: tuple[int, ...]
    last_old: int | None
    posterior: float
    probes: int
    misreads: int
    failure: str = ""

    @property
    def found(self) -> bool:
        return not self.failure


class Search:
    """Finds the first bad candidate between a good and a bad one.

    candidates: labels in order (dates, versions); opaque, but no two alike.
    good, bad: the labels of the two ends. With find_fix the bad one comes first, and the first good is found.
    false_bad, false_good: how often a probe of a good candidate reads BAD, and the reverse, each in [0, 0.5).
        Repeats of a probe are taken as independent of each other.
    confidence: the posterior at which an answer is an answer, in (0.5, 1).
    budget: after so many GOOD and BAD readings, ends included, the likeliest answer is given as it stands, with
        its posterior; by default there is no end to patience.
    Raises SearchError, one line, on anything else.
    """

    def __init__(
        self,
        candidates: Sequence[str],
        good: str,
        bad: str,
        false_bad: float = 0.0,
        false_good: float = 0.0,
        confidence: float = 0.98,
        *,
        find_fix: bool = False,
        budget: int | None = None,
    ) -> None:
        _check(candidates, good, bad, find_fix)
        _check_numbers(false_bad, false_good, confidence, budget)
        self.candidates = tuple(candidates)
        self.find_fix = find_fix
        self.confidence = confidence
        self.budget = budget
        self.history: list[tuple[int, Outcome]] = []
        early, late = (bad, good) if find_fix else (good, bad)
        self.old, self.new = (Outcome.BAD, Outcome.GOOD) if find_fix else (Outcome.GOOD, Outcome.BAD)
        self.first, self.last = self.candidates.index(early), self.candidates.index(late)
        self._false_new, self._false_old = (false_good, false_bad) if find_fix else (false_bad, false_good)
        self._noise_bits = entropy(self._false_new), entropy(self._false_old)
        self._tally = {outcome: Counter[int]() for outcome in Outcome}
        self._aside: set[int] = set()
        self._posterior: list[float] | None = None

    def record(self, index: int, outcome: Outcome) -> None:
        """Takes one outcome in. Any candidate between the ends may be recorded, asked for or not."""
        if not self.first <= index <= self.last:
            raise SearchError(f"candidate {index} does not lie between the ends {self.first} and {self.last}")
        self.history.append((index, outcome))
        self._tally[outcome][index] += 1
        if outcome is Outcome.SKIP or self._tally[Outcome.UNKNOWN][index] >= UNKNOWN_LIMIT:
            self._aside.add(index)
        self._posterior = None

    def next(self) -> list[int]:
        """What to probe now: both ends at first (in any order, or at once), then one; empty when it is over."""
        if self.result() is not None:
            return []
        return self._unseen_ends() or [self._most_telling()]

    def prefetch(self) -> list[int]:
        """What may be asked for after next(), one index for each way it may turn out: to be installed ahead."""
        now = self.next()
        if self._unseen_ends():
            said = [(index, self.old if index == self.first else self.new) for index in now]
            ways = [said]
        else:
            ways = [[(index, outcome)] for index in now for outcome in (self.old, self.new)]
        later = [index for way in ways for index in self._after(way).next()]
        return [index for index in dict.fromkeys(later) if index not in now]

    def result(self) -> Result | None:
        """The answer, or why there is none; None while the search goes on."""
        posterior = self.posterior()
        failure = self._end_fault(posterior)
        if failure:
            return self._failed(failure)
        if self._unseen_ends():
            return None
        masses = [(math.fsum(posterior[k] for k in ks), ks) for ks in self._classes()]
        mass, likely = max(masses, key=lambda each: each[0])
        # Evidence from before a candidate was set aside may have cleared part of the class.
        share = (1 - self.confidence) * mass / len(likely)
        kept = [k for k in likely if posterior[k] >= share]
        mass = math.fsum(posterior[k] for k in kept)
        if mass < self.confidence and not self._spent():
            return None
        return self._answer(range(self.first + kept[0], self.first + kept[-1] + 1), mass)

    def _answer(self, suspects: range, mass: float) -> Result:
        misreads = sum(
            (i < suspects[0] and outcome is self.new) or (i >= suspects[-1] and outcome is self.old)
            for i, outcome in self.history
        )
        readings = self._readings()
        if _tail(misreads, readings, max(self._false_new, self._false_old)) < UNRELIABLE:
            label = self.candidates[suspects[-1]]
            return self._failed(
                f"{misreads} of {readings} readings contradict {label}: the probe is noisier than stated"
            )
        return Result(tuple(suspects), suspects[0] - 1, mass, len(self.history), misreads)

    def _failed(self, failure: str) -> Result:
        return Result((), None, 0.0, len(self.history), 0, failure)

    def _spent(self) -> bool:
        return self.budget is not None and self._readings() >= self.budget

    def _readings(self) -> int:
        """How many GOOD and BAD there are."""
        return self._tally[self.old].total() + self._tally[self.new].total()

    def steps_left(self) -> int:
        """About how many probes are still needed: bits that are missing over bits that one probe can tell."""
        if self.result() is not None:
            return 0
        posterior = self.posterior()
        masses = [math.fsum(posterior[k] for k in ks) for ks in self._classes()]
        total = math.fsum(masses)
        missing = math.fsum(-m / total * math.log2(m / total) for m in masses if m > 0) if total else 0.0
        # Noise leaves the last bits to repeats: the answer must stand out from its neighbours by the confidence.
        noisy = max(self._false_new, self._false_old)
        closing = math.log2(1 / (1 - self.confidence)) / math.log2((1 - noisy) / noisy) if noisy else 0.0
        steps = math.ceil(round(missing / capacity(self._false_new, self._false_old) + closing, 9))
        return max(1, len(self._unseen_ends()) + steps)

    def progress(self) -> str:
        """steps_left in words."""
        steps = self.steps_left()
        return f"about {steps} step{'' if steps == 1 else 's'} left"

    def posterior(self) -> list[float]:
        """Probability of each hypothesis 0..n; all zero where noiseless outcomes contradict each other.

        A function of how often each candidate read what, and not of the order: a replay gives the same bits.
        """
        if self._posterior is None:
            indices = range(self.first, self.last + 1)
            as_old = [self._log_likelihood(i, self._false_new, 1 - self._false_new) for i in indices]
            as_new = [self._log_likelihood(i, 1 - self._false_old, self._false_old) for i in indices]
            before = accumulate(as_old, initial=0.0)
            after = reversed(list(accumulate(reversed(as_new), initial=0.0)))
            logs = [p + a + b for p, a, b in zip(self._log_prior(), before, after)]
            top = max(logs)
            weights = [math.exp(x - top) if top > -math.inf else 0.0 for x in logs]
            total = math.fsum(weights)
            self._posterior = [w / total if total else 0.0 for w in weights]
        return self._posterior

    def _log_prior(self) -> list[float]:
        inner = math.log((1 - 2 * END_DOUBT) / (self.last - self.first))
        return [math.log(END_DOUBT), *[inner] * (self.last - self.first), math.log(END_DOUBT)]

    def _log_likelihood(self, index: int, reads_new: float, reads_old: float) -> float:
        """Of this candidate's readings, given the chance of each."""
        new, old = self._tally[self.new][index], self._tally[self.old][index]
        return _times_log(new, reads_new) + _times_log(old, reads_old) if new or old else 0.0

    def _unseen_ends(self) -> list[int]:
        """Ends without a verdict. What is left of their doubt afterwards, next() weighs like any other."""
        return [i for i in (self.first, self.last) if not self._judged(i)]

    def _judged(self, index: int) -> bool:
        return index in self._tally[self.old] or index in self._tally[self.new]

    def _most_telling(self) -> int:
        """The probe with the highest expected gain; the first of equals, rounded so that libm decides none."""
        reached = list(accumulate(self.posterior()))
        best, best_gain = self.first, -1.0
        for i in range(self.first, self.last + 1):
            if i in self._aside:
                continue
            told = self._gain(min(1.0, reached[i - self.first]))
            told = round(told * self._installs(i), 12)
            if told > best_gain:
                best, best_gain = i, told
        return best

    def _installs(self, index: int) -> float:
        """How likely a candidate installs: broken builds come in runs, and end somewhere near."""
        return 1 - 0.5 ** min((abs(index - i) for i in self._aside), default=math.inf)

    def _gain(self, mass: float) -> float:
        """Bits that a probe is expected to tell where its candidate is new with probability `mass`."""
        reads_new = mass * (1 - self._false_old) + (1 - mass) * self._false_new
        bits_new, bits_old = self._noise_bits
        return entropy(reads_new) - mass * bits_old - (1 - mass) * bits_new

    def _classes(self) -> list[list[int]]:
        """Hypotheses 1..n-1 in classes that no probe can tell apart: those with a set-aside candidate between."""
        classes = [[1]]
        for k in range(2, self.last - self.first + 1):
            if self.first + k - 1 in self._aside:
                classes[-1].append(k)
            else:
                classes.append([k])
        return classes

    def _end_fault(self, posterior: list[float]) -> str:
        """Why the ends, or the outcomes, allow no answer; empty where they do."""
        ends = (
            (self.first, self.old, posterior[0], "an earlier"),
            (self.last, self.new, posterior[-1], "a later"),
        )
        for index, said, doubt, _ in ends:
            if index in self._aside and (not self._judged(index) or doubt > (1 - self.confidence) / 2):
                what = "does not install" if self._tally[Outcome.SKIP][index] else "gives no verdict"
                return f"the {said.value.lower()} end {self.candidates[index]} {what}: name another"
        sure = max(posterior) if self._spent() else self.confidence
        wrong = [end for end in ends if end[2] >= sure > 0]
        if wrong:
            index, said, _, other = wrong[0]
            state = self.new if said is self.old else self.old
            label = self.candidates[index]
            return f"the {said.value.lower()} end {label} is {state.value}: name {other} one"
        return "" if any(posterior) else self._contradiction()

    def _contradiction(self) -> str:
        new = min(i for i, outcome in self.history if outcome is self.new)
        old = max(i for i, outcome in self.history if outcome is self.old)
        names = self.candidates
        if (new, old) == (self.first, self.last):
            return f"{names[new]} reads {self.new.value} and {names[old]} {self.old.value}: the ends look swapped"
        return (
            f"{names[new]} reads {self.new.value} but {names[old]} reads {self.old.value}:"
            " the probe is noisy (say how often: --false-bad, --false-good) or the fault comes and goes"
        )

    def _after(self, outcomes: list[tuple[int, Outcome]]) -> Search:
        """This search as it would stand after some outcomes."""
        ahead = copy(self)
        ahead.history, ahead._aside = list(self.history), set(self._aside)
        ahead._tally = {outcome: counts.copy() for outcome, counts in self._tally.items()}
        for index, outcome in outcomes:
            ahead.record(index, outcome)
        return ahead


def capacity(false_new: float, false_old: float) -> float:
    """Bits that the best probe tells: the capacity of the binary asymmetric channel."""
    clear = 1 - false_new - false_old
    tilt = (entropy(false_new) - entropy(false_old)) / clear
    lost = ((1 - false_old) * entropy(false_new) - false_new * entropy(false_old)) / clear
    return math.log2(1 + 2**tilt) - lost


def entropy(p: float) -> float:
    """Bits of a coin that falls one way with probability p."""
    return -p * math.log2(p) - (1 - p) * math.log2(1 - p) if 0 < p < 1 else 0.0


def _times_log(count: int, p: float) -> float:
    """count * log(p), where none of an impossible thing is no evidence."""
    if not count:
        return 0.0
    return count * math.log(p) if p > 0 else -math.inf


def _tail(count: int, trials: int, p: float) -> float:
    """Probability of at least `count` in so many trials."""
    return math.fsum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(count, trials + 1))


def _check(candidates: Sequence[str], good: str, bad: str, find_fix: bool) -> None:
    twice = [label for label, count in Counter(candidates).items() if count > 1]
    if twice:
        raise SearchError(f"candidate {twice[0]!r} is listed {candidates.count(twice[0])} times")
    for name, label in (("good", good), ("bad", bad)):
        if label not in candidates:
            raise SearchError(f"the {name} end {label!r} is none of the {len(candidates)} candidates")
    if good == bad:
        raise SearchError(f"{good!r} is named as good and as bad")
    if (candidates.index(good) > candidates.index(bad)) != find_fix:
        order = "after" if find_fix else "before"
        other = "drop --find-fix to find the first bad" if find_fix else "--find-fix finds the first good"
        raise SearchError(f"good {good} does not come {order} bad {bad}: swap them, or {other}")


def _check_numbers(false_bad: float, false_good: float, confidence: float, budget: int | None) -> None:
    for name, rate in (("false_bad", false_bad), ("false_good", false_good)):
        if not 0 <= rate < 0.5:
            raise SearchError(f"{name} must lie in [0, 0.5), got {rate!r}: at a half a probe tells nothing")
    if not 0.5 < confidence < 1:
        raise SearchError(f"confidence must lie in (0.5, 1), got {confidence!r}")
    if budget is not None and budget < 2:
        raise SearchError(f"a budget of {budget} does not reach both ends")
