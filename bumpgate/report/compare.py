"""`bumpgate compare`: two records or gates side by side as Markdown, without a new run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer

from bumpgate.core.errors import BumpgateError
from bumpgate.core.findings import Decision, Finding, group
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import Record, Row, is_number, read_record, write_atomic
from bumpgate.core.text import printable, redacted
from bumpgate.gate.evidence import read_judged
from bumpgate.gate.verdict import Side, judge_gate
from bumpgate.report.markdown import SIGN, escape

# Parts of a record's provenance that name what was installed and where.
BUILD = ("torch", "torch_git", "triton", "python", "device", "driver", "cpu", "cores", "commit", "started")
SHOWN = 10  # rows of a cause
TONES = {Decision.HOLD: "bad", Decision.UNKNOWN: "open"}
# What a record did not run, or logged, is no difference of the rows of both.
UNCOMPARED = ("NOT RUN", "LOGS")


def command(
    before: Annotated[Path, typer.Argument(help="record.json, or gate.json, whose candidate is taken.")],
    after: Annotated[Path, typer.Argument(help="Another one of the same lane.")],
    out: Annotated[Path | None, typer.Option(help="Path of the Markdown; printed by default.")] = None,
) -> None:
    """Compare two records or gates: the rows that differ materially, by cause, and the packages that differ.

    Times are compared by their single readings, which the gate measures in pairs.

    Exit codes: 0 compared, whatever differs; 4 bad input.
    """
    text = printable(redacted(markdown(before, after)))
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_atomic(out, text)
        typer.echo(f"wrote {out}")


def markdown(before: Path, after: Path) -> str:
    """Return the comparison. Raises BumpgateError if an input has no record, or the lanes differ."""
    (old, old_packages), (new, new_packages) = _read(before), _read(after)
    lanes = [str(record.provenance.get("lane")) for record in (old, new)]
    if lanes[0] != lanes[1]:
        raise BumpgateError(f"{before} is of lane {lanes[0]}, {after} of {lanes[1]}: compare one lane")
    findings = judge_gate(lanes[0], Side(str(before), old), Side(str(after), new)).findings
    causes = group(_plain(f) for f in findings if f.label not in UNCOMPARED)
    a, b = ({j.row.id: j.row for j in record.judgements} for record in (old, new))
    lines = [f"## {escape(before.name)} -> {escape(after.name)}: {len(causes)} causes", ""]
    lines += [f"{len(a.keys() & b.keys())} rows in both, {len(a.keys() - b.keys())} only before,"]
    lines += [f"{len(b.keys() - a.keys())} only after.", ""]
    if moved := _moved(old_packages, new_packages):
        lines += ["| what differs | before | after |", "|---|---|---|"]
        lines += [f"| {escape(name)} | {escape(one)} | {escape(two)} |" for name, one, two in moved]
    else:
        lines.append("No package differs.")
    return "\n".join([*lines, *(line for f in causes for line in _cause(f, a, b))]) + "\n"


def _plain(f: Finding) -> Finding:
    """A finding without numbers in its head, so that equal causes merge. A host's own rows are one cause."""
    if f.rows and all(row.startswith("calibration/") for row in f.rows):
        return Finding(Decision.ADOPT, "HOST", "", "measured of the host, not of a build", f.rows)
    head = "" if f.metric else re.sub(r"(?<!\w)\d+(\.\d+)?(e[+-]?\d+)?", "N", f.head)
    head = re.sub(r"^reviewed N.*", "beyond its reviewed limit", re.sub(r"^(not reviewed).*", r"\1", head))
    return replace(f, head=head, repro="")


def _cause(f: Finding, old: Mapping[str, Row], new: Mapping[str, Row]) -> Iterator[str]:
    """Yield a cause as Markdown: its rows with both values; without rows, what both sides showed."""
    what = escape(": ".join(filter(None, (f.metric, f.head))))
    both = zip_longest(f.adopted, f.candidate, fillvalue="nothing")
    lines = [f"- {escape(a if a == b else f'{a} -> {b}')}" for a, b in both]
    if f.rows:
        lines = [
            f"| `{id}` | {_value(old.get(id))} | {_value(new.get(id))} | {_change(old, new, id)} |"
            for id in f.rows
        ]
    yield from ("", f"### {SIGN[TONES.get(f.decision, 'info')]} {f.label} {what} ({len(lines)})", "")
    yield from ("| row | before | after | change |", "|---|---|---|---|") if f.rows else ()
    yield from lines[:SHOWN]
    yield from ("", f"and {len(lines) - SHOWN} more") if len(lines) > SHOWN else ()


def _change(old: Mapping[str, Row], new: Mapping[str, Row], id: str) -> str:
    a, b = (side[id].value if id in side else None for side in (old, new))
    return f"{100 * (b / a - 1):+.1f} %" if is_number(a) and is_number(b) and a else ""


def _value(row: Row | None) -> str:
    if row is None:
        return "not measured"
    value = f"{row.value:.6g}" if isinstance(row.value, float) else str(row.value)
    return escape(f"{value} {row.unit}".strip())


def _read(path: Path) -> tuple[Record, dict[str, str]]:
    """Return a record, and what was installed."""
    found = read_record(path) if path.suffix == ".xz" else read_judged(path)
    packages: dict[str, str] = {}
    if isinstance(found, GateFile):
        side = found.candidate
        if side.record is None:
            raise BumpgateError(f"{path}: its candidate has no record ({side.failure}); compare another gate")
        found, packages = side.record, dict(side.packages)
    build = {name: str(found.provenance[name])[:40] for name in BUILD if found.provenance.get(name)}
    return found, packages | build


def _moved(old: dict[str, str], new: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return name, value before and value after. Packages that one side does not list are not compared."""
    both = sorted(old.keys() & new.keys())
    return [(name, old[name], new[name]) for name in both if old[name] != new[name]]
