"""Holm and Benjamini-Hochberg: against worked examples, their definitions, and simulated families."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bumpgate.gate.sequential import benjamini_hochberg, holm
from tests.support.simulation import rate_text, wilson

FIXED = settings(derandomize=True, max_examples=100, deadline=None)
Adjust = Callable[[Mapping[str, float]], dict[str, float]]

families = st.lists(st.floats(0, 1), max_size=20).map(lambda ps: {f"row{i}": p for i, p in enumerate(ps)})
levels = st.sampled_from([0.01, 0.05, 0.2])
WORKED = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}


def test_adjusted_p_values_match_worked_examples() -> None:
    assert holm(WORKED) == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert benjamini_hochberg(WORKED) == pytest.approx({"d": 0.02, "a": 0.02, "c": 0.04, "b": 0.04})


def step_down(p_values: Mapping[str, float], level: float) -> set[str]:
    """Holm's rule by its definition: go up from the smallest p-value, stop at the first that fails."""
    rejected: set[str] = set()
    for rank, row in enumerate(sorted(p_values, key=lambda r: p_values[r])):
        if p_values[row] > level / (len(p_values) - rank):
            break
        rejected.add(row)
    return rejected


def step_up(p_values: Mapping[str, float], level: float) -> set[str]:
    """Benjamini and Hochberg's rule: all ranks up to the largest one that passes are rejected."""
    ascending = sorted(p_values, key=lambda r: p_values[r])
    passing = [k for k, row in enumerate(ascending, 1) if p_values[row] <= level * k / len(ascending)]
    return set(ascending[: max(passing, default=0)])


@pytest.mark.parametrize(("adjust", "rule"), [(holm, step_down), (benjamini_hochberg, step_up)])
@FIXED
@given(families, levels)
def test_adjusted_p_values_reject_as_the_definition_does(
    adjust: Adjust,
    rule: Callable[[Mapping[str, float], float], set[str]],
    family: dict[str, float],
    level: float,
) -> None:
    adjusted = adjust(family)
    edge = [row for row, p in adjusted.items() if math.isclose(p, level, rel_tol=1e-9)]  # rounding decides
    assert {row for row, p in adjusted.items() if p <= level} - set(edge) == rule(family, level) - set(edge)


@FIXED
@given(families)
def test_adjusting_keeps_the_order_and_never_lowers_a_p_value(family: dict[str, float]) -> None:
    strict, mild = holm(family), benjamini_hochberg(family)
    for row, p in family.items():
        assert p <= mild[row] * (1 + 1e-12)
        assert mild[row] <= strict[row] * (1 + 1e-12) <= 1 + 1e-9
    ascending = sorted(family, key=lambda r: family[r])
    for adjusted in (strict, mild):
        values = [adjusted[row] for row in ascending]
        assert values == sorted(values)


@pytest.mark.parametrize("adjust", [holm, benjamini_hochberg])
@pytest.mark.parametrize("candidate", [-0.1, 1.1, math.nan, math.inf])
def test_adjusting_refuses_values_outside_0_to_1(adjust: Adjust, candidate: float) -> None:
    with pytest.raises(ValueError, match=r"row: a p-value lies in \[0, 1\]"):
        adjust({"row": candidate})


@pytest.mark.parametrize("adjust", [holm, benjamini_hochberg])
def test_adjusting_no_rows_returns_no_values(adjust: Adjust) -> None:
    assert adjust({}) == {}


def rates(adjust: Adjust, level: float, unchanged: int, moved: int, runs: int) -> tuple[int, float]:
    """Count families with any unchanged row below the level, and the mean share of such rows among those below it."""
    rng = random.Random(1)
    wrong, shares = 0, 0.0
    for _ in range(runs):
        family = {f"unchanged{i}": rng.random() for i in range(unchanged)}
        family |= {f"moved{i}": rng.random() / 1000 for i in range(moved)}
        under = [row for row, p in adjust(family).items() if p <= level]
        false = sum(row.startswith("unchanged") for row in under)
        wrong += false > 0
        shares += false / max(1, len(under))
    return wrong, shares / runs


def test_holm_keeps_family_wise_error_and_unadjusted_does_not() -> None:
    runs = 40_000
    wrong, _ = rates(holm, 0.02, 15, 0, runs)
    exact = 1 - (1 - 0.02 / 15) ** 15  # independent rows use almost the whole level
    margin = 4 * math.sqrt(exact * (1 - exact) / runs)
    assert abs(wrong / runs - exact) <= margin, rate_text(f"Holm, {exact:.2%} +- {margin:.2%}", wrong, runs)
    runs = 2000
    wrong, _ = rates(dict, 0.02, 15, 0, runs)
    assert wilson(wrong, runs)[0] > 0.2, rate_text("unadjusted", wrong, runs)


def test_benjamini_hochberg_bounds_the_false_discovery_rate() -> None:
    runs = 2000
    wrong, share = rates(benjamini_hochberg, 0.1, 10, 5, runs)
    assert share < 0.1 * 10 / 15 + 0.01, share
    assert wilson(wrong, runs)[0] > 0.1, "it bounds the share, not the probability of any: Holm bounds that"
    assert rates(dict, 0.1, 10, 5, runs)[1] > 0.1
