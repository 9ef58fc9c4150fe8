"""A NaN or an infinity that was measured stays one: no reduction, comparison or row turns it into a good number.

Python's own `max` and `sorted` do: every comparison with NaN is false, so `max([0.1, nan])` is 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bumpgate.core.baseline import Baseline, Reviewed, violation
from bumpgate.core.rows import Judgement, RowError, Verdict
from bumpgate.plugin import rows
from launch import ablation
from suites.kernels import golden
from suites.model import golden as model_golden
from suites.numerics import gradients
from suites.support.comparison import error_ratio, outside
from suites.support.reduce import (
    growth,
    largest,
    largest_difference,
    name_of_largest,
    smallest,
    sum_of_smallest,
)

BAD = [math.nan, math.inf, -math.inf]


def median(value: float, low: float, high: float) -> SimpleNamespace:
    return SimpleNamespace(median=value, low=low, high=high)


# A call of each verb that takes a number.
VERBS: dict[str, Callable[[rows.RowRecorder, str, float], Judgement]] = {
    "at_most": lambda row, id, value: row.bound(id, value, "ratio", at_most=3.0, seen=1, rule="C1"),
    "at_least": lambda row, id, value: row.bound(id, value, "ratio", at_least=-3.0, seen=1, rule="C1"),
    "expected": lambda row, id, value: row.bound(id, value, "ratio", expected=value, seen=1, rule="C1"),
    "count": lambda row, id, value: row.count(id, value, seen=1, rule="C1"),
    "exact": lambda row, id, value: row.exact(id, value, "ratio", seen=1, rule="C1"),
    "lower": lambda row, id, value: row.cost(id, value, "s", tolerance=0.1, seen=1, rule="C1"),
    "higher": lambda row, id, value: row.cost(id, value, "s", better="higher", seen=1, rule="C1"),
    "timed": lambda row, id, value: row.timed(id, median(value, 0.9, 1.1), "s", seen=1, rule="C1"),
    "interval": lambda row, id, value: row.timed(id, median(1.0, value, value), "s", seen=1, rule="C1"),
}


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("verb", VERBS)
def test_row_with_a_non_finite_number_is_never_good(verb: str, value: float) -> None:
    config = SimpleNamespace(stash={}, rootpath=Path())
    item = SimpleNamespace(
        config=config, stash={}, nodeid="t", user_properties=[], path=Path(), location=("", 0, "t")
    )
    id = "a/b/error_ratio"
    reviewed = Baseline("cpu", {}, {id: Reviewed(1.0, "s", "lower", 0.1, test="t")})
    for baseline in (Baseline("cpu"), reviewed):
        try:
            judged = VERBS[verb](rows.RowRecorder(item, baseline, {}, {}), id, value)
        except RowError:
            continue  # refused before it is judged
        assert judged.verdict in (Verdict.REGRESSION, Verdict.INCONCLUSIVE)
        assert verb == "interval" or "not a finite number" in violation(judged.row)


@pytest.mark.parametrize("reduce", [largest, smallest])
@pytest.mark.parametrize("at", range(3))
def test_reductions_keep_non_finite_values(reduce: Callable[..., float], at: int) -> None:
    for value in BAD:
        values = [0.1, 0.2, 0.3]
        values[at] = value
        assert str(reduce(values)) == str(value)
        values[at - 1] = math.nan
        assert math.isnan(reduce(iter(values)))
    with pytest.raises(ValueError):
        reduce([])


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("at", range(3))
def test_curves_keep_a_non_finite_point(at: int, value: float) -> None:
    curve = [3.0, 2.0, 1.0]
    curve[at] = value
    for relative in (False, True):
        assert not math.isfinite(largest_difference(curve, [3.0, 2.0, 1.0], relative=relative))
    assert not math.isfinite(largest_difference([3.0, 2.0, 1.0], curve))
    assert at == 0 or not math.isfinite(growth(curve))
    assert math.isnan(sum_of_smallest(curve, 2 / 3))


def test_reductions_of_finite_values() -> None:
    assert (largest([1, 3, 2]), smallest(iter([2.0, 1.0]))) == (3, 1.0)
    assert name_of_largest({"a": 1.0, "b": math.inf, "c": 2.0}) == "b"
    assert name_of_largest({"a": math.inf, "b": math.nan, "c": 2.0}) == "b"
    assert largest_difference([1.0, 3.0], [1.5, -4.0]) == 7.0
    assert largest_difference([1.0, 3.0], [1.5, -4.0], relative=True) == 1.75
    assert growth([2.0, 3.0, 1.0]) == 1.5
    assert sum_of_smallest([1.0, 0.25, 0.5, 100.0], 3 / 4) == 1.75
    with pytest.raises(ValueError):
        largest_difference([1.0], [1.0, 2.0])


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("side", [0, 1, 2])
def test_error_ratio_keeps_a_non_finite_entry_of_any_side(side: int, value: float) -> None:
    """Sides: the op, the eager formula or the oracle; the last pair has the value on two sides."""
    three = [torch.tensor([1.0, 2.0]) + i * 1e-6 for i in range(3)]
    assert error_ratio(*three) < 3
    three[side][-1] = value
    assert not math.isfinite(error_ratio(*three))
    if side > 0:  # interpreted kernels: the rule asserts that the kernel's own result is finite
        assert outside(*([t] for t in three))
    three[side - 1][-1] = value
    assert not math.isfinite(error_ratio(*three))


@pytest.mark.parametrize("value", BAD)
def test_golden_differences_report_a_non_finite_array(value: float) -> None:
    kept = {"output.y": torch.ones(2).double(), "grad.x": torch.ones(2).double()}
    found = kept | {"grad.x": torch.tensor([1.0, value]).double()}
    for pair in ((found, kept), (kept, found), (found, found)):
        assert golden.differences(*pair, golden.RELATIVE)
        assert model_golden.differences(*pair)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("column", [0, 1])
def test_compiled_gradient_ratios_keep_a_non_finite_error(column: int, value: float) -> None:
    errors = {"first": [1e-14, 1e-14], "last": [1e-14, 1e-14]}
    errors["last"][column] = value
    ratios = gradients.error_ratios(errors, floor=1e-15)
    assert name_of_largest(ratios) == "last"
    assert not math.isfinite(ratios["last"])


@pytest.mark.parametrize("value", BAD[:2])
@pytest.mark.parametrize("side", [0, 1])
def test_worst_ablation_group_keeps_a_non_finite_error(side: int, value: float) -> None:
    errors, limits = ({"first": 1e-7, "last": 1e-7} for _ in range(2))
    (errors, limits)[side]["last"] = value
    group, ratio = ablation.worst_group(errors, limits)
    assert group == "last"
    assert not ratio <= ablation.FACTOR
