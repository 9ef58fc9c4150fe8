"""Reductions of measured numbers in which a NaN or an infinity is never lost.

Every comparison with NaN is false, so Python's `max([0.1, nan])` is 0.1 and `min` and `sorted` depend on the order as
well. Here a value that is not finite is the result, wherever it occurs. tests/suites/test_reductions.py keeps the
built-in functions off measured floats in suites/.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence


def largest(values: Iterable[float]) -> float:
    """Return the largest value; NaN if any value is NaN, otherwise an infinity if any value is infinite.

    Raises ValueError if there are no values.
    """
    return _extreme(max, values)


def smallest(values: Iterable[float]) -> float:
    """Return the smallest value; NaN if any value is NaN, otherwise an infinity if any value is infinite.

    Raises ValueError if there are no values.
    """
    return _extreme(min, values)


def name_of_largest(values: Mapping[str, float]) -> str:
    """Return the name of the value that `largest` returns. Raises ValueError if there are no values."""
    return max(
        values, key=lambda name: (math.isnan(values[name]), abs(values[name]) == math.inf, values[name])
    )


def largest_difference(found: Iterable[float], expected: Iterable[float], *, relative: bool = False) -> float:
    """Return the largest |found - expected|, or |found - expected| / |expected|, over two curves.

    Raises ValueError if the curves are empty or differ in length.
    """
    pairs = zip(found, expected, strict=True)
    return largest(abs(a - b) / (abs(b) if relative else 1.0) for a, b in pairs)


def growth(curve: Iterable[float]) -> float:
    """Return the largest value of a curve over its first one. Raises ValueError if the curve is empty."""
    curve = [*curve]
    return largest(curve) / curve[0]


def sum_of_smallest(values: Sequence[float], share: float) -> float:
    """Return the sum of the smallest `share` of the values, rounded down; NaN if any of them is not finite."""
    if not all(map(math.isfinite, values)):
        return math.nan
    return math.fsum(sorted(values)[: int(share * len(values))])


def _extreme(choose: Callable[[list[float]], float], values: Iterable[float]) -> float:
    values = [*values]
    infinite = [value for value in values if not math.isfinite(value)]
    nan = [value for value in infinite if math.isnan(value)]
    return choose(values) if not infinite else (nan or infinite)[0]
