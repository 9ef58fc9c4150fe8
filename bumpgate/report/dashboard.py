"""`bumpgate dashboard`: rows, nights and hosts of the history as plain files, with change points and findings.

A night has one reading per row and class of host: the last one, of the candidate. The adopted side of a gate is left
out. Everything is drawn when it is written, so the pages need no network and little script.
"""

from __future__ import annotations

import hashlib
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from bumpgate.core.accepted import today
from bumpgate.core.errors import BumpgateError, loads
from bumpgate.core.findings import PRODUCT
from bumpgate.core.rows import Value, is_finite, write_atomic
from bumpgate.history.archive import MOST_DAYS, Archive, default_store
from bumpgate.report.history import changes, same
from bumpgate.report.html_page import fill
from bumpgate.table import show

MARK = '<meta name="generator" content="bumpgate dashboard">'
PAGE = re.compile(r"[0-9a-f]{12}\.html")
ADD = "add records with: bumpgate history add FILE..."
# Verdicts of a red row that speak against the product; any other red row is open.
AGAINST = {verdict.value for verdict in PRODUCT}
RECENT = 40  # changes of level on the first page
SHOWN = 120  # spans of nights on the page of a row
WIDTH, HEIGHT = 1000, 240  # of a plot, in its own units


class NightReading(NamedTuple):
    """The last reading of a night. day: counted from the first night of the dashboard."""

    day: int
    value: Value
    verdict: str
    red: bool


@dataclass
class Series:
    """One row of a lane on one class of host. levels: indices of nights at which a new level starts."""

    lane: str
    row: str
    host: str
    unit: str
    nights: list[NightReading] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)

    @property
    def page(self) -> str:
        name = hashlib.sha256("\n".join((self.lane, self.row, self.host)).encode()).hexdigest()[:12]
        return f"{name}.html"

    @property
    def last(self) -> NightReading:
        return self.nights[-1]

    @property
    def tone(self) -> str:
        """How the last night is shown: bad, open, good or info."""
        verdict = self.last.verdict
        if self.last.red:
            return "bad" if verdict in AGAINST else "open"
        return "good" if verdict in ("PASS", "WIN", "FIXED") else "info"

    @property
    def since(self) -> int:
        """The day at which the present level starts."""
        return self.nights[self.levels[-1] if self.levels else 0].day


class Span(NamedTuple):
    """Consecutive nights with one value, verdict and level."""

    first: str
    last: str
    nights: int
    value: Value
    verdict: str
    red: bool
    new: bool


def command(
    folder: Annotated[Path, typer.Argument(help="Folder of the pages: a new one, or a dashboard's.")],
    lane: Annotated[str, typer.Option(help="Only this lane's.")] = "",
    days: Annotated[int, typer.Option(help="Only the last days.", min=1, max=MOST_DAYS)] = 365,
    store: Annotated[str, typer.Option(help="SQLAlchemy URL; by default a SQLite file of this user.")] = "",
) -> None:
    """Write the history as a static dashboard: open index.html in a browser, or copy the folder to a web server.

    Exit codes: 0 written, 4 bad input, or an invalid store.
    """
    index = folder / "index.html"
    if folder.exists() and not folder.is_dir():
        raise BumpgateError(f"{folder}: not a folder")
    if folder.is_dir() and any(folder.iterdir()) and not _is_ours(index):
        raise BumpgateError(f"{folder}: holds other files than a dashboard: name a new folder")
    archive = Archive(store or default_store())
    start = today() - timedelta(days - 1)
    found = read(archive, start, lane)
    write(folder, found, start, archive.findings(lane))
    nights = len({night.day for one in found for night in one.nights})
    typer.echo(f"wrote {index}: {len(found)} rows, {nights} nights")
    if not found:
        on_lane = f" on lane {lane}" if lane else ""
        typer.echo(f"no reading{on_lane} of the last {days} days in {archive.name}; {ADD}")


def _is_ours(index: Path) -> bool:
    """Whether a page was written by this command."""
    return index.is_file() and MARK in index.read_text(encoding="utf-8", errors="replace")[:2000]


def read(archive: Archive, start: date, lane: str = "") -> list[Series]:
    """Return all series with a reading since a day, red and recently changed ones first."""
    series: dict[tuple[str, str, str], Series] = {}
    for found in archive.nights(start, lane):
        key = found.lane or "", found.row, found.host_class or "unknown"
        one = series.get(key) or series.setdefault(key, Series(*key, found.unit))
        day = (date.fromisoformat(found.started[:10]) - start).days
        night = NightReading(day, _value(found.number, found.value), found.verdict, bool(found.row_red))
        if one.nights and one.last.day == day:
            one.nights[-1] = night
        else:
            one.nights.append(night)
    for one in series.values():
        one.levels = changes([night.value for night in one.nights])
    return sorted(series.values(), key=lambda s: (not s.last.red, -s.since, s.lane, s.row, s.host))


def _value(number: float | None, text: str) -> Value:
    """Return a stored value. number: None if it is not a finite number. text: JSON."""
    if number is not None:
        return int(text) if text.lstrip("-").isdigit() else number
    raw = loads(text)
    return float(raw["float"]) if isinstance(raw, dict) else raw


