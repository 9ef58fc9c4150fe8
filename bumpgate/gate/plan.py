"""The plan of the paired sessions: when to look, which margins count, how the levels are divided among the rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from statistics import NormalDist
from typing import Any

from bumpgate.core.findings import SAME_MARGIN
from bumpgate.gate.modes import Modes


@dataclass(frozen=True)
class Look:
    """One look, after `sessions` sessions; `different` and `same` are its shares of the two levels."""

    sessions: int
    different: float
    same: float


# 6 sessions are the fewest that can call SAME: 2^-6 is 0.32 of 0.05. With 71 rows, 16 are the fewest that can call
# SLOWER; by then the other tests are decided and dropped, so these sessions are short.
LOOKS = (
    Look(6, 0.0, 0.32),
    Look(8, 0.05, 0.1),
    Look(12, 0.2, 0.1),
    Look(16, 0.2, 0.08),
    Look(20, 0.1, 0.08),
    Look(28, 0.15, 0.12),
    Look(36, 0.1, 0.05),
    Look(48, 0.1, 0.1),
    Look(72, 0.1, 0.05),
)


# Sessions after which NOT SLOWER ends the sessions of a row on a GPU or TPU.
SETTLE_ON_DEVICE = 8
# Share of processes of an unchanged build that are slow, of a row with a margin of its lane: such a row varies by 10 to
# 24 % (standard deviation of a session on an H200), so that a process beyond 1.3 times is no mode.
RARE_IF_NOISY = 0.2
# Part of the level of SLOWER that the biases of compile caches may use.
CACHE_PART = 0.25


@dataclass(frozen=True)
class SessionRule:
    """How the rows whose id matches `pattern` (fnmatch) are judged; the first matching rule applies.

    different, same: margins, as in `SessionPlan`. weight: importance; the levels are divided among the rules that have
    rows, in proportion to their weights, and within a rule equally. watch: SAME needs as many sessions as clear a row
    of slow modes, even if no slow process was seen. rare: share of slow processes in an unchanged build, if it is more
    than `Modes.rare`.
    """

    pattern: str
    different: float = 0.01
    same: float = SAME_MARGIN
    weight: float = 1.0
    watch: bool = False
    rare: float = 0.0


def starts(watch: bool) -> tuple[SessionRule, SessionRule]:
    """Return the rules of process starts, which are measured once per process: wider margins, less of the level.

    watch: whether warm starts are watched for slow modes; a cold one takes three times as long. In a recorded gate of a
    build against itself, on fixed cores, 2.2 % of the processes were slow.
    """
    cold = SessionRule("throughput/start-*/cold_*", different=0.02, same=0.05, weight=0.15, rare=0.022)
    warm = SessionRule("throughput/start-*", different=0.02, same=0.05, weight=0.1, watch=watch)
    return cold, warm


@dataclass(frozen=True)
class SessionPlan:
    """When to look, and what counts as moved. Raises ValueError on a plan that does not bound its errors.

    different: a row is SLOWER or FASTER if its interval lies beyond this change, 0.01 is 1 %.
    same: a row is SAME if its interval lies within this change in both directions.
    alpha: chance of a false SLOWER or FASTER in the family of rows, over all looks; half for each direction.
    alpha_same: chance that one row which moved by more than `same` is called SAME, over all looks; and that one which
        is slower by more than `same` is called NOT SLOWER.
    settle: sessions after which NOT SLOWER ends the sessions of a row. Before, SAME or FASTER may still become certain.
    rules: for rows with other margins, importance or watch. modes: the test of slow modes.
    cache_sd: standard deviation of what a compile cache (autotuning choices, code layout) adds to the log of a time.
    """

    looks: tuple[Look, ...] = LOOKS
    different: float = 0.01
    same: float = SAME_MARGIN
    alpha: float = 0.02
    alpha_same: float = 0.05
    rules: tuple[SessionRule, ...] = ()
    modes: Modes = field(default_factory=Modes)
    cache_sd: float = 0.01
    settle: int = 16

    def __post_init__(self) -> None:
        counts = [look.sessions for look in self.looks]
        if not counts or counts[0] < 1 or any(a >= b for a, b in pairwise(counts)):
            raise ValueError(f"sessions of the looks must increase, got {counts}")
        for shares in ([x.different for x in self.looks], [x.same for x in self.looks]):
            if min(shares) < 0 or sum(shares) > 1 + 1e-9:
                raise ValueError(f"shares of a level must be at least 0 and sum to at most 1, got {shares}")
        for rule in (SessionRule("*", self.different, self.same), *self.rules):
            if not 0 <= rule.different <= rule.same:
                raise ValueError(f"need 0 <= different <= same, got {rule.different} and {rule.same}")
        if not all(rule.weight > 0 for rule in self.rules):
            raise ValueError(f"weights must be positive, got {[rule.weight for rule in self.rules]}")
        if not (0 < self.alpha < 1 and 0 < self.alpha_same < 0.5 and self.cache_sd >= 0):
            raise ValueError(f"levels out of range: {self.alpha}, {self.alpha_same} and {self.cache_sd}")

    @property
    def budget(self) -> int:
        """Return the number of sessions after which an open row is left INCONCLUSIVE."""
        return self.looks[-1].sessions

    def rule(self, row: str) -> SessionRule:
        """Return the rule of one row."""
        found = (rule for rule in self.rules if fnmatchcase(row, rule.pattern))
        return next(found, SessionRule("*", self.different, self.same))


@dataclass(frozen=True)
class Family:
    """Rows that are judged together, and the origin of each reading.

    tests: row id -> node id; rows of one test come from the same processes. A row without one is a separate test.
    caches: row id -> the pair of compile caches that each reading used; a row without one alternated between two.
    """

    tests: Mapping[str, str] = field(default_factory=dict)
    caches: Mapping[str, Sequence[int]] = field(default_factory=dict)


def cache_allowance(plan: SessionPlan, share: float, bias: float, pairs: int) -> float:
    """Return the log-ratio that compile caches alone exceed with a chance of `share` of CACHE_PART of half of alpha.

    Each side's cache adds an independent bias, normal with the standard deviation `bias`. More sessions do not remove
    it; `pairs` independent pairs of caches average it.
    """
    if not bias:
        return 0.0
    deviation = bias * math.sqrt(2 / pairs)
    return deviation * NormalDist().inv_cdf(1 - CACHE_PART * plan.alpha / 2 * share)


def shares(names: Iterable[str], plan: SessionPlan) -> dict[str, float]:
    """Return row id -> its share of the level: the rules that have rows divide it by weight, and their rows equally."""
    rules = {name: plan.rule(name) for name in names}
    counts = Counter(rules.values())
    total = sum(rule.weight for rule in counts)
    return {name: rule.weight / total / counts[rule] for name, rule in rules.items()}


def plan_for(
    sessions: int | None = None,
    slow_modes: bool = False,
    device: str = "cpu",
    margins: Iterable[tuple[str, float]] = (),
) -> SessionPlan:
    """Return the plan of a lane, cut to `sessions`; the last look gets the shares of the looks that are cut off.

    Slow modes of a training step and of a warm start are watched for on the CPU lane, where a session is cheap, and
    only if there are enough sessions to clear a row of them. On another device, where a session takes minutes, NOT
    SLOWER ends the sessions of a row early. margins: of the lane, for rows that vary much. Raises ValueError on fewer
    sessions than the first look needs.
    """
    default = SessionPlan() if device == "cpu" else SessionPlan(settle=SETTLE_ON_DEVICE)
    watch = slow_modes and (sessions is None or sessions >= default.modes.sessions)
    noisy = (SessionRule(pattern, min(0.02, m), m, weight=0.1, rare=RARE_IF_NOISY) for pattern, m in margins)
    default = replace(default, rules=(*noisy, *starts(watch), SessionRule("throughput/*", watch=watch)))
    if sessions is None or sessions >= default.budget:
        return default
    if sessions < default.looks[0].sessions:
        raise ValueError(f"at least {default.looks[0].sessions} sessions, got {sessions}")
    looks = [look for look in default.looks if look.sessions < sessions]
    rest = Look(sessions, 1 - sum(x.different for x in looks), 1 - sum(x.same for x in looks))
    return replace(default, looks=(*looks, rest))


def plan_of(raw: Mapping[str, Any]) -> SessionPlan:
    """Return the plan that `asdict` made JSON of. Raises KeyError, TypeError or ValueError on anything else."""
    parts = {
        "looks": tuple(Look(**look) for look in raw["looks"]),
        "rules": tuple(SessionRule(**rule) for rule in raw["rules"]),
        "modes": Modes(**raw["modes"]),
    }
    return SessionPlan(**{**raw, **parts})
