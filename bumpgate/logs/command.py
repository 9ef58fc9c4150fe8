"""`bumpgate logs`: what happened to a run, by its logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bumpgate.logs.families import LogsError, load_families
from bumpgate.logs.reader import classify_files, expanded
from bumpgate.logs.report import ALERT, compare, markdown, text
from bumpgate.logs.traces import divergences, is_trace, read_trace


def command(
    files: Annotated[
        list[str], typer.Argument(help="Logs of one run: files, .gz, .zst, folders, - for stdin.")
    ],
    against: Annotated[
        list[str] | None, typer.Option(help="Logs of an earlier run: print what differs; repeatable.")
    ] = None,
    bound: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FAMILY=N", help="The most events of a rank, such as graph_break=13; repeatable."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="The report as Markdown, for an issue.")
    ] = False,
) -> None:
    """Name the first cause of a failed run, what followed, and what to look at first.

    Traces of torch (TORCH_TRACE) among the files are compared rank by rank: where one compiled something else.

    Exit codes: 0 clean, 1 an alert, 3 warnings or errors of no family, 4 bad input. With --against: 0 nothing new, 1 a
    new or more frequent family or text.
    """
    families = load_families(bounds=_bounds(bound or []))
    paths = list(expanded([Path(file) for file in files]))
    traces = [path for path in paths if is_trace(path)]
    diverged = divergences([read_trace(path) for path in traces])
    logs = [path for path in paths if path not in traces] if traces else [Path(file) for file in files]
    report = classify_files(logs, families)
    if against is not None:
        found = compare(classify_files([Path(file) for file in against], families), report)
        typer.echo("\n".join(map(str, found)) or "the runs log the same families")
        raise typer.Exit(any(d.label in ("NEW", "MORE") for d in found))
    if as_json:
        typer.echo(json.dumps(report.to_json() | {"ranks": list(map(str, diverged))}, indent=1))
    else:
        typer.echo(markdown(report) if as_markdown else text(report))
        typer.echo("".join(f"{'* ' * as_markdown}DIVERGED   {one}\n" for one in diverged), nl=False)
        if traces and not diverged:
            typer.echo(f"{len(traces)} traces: no rank compiled anything else than the others")
    raise typer.Exit(ALERT if diverged else report.exit_code)


def _bounds(options: list[str]) -> dict[str, int]:
    bounds = {}
    for option in options:
        name, _, value = option.partition("=")
        if not value.isdecimal():
            raise LogsError(f"--bound {option!r}: write FAMILY=N, such as graph_break=13")
        bounds[name] = int(value)
    return bounds
