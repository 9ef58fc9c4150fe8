"""`bumpgate rebaseline`: the only writer of baselines; its diff is reviewed by a human."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from bumpgate.core import census, lanes
from bumpgate.core.baseline import (
    BUILD,
    CALIBRATION,
    Baseline,
    Reviewed,
    comparable,
    file_text,
    find_root,
    in_tier,
    judge,
    load,
    other_build,
    times,
)
from bumpgate.core.errors import BumpgateError, RefusedError
from bumpgate.core.hosts import measured_in, of_host, unlike
from bumpgate.core.rows import Judgement, Record, Row, Value, Verdict, read_record
from bumpgate.core.text import some
from bumpgate.process.file_transaction import Edit, read, replace_all, writing
from bumpgate.process.tree_digest import measured_tree
from bumpgate.table import change_lines

MADE_WITH = ("torch", "torch_git", "triton", "python", "wheel_set", "device", "cpu", "cores", "driver")


@dataclass(frozen=True)
class BaselineChange:
    """One row of the diff. old: None for a new row; new: None for a dropped one."""

    id: str
    old: Reviewed | None
    new: Reviewed | None
    why: str


def command(
    lane: Annotated[str, typer.Option(help="A declared lane; by default the only one.")] = "",
    record: Annotated[Path | None, typer.Option(help="Record of a run; by default record.json.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Row ids to accept, as a glob: 'compile/*/graph_breaks'; repeatable."),
    ] = None,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Also drop rows and tests that a whole run does not have any more."),
    ] = False,
    new: Annotated[bool, typer.Option("--new", help="Only rows that were never reviewed.")] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Also rows that moved within their tolerance; needs --only.")
    ] = False,
    times: Annotated[
        bool, typer.Option("--times", help="Review this machine's times and calibrations, and nothing else.")
    ] = False,
    other_tree: Annotated[
        bool, typer.Option("--other-tree", help="Use a record that was measured from other sources.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the diff and write nothing.")] = False,
) -> None:
    """Accept the values of a run: rewrite only the rows that are new or outside their tolerance.

    The record must be of the present sources, committed or not; documents and baselines may have changed.
    The tests of the run join the reviewed set of the lane's tests; --prune drops those that a whole run lacks.
    Hand-edited tolerances and notes are kept. A record of another torch or triton is accepted completely or not at all.

    Exit codes: 0 done (or nothing to do), 1 refused and nothing written, 4 bad input.
    """
    if os.environ.get("BUMPGATE_GATE") == "1":
        raise BumpgateError("rebaseline never runs inside a gate (BUMPGATE_GATE=1)")
    root = find_root(Path.cwd())
    lane = lanes.require(root, lane).name
    if times and (only or new or prune or refresh):
        raise BumpgateError("--times takes all times of one machine: leave out every other selection")
    if refresh and not only:
        raise BumpgateError("--refresh takes what moved within its tolerance: name the rows with --only")
    measured = record or root / "record.json"
    found = read_record(measured)
    refuse_unproved(found, whole=not (only or times))
    if not other_tree:
        refuse_other_tree(found, measured_tree(root, measured))
    place = root / "baselines" / f"{lane}.json"
    tests_place = census.path(place)
    with writing(root):
        texts = read(place), read(tests_place)
        old, tests = load(place, lane, missing_ok=True), census.load(tests_place)
        if times:
            made, changes = plan_times(found, old)
        else:
            made, changes = plan(found, old, only=only or (), new=new, prune=prune, refresh=refresh)
        now = tests if only or new or times else reviewed_tests(found, tests, prune=prune)
        edits = [Edit(f"baselines/{place.name}", texts[0], file_text(made))] if made != old else []
        if now != tests:
            edits.append(Edit(f"baselines/{tests_place.name}", texts[1], census.text(now)))
        left = _left(found, old, made, now, prune=prune)
        typer.echo(diff(old, made, changes) + tests_diff(tests, now) + left, nl=False)
        if not edits:
            every = "nothing to accept: every measured row is within its tolerance"
            typer.echo("nothing written: what is named above stays as it is" if left else every)
            return
        if dry_run:
            typer.echo("dry run: nothing written")
            return
        replace_all(root, edits)
    paths = " ".join(edit.path for edit in edits)
    typer.echo(f"wrote {paths}; review it with: git diff {paths}")


def refuse_unproved(record: Record, *, whole: bool = False) -> None:
    """Raise RefusedError on a record that no run of this bumpgate wrote, or whose run measured nothing.

    whole: also on a run that did not reach its end.
    """
    again = f"run pytest -m {record.provenance.get('lane')} again"
    if not record.sealed:
        raise RefusedError(f"the record has no digest of itself, so it may have been edited: {again}")
    measured = [j for j in record.judgements if not (j.row.unmeasured or j.row.id.startswith(CALIBRATION))]
    if not record.complete and (whole or not measured):
        found = f"measured {len(measured)} rows" if measured else "measured no row"
        why = f": {record.problems[0]}" if record.problems else ""
        by_name = ", or name rows that it measured with --only" if measured else ""
        raise RefusedError(
            f"the run is NOT COMPLETE and {found}{why}: correct what ended it, and {again}{by_name}"
        )


def reviewed_tests(record: Record, old: Collection[str], *, prune: bool) -> frozenset[str]:
    """Return the reviewed set of a lane's tests after a run. The first set is that of a whole run.

    prune: drop the tests that a whole run does not collect any more.
    """
    whole = _whole(record)
    if not record.tests or not (old or whole):
        return frozenset(old)
    return census.reviewed(old, record.tests, whole=whole and (prune or not old))


def tests_diff(old: Collection[str], new: Collection[str]) -> str:
    """Return the change of the reviewed set of tests, one line for each direction."""
    sides = {"new": sorted({*new} - {*old}), "gone": sorted({*old} - {*new})}
    return "".join(f"tests       {len(t)} {word}: {some(t)}\n" for word, t in sides.items() if t)


def _left(record: Record, old: Baseline, new: Baseline, tests: Collection[str], *, prune: bool) -> str:
    """Return what stays as it is, and why, one line for each cause: gone, not measured, not decided."""
    silent = [
        j for j in record.judgements if j.row.unmeasured and j.row.id in old.rows.keys() & new.rows.keys()
    ]
    whole, text = _whole(record), ""
    absent = census.lost(tests, record.tests) if record.tests and whole and not prune else {}
    gone = [j.row.id for j in silent if j.gone and whole]
    gone += [test for test, outcome in absent.items() if outcome == census.ABSENT]
    if gone and not prune:
        text = f"kept although nothing measures it: {some(gone)}; drop with --prune\n"
    lost = [f"{j.row.id} ({j.reason})" for j in silent if not (j.gone and whole)]
    part = "" if whole else f"; only a whole run can drop a row: pytest -m {old.lane}"
    text += f"kept, not measured in this run: {some(lost)}{part}\n" if lost else ""
    still = {j.row.id: _still_new(j, old, record, whole=whole) for j in record.judgements}
    why = [f"{id} ({reason})" for id, reason in still.items() if reason and id not in new.rows]
    return text + (f"still new: {some(why)}\n" if why else "")


def plan(
    record: Record,
    old: Baseline,
    *,
    only: Sequence[str] = (),
    new: bool = False,
    prune: bool = False,
    refresh: bool = False,
) -> tuple[Baseline, list[BaselineChange]]:
    """Return the baseline that accepts a record, and the changes from the old one; empty if repeated.

    new: only rows that were never reviewed. One that cannot be accepted yet stays new, unless `only` names it.
    refresh: also accept the values of rows that pass, since small changes of our own use up the tolerance.

    Raises RefusedError with all reasons at once; BumpgateError if a glob of `only` matches no row of the record.
    """
    _refuse_record(record, old, only, prune)
    whole = _whole(record) and not (only or new)
    other_host = comparable(old.made_with, record.provenance)
    timed = {j.row.id for j in record.judgements if j.row.interval is not None}
    selected = [j for j in record.judgements if not only or any(fnmatchcase(j.row.id, g) for g in only)]
    unreviewed = (Verdict.NEW, Verdict.MISSING)  # MISSING: of a record before NEW
    selected = [j for j in selected if not new or (_is_new(j, old) and j.verdict in unreviewed)]
    for glob in only:
        if not any(fnmatchcase(j.row.id, glob) for j in selected):
            raise BumpgateError(f"--only {glob!r} matches no row of the record")
    if not only:
        selected = [j for j in selected if not _still_new(j, old, record, whole=whole)]
    if refused := [f"{j.row.id}: {reason}" for j in selected if (reason := _unacceptable(j, old, record))]:
        raise RefusedError(*refused)
    changes = [c for j in selected if (c := _change(j, old, record, prune, refresh))]
    if not only:
        changes += _renames(record, old, changes)
    if other_host and not whole and any(change.id in timed for change in changes):
        raise RefusedError(
            f"{other_host}: accept them from a whole run, without --only: pytest -m {old.lane}"
        )
    build = old.made_with and other_build(old.made_with, record.provenance)
    made = old.made_with
    if not made or (whole and (changes or build)):
        _refuse_kept_values(record, old)
        made = made_with(record)
    return Baseline(old.lane, made, changed_rows(old, changes)), changes


def _is_new(j: Judgement, old: Baseline) -> bool:
    return not j.row.unmeasured and j.row.id not in old.rows


def _still_new(j: Judgement, old: Baseline, record: Record, *, whole: bool) -> str:
    """Return why a row that was never reviewed stays new: a wide interval, or another host; "" if it does not."""
    if not _is_new(j, old):
        return ""
    host = comparable(old.made_with, record.provenance) if j.row.interval and not whole else ""
    reason = _unacceptable(j, old, record) or ""
    return host or (reason if reason.startswith(Verdict.INCONCLUSIVE.value) else "")


def _renames(record: Record, old: Baseline, changes: Sequence[BaselineChange]) -> list[BaselineChange]:
    """Return the removal of each row that its test reports under a new name only: one of the same value and kind."""

    def kind(row: Reviewed) -> tuple[object, ...]:
        return row.test, row.unit, row.better, row.value

    new = [c for c in changes if c.old is None and c.new is not None]
    names = [j.row.id for j in record.judgements if j.gone and j.row.id in old.rows]
    removed = {c.id for c in changes if c.new is None}
    found = []
    for name in names:
        now = [c.id for c in new if c.new and kind(c.new) == kind(old.rows[name])]
        same = [each for each in names if kind(old.rows[each]) == kind(old.rows[name])]
        if name not in removed and len(now) == len(same) == 1:
            found.append(BaselineChange(name, old.rows[name], None, f"renamed to {now[0]}"))
    return found


def plan_times(record: Record, old: Baseline) -> tuple[Baseline, list[BaselineChange]]:
    """Return the baseline whose times are those of the record's host, with its calibrations, and the changes.

    A time that this host does not run is dropped: it would belong to another one. The record may be of a part of the
    lane if that part has every reviewed time.
    Raises RefusedError with all reasons at once.
    """
    _refuse_record(record, old, (), prune=False)
    if other := old.made_with and other_build(old.made_with, record.provenance):
        raise RefusedError(f"{other}: another build is adopted from a whole run, without --times")
    rows = [j for j in record.judgements if of_host(j.row.id, j.row.better, j.row.unit)]
    lost = [j for j in rows if j.row.unmeasured and not j.gone]
    found = [j for j in rows if not j.row.unmeasured and (j.row.id in old.rows or not j.row.paired)]
    faults = {j.row.id: why for j in found if (why := _unacceptable(j, Baseline(old.lane), record))}
    refused = [f"{id}: {why}" for id, why in faults.items() if id in old.rows]
    found = [j for j in found if j.row.id not in faults]  # a new time that is undecided stays new
    if refused or lost:
        raise RefusedError(
            *refused, *(f"{j.row.id} would keep another host's value: {j.reason}" for j in lost)
        )
    new = {j.row.id: reviewed(j.row, old.rows.get(j.row.id), record) for j in found}
    here = {id: row for id, row in old.rows.items() if of_host(id, row.better, row.unit)}
    if not _whole(record) and (absent := sorted(here.keys() - new.keys())):
        raise RefusedError(
            f"--times takes all times of one host, and this run lacks {some(absent)}: pytest -m {old.lane}"
        )
    changes = [
        BaselineChange(id, here.get(id), new.get(id), "this host" if id in new else "not run on this host")
        for id in sorted(here.keys() | new.keys())
        if here.get(id) != new.get(id)
    ]
    return Baseline(old.lane, made_with(record), changed_rows(old, changes)), changes


def changed_rows(old: Baseline, changes: Iterable[BaselineChange]) -> dict[str, Reviewed]:
    rows = {**old.rows, **{c.id: c.new for c in changes if c.new}}
    dropped = {c.id for c in changes if c.new is None}
    return {id: row for id, row in rows.items() if id not in dropped}


def refuse_other_tree(record: Record, now: str) -> None:
    """Raise RefusedError on a record that was measured from other sources than this work tree."""
    if record.provenance.get("tree") == now:
        return
    commit = record.provenance.get("commit")
    of = f"commit {str(commit)[:12]}" if commit else "no commit"
    raise RefusedError(
        f"the record was measured from other sources ({of}) than these: run pytest -m "
        f"{record.provenance.get('lane')} again, or take it as it is with --other-tree"
    )


def _refuse_kept_values(record: Record, old: Baseline) -> None:
    """Raise RefusedError if a row that the record lacks would keep the value of another build or class of host."""
    build = old.made_with and other_build(old.made_with, record.provenance)
    reason = build or comparable(old.made_with, record.provenance)
    lost = [j for j in record.judgements if j.row.unmeasured and not j.gone and j.row.id in old.rows]
    kept = [j for j in lost if build or old.rows[j.row.id].better in ("lower", "higher")]
    if reason and kept:
        raise RefusedError(*(f"{j.row.id} would keep its value ({reason}): {j.reason}" for j in kept))


def _whole(record: Record) -> bool:
    return record.complete and bool(record.provenance.get("full_run"))


def _refuse_record(record: Record, old: Baseline, only: Sequence[str], prune: bool) -> None:
    lane = record.provenance.get("lane")
    if lane != old.lane:
        raise RefusedError(f"the record is of lane {lane!r}, not {old.lane!r}")
    tier = all(in_tier(j.row.test) for j in record.judgements)
    if prune and not (_whole(record) or (tier and record.complete)):
        raise RefusedError(f"--prune needs the record of a whole run: pytest -m {old.lane}")
    other = old.made_with and other_build(old.made_with, record.provenance)
    if other and not tier and (only or not _whole(record)):
        raise RefusedError(
            f"{other}: another build is adopted from a whole run (pytest -m {old.lane}), without --only"
        )


def judged(j: Judgement, old: Baseline, record: Record) -> Judgement:
    """Judge a row again: the baseline may have changed since the run."""
    return judge(j.row, old, failed_instruments={}, build=build_of(record))


def made_with(record: Record) -> dict[str, str | None]:
    """Return the versions and the machine of a record, as a baseline states them."""
    facts = {name: record.provenance.get(name) for name in MADE_WITH}
    return {name: None if fact is None else str(fact) for name, fact in facts.items()}


def build_of(record: Record) -> dict[str, str | None]:
    """Return the versions of the BUILD packages in the measured environment."""
    return {name: record.provenance.get(name) for name in BUILD}


def _unacceptable(j: Judgement, old: Baseline, record: Record) -> str | None:
    """Return why this row cannot be accepted, in one line; None if it can."""
    if j.verdict in (Verdict.INSTRUMENT, Verdict.INFRA):
        return f"{j.verdict.value}: {j.reason}"
    if j.row.unmeasured:  # stays as it is, unless --prune drops it
        return None
    if j.row.paired and j.verdict is Verdict.PASS and j.row.id not in old.rows:
        return None  # compared in gates only, and never reviewed
    new_time = old.made_with and j.row.id not in old.rows and of_host(j.row.id, j.row.better, j.row.unit)
    measured = measured_in(judgement.row for judgement in record.judgements)
    if new_time and j.row.bound and (reason := unlike(j.row, old, record.provenance, measured)):
        return f"{reason}: review all times of this host: {times(old.lane)}"
    now = judged(j, old, record)
    if now.verdict is Verdict.INCONCLUSIVE:
        return f"{now.verdict.value}: {now.reason}"
    # Red even against itself: a broken derivation, no witness, an interval wider than its tolerance.
    accepted = Baseline(old.lane, {}, {j.row.id: reviewed(j.row, old.rows.get(j.row.id), record)})
    then = judge(j.row, accepted, failed_instruments={}, build=build_of(record))
    return f"{then.verdict.value} whatever the baseline holds: {then.reason}" if then.red else None


def _change(j: Judgement, old: Baseline, record: Record, prune: bool, refresh: bool) -> BaselineChange | None:
    row, was = j.row, old.rows.get(j.row.id)
    if row.unmeasured:
        return _pruned(was, row.id, record) if prune and j.gone and was else None
    if row.bound and j.explains:
        return None  # the times of a host change together with its calibrations (--times)
    if row.id.startswith(CALIBRATION):
        return None if old.made_with else BaselineChange(row.id, None, reviewed(row, None, record), "new")
    verdict = judged(j, old, record).verdict
    new = reviewed(row, was, record)
    if verdict is not Verdict.PASS:
        return BaselineChange(row.id, was, new, "new" if was is None else verdict.value.lower())
    if was and new.values.keys() != was.values.keys():
        return BaselineChange(row.id, was, new, "new triton")
    if refresh and was and was.at(build_of(record)["triton"]) != row.value:
        return BaselineChange(row.id, was, new, "refreshed")
    if was and was.test != row.test:
        return BaselineChange(row.id, was, replace(was, test=row.test), "test moved")
    if was and (was.work, was.bound) != (row.work, row.bound):
        now = replace(was, work=row.work, bound=row.bound)
        return BaselineChange(row.id, was, now, "work or bound stated")
    return None


def _pruned(was: Reviewed, id: str, record: Record) -> BaselineChange:
    """Drop a row; for a "code" row, only the value for the record's triton if others are left."""
    triton = str(record.provenance.get("triton"))
    left = {version: value for version, value in was.values.items() if version != triton}
    new = replace(was, values=left) if left else None
    return BaselineChange(id, was, new, "not launched" if new else "nothing measures it")


