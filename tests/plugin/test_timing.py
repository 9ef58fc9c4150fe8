"""Ratios of rounds, and wall time without the time that a thread waits for a core."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from bumpgate.core.rows import COST_PER_ROUND
from bumpgate.plugin import timing


def test_core_lost_between_both_readings_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread waits from 1.0 to 1.5, after the clock was read and before its waiting time was."""
    clock = iter([1.0, 1.5])
    waited = iter([0.25, 0.75, 0.75])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(timing, "_waited_seconds", lambda: next(waited))
    assert timing._wall_seconds() == 0.75


def rounds(quiet: int, paired: bool = False) -> timing.Rounds:
    """Rounds in which `slow` takes 1.01, 1.02, ... times as long as `fast`, in another order, and waits 10 times."""
    fast = [1.0 + 0.1 * (7 * k % quiet) for k in range(quiet)]
    slow = [s * (1.01 + 0.01 * (3 * k % quiet)) for k, s in enumerate(fast)]
    return timing.Rounds({"fast": fast, "slow": slow}, {"slow": [10 * s for s in slow]}, quiet, paired=paired)


def test_ratio_is_the_median_of_paired_rounds() -> None:
    """25 rounds: 2.576 * sqrt(25) / 2 = 6.4, so the interval reaches 7 order statistics from the median."""
    ratio = rounds(25).ratio("slow", "fast")
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((1.13, 1.06, 1.20))
    assert ratio.rounds == 25
    assert rounds(25).wall_over_cpu("slow").median == pytest.approx(10)


def test_a_rate_is_the_inverse_of_the_cost() -> None:
    rounds = timing.Rounds({"a": [1.0, 2.0, 4.0]}, {}, quiet=3)
    cost, rate = rounds.cost("a"), rounds.rate("a", 100.0)
    assert (rate.median, rate.low, rate.high) == (50.0, 100.0 / cost.high, 100.0 / cost.low)


def test_interval_of_few_rounds_is_a_factor_of_two() -> None:
    ratio = rounds(timing.QUIET_NEEDED - 1).ratio("slow", "fast")
    assert (ratio.low, ratio.high) == pytest.approx((ratio.median / 2, ratio.median * 2))
    assert rounds(timing.QUIET_NEEDED + 1).ratio("slow", "fast").high < 1.2


def test_costs_of_rounds_are_compared_in_a_duet_only() -> None:
    alone, duet = rounds(16), rounds(16, paired=True)
    assert alone.paired_costs("slow") == alone.paired_waits("slow") == {}
    assert duet.paired_costs("slow") == {COST_PER_ROUND: tuple(duet.seconds["slow"])}
    (costs,) = duet.paired_costs("slow", "fast").values()
    assert costs[:3] == pytest.approx((1.01, 1.04, 1.07))
    assert duet.paired_waits("slow")[COST_PER_ROUND] == pytest.approx((10.0,) * 16)


@pytest.mark.parametrize(("own", "other"), [(True, True), (True, False), (False, True), (False, False)])
def test_time_is_over_for_both_sides_of_a_duet(own: bool, other: bool) -> None:
    now = time.monotonic()
    deadline = now - 1 if own else now + 1000
    said: list[object] = []
    duet: Any = SimpleNamespace(exchange=lambda value, what: said.append(value) or other)
    assert timing._over(deadline, duet) is (own or other)
    assert said == [own]
    assert timing._over(deadline, None) is own
