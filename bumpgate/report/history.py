"""`bumpgate history`: the values of a row over builds and days, with its change points."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from bumpgate.core.errors import BumpgateError, need
from bumpgate.core.rows import is_finite
from bumpgate.gate.evidence import read_judged
from bumpgate.history import known_findings
from bumpgate.history.archive import MOST_DAYS, Archive, Point, default_store
from bumpgate.table import show

ADD = "add"
# Minimum number of readings in a level: a single outlier does not start a new one.
LEVEL = 3
# A jump must lower the squared error by PENALTY * log(n), in units of the noise. Of series of pure normal noise, 3 in
# 100 of 20 readings and 1 in 100 of 60 then show a false jump; one of 3 sigma is located within 2 readings in 95.
PENALTY = 4.0


def command(
    what: Annotated[
        list[str], typer.Argument(help="A row id; or `add` and the record.json and gate.json files.")
    ],
    lane: Annotated[str, typer.Option(help="Only this lane's.")] = "",
    host: Annotated[str, typer.Option(help="Only hosts with this in their class: 'H200', '16 cores'.")] = "",
    store: Annotated[str, typer.Option(help="SQLAlchemy URL; by default a SQLite file of this user.")] = "",
    days: Annotated[int, typer.Option(help="Only the last days; 0 for all.", min=0, max=MOST_DAYS)] = 0,
) -> None:
    """Keep records and gates (`history add FILE...`), or show a row's values over time (`history ROW`).

    Adding a file twice keeps it once. A gate's findings are printed as new, still there, back, gone or not measured.
    Marks where the row jumped to another level. `bumpgate dashboard` plots every row.

    Exit codes: 0 done, 4 bad input, or an invalid store.
    """
    archive = Archive(store or default_store())
    row, *files = what
    if row == ADD:
        if not files:
            raise BumpgateError("history add: name record.json or gate.json files")
        for name in files:
            added = archive.add(Path(name), read_judged(Path(name)))
            typer.echo(f"{name}: {'added' if added.new else 'already stored'}")
            for one in added.findings:
                typer.echo(known_findings.line(one))
        return
    if files:
        add = "to keep files: bumpgate history add FILE..."
        raise BumpgateError(f"history shows one row, got {len(what)}; {add}")
    points = [p for p in archive.points(row, lane, days) if host in (p.host_class or host)]
    if not points:
        where = f" on lane {lane}" * bool(lane) + f" on a host like {host!r}" * bool(host)
        add = "add records with: bumpgate history add FILE..."
        raise BumpgateError(f"no reading of {row}{where} in {archive.name}; {add}")
    lanes = sorted({p.lane for p in points})
    if len(lanes) > 1:
        choose = f"name one with --lane {' | '.join(lanes)}"
        raise BumpgateError(f"{row} has readings of {len(lanes)} lanes: {choose}")
    classes = sorted({p.host_class for p in points if p.timed and p.host_class})
    if len(classes) > 1:
        raise BumpgateError(
            f"{row} is timed, and its readings of {len(classes)} classes of host are not comparable: "
            f"name one with --host {' | '.join(map(shlex.quote, classes))}"
        )
    typer.echo(listing(points, changes([p.value for p in points])), nl=False)


def changes(values: Sequence[Any]) -> list[int]:
    """Return the indices at which a new level starts: every change of exact values, PELT's jumps of measured ones.

    PELT (Killick, Fearnhead and Eckley 2012, "Optimal detection of changepoints with a linear computational cost",
    JASA 107) with squared error, in units of the noise. The noise is estimated from the median difference of
    neighbours: a jump is one difference among many. A series that is mostly constant has no noise.
    """
    if not all(is_finite(v) for v in values):
        return [i for i, (a, b) in enumerate(pairwise(values), 1) if not same(a, b)]
    noise = statistics.median([abs(b - a) for a, b in pairwise(values)] or [0.0]) / (0.6745 * math.sqrt(2))
    if noise == 0:
        return [i for i, (a, b) in enumerate(pairwise(values), 1) if a != b]
    if len(values) < 2 * LEVEL:
        return []
    numpy, ruptures = (need(name, command="bumpgate history") for name in ("numpy", "ruptures"))
    scaled = numpy.array([(v - values[0]) / noise for v in values])
    search = ruptures.KernelCPD(kernel="linear", min_size=LEVEL).fit(scaled)
    return [int(i) for i in search.predict(pen=PENALTY * math.log(len(values)))[:-1]]


def same(a: Any, b: Any) -> bool:
    """Return whether two readings have one value; NaN, which equals nothing, is one."""
    return bool(a == b or (a != a and b != b))


def listing(points: Sequence[Point], breaks: Sequence[int]) -> str:
    """Format one line per reading, oldest first; `>` where a new level starts."""
    rows = []
    for i, p in enumerate(points):
        when, mark = p.when[:16].replace("T", " "), ">" if i in breaks else " "
        build = (f"torch {p.torch or '?'}", (p.commit or "")[:12])
        rows.append((mark, when, show(p.value), p.unit, p.verdict, *build))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths)).rstrip() for row in rows)
    last = f"{len(points)} readings, {len(breaks)} change{'s' * (len(breaks) != 1)} of level"
    return "".join(f"{line}\n" for line in lines) + last + "\n"