def write(folder: Path, found: Sequence[Series], start: date, findings: Sequence[Any]) -> None:
    """Write rows/*.html, then index.html, which links to them; pages of rows that are gone are removed."""
    rows = folder / "rows"
    rows.mkdir(parents=True, exist_ok=True)
    template = "dashboard_row.html.j2"
    shared = {"show": show, "day": _day(start)}
    for one in found:
        drawn = {"spans": spans(one, start)[:SHOWN], "svg": plot(one, start)}
        (rows / one.page).write_text(fill(template, one=one, **drawn, **shared), encoding="utf-8")
    days = {night.day for one in found for night in one.nights}
    first_day, length = min(days, default=0), max(days, default=-1) + 1
    recent = sorted(
        ((one.nights[i].day, one, one.nights[i - 1], one.nights[i]) for one in found for i in one.levels),
        key=lambda change: (-change[0], change[1].row),
    )
    first = {"recent": recent[:RECENT], "more": len(recent[RECENT:]), "findings": findings, "length": length}
    first |= {"first_day": first_day, "nights": len(days), "add": ADD}
    strips = {"hosts": hosts(found), "strip": lambda nights: strip(nights, length, first_day)}
    text = fill("dashboard.html.j2", mark=MARK, series=found, **strips, **first, **shared)
    write_atomic(folder / "index.html", text)
    kept = {one.page for one in found}
    for path in rows.iterdir():
        if PAGE.fullmatch(path.name) and path.name not in kept:
            path.unlink()


def hosts(found: Sequence[Series]) -> list[tuple[str, str, list[NightReading]]]:
    """Return (lane, class of host, nights) with the number of red rows of each night as its value."""
    nights: dict[tuple[str, str], dict[int, int]] = {}
    for one in found:
        of_host = nights.setdefault((one.lane, one.host), {})
        for night in one.nights:
            of_host[night.day] = of_host.get(night.day, 0) + night.red
    return [
        (lane, host, [NightReading(day, red, "", red > 0) for day, red in sorted(counts.items())])
        for (lane, host), counts in sorted(nights.items())
    ]


def strip(nights: Sequence[NightReading], length: int, first: int = 0) -> str:
    """Return one mark per night from the first day on, as SVG: green or red; a gap for nights without a reading."""
    paths = {False: "", True: ""}
    # The day of a night less its number grows after every gap.
    for (red, _), group in groupby(enumerate(nights), key=lambda pair: (pair[1].red, pair[1].day - pair[0])):
        days = [night.day for _, night in group]
        paths[red] += f"M{days[0]} 4h{days[-1] - days[0] + 1}"
    shapes = "".join(f'<path class="{"r" if red else "g"}" d="{d}"/>' for red, d in paths.items() if d)
    red = sum(night.red for night in nights)
    title = f"{red} of {len(nights)} nights red"
    return (
        f'<svg class="strip" role="img" aria-label="{title}" viewBox="{first} 0 {length - first} 8" '
        f'preserveAspectRatio="none"><title>{title}</title>{shapes}</svg>'
    )


def spans(one: Series, start: date) -> list[Span]:
    """Merge consecutive nights with one value, verdict and level, newest first."""
    levels, name = set(one.levels), _day(start)
    parts: list[list[int]] = []
    for i, night in enumerate(one.nights):
        before = one.nights[i - 1] if i else None
        if before and before.verdict == night.verdict and same(before.value, night.value) and i not in levels:
            parts[-1].append(i)
        else:
            parts.append([i])
    out = []
    for part in reversed(parts):
        first, last = one.nights[part[0]], one.nights[part[-1]]
        shown = (last.value, last.verdict, last.red, part[0] in levels)
        out.append(Span(name(first.day), name(last.day), len(part), *shown))
    return out


def plot(one: Series, start: date) -> str:
    """Return the values over time with the median of each level, as SVG; "" for a single value, or no numbers."""
    values = [night.value for night in one.nights]
    if len(set(values)) < 2 or not all(is_finite(value) for value in values):
        return ""
    numbers = [float(value) for value in values if value is not None]
    low, high = min(numbers), max(numbers)
    first, last = one.nights[0].day, one.last.day

    def x(day: int) -> float:
        return round(8 + (WIDTH - 16) * (day - first) / max(last - first, 1), 1)

    def y(value: float) -> float:
        return round(HEIGHT - 12 - (HEIGHT - 24) * (value - low) / (high - low), 1)

    places = [(x(night.day), y(number)) for night, number in zip(one.nights, numbers)]
    dots = {False: "", True: ""}
    for night, (across, up) in zip(one.nights, places):
        dots[night.red] += f"M{across:g} {up:g}h0"
    lines = ""
    for i, j in pairwise([0, *one.levels, len(numbers)]):
        middle = y(statistics.median(numbers[i:j]))
        lines += f"M{places[i][0]:g} {middle:g}H{places[j - 1][0]:g}"
    name = _day(start)
    title = f"{show(low)} to {show(high)} from {name(first)} to {name(last)}"
    return (
        f'<svg class="plot" role="img" aria-label="{title}" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f'<path class="level" d="{lines}"/><path class="dot g" d="{dots[False]}"/>'
        f'<path class="dot r" d="{dots[True]}"/></svg>'
    )


def _day(start: date) -> Any:
    return lambda day: (start + timedelta(day)).isoformat()