def reviewed(row: Row, was: Reviewed | None, record: Record) -> Reviewed:
    """Return the reviewed row with the new value. The note is kept, and so is the tolerance if its meaning is the same.

    For a "code" row, only the value for the record's triton is replaced.
    """
    tolerance = was.tolerance if was and was.better == row.better else row.tolerance
    note = was.note if was else ""
    found = Reviewed(row.value, row.unit, row.better, tolerance, note, row.test, row.per_build)
    found = replace(found, work=row.work, bound=row.bound)
    if row.better != "code":
        return found
    values = was.values if was and was.better == "code" else {}
    return replace(found, value=None, values={**values, str(record.provenance.get("triton")): str(row.value)})


def _moved(change: BaselineChange) -> tuple[Value, Value]:
    """Return the old and the new value; of a "code" row, for the version that moved."""
    old, new = change.old, change.new
    before, after = old.values if old else {}, new.values if new else {}
    if dropped := [version for version in before if new and version not in after]:
        return before[dropped[0]], f"triton {dropped[0]}: not launched"
    if moved := [version for version, counts in after.items() if before.get(version) != counts]:
        return before.get(moved[0]), f"triton {moved[0]}: {after[moved[0]]}"
    return (old.value if old else None), (new.value if new else None)


def diff(old: Baseline, new: Baseline, changes: Iterable[BaselineChange]) -> str:
    rows = [(c.id, *_moved(c), c.why) for c in changes]
    was = old.made_with
    made = [(f"made_with {n}", was.get(n), v, "") for n, v in new.made_with.items() if was.get(n) != v]
    return change_lines(rows) + change_lines(made)
