"""Misread rates of a probe: the rates considered, and the information in one reading under them."""

from __future__ import annotations

import math

# Misread rates to choose from if they are not stated, and the prior probability of a test without misreads.
RATES = (0.0, 0.03, 0.1, 0.2, 0.35, 0.5)
NO_MISREADS = 0.6


def noises(false_new: float | None, false_old: float | None) -> list[tuple[tuple[float, float], float]]:
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
