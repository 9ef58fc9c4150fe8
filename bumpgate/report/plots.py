"""Plots of a report as inline SVG that uses the page's colours (light and dark) and font.

Drawn by matplotlib, which is imported when the first plot is requested.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from bumpgate.core.extra import need

# Not imported for their names: the library belongs to an extra.
Axes: TypeAlias = Any
Figure: TypeAlias = Any

WIDTH = (
    4.6  # inches: at 8 pt the text reads well on a screen of 400 px, where a wider plot would be scaled down
)
# matplotlib does not support CSS variables, so each role has a unique placeholder colour, which is replaced by the
# style sheet's variable in the finished SVG.
INK, FAINT, GOOD, BAD, OPEN, LINE = "#010201", "#010202", "#010203", "#010204", "#010205", "#010206"
IN_PAGE = {
    INK: "currentColor",
    FAINT: "var(--faint)",
    GOOD: "var(--good)",
    BAD: "var(--bad)",
    OPEN: "var(--open)",
    LINE: "var(--accent)",
}
ON_PAPER = {
    INK: "#1a1d21",
    FAINT: "#8a919b",
    GOOD: "#1a7f4b",
    BAD: "#c62f2f",
    OPEN: "#a86a00",
    LINE: "#2563c9",
}
TONES = {"bad": BAD, "good": GOOD, "open": OPEN}
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
NAME_WIDTH = 44  # characters that leave room for the text at the right


@dataclass(frozen=True)
class Interval:
    """One line of a forest plot. text: its reading in words. tone: good, bad, open or ""."""

    name: str
    text: str
    tone: str
    ratio: float
    low: float
    high: float


def curves(title: str, series: Mapping[str, Sequence[float]], unit: str, step: str = "step") -> str:
    """Plot one line per curve over its points. Curves differ in dash as well as in colour."""
    figure, axes = _new(2.5)
    colours = (LINE, BAD, OPEN, GOOD)
    for i, (name, points) in enumerate(series.items()):
        style = {"linestyle": DASHES[i % len(DASHES)], "color": colours[i % len(colours)]}
        axes.plot(range(1, len(points) + 1), points, linewidth=1.3, label=_plain(name), **style)
    axes.set_xlabel(step)
    axes.set_ylabel(_plain(unit))
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return _svg(figure, title)


def forest(title: str, rows: Sequence[Interval], margin: float, axis: str) -> str:
    """Intervals around 1, one row each, its name above it. axis: what 1 means, as the label of the x axis.

    margin: half-width of the band within which a row counts as unmoved; 0 for none. A row without a finite ratio is
    named and has no mark; an end that is not finite runs to the edge.
    """
    figure, axes = _new(0.75 + 0.36 * len(rows))
    known = [x for row in rows for x in (row.ratio, row.low, row.high) if math.isfinite(x)]
    reach = 1.1 * max(margin, 0.01, *(abs(x - 1) for x in known))
    left, right = 1 - reach, 1 + reach
    axes.axvspan(1 - margin, 1 + margin, color=FAINT, alpha=0.18, linewidth=0)
    axes.axvline(1, color=FAINT, linewidth=0.8)
    for i, row in enumerate(rows):
        colour = TONES.get(row.tone, INK)
        _name(axes, i, row.name, row.text, colour)
        if math.isfinite(row.ratio):
            low = row.low if math.isfinite(row.low) else left
            high = row.high if math.isfinite(row.high) else right
            axes.plot((low, high), (i + 0.15, i + 0.15), color=colour, linewidth=2, solid_capstyle="butt")
            axes.plot([row.ratio], [i + 0.15], color=colour, marker="D", markersize=4.5)
    axes.set(xlim=(left, right), ylim=(len(rows) - 0.4, -0.6), yticks=[])
    axes.set_xlabel(axis)
    return _svg(figure, title)


def changes(title: str, rows: Mapping[str, tuple[float, float]]) -> str:
    """Removed to the left, added to the right: row id -> (added, removed), in the row's own unit."""
    figure, axes = _new(0.7 + 0.36 * len(rows))
    reach = 1.15 * max((max(pair) for pair in rows.values()), default=1) or 1
    axes.axvline(0, color=FAINT, linewidth=0.8)
    for i, (row, (added, removed)) in enumerate(rows.items()):
        axes.barh(i + 0.15, added, height=0.3, color=BAD)
        axes.barh(i + 0.15, -removed, height=0.3, color=GOOD)
        _name(axes, i, row, f"+{added:g}  \u2212{removed:g}", INK)
    axes.set(xlim=(-reach, reach), ylim=(len(rows) - 0.4, -0.6), yticks=[])
    axes.set_xlabel("removed \u2190  \u2192 added")
    return _svg(figure, title)


