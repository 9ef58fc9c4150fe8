"""What the plots draw: lines, bars and bands at the places of their values."""

from __future__ import annotations

import math
from typing import Any

import pytest
from matplotlib.colors import to_hex

from bumpgate.report import plots
from bumpgate.report.plots import BAD, FAINT, GOOD, INK, LINE, Interval


@pytest.fixture(autouse=True)
def figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots return their figure instead of its SVG text."""
    monkeypatch.setattr(plots, "_svg", lambda figure, title: figure)


def lines(figure: Any) -> list[tuple[list[float], list[float], str]]:
    """Return x, y and colour of each line."""
    (axes,) = figure.axes
    found = axes.get_lines()
    return [([*map(float, n.get_xdata())], [*map(float, n.get_ydata())], n.get_color()) for n in found]


def test_changes_are_bars_to_both_sides() -> None:
    figure: Any = plots.changes("fewer kernels", {"a": (3, 1), "b": (0, 4)})
    (axes,) = figure.axes
    bars = [(b.get_width(), round(b.get_y() + b.get_height() / 2, 6)) for b in axes.patches]
    assert bars == [(3, 0.15), (-1, 0.15), (0, 1.15), (-4, 1.15)]
    assert [to_hex(bar.get_facecolor()) for bar in axes.patches] == [BAD, GOOD, BAD, GOOD]
    assert axes.get_xlim() == pytest.approx((-4.6, 4.6))
    assert [text.get_text() for text in axes.texts] == ["a", "+3  \u22121", "b", "+0  \u22124"]


def test_forest_draws_each_interval_around_its_ratio() -> None:
    rows = [
        Interval("a", "5 % slower", "bad", 1.05, 1.02, 1.08),
        Interval("b", "unknown", "open", 1.0, -math.inf, math.inf),
        Interval("c", "no reading", "", math.nan, math.nan, math.nan),
    ]
    figure: Any = plots.forest("ratios", rows, 0.035, "1: equal")
    (axes,) = figure.axes
    left, right = axes.get_xlim()
    assert (left, right) == pytest.approx((1 - 0.088, 1 + 0.088))
    middle, *marks = lines(figure)
    assert (middle[0], middle[2]) == ([1, 1], FAINT)
    assert [x for x, _, _ in marks] == [[1.02, 1.08], [1.05], [left, right], [1.0]]
    assert [y[0] for _, y, _ in marks] == [0.15, 0.15, 1.15, 1.15]
    assert marks[0][2] == marks[1][2] == BAD != marks[2][2]
    (band,) = axes.patches
    extent = band.get_extents().transformed(axes.transData.inverted())
    assert (extent.x0, extent.x1) == pytest.approx((0.965, 1.035))


def test_levels_of_a_history_are_their_means() -> None:
    figure = plots.over_time("row", [1, 2, 3, 5, 6], [1, 2, 3, 8, 10], [3], "ms", [False] * 4 + [True])
    values, *points, first, second, change = lines(figure)
    assert values[:2] == ([1, 2, 3, 5, 6], [1, 2, 3, 8, 10])
    assert [(x[0], y[0], colour) for x, y, colour in points] == [
        (1, 1, LINE), (2, 2, LINE), (3, 3, LINE), (5, 8, LINE), (6, 10, BAD),
    ]  # fmt: skip
    assert (first, second) == (([1, 3], [2, 2], INK), ([5, 6], [9, 9], INK))
    assert (change[0], change[2]) == ([4, 4], BAD)
    assert len(lines(plots.over_time("row", [1, 2], [1, 2], [], "ms", [False, False]))) == 3, (
        "one level: no mean"
    )


def test_curves_have_a_colour_and_a_dash_of_their_own() -> None:
    figure: Any = plots.curves("loss", {"adopted": [3, 2], "candidate": [3, 2.5, 2]}, "nats")
    (axes,) = figure.axes
    assert [line[:2] for line in lines(figure)] == [([1, 2], [3, 2]), ([1, 2, 3], [3, 2.5, 2])]
    assert len({line[2] for line in lines(figure)}) == len({n.get_linestyle() for n in axes.get_lines()}) == 2
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["adopted", "candidate"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "nats")


def test_plot_without_changes_has_no_bars() -> None:
    figure: Any = plots.changes("none", {"a": (0, 0)})
    (axes,) = figure.axes
    assert axes.get_xlim() == (-1, 1)
    assert {bar.get_width() for bar in axes.patches} == {0}
