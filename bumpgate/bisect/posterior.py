"""Posterior over the position of a change and the misread rates, from counts of readings per candidate.

Hypothesis k of 0..n: the first k candidates have the state of the early endpoint (`old`), the others the state of the
late one (`new`). Each pair of misread rates, (an old candidate reads new, a new one reads old), has a prior weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

Pair = tuple[float, float]
# Misread rates to choose from if they are not stated, and the prior probability of a test without misreads.
RATES = (0.0, 0.03, 0.1, 0.2, 0.35, 0.5)
NO_MISREADS = 0.6


@dataclass(frozen=True)
class Belief:
    """Posterior state.

    places: the posterior of each hypothesis. false_new, false_old: the expected misread rates under it.
    """

    places: list[float]
    false_new: list[float]
    false_old: list[float]

    def reads_new(self) -> list[float]:
        """Return for each candidate the probability that one reading is `new`."""
        as_new = list(accumulate(p * (1 - e) for p, e in zip(self.places, self.false_old)))
        as_old = list(accumulate(p * e for p, e in zip(self.places, self.false_new)))
        return [min(1.0, new + as_old[-1] - old) for new, old in zip(as_new, as_old)]

    def gains(self) -> list[float]:
        """Return the expected information gain about the position, in bits, of one reading of each candidate."""
        bits_new = list(accumulate(p * entropy(e) for p, e in zip(self.places, self.false_old)))
        bits_old = list(accumulate(p * entropy(e) for p, e in zip(self.places, self.false_new)))
        return [
            entropy(new) - in_new - (bits_old[-1] - in_old)
            for new, in_new, in_old in zip(self.reads_new(), bits_new, bits_old)
        ]


def believe(
    log_prior: Sequence[float], counts: Sequence[tuple[int, int]], noises: Sequence[tuple[Pair, float]]
) -> Belief:
    """Return the posterior. counts: (new, old) readings per candidate. noises: pairs of rates and their weights."""
    pairs = [pair for pair, _ in noises]
    joint = [_log_joint(log_prior, counts, *pair, weight) for pair, weight in noises]
    top = max(map(max, joint))
    if top == -math.inf:
        return Belief(*([0.0] * len(joint[0]) for _ in range(3)))
    columns = [[math.exp(x - top) for x in column] for column in zip(*joint)]
    sums = [math.fsum(column) for column in columns]
    total = math.fsum(sums)

    def expected(side: int) -> list[float]:
        rates = [math.fsum(w * pair[side] for w, pair in zip(column, pairs)) for column in columns]
        return [rate / s if s else 0.0 for rate, s in zip(rates, sums)]

    return Belief([s / total for s in sums], expected(0), expected(1))


def _log_joint(
    prior: Sequence[float],
    counts: Sequence[tuple[int, int]],
    false_new: float,
    false_old: float,
    weight: float,
) -> list[float]:
    """Return each hypothesis' log joint with the (new, old) counts per candidate, under one pair of misread rates."""
    # Most candidates have no reading and share one term.
    old_terms = {c: times_log(c[0], false_new) + times_log(c[1], 1 - false_new) for c in set(counts)}
    new_terms = {c: times_log(c[0], 1 - false_old) + times_log(c[1], false_old) for c in set(counts)}
    as_old, as_new = [old_terms[c] for c in counts], [new_terms[c] for c in counts]
    before = accumulate(as_old, initial=0.0)
    after = reversed(list(accumulate(reversed(as_new), initial=0.0)))
    return [p + math.log(weight) + a + b for p, a, b in zip(prior, before, after)]


def noises(false_new: float | None, false_old: float | None) -> list[tuple[Pair, float]]:
    """Return the pairs of misread rates, each with its prior probability."""
    new = RATES if false_new is None else (false_new,)
    old = RATES if false_old is None else (false_old,)
    pairs = [(a, b) for a in new for b in old]
    if len(pairs) == 1:
        return [(pairs[0], 1.0)]
    noisy = (1 - NO_MISREADS) / (len(pairs) - 1)
    return [(pair, noisy if i else NO_MISREADS) for i, pair in enumerate(pairs)]


def capacity(false_new: float, false_old: float) -> float:
    """Return the bits per probe at best: the capacity of the binary asymmetric channel."""
    clear = 1 - false_new - false_old
    tilt = (entropy(false_new) - entropy(false_old)) / clear
    lost = ((1 - false_old) * entropy(false_new) - false_new * entropy(false_old)) / clear
    return math.log2(1 + 2**tilt) - lost


def entropy(p: float) -> float:
    """Return the binary entropy of p, in bits."""
    return -p * math.log2(p) - (1 - p) * math.log2(1 - p) if 0 < p < 1 else 0.0


def times_log(count: int, p: float) -> float:
    """Return count * log(p), and 0 for count 0 even if p is 0."""
    if not count:
        return 0.0
    return count * math.log(p) if p > 0 else -math.inf


def tail(count: int, trials: int, p: float) -> float:
    """Return the binomial probability of at least `count` successes in `trials`."""
    return math.fsum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(count, trials + 1))
