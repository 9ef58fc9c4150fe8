"""Posterior over the position of a change and the misread rates, from counts of readings per candidate.

Hypothesis k of 0..n: the first k candidates have the state of the early endpoint (`old`) and the others that of the
late one (`new`). Each pair of misread rates, (an old candidate reads new, a new one reads old), has a prior weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from bumpgate.bisect.noise import entropy, times_log

Pair = tuple[float, float]


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
    false_new, false_old = (
        [
            math.fsum(w * pair[side] for w, pair in zip(column, pairs)) / s if s else 0.0
            for column, s in zip(columns, sums)
        ]
        for side in (0, 1)
    )
    return Belief([s / total for s in sums], false_new, false_old)


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
