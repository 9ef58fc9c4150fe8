"""Many timed rows, one verdict: p-values adjusted for how many rows were looked at.

Both functions map row id -> p-value to row id -> adjusted p-value, to be compared with the level itself.
Any p that is valid when the comparison stops, such as those of `sequential`, may be passed at any time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def holm(p_values: Mapping[str, float], shares: Mapping[str, float] | None = None) -> dict[str, float]:
    """Control the family-wise error: the chance that even one unchanged row falls under the level is at most the level.

    The step-down rule of Holm (1979), whatever the dependence between rows: the smallest of R p-values is
    multiplied by R, the next by R - 1, and none gets smaller than its predecessor. With `shares` (positive, summing
    to 1) instead of equal parts, in the weighted form of the same paper: each p is divided by its row's share of the
    remaining level.
    Raises ValueError on a p outside [0, 1].
    """
    _check(p_values)
    weights = shares or dict.fromkeys(p_values, 1.0)
    out: dict[str, float] = {}
    floor, left = 0.0, math.fsum(weights[row] for row in p_values)
    for row in sorted(p_values, key=lambda row: p_values[row] / weights[row]):
        floor = max(floor, min(1.0, p_values[row] * left / weights[row]))
        left -= weights[row]
        out[row] = floor
    return out


def benjamini_hochberg(p_values: Mapping[str, float]) -> dict[str, float]:
    """Control the false discovery rate: the expected share of unchanged rows under the level is at most the level.

    The step-up rule of Benjamini and Hochberg (1995), for independent or positively dependent rows. It selects the
    rows of a gate that are worth a look; the gate's verdict uses `holm`.
    Raises ValueError on a p outside [0, 1].
    """
    out: dict[str, float] = {}
    ceiling = 1.0
    _check(p_values)
    ascending = sorted(p_values.items(), key=lambda item: item[1])
    for rank in range(len(ascending), 0, -1):
        row, p = ascending[rank - 1]
        ceiling = min(ceiling, p * len(ascending) / rank)
        out[row] = ceiling
    return out


def _check(p_values: Mapping[str, float]) -> None:
    for row, p in p_values.items():
        if not 0 <= p <= 1:  # false for NaN too
            raise ValueError(f"{row}: a p-value lies in [0, 1], got {p!r}")