def over_time(
    title: str,
    days: Sequence[float],
    values: Sequence[float],
    breaks: Sequence[int],
    unit: str,
    red: Sequence[bool],
) -> Figure:
    """A row's values by day (days: of matplotlib's date axis), with a line at each change point.

    breaks: indices at which a new level starts; each level is drawn as its mean. red: a filled mark in the bad colour.
    """
    dates = need("matplotlib.dates", command="bumpgate history")
    figure, axes = _new(2.8)
    axes.plot(days, values, color=FAINT, linewidth=0.8)
    for day, value, is_red in zip(days, values, red):
        axes.plot([day], [value], marker="o", markersize=4, color=BAD if is_red else LINE)
    for start, end in zip([0, *breaks], [*breaks, len(values)]):
        if breaks:
            mean = math.fsum(values[start:end]) / (end - start)
            axes.plot([days[start], days[end - 1]], [mean, mean], color=INK, linewidth=1.4)
    for index in breaks:
        axes.axvline((days[index - 1] + days[index]) / 2, color=BAD, linewidth=1, linestyle=DASHES[1])
    axes.xaxis.set_major_locator(dates.AutoDateLocator(minticks=2, maxticks=6))
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(axes.xaxis.get_major_locator()))
    axes.xaxis.get_offset_text().set_fontsize(8)
    axes.set_ylabel(_plain(unit))
    axes.set_title(_plain(title), fontsize=8, color=INK, loc="left")
    return figure


def svg(figure: Figure, title: str) -> str:
    """Return a figure of `over_time` as SVG text for a page."""
    return _svg(figure, title)


def png(figure: Figure) -> bytes:
    """Render a figure to PNG on white with fixed colours, since a PNG has no style sheet."""
    for artist in figure.findobj():
        for get, put in (("get_color", "set_color"), ("get_edgecolor", "set_edgecolor")):
            colour = getattr(artist, get, lambda: None)()
            if isinstance(colour, str) and colour in ON_PAPER:
                getattr(artist, put)(ON_PAPER[colour])
    for axes in figure.axes:
        axes.tick_params(colors=ON_PAPER[INK])
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=160, facecolor="white")
    return out.getvalue()


def _new(height: float) -> tuple[Figure, Axes]:
    figure_module = need("matplotlib", "matplotlib.figure", command="a report with plots")
    figure = figure_module.Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=INK, fontsize=8)
    axes.yaxis.grid(False)
    return figure, axes


def _name(axes: Axes, i: int, name: str, text: str, colour: str) -> None:
    """Draw the name of line i at the left and its text at the right, both above its mark."""
    short = name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "\u2026"
    across = axes.get_yaxis_transform()
    axes.text(0, i - 0.28, _plain(short), transform=across, color=INK, va="center")
    axes.text(1, i - 0.28, _plain(text), transform=across, color=colour, va="center", ha="right")


def _svg(figure: Figure, title: str) -> str:
    """Return the figure as one <svg> element without a fixed size, or an id that another plot in the page repeats."""
    matplotlib = need("matplotlib", command="a report with plots")
    out = io.StringIO()
    # Text stays text: it can be searched, selected and read aloud. The salt keeps ids apart, and the file reproducible.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 8}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(<g) id="[^"]*"', r"\1", text)
    text = re.sub(
        r'(<svg[^>]*?) width="([\d.]+)pt" height="[\d.]+pt"', r'\1 style="max-width: \2pt"', text, count=1
    )
    text = text.replace("<svg", f'<svg role="img" aria-label="{_attribute(title)}"', 1)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    for colour, name in IN_PAGE.items():
        text = text.replace(colour, name)
    return text


def _plain(text: str) -> str:
    """Escape $, since matplotlib reads $...$ as a formula."""
    return text.replace("$", r"\$")


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
