"""Sequential test of timed rows: whether the candidate's time changed, judged as sessions are measured.

A session is a fresh process of each side (A adopted, B candidate), both at once or one after the other, and gives
one log-ratio per row, log(time of B / time of A). Its noise is mostly a bias of each process (memory layout;
standard deviation 1 to 3 %, on a busy host 5), which more rounds within a process do not remove, so sessions are
counted.

The test of "the true log-ratio is at most b": each session's distance from b counts with its sign, and at most
with the median distance (winsorised, so one bad session weighs like an ordinary one). If the claim holds, swapping
A and B in a session is a fair coin, so the sum is compared with its exact distribution over all 2^n signs given
the distances. It assumes no normal distribution and estimates no variance: any noise that is the same for A and B is
allowed, heavy tails and sessions of unequal quality included. (Fisher's randomisation test with the score of an
M-estimate: Maritz 1979, "A note on exact robust confidence intervals for location", Biometrika 66.)

Several looks: each look owns a share of the level, the shares sum to 1, and p is divided by its look's share. By
Bonferroni's inequality the smallest quotient so far is a p-value at any stopping time (alpha spending as of Slud and
Wei 1982, in its simplest form; "always valid" p of Johari, Pekelis and Walsh 2022). Few looks are better than
many: a look after each session spends the level on nearly the same data again.

Between the two margins lies Wald's indifference zone, where SAME and DIFFERENT are both correct. With a single margin,
a row that moved by exactly that much would use up every budget.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import combinations_with_replacement

from bumpgate.core.findings import TimedOutcome
from bumpgate.gate.modes import MAD, Mode, Usual, slow_mode, slow_sessions
from bumpgate.gate.plan import Family, SessionPlan, SessionRule, cache_allowance, shares

# Steps of the winsorised distances: whole numbers make the exact distribution a product of polynomials.
STEPS = 8
BISECTIONS = 24
# What it takes to estimate the bias of compile caches from a gate's own sessions: tests, and sessions of each pair of
# caches. CERTAIN: a median of that many differences is too small by more than this factor in less than 1 of 100 gates.
# LEAST_BIAS: of what a few sessions can show.
MANY_TESTS, LEAST_OF_PAIR, CERTAIN, LEAST_BIAS = 20, 3, 2.0, 0.002


@dataclass(frozen=True)
class Timed:
    """One row as the gate reports it.

    ratio: time of the candidate over time of the adopted build, Hodges-Lehmann estimate (1.05 is 5 % slower).
    interval: of the ratio; over all looks, each end errs with at most `alpha_same`. SAME lies within the margin
        `same`, SLOWER and FASTER beyond the margin `different`, at the look that decided.
    p: Holm-adjusted, of the likelier direction.
    slow: sessions with a slow process of the candidate, and of the adopted build (bumpgate.gate.modes).
    """

    outcome: TimedOutcome
    ratio: float
    interval: tuple[float, float]
    sessions: int
    p: float
    slow: tuple[int, int] = (0, 0)
    mode: bool = False


@dataclass(frozen=True)
class Evidence:
    """Always-valid p-values of one row against: not slower, not faster, not the same, slower than the margin `same`.

    The last one is 1 before `plan.settle` sessions.
    """

    slower: float
    faster: float
    same: float
    not_slower: float


def alternate(session: int) -> str:
    """Return the order of the two processes of a session, counted from 0: AB, BA, BA, AB, and so on.

    The effects of a steady drift of the machine, and of being the first process of a session (a waking machine), change
    sign from one session to the next, and from one session on a pair of compile caches to its next.
    """
    return "AB" if session % 4 in (0, 3) else "BA"


def log_ratio(order: str, readings: Sequence[float]) -> float:
    """Return log(time of B / time of A) of one session: mean log of B minus mean log of A, in the order they ran.

    readings: positive times (or costs), one per process. Raises ValueError on other values or another number of them.
    """
    if len(readings) != len(order) or order.count("A") != order.count("B") or set(order) != {"A", "B"}:
        raise ValueError(f"order {order!r} does not pair {len(readings)} readings")
    if not all(0 < x < math.inf for x in readings):
        raise ValueError(f"times must be positive and finite, got {list(readings)}")
    signed = (math.log(x) if letter == "B" else -math.log(x) for letter, x in zip(order, readings))
    return math.fsum(signed) / order.count("B")


def log_ratio_of_rounds(adopted: Sequence[float], candidate: Sequence[float]) -> float:
    """Return log(cost of candidate / cost of adopted) of two processes that ran the same rounds at the same time.

    Neighbouring rounds are averaged first: the sides swap cores after each round, so that a disturbance of one core
    cancels; then Hodges-Lehmann over the averages. Raises ValueError on costs that do not pair.
    """
    positive = all(0 < x < math.inf for x in (*adopted, *candidate))
    if not adopted or len(adopted) != len(candidate) or not positive:
        counts = f"{len(adopted)} and {len(candidate)}"
        raise ValueError(f"{counts} rounds do not pair, or a cost is not positive and finite")
    logs = [math.log(b / a) for a, b in zip(adopted, candidate)]
    places = [(x + y) / 2 for x, y in zip(logs[::2], logs[1::2])]
    return estimate(places or logs)


@lru_cache(maxsize=4096)  # a later look needs the p-values of the earlier ones again
def p_above(log_ratios: tuple[float, ...], bound: float) -> float:
    """Return the exact one-sided p-value of "the true log-ratio is at most `bound`"; small means that it lies above."""
    distances = [x - bound for x in log_ratios]
    cap = statistics.median(map(abs, distances))
    if cap == 0:  # half of the sessions lie on the bound itself
        return 1.0
    scores = [round(STEPS * min(abs(d), cap) / cap) for d in distances]
    observed = sum(score for score, d in zip(scores, distances) if d > 0)
    # How many sign patterns give each sum: the coefficients of the product of (1 + z^score). One integer holds
    # them all, each in `width` bits, more than all 2^n patterns need; a remainder sums the upper ones.
    width = len(scores) + 2
    counts = 1
    for score in scores:
        counts += counts << (score * width)
    at_least = (counts >> (observed * width)) % ((1 << width) - 1)
    return float(at_least / 2 ** len(scores))


@lru_cache(maxsize=4096)
def p_below(log_ratios: tuple[float, ...], bound: float) -> float:
    """Return the exact one-sided p-value of "the true log-ratio is at least `bound`"."""
    return p_above(tuple(-x for x in log_ratios), -bound)


def evidence(
    log_ratios: Sequence[float],
    plan: SessionPlan,
    rule: SessionRule | None = None,
    share: float = 1.0,
    caches: Sequence[int] = (),
    cache_sd: float | None = None,
) -> Evidence:
    """Return the p-values over all looks that these sessions reached; 1 before the first.

    A look counts for SLOWER or FASTER only if the estimate exceeds what compile caches alone explain, and lies beyond
    the margin on each pair of caches. share: of the level, see `shares`. caches: the pair of each
    session; by default two alternate. cache_sd: standard deviation of the bias of a cache, by default the plan's.
    """
    rule = rule or plan.rule("")
    bias = plan.cache_sd if cache_sd is None else cache_sd
    allowance = partial(cache_allowance, plan, share, bias)
    different, same = math.log1p(rule.different), math.log1p(rule.same)
    level = plan.alpha / 2
    slower = faster = alike = not_slower = 1.0
    for look in plan.looks:
        if look.sessions > len(log_ratios):
            break
        seen = tuple(log_ratios[: look.sessions])
        if look.different:
            above, below = (p / look.different for p in (p_above(seen, different), p_below(seen, -different)))
            # A larger p cannot decide, so the estimates are not needed.
            if above > level or _beyond_caches(seen, caches, different, allowance):
                slower = min(slower, above)
            if below > level or _beyond_caches([-x for x in seen], caches, different, allowance):
                faster = min(faster, below)
        if look.same:  # two one-sided tests, and both must hold (Schuirmann 1987)
            above = p_above(seen, -same) / look.same
            below = p_below(seen, same) / look.same
            alike = min(alike, max(above, below))
            not_slower = min(not_slower, below)
    return Evidence(slower, faster, alike, not_slower if len(log_ratios) >= plan.settle else 1.0)


def by_cache(log_ratios: Sequence[float], caches: Sequence[int] = ()) -> list[list[float]]:
    """Group log-ratios by the pair of compile caches of each; by default two alternate."""
    groups: dict[int, list[float]] = {}
    for i, value in enumerate(log_ratios):
        groups.setdefault(caches[i] if caches else i % 2, []).append(value)
    return [*groups.values()]


def cache_biases(
    sessions: Mapping[str, Sequence[float]], plan: SessionPlan, family: Family
) -> dict[str, float]:
    """Return the standard deviation of a compile cache's bias for each row: the plan's, or less if two pairs agree.

    The estimates on two pairs differ by four independent biases. Over MANY_TESTS tests or more, the median difference
    gives their standard deviation, with a factor for its own error; a row whose pairs differ more has more.
    """
    differences, of_test = {}, dict[str, float]()
    for row, values in sessions.items():
        groups = by_cache(values, family.caches.get(row, ()))
        if len(groups) == 2 and min(map(len, groups)) >= LEAST_OF_PAIR:
            differences[row] = abs(estimate(groups[0]) - estimate(groups[1]))
            test = family.tests.get(row, row)
            of_test[test] = max(differences[row], of_test.get(test, 0.0))
    if len(of_test) < MANY_TESTS:
        return dict.fromkeys(sessions, plan.cache_sd)
    pooled = CERTAIN * MAD * statistics.median(of_test.values()) / 2
    own = {row: max(pooled, LEAST_BIAS, apart / 2) for row, apart in differences.items()}
    return {row: min(plan.cache_sd, own.get(row, plan.cache_sd)) for row in sessions}


def decide(
    sessions: Mapping[str, Sequence[float]], plan: SessionPlan, family: Family | None = None
) -> dict[str, TimedOutcome]:
    """Return row id -> outcome, from each row's log-ratios so far, in the order they were measured.

    Each call takes the complete family: decided rows with the sessions they stopped at, and rows without a session. A
    pure function, so a killed gate continues from its stored state. A row needs
    more sessions while it is INCONCLUSIVE and has fewer than `plan.budget`.
    """
    return {row: outcome for row, (outcome, *_) in _judge(sessions, plan, family or Family()).items()}


def summarise(
    sessions: Mapping[str, Sequence[float]], plan: SessionPlan, family: Family | None = None
) -> dict[str, Timed]:
    """Return the outcomes of `decide`, with the numbers that a report shows. A row without a session has no number."""
    judged = _judge(sessions, plan, family or Family())
    likelier = {row: min(1.0, 2 * min(e.slower, e.faster)) for row, (_, e, _) in judged.items()}
    p = holm(likelier, shares(sessions, plan))
    out = {}
    for row, values in sessions.items():
        outcome, _, mode = judged[row]
        ratio = math.exp(estimate(values)) if values else math.nan
        low, high = (math.exp(x) for x in interval(values, plan))
        out[row] = Timed(outcome, ratio, (low, high), len(values), p[row], slow_sessions(values), mode)
    return out


def _judge(
    sessions: Mapping[str, Sequence[float]], plan: SessionPlan, family: Family
) -> dict[str, tuple[TimedOutcome, Evidence, bool]]:
    share = shares(sessions, plan)
    bias = cache_biases(sessions, plan, family)
    found = {
        row: evidence(values, plan, plan.rule(row), share[row], family.caches.get(row, ()), bias[row])
        for row, values in sessions.items()
    }
    slower = holm({row: e.slower for row, e in found.items()}, share)
    faster = holm({row: e.faster for row, e in found.items()}, share)
    # Rows of one test come from the same processes, so its slow modes are tested once, with the shares of all its rows.
    rows_of: dict[str, list[str]] = {}
    for row in sessions:
        rows_of.setdefault(family.tests.get(row, row), []).append(row)
    of_test = {test: sum(share[row] for row in rows) for test, rows in rows_of.items()}
    usual = {test: Usual.of(sessions[row] for row in rows) for test, rows in rows_of.items()}
    out = {}
    for row, e in found.items():
        test = family.tests.get(row, row)
        last = len(sessions[row]) >= plan.budget
        modes = plan.modes.from_share(plan.rule(row).rare)
        mode = slow_mode(sessions[row], modes, of_test[test], usual[test], last)
        seen = plan.rule(row).watch or slow_sessions(sessions[row])[0] > 0
        out[row] = _outcome(e, slower[row], faster[row], plan, mode, seen), e, mode is Mode.FOUND
    return out


def estimate(log_ratios: Sequence[float]) -> float:
    """Return the Hodges-Lehmann estimate, the median of all pairwise means; robust to up to 29 % of bad sessions."""
    return statistics.median((a + b) / 2 for a, b in combinations_with_replacement(log_ratios, 2))


def interval(log_ratios: Sequence[float], plan: SessionPlan) -> tuple[float, float]:
    """Return the bounds of the log-ratio that the last look cannot reject, each at its share of `alpha_same`."""
    look = next((x for x in reversed(plan.looks) if x.sessions <= len(log_ratios)), None)
    if look is None:
        return -math.inf, math.inf
    seen = tuple(log_ratios[: look.sessions])
    level = plan.alpha_same * look.same
    return _lower_end(seen, level), -_lower_end(tuple(-x for x in seen), level)


def _outcome(
    e: Evidence, slower: float, faster: float, plan: SessionPlan, mode: Mode, watch: bool
) -> TimedOutcome:
    if slower <= plan.alpha / 2:
        return TimedOutcome.SLOWER
    if mode is Mode.FOUND:
        return TimedOutcome.SLOW_MODE
    if faster <= plan.alpha / 2:
        return TimedOutcome.FASTER
    if watch and mode is not Mode.CLEARED:
        return TimedOutcome.INCONCLUSIVE
    if e.same <= plan.alpha_same:
        return TimedOutcome.SAME
    return TimedOutcome.NOT_SLOWER if e.not_slower <= plan.alpha_same else TimedOutcome.INCONCLUSIVE


def _beyond_caches(
    log_ratios: Sequence[float], caches: Sequence[int], different: float, allowance: Callable[[int], float]
) -> bool:
    """Whether compile caches alone do not explain the change, and each pair of caches shows it.

    allowance: of a number of pairs, the log-ratio that they explain.
    """
    groups = by_cache(log_ratios, caches)
    least = min(map(estimate, groups))
    return least > different and estimate(log_ratios) > allowance(len(groups))


def _lower_end(log_ratios: tuple[float, ...], level: float) -> float:
    """Return the largest bound below the estimate that is rejected."""
    high = estimate(log_ratios)
    low = min(log_ratios) - (max(log_ratios) - min(log_ratios)) - 1e-6
    if p_above(log_ratios, low) > level:
        return -math.inf
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if p_above(log_ratios, middle) <= level:
            low = middle
        else:
            high = middle
    return low


def holm(p_values: Mapping[str, float], shares: Mapping[str, float] | None = None) -> dict[str, float]:
    """Control the family-wise error: the chance that even one unchanged row falls under the level is at most the level.

    The step-down rule of Holm (1979), whatever the dependence between rows: the smallest of R p-values is
    multiplied by R, the next by R - 1, and none gets smaller than its predecessor. With `shares` (positive, summing
    to 1) instead of equal parts, in the weighted form of the same paper: each p is divided by its row's share of the
    remaining level.
    Raises ValueError on a p outside [0, 1].
    """
    for row, p in p_values.items():
        if not 0 <= p <= 1:  # false for NaN too
            raise ValueError(f"{row}: a p-value lies in [0, 1], got {p!r}")
    weights = shares or dict.fromkeys(p_values, 1.0)
    out: dict[str, float] = {}
    floor, left = 0.0, math.fsum(weights[row] for row in p_values)
    for row in sorted(p_values, key=lambda row: p_values[row] / weights[row]):
        floor = max(floor, min(1.0, p_values[row] * left / weights[row]))
        left -= weights[row]
        out[row] = floor
    return out
