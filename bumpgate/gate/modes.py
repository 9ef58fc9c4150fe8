"""Slow modes: processes of the candidate that are now and then much slower, which most sessions do not show.

A winsorised test treats a slow process as noise, so it never reports a build in which one process in ten takes twice
as long. This module counts those processes, in Wald's sequential test of "as rare as in an unchanged build" against
"frequent" (Wald 1945, "Sequential tests of statistical hypotheses"). Noise alone cannot prove a slow mode: with signs
alone, k slow processes of one side and none of the other have p = 2^-k. The test therefore assumes how rare a slow
process is in an unchanged build (`Modes.rare`). On a machine where processes of the adopted build are slow more often
(`Usual`), the candidate must have slow processes in addition to that share, and by far more of them.

Readings that were lost are counted too: a build that is too rough to be timed, or that dies, loses more of them.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

HIGHEST = 0.5  # upper limit of the share of slow processes that is attributed to the machine
# A session this far above the median of its row had a slow process of the candidate; this far below, of the adopted.
# SLOW, or SPREADS standard deviations of the row if that is more: a row that varies by 11 % passes a factor of 1.3 in 1
# of 100 sessions by chance, at 4 standard deviations in 1 of 30 000. At most SLOWEST, so that a factor of 2 counts.
SLOW, SLOWEST, SPREADS = math.log(1.3), math.log(1.7), 4
# Standard deviation of normal noise over its median absolute deviation, which one bad session in ten hardly moves.
MAD = 1.4826


class Mode(Enum):
    """FOUND: frequent. CLEARED: rare. OPEN: more sessions are needed."""

    FOUND = "FOUND"
    CLEARED = "CLEARED"
    OPEN = "OPEN"


@dataclass(frozen=True)
class Modes:
    """The two hypotheses and their errors. Raises ValueError on values that do not bound the errors.

    rare, frequent: share of slow processes in an unchanged build, and the share that must be found.
    alpha: chance of a false FOUND in all tests of a gate. beta: chance that a frequent slow mode is CLEARED.
    sides: the greatest p of "a slow process is of either side with equal chance" for a FOUND, on a machine on which
    processes of the adopted build are slow too.
    """

    rare: float = 0.002
    frequent: float = 0.1
    alpha: float = 0.006
    beta: float = 0.06
    sides: float = 1 / 128

    def __post_init__(self) -> None:
        if not (0 < self.rare < self.frequent < 1 and 0 < self.alpha < 0.5 and 0 < self.beta < 0.5):
            raise ValueError(f"need 0 < rare < frequent < 1 and levels below 0.5, got {self}")

    def from_share(self, rare: float) -> Modes:
        """Return the hypotheses for rows with at least this share of slow processes in an unchanged build."""
        more = rare - self.rare
        return replace(self, rare=rare, frequent=self.frequent + more) if more > 0 else self

    @property
    def sessions(self) -> int:
        """Return the number of sessions without a slow process that clear a row."""
        return math.ceil(math.log(self.beta) / math.log((1 - self.frequent) / (1 - self.rare)))


def slow_sessions(log_ratios: Sequence[float]) -> tuple[int, int]:
    """Return the number of sessions with a slow process of the candidate, and with one of the adopted build."""
    signs = _signs(log_ratios)
    return signs.count(1), signs.count(-1)


@dataclass(frozen=True)
class Usual:
    """How many readings of all rows of a test had a slow process of the adopted build."""

    slow: int = 0
    readings: int = 0

    @classmethod
    def of(cls, rows: Iterable[Sequence[float]]) -> Usual:
        """Count the sessions of these rows, and those with a slow process of the adopted build."""
        kept = list(rows)
        return cls(sum(slow_sessions(row)[1] for row in kept), sum(map(len, kept)))

    @property
    def share(self) -> float:
        """Return an upper estimate of the machine's share of slow processes: observed plus one standard deviation."""
        return min(HIGHEST, (self.slow + math.sqrt(self.slow)) / self.readings) if self.slow else 0.0


def slow_mode(
    log_ratios: Sequence[float],
    modes: Modes,
    share: float = 1.0,
    usual: Usual = Usual(),
    last: bool = False,
) -> Mode:
    """Return the first bound that the log-likelihood ratio crosses, session by session.

    share: of `modes.alpha`, if several tests are judged. usual: of the row's test. last: no session will follow; a row
    that crossed no bound is then CLEARED if a frequent slow mode shows so few slow processes with chance `modes.beta`.
    """
    rare = max(modes.rare, usual.share)
    frequent = rare + modes.frequent - modes.rare
    slow = math.log(frequent / rare)
    normal = math.log((1 - frequent) / (1 - rare))
    upper, lower = -math.log(modes.alpha * share), math.log(modes.beta)
    total, sides = 0.0, Counter[int]()
    for sign in _signs(log_ratios):
        sides[sign] += 1
        total += sign * slow if sign else normal
        if total >= upper and (not usual.slow or p_lost(sides[1], sides[-1]) <= modes.sides):
            return Mode.FOUND
        if total <= lower:
            return Mode.CLEARED
    few = last and _at_most(sides[1], len(log_ratios), frequent) <= modes.beta
    return Mode.CLEARED if few else Mode.OPEN


def _at_most(count: int, total: int, share: float) -> float:
    """Return the chance of at most `count` among `total`, each with chance `share` (binomial)."""
    return math.fsum(math.comb(total, k) * share**k * (1 - share) ** (total - k) for k in range(count + 1))


def p_lost(candidate: int, adopted: int) -> float:
    """Return the exact one-sided p of "the candidate loses no more readings than the adopted build".

    candidate, adopted: numbers of lost readings, or of slow ones. If the claim holds, each of them is of either side
    with equal chance (binomial test).
    """
    total = candidate + adopted
    return float(sum(math.comb(total, k) for k in range(candidate, total + 1)) / 2**total)


def _signs(log_ratios: Sequence[float]) -> list[int]:
    """Return 1, -1 or 0 per session: a slow process of the candidate, of the adopted build, of neither."""
    if not log_ratios:
        return []
    middle = statistics.median(log_ratios)
    spread = MAD * statistics.median(abs(x - middle) for x in log_ratios)
    slow = min(max(SLOW, SPREADS * spread), SLOWEST)
    return [(x - middle > slow) - (x - middle < -slow) for x in log_ratios]
