"""Slow modes and lost readings: the deciding counts."""

from __future__ import annotations

import math
from datetime import date

import pytest

from bumpgate.core.accepted import Acceptance
from bumpgate.core.findings import TimedOutcome
from bumpgate.gate.drift import apply_to_times
from bumpgate.gate.modes import Mode, Modes, Usual, p_lost, slow_mode, slow_sessions
from bumpgate.gate.plan import Family, SessionPlan, SessionRule, plan_for
from bumpgate.gate.sequential import decide, summarise

SLOW = math.log(2)


def series(slow: int, normal: int, fast: int = 0) -> list[float]:
    return [0.01 * (i % 3) for i in range(normal)] + [SLOW] * slow + [-SLOW] * fast


def test_slow_sessions_are_counted_by_side() -> None:
    assert slow_sessions(series(2, 10, 1)) == (2, 1)
    assert slow_sessions([x + 0.5 for x in series(2, 10)]) == (2, 0), (
        "a row whose sessions all moved has none"
    )
    assert slow_sessions([]) == (0, 0)


BOUNDS = {
    "too few": (series(0, 27), Mode.OPEN),
    "none slow": (series(0, 28), Mode.CLEARED),
    "one slow": (series(1, 20), Mode.OPEN),
    "two slow": (series(2, 20), Mode.FOUND),
    "found before": (series(2, 20, 2), Mode.FOUND),
    "both sides slow": ([*series(0, 10), -SLOW, -SLOW, SLOW, SLOW], Mode.CLEARED),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_slow_mode_is_decided_at_the_first_bound(name: str) -> None:
    values, expected = BOUNDS[name]
    assert slow_mode(values, Modes()) is expected


def test_slow_processes_of_both_builds_are_noise_of_the_machine() -> None:
    """Three slow processes of the candidate prove a slow mode only where the adopted build has none."""
    values = [*series(0, 10), SLOW, *series(0, 20), SLOW, *series(0, 8), SLOW]
    noisy = Usual(slow=11, readings=708)
    assert slow_mode(values, Modes()) is Mode.FOUND
    assert slow_mode(values, Modes(), usual=noisy) is Mode.OPEN
    assert slow_mode(series(9, 20), Modes(), usual=noisy) is Mode.FOUND
    assert slow_mode([*series(0, 12), *[SLOW, -SLOW] * 9], Modes(), usual=noisy) is not Mode.FOUND
    assert Usual.of([series(1, 9, 2), series(0, 12, 1)]) == Usual(3, 25)
    assert (Usual().share, Usual(1, 100).share, Usual(90, 100).share) == (0.0, 0.02, 0.5)


def test_slow_process_exceeds_the_spread_of_its_row() -> None:
    """A factor of 1.34 is noise in a row that varies by 13 %, a factor of 2 is not."""
    wide = [0.13 * (-1) ** i for i in range(20)]
    assert slow_sessions([*wide, math.log(1.34)]) == (0, 0)
    assert slow_sessions([*wide, SLOW, -SLOW]) == (1, 1)
    assert slow_sessions([*series(0, 20), math.log(1.34)]) == (1, 0)
    assert slow_sessions([*(3 * x for x in wide), SLOW, -SLOW]) == (1, 1), "a factor of 2 always counts"


def test_last_look_clears_a_row_that_a_frequent_mode_excludes() -> None:
    """At most 3 slow processes in 72 sessions: a share of 10 % shows so few in 6 of 100 gates."""
    noisy = Usual(slow=2, readings=720)
    few, more = ([*[0.0] * 20, *[SLOW] * n, *[0.0] * (52 - n)] for n in (3, 5))
    assert slow_mode(few, Modes(), usual=noisy) is Mode.OPEN
    assert slow_mode(few, Modes(), usual=noisy, last=True) is Mode.CLEARED
    assert slow_mode(more, Modes(), usual=noisy, last=True) is not Mode.CLEARED


def test_cold_starts_expect_more_slow_processes() -> None:
    modes = Modes().from_share(0.022)
    assert (modes.rare, modes.frequent) == (0.022, pytest.approx(0.12))
    assert Modes().from_share(0.0) == Modes()
    three = [*series(0, 20), SLOW, SLOW, SLOW]
    start, step = "throughput/start-cpu/cold_cpu_seconds", "throughput/nam52/seconds"
    assert decide({start: three, step: three}, plan_for(None, True)) == {
        start: TimedOutcome.INCONCLUSIVE,
        step: TimedOutcome.SLOW_MODE,
    }


def test_usual_slow_processes_count_over_all_rows_of_a_test() -> None:
    noisy, row = series(0, 18, 6), [*series(0, 10), SLOW, 0.0, 0.01, SLOW, *series(0, 10)]
    one, two = "a/b/noisy", "a/b/row"
    alone = decide({one: noisy, two: row}, SessionPlan())
    together = decide({one: noisy, two: row}, SessionPlan(), Family({one: "t", two: "t"}))
    assert (alone[two], together[two]) == (TimedOutcome.SLOW_MODE, TimedOutcome.INCONCLUSIVE)


def test_watched_row_is_same_only_when_cleared() -> None:
    watched = SessionPlan(rules=(SessionRule("*", watch=True),))
    assert decide({"a/b/s": series(0, 20)}, SessionPlan()) == {"a/b/s": TimedOutcome.SAME}
    assert decide({"a/b/s": series(0, 20)}, watched) == {"a/b/s": TimedOutcome.INCONCLUSIVE}
    assert decide({"a/b/s": series(0, 28)}, watched) == {"a/b/s": TimedOutcome.SAME}
    assert decide({"a/b/s": series(2, 20)}, watched) == {"a/b/s": TimedOutcome.SLOW_MODE}


def test_p_lost_is_the_binomial_tail() -> None:
    assert p_lost(8, 0) == 2**-8
    assert p_lost(1, 1) == 0.75
    assert p_lost(0, 8) == 1


def test_difference_on_only_one_cache_pair_is_not_slower() -> None:
    one = [0.12 + 0.001 * (i % 5) if i % 2 else 0.001 * (i % 5) for i in range(28)]
    both = [0.06 + 0.001 * (i % 5) for i in range(28)]
    assert decide({"a/b/s": one}, SessionPlan())["a/b/s"] is TimedOutcome.INCONCLUSIVE
    assert decide({"a/b/s": both}, SessionPlan())["a/b/s"] is TimedOutcome.SLOWER
    few = [0.001 * (i % 5) + 0.12 * (i not in (1, 3)) for i in range(28)]
    uneven = Family(caches={"a/b/s": [int(i in (1, 3)) for i in range(28)]})
    assert decide({"a/b/s": few}, SessionPlan(), uneven)["a/b/s"] is TimedOutcome.INCONCLUSIVE
    assert decide({"a/b/s": few}, SessionPlan())["a/b/s"] is TimedOutcome.SLOWER


@pytest.mark.parametrize("fields", [{"rare": 0.2}, {"alpha": 0.0}, {"beta": 0.7}], ids=str)
def test_modes_with_invalid_error_bounds_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="need 0 < rare"):
        Modes(**fields)


