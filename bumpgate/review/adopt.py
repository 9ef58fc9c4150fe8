"""`bumpgate adopt`: a candidate that passed its gate becomes the adopted set of its lane, in one reviewable diff."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from packaging.utils import canonicalize_name

from bumpgate.core import accepted, census, lanes
from bumpgate.core.baseline import file_text, find_root, load
from bumpgate.core.errors import BumpgateError
from bumpgate.core.findings import Decision
from bumpgate.core.gate_file import GateFile
from bumpgate.core.text import some
from bumpgate.env.freeze import changes, fill_store, store_adopted
from bumpgate.env.lane import LaneContext
from bumpgate.env.locks import lock_text
from bumpgate.env.requirements import requirements_file
from bumpgate.gate.evidence import read_judged
from bumpgate.history import adoptions
from bumpgate.history.adoptions import Adoption
from bumpgate.process.file_transaction import (
    ADOPTION,
    AdoptionError,
    Edit,
    Operation,
    diff,
    digest,
    interrupted,
    read,
    recover,
    replace_all,
    writing,
)
from bumpgate.process.tree_digest import Binding, bind
from bumpgate.review import rebaseline
from bumpgate.review.candidate_rows import given_up_rows, lost_rows, moved_baseline, moved_tests
from bumpgate.review.declarations import check_without, moved_declaration, moved_requirements, taken_back
from bumpgate.review.measured_set import (
    MeasuredSet,
    Named,
    adopted_differences,
    canonical,
    check_named,
    measured_set,
)
from bumpgate.review.reviewed_findings import reviewed as review_of


def command(
    gate: Annotated[Path, typer.Argument(help="The gate.json of the candidate.")],
    reviewed: Annotated[
        list[str] | None,
        typer.Option(help="A row, or a glob, of a finding that holds the gate and is intended. Repeatable."),
    ] = None,
    reason: Annotated[
        list[str] | None, typer.Option(help="The reason: one line for each --reviewed, or one for all.")
    ] = None,
    review: Annotated[
        Path | None,
        typer.Option(help="TOML file of reviewed findings: [[reviewed]] with rows = [...] and reason."),
    ] = None,
    candidate: Annotated[
        str, typer.Option(help="For a gate of interpreters: the requirement whose set the candidate was.")
    ] = "",
    without: Annotated[
        list[str] | None,
        typer.Option(help="A kernel wheel that the candidate lacks and the lane gives up. Repeatable."),
    ] = None,
    index: Annotated[str | None, typer.Option(help="Of --candidate: an index before the host's.")] = None,
    find_links: Annotated[
        list[str] | None, typer.Option(help="Of --candidate: a folder or page of wheels; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the diff and write nothing.")] = False,
    store: Annotated[
        bool, typer.Option("--store/--no-store", help="Put the wheels into the wheel store, for rollback.")
    ] = True,
) -> None:
    """Make the candidate of a gate the adopted set of its lane: lock, wheels, requirements, baseline and history.

    The gate must be ADOPT, or --reviewed or --review must name every finding that holds it, and every time that is
    undecided after 16 sessions, with a reason. The work tree must be the one that was gated. If the candidate was an
    interpreter, the set of --candidate is resolved, and must be what the gate recorded. A kernel wheel of the lane that
    the candidate lacks is given up by --without. Nothing is committed; `bumpgate rollback LANE --adoption` undoes it.

    Exit codes: 0 done, 4 refused or bad input and nothing written, 125 the machine or the index failed and nothing
    was written.
    """
    if os.environ.get("BUMPGATE_GATE") == "1":
        raise BumpgateError("adopt never runs inside a gate (BUMPGATE_GATE=1)")
    root = find_root(Path.cwd())
    with writing(root):
        _recover(root, dry_run=dry_run)
        named = Named(candidate, index, tuple(find_links or ()))
        found, commit = _gate(gate, root, named)
        findings = review_of(found, reviewed or [], reason or [], review)
        given_up = tuple(sorted({str(canonicalize_name(name)) for name in without or ()}))
        lane = LaneContext(root, found.lane)
        check_without(lane, canonical(found.candidate.packages), given_up)
        measured = measured_set(lane, gate, found, named)
        entry = _entry(gate, lane, found, measured)
        entry = replace(entry, commit=commit, reviewed=findings, without=given_up)
        edits, summary = _edits(lane, found, measured, entry)
        if dry_run:
            typer.echo(f"{diff(edits)}{summary}dry run: nothing written")
            return
        try:
            if store:
                _fill_store(lane, measured)
            adoptions.keep(edits)
            replace_all(root, edits, Operation(ADOPTION, found.lane))
        except OSError as error:
            typer.echo(f"bumpgate: {error.filename or root}: {error.strerror}; nothing was adopted", err=True)
            raise typer.Exit(Decision.UNKNOWN.value) from None
    typer.echo(summary, nl=False)
    typer.echo(f"wrote {', '.join(edit.path for edit in edits)}; review: git diff")
    typer.echo(f"check: {found.candidate.python} -m pytest -m {found.lane} --gate")
    typer.echo(f"undo: bumpgate rollback {found.lane} --adoption")


def _recover(root: Path, *, dry_run: bool) -> None:
    """Undo what a killed process has left. A dry run changes nothing, and is refused."""
    if dry_run and (cut := interrupted(root)):
        raise AdoptionError(
            f"{cut} was cut short here: undo it with: bumpgate rollback {cut.lane} --adoption"
        )
    if undone := recover(root):
        for path in undone.paths:
            typer.echo(f"restored {path}: {undone.operation} was cut short", err=True)


def _fill_store(lane: LaneContext, measured: MeasuredSet) -> None:
    """Store the wheels of both sets: rollback restores the earlier one, and a later rollback this one."""

    def say(line: str) -> None:
        typer.echo(line, err=True)

    fill_store(measured.lock, measured.sources, say)
    if lost := store_adopted(lane, say):
        names = ", ".join(lost)
        say(f"neither the wheel store nor the index has {names}: rollback cannot restore the earlier set")


def _gate(path: Path, root: Path, named: Named) -> tuple[GateFile, str]:
    """Load a gate that can be adopted, and its commit. Raises AdoptionError (one line) if it cannot be."""
    found = read_judged(path)
    if not isinstance(found, GateFile):
        raise AdoptionError(f"{path} is the record of one run: name the gate.json of a gate")
    if not found.finished:
        raise AdoptionError(
            f"{path}: the gate is not finished: resume it with its command and --resume: {found.command}"
        )
    if found.decision is Decision.UNKNOWN and (gaps := found.gaps()):
        raise AdoptionError(
            f"{path}: UNKNOWN, with {len(gaps)} gaps in the evidence: close them and gate again"
        )
    if found.lane not in (known := lanes.load(root)):
        raise AdoptionError(f"{path}: unknown lane {found.lane!r}; lanes: {', '.join(known)}")
    record, config = found.candidate.record, found.config
    selection = config.get("selection")
    if selection or record is None or not record.complete or not record.provenance.get("full_run"):
        part = " ".join(selection) if selection else "it left no complete record"
        raise AdoptionError(f"{path} measured a part of lane {found.lane} ({part}): gate the whole lane")
    if other := config.get("adopted"):
        raise AdoptionError(f"{path} compares with {other}, not with the adopted set: gate without --adopted")
    check_named(path, found, named)
    binding = Binding.of_gate(path, found.binding)
    entries = accepted.load(root / "baselines" / accepted.FILE)
    lapsed = accepted.lapsed(entries, found.lane, found.started, accepted.today())
    if stale := [*binding.differences(bind(root, path.parent)), *lapsed]:
        raise AdoptionError(f"{path} is stale ({'; '.join(stale)}): gate again")
    lane = LaneContext(root, found.lane)
    if config.get("python_adopted") and lane.lock:
        baseline = load(lane.baseline_path, lane.name, missing_ok=True)
        if moved := adopted_differences(lane.lock, found.adopted, baseline):
            raise AdoptionError(
                f"{path} does not compare with the adopted set ({some(moved)}): gate without --python-adopted, or with"
                f" the interpreter that this builds: bumpgate rollback {lane.name} --no-smoke"
            )
    return found, binding.commit


def _entry(path: Path, lane: LaneContext, gate: GateFile, measured: MeasuredSet) -> Adoption:
    """Return the entry of an adoption without its review and its files."""
    before = lane.lock.versions if lane.lock else {}
    return Adoption(
        lane=lane.name,
        day=accepted.today(),
        candidate=measured.candidate,
        old=gate.adopted.packages.get("torch") or before.get("torch", ""),
        new=gate.candidate.packages.get("torch") or measured.lock.versions.get("torch", ""),
        decision=gate.decision.name,
        gate=hashlib.sha256(path.read_bytes()).hexdigest(),
        commit="",
        before={},
        after={},
        not_in_lock=measured.unlocked,
    )


def _edits(
    lane: LaneContext, gate: GateFile, measured: MeasuredSet, entry: Adoption
) -> tuple[list[Edit], str]:
    """Return all new files and the summary. Raises AdoptionError if a file cannot be changed.

    entry: without the digests of the files.
    """
    record, lock = gate.candidate.record, measured.lock
    assert record is not None
    torch = str(record.provenance.get("torch") or lock.versions.get("torch", ""))
    declaration, declared = moved_declaration(lane, lock, torch, entry.without)
    old = load(lane.baseline_path, lane.name, missing_ok=True)
    lost = lost_rows(gate, old)
    given_up = given_up_rows(lost, entry.without)
    new, moved, left = moved_baseline(gate, old, {r.row for r in entry.reviewed}, given_up)
    tests = census.load(census.path(lane.baseline_path))
    now = moved_tests(record, tests, moved)
    after = {lane.lock_path: lock_text(lock), declaration: declared}
    required = requirements_file(lane.root, lane.declared)  # a guest may declare its lane in the same file
    if (text := after.get(required) or read(required)) is not None:
        after[required] = moved_requirements(lane, text, lock, entry.without, taken_back(lane, lock))
    after |= {lane.baseline_path: file_text(new), census.path(lane.baseline_path): census.text(now) or None}
    edits = [
        Edit(p.relative_to(lane.root).as_posix(), before, text)
        for p, text in after.items()
        if text is not None and (before := read(p)) != text
    ]
    digests = ({e.path: digest(e.before) for e in edits}, {e.path: digest(e.after) for e in edits})
    log = adoptions.load(lane.root).adding(replace(entry, before=digests[0], after=digests[1]))
    edits.append(Edit(adoptions.FILE, read(lane.root / adoptions.FILE), adoptions.text(log)))
    packages = changes(lane.lock.versions if lane.lock else {}, lock.versions)
    others = [f"{row} ({why})" for row, why in lost.items() if row not in given_up]
    rows = (rebaseline.diff(old, new, moved) + rebaseline.tests_diff(tests, now)).splitlines()
    head = f"lane {lane.name}: torch {entry.old} -> {entry.new}, {entry.decision} of the gate of {gate.started[:10]}"
    lines = [head, *(f"  reviewed {r.row} ({r.finding}): {r.reason}" for r in entry.reviewed)]
    lines += [f"packages: {len(packages)} moved", *(f"  {line}" for line in packages)]
    if entry.not_in_lock:
        lines.append(f"not in the lock: {', '.join(' '.join(each) for each in entry.not_in_lock.items())}")
    if entry.without:
        count = f"{len(given_up)} row{'s' * (len(given_up) != 1)}"
        lines.append(f"given up: {', '.join(entry.without)}, with {count}")
    if others:
        lines.append(f"not run in the candidate, kept in the baseline: {some(others)}")
    lines += ["baseline:" if rows else "baseline: nothing moved", *(f"  {line}" for line in rows)]
    return edits, "".join(f"{line}\n" for line in [*lines, *(f"  stays red: {row}" for row in left)])
