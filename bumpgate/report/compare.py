"""`bumpgate compare`: two records or gates side by side as Markdown, without a new run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bumpgate.core.errors import BumpgateError
from bumpgate.core.findings import Finding
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import Record, read_record, write_atomic
from bumpgate.core.text import printable, redacted
from bumpgate.gate.evidence import read_judged
from bumpgate.gate.verdict import Side, judge_gate
from bumpgate.report.markdown import escape, finding_block

# Parts of a record's provenance that name what was installed and where.
BUILD = ("torch", "torch_git", "triton", "python", "wheel_set", "device", "cpu")


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
    rows = [{j.row.id for j in record.judgements} for record in (old, new)]
    moved = _moved(old_packages, new_packages)
    lines = [f"## {escape(before.name)} -> {escape(after.name)}: {len(findings)} causes\n"]
    lines += [f"{len(rows[0] & rows[1])} rows in both, {len(rows[0] - rows[1])} only before,"]
    lines += [f"{len(rows[1] - rows[0])} only after.\n"]
    if moved:
        lines += ["| what differs | before | after |", "|---|---|---|"]
        lines += [f"| {escape(name)} | {escape(a)} | {escape(b)} |" for name, a, b in moved]
    else:
        lines.append("No package differs.")
    return "\n".join(lines) + "\n" + "".join(finding_block(_plain(f)) for f in findings)


def _read(path: Path) -> tuple[Record, dict[str, str]]:
    """Return a record, and what was installed."""
    found = read_record(path) if path.suffix == ".xz" else read_judged(path)
    packages: dict[str, str] = {}
    if isinstance(found, GateFile):
        side = found.candidate
        if side.record is None:
            raise BumpgateError(f"{path}: its candidate has no record ({side.failure}); compare another gate")
        found, packages = side.record, dict(side.packages)
    build = {name: str(found.provenance[name]) for name in BUILD if found.provenance.get(name)}
    return found, packages | build


def _moved(old: dict[str, str], new: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return name, value before and value after. Packages that one side does not list are not compared."""
    both = sorted(old.keys() & new.keys())
    return [(name, old[name], new[name]) for name in both if old[name] != new[name]]


def _plain(finding: Finding) -> Finding:
    """A finding without the command of a gate: no side of a comparison is installed here."""
    return replace(finding, repro="")