def test_faster_row_does_not_hide_a_slow_mode() -> None:
    values = [0.001 * (i % 5) - 0.1 + SLOW * (i % 7 == 3) for i in range(28)]
    usual = [0.001 * (i % 5) - 0.1 for i in range(28)]
    found = decide({"a/b/s": values, "a/c/s": usual}, SessionPlan())
    assert found == {"a/b/s": TimedOutcome.SLOW_MODE, "a/c/s": TimedOutcome.FASTER}


def test_accepted_slowdown_does_not_hide_a_slow_mode() -> None:
    """Every process is 5 % slower, which is accepted; every fourth takes three times as long, which is not."""
    row = "throughput/b/seconds"
    noise = [0.004, -0.003, 0.002, -0.005, 0.001, 0.003, -0.002, 0.0, 0.005, -0.004]
    values = [math.log(1.05) + noise[i % 10] + math.log(3) * (i % 4 == 3) for i in range(12)]
    timed = summarise({row: values}, plan_for(None, True))
    assert (timed[row].outcome, timed[row].slow) == (TimedOutcome.SLOWER, (3, 0))
    entry = Acceptance("cpu", row, None, "ann", "known", date(2026, 1, 1), date(2026, 12, 1), 1.05)
    times, _, _ = apply_to_times(timed, {}, [entry], "cpu", date(2026, 3, 2))
    assert times[row].outcome is TimedOutcome.SLOW_MODE
