"""The pooling of a gradient's errors over batches."""

from __future__ import annotations

import math

import pytest

from suites.numerics.test_compiled_gradients import kept, pooled


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_pooled_batches_keep_a_non_finite_error(value: float) -> None:
    assert math.isnan(pooled([1e-14, value, 1e-14, 1e-14]))


def test_pooled_batches_leave_out_the_worst_quarter() -> None:
    assert pooled([1.0, 0.25, 0.5, 100.0]) == 1.75
    assert pooled([1.0, 100.0, 100.0, 0.5]) == 101.5
    assert (kept(4), kept(12)) == (3, 9)
