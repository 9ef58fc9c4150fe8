"""`bumpgate accept`: records owner, reason and last day of an expected difference in baselines/accepted.toml."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from bumpgate.core import lanes
from bumpgate.core.accepted import ACCEPTABLE, FILE, MAX_DAYS, MAX_RATIO, Acceptance, covers, load, today
from bumpgate.core.baseline import find_root
from bumpgate.core.baseline import load as load_baseline
from bumpgate.core.errors import BumpgateError, RefusedError, is_line
from bumpgate.core.findings import TimedOutcome
from bumpgate.core.gate_file import GateFile, Paired
from bumpgate.core.rows import Record, is_finite
from bumpgate.gate.evidence import read_judged
from bumpgate.process.file_transaction import Edit, replace_all, writing
from bumpgate.process.file_transaction import read as read_text
from bumpgate.process.tree_digest import Binding, bind, measured_tree
from bumpgate.review.rebaseline import refuse_other_tree, refuse_unproved

HEAD = """\
# Differences that are accepted until a day: `bumpgate accept` writes them, an expired one is red.
# A permanent change belongs in the lane's baseline: `bumpgate rebaseline`.
"""


def command(
    row: Annotated[str, typer.Argument(help="Row id: suite/case/metric.")],
    lane: Annotated[str, typer.Option(help="A declared lane.")],
    owner: Annotated[str, typer.Option(help="Who is responsible for it.")] = "",
    reason: Annotated[str, typer.Option(help="Why the difference is expected, in one line.")] = "",
    expires: Annotated[str, typer.Option(help="Its last day, such as 2026-12-31.")] = "",
    record: Annotated[
        Path | None, typer.Option(help="What was measured: record.json (the default) or a gate.json.")
    ] = None,
    other_tree: Annotated[
        bool, typer.Option("--other-tree", help="Use a record or gate that was measured from other sources.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Drop every entry of the row instead.")] = False,
) -> None:
    """Accept the measured value of a row until a day. It is then shown and not red.

    For a row that the gate timed in pairs, the ratio of times is accepted, to the adopted build or, of a drift (CREEP),
    to the anchor. The record or gate must be of the present sources; documents and baselines may have changed.

    Exit codes: 0 done, 1 refused and nothing written, 4 bad input.
    """
    if os.environ.get("BUMPGATE_GATE") == "1":
        raise BumpgateError("accept never runs inside a gate (BUMPGATE_GATE=1)")
    root = find_root(Path.cwd())
    lanes.require(root, lane)
    path = f"baselines/{FILE}"
    with writing(root):
        before = read_text(root / path)
        entries = load(root / path)
        if remove:
            kept = [a for a in entries if (a.lane, a.row) != (lane, row)]
            if len(kept) == len(entries):
                raise BumpgateError(f"no acceptance of {row} on lane {lane}; {path} lists them")
            done = f"removed {len(entries) - len(kept)} of {row}"
        else:
            measured = record or root / "record.json"
            found = read_judged(measured)
            if isinstance(found, Record):
                refuse_unproved(found)
            for name, text in (("owner", owner), ("reason", reason)):
                if not is_line(text):
                    raise BumpgateError(f"--{name} must be one line of text in UTF-8, got {text!r}")
            draft = Acceptance(lane, row, None, owner.strip(), reason.strip(), today(), _day(expires))
            made = _entry(root, measured, found, draft)
            if not other_tree:
                _refuse_other_tree(root, measured, found)
            kept = [*(a for a in entries if a.key != made.key), made]
            done = f"accepted {row} {made.measured} for {made}"
        replace_all(root, [Edit(path, before, file_text(kept))])
    typer.echo(done)
    typer.echo(f"wrote {path}; review it with: git diff {path}")


def file_text(entries: Iterable[Acceptance]) -> str:
    """Format accepted.toml, sorted by lane, row and value."""
    import tomlkit

    raw = []
    for a in sorted(entries, key=lambda a: a.key):
        what: dict[str, Any] = {"value": a.value} if a.ratio is None else {"ratio": a.ratio}
        fields = {"lane": a.lane, "row": a.row, **what, "owner": a.owner, "reason": a.reason}
        raw.append(fields | {"since": a.since, "expires": a.expires})
    return HEAD + tomlkit.dumps({"accepted": raw} if raw else {})


def _day(text: str) -> date:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise BumpgateError(f"--expires {text!r}: not a day such as 2026-12-31") from None
    if not 0 <= (day - today()).days <= MAX_DAYS:
        raise BumpgateError(f"--expires {day}: from today on, and at most {MAX_DAYS} days away")
    return day


def _refuse_other_tree(root: Path, path: Path, found: Record | GateFile) -> None:
    """Raise RefusedError on a record or gate that was measured from other sources than this work tree."""
    if isinstance(found, Record):
        refuse_other_tree(found, measured_tree(root, path))
        return
    now = bind(root, path.parent).sources()
    if differences := Binding.of_gate(path, found.binding).sources().differences(now):
        other = f"{path} was measured from other sources ({'; '.join(differences)}) than these"
        raise RefusedError(f"{other}: gate again, or take it as it is with --other-tree")


def _entry(root: Path, path: Path, measured: Record | GateFile, made: Acceptance) -> Acceptance:
    """Return the entry with the measured value or ratio. Raises RefusedError on a row that cannot be accepted."""
    lane, row = made.lane, made.row
    gate = measured if isinstance(measured, GateFile) else None
    record = measured.candidate.record if isinstance(measured, GateFile) else measured
    found = measured.lane if isinstance(measured, GateFile) else measured.provenance.get("lane")
    if found != lane:
        raise RefusedError(f"{path.name} is of lane {found!r}, not {lane!r}")
    if gate and row in gate.timed:
        return _timed_entry(made, gate.timed[row], gate.drifts.get(row, {}).get("ratio"))
    judgement = next((j for j in record.judgements if j.row.id == row), None) if record else None
    if judgement is None:
        raise BumpgateError(f"{path.name} holds no row {row!r}")
    made = replace(made, value=judgement.row.value)
    baseline = load_baseline(root / "baselines" / f"{lane}.json", lane)
    if not (judgement.red or judgement.accepted):
        raise RefusedError(f"{row}: {judgement.label}: nothing to accept")
    why = f"{judgement.verdict.value}: {judgement.reason}"
    if judgement.verdict not in ACCEPTABLE:
        raise RefusedError(f"{row}: {why}; only a measured difference can be accepted")
    if not covers(made, judgement.row, baseline):
        raise RefusedError(f"{row}: {judgement.verdict.value} whatever is accepted: {judgement.reason}")
    return made


def _timed_entry(made: Acceptance, timed: Paired, drift: float | None) -> Acceptance:
    """Return the entry for the slowdown or the drift of a row; the larger ratio, if it has both."""
    ratios = [timed.ratio] if timed.outcome == TimedOutcome.SLOWER.value else []
    ratios = [ratio for ratio in (*ratios, drift) if is_finite(ratio)]
    if not ratios:
        raise RefusedError(f"{made.row}: the paired sessions read {timed.outcome}: nothing to accept")
    ratio = round(max(ratios), 6)
    if ratio > MAX_RATIO:
        raise RefusedError(f"{made.row}: {ratio:.3g} times as long: at most {MAX_RATIO:g} can be accepted")
    return replace(made, ratio=ratio)
