"""`bumpgate adopt`: a candidate that passed its gate becomes the adopted set of its lane, in one reviewable diff."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from packaging.utils import canonicalize_name

from bumpgate.core import accepted, lanes
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
from bumpgate.history.adoptions import Adoption, ReviewedFinding
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
from bumpgate.review.candidate_rows import moved_baseline
from bumpgate.review.kernel_wheels import (
    check_declaration,
    check_without,
    given_up_rows,
    lost_rows,
    moved_declaration,
    taken_back,
)
from bumpgate.review.measured_set import (
    MeasuredSet,
    Named,
    adopted_differences,
    canonical,
    check_named,
    measured_set,
)
from bumpgate.review.rebaseline import diff as baseline_diff
from bumpgate.review.requirements import moved_requirements
from bumpgate.review.reviewed_findings import reviewed as review_of


@dataclass(frozen=True)
class Adopting:
    """Everything that one adoption writes and prints."""

    edits: tuple[Edit, ...]
    measured: MeasuredSet
    summary: str


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
        if dry_run and (cut := interrupted(root)):
            raise AdoptionError(
                f"{cut} was cut short here: undo it with: bumpgate rollback {cut.lane} --adoption"
            )
        if undone := recover(root):
            for path in undone.paths:
                typer.echo(f"restored {path}: {undone.operation} was cut short", err=True)
        named = Named(candidate, index, tuple(find_links or ()))
        found, binding = _gate(gate, root, named)
        findings = review_of(found, reviewed or [], reason or [], review)
        given_up = tuple(sorted({str(canonicalize_name(name)) for name in without or ()}))
        lane = LaneContext(root, found.lane)
        check_without(lane, canonical(found.candidate.packages), given_up)
        measured = measured_set(lane, gate, found, named)
        made = _adopting(root, gate, found, binding, findings, measured, given_up)
        if dry_run:
            typer.echo(diff(made.edits), nl=False)
            typer.echo(made.summary, nl=False)
            typer.echo("dry run: nothing written")
            return
        try:
            if store:
                _fill_store(root, found.lane, made)
            adoptions.keep(made.edits)
            replace_all(root, made.edits, Operation(ADOPTION, found.lane))
        except OSError as error:
            typer.echo(f"bumpgate: {error.filename or root}: {error.strerror}; nothing was adopted", err=True)
            raise typer.Exit(Decision.UNKNOWN.value) from None
    typer.echo(made.summary, nl=False)
    typer.echo(f"wrote {', '.join(edit.path for edit in made.edits)}; review: git diff")
    typer.echo(f"check: {found.candidate.python} -m pytest -m {found.lane} --gate")
    typer.echo(f"undo: bumpgate rollback {found.lane} --adoption")


def _fill_store(root: Path, lane: str, made: Adopting) -> None:
    """Store the wheels of both sets: rollback restores the earlier one, and a later rollback this one."""

    def say(line: str) -> None:
        typer.echo(line, err=True)

    fill_store(made.measured.lock, made.measured.sources, say)
    lost = store_adopted(LaneContext(root, lane), say)
    if lost:
        say(
            f"neither the wheel store nor the index has {', '.join(lost)}: rollback cannot restore the earlier set"
        )


def _gate(path: Path, root: Path, named: Named) -> tuple[GateFile, Binding]:
    """Load a gate and check that it can be adopted. Raises AdoptionError (one line) if not."""
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
    record = found.candidate.record
    selection = found.config.get("selection")
    if selection or record is None or not record.complete or not record.provenance.get("full_run"):
        part = " ".join(selection) if selection else "it left no complete record"
        raise AdoptionError(f"{path} measured a part of lane {found.lane} ({part}): gate the whole lane")
    if found.config.get("adopted"):
        raise AdoptionError(
            f"{path} compares with {found.config['adopted']}, not with the adopted set: gate without --adopted"
        )
    check_named(path, found, named)
    binding = Binding.of_gate(path, found.binding)
    entries = accepted.load(root / "baselines" / accepted.FILE)
    lapsed = accepted.lapsed(entries, found.lane, found.started, accepted.today())
    if differences := [*binding.differences(bind(root, path.parent)), *lapsed]:
        raise AdoptionError(f"{path} is stale ({'; '.join(differences)}): gate again")
    _check_adopted(root, path, found)
    return found, binding


def _check_adopted(root: Path, path: Path, gate: GateFile) -> None:
    """Raise AdoptionError if the adopted side of the gate was not the lane's adopted set."""
    lane = LaneContext(root, gate.lane)
    if not gate.config.get("python_adopted") or lane.lock is None:
        return
    reviewed = load(lane.baseline_path, gate.lane, missing_ok=True)
    if moved := adopted_differences(lane.lock, gate.adopted, reviewed):
        raise AdoptionError(
            f"{path} does not compare with the adopted set ({some(moved)}): gate without --python-adopted, or with the"
            f" interpreter that this builds: bumpgate rollback {gate.lane} --no-smoke"
        )


def _adopting(
    root: Path,
    path: Path,
    gate: GateFile,
    binding: Binding,
    findings: tuple[ReviewedFinding, ...],
    measured: MeasuredSet,
    without: tuple[str, ...],
) -> Adopting:
    """Return all new files. Raises AdoptionError if a file cannot be changed."""
    record = gate.candidate.record
    assert record is not None
    lock = measured.lock
    lane, context = gate.lane, LaneContext(root, gate.lane)
    torch = str(record.provenance.get("torch") or lock.versions.get("torch", ""))
    declaration, row = moved_declaration(context, lock, torch, without)
    check_declaration(context, row, lock)
    old = load(context.baseline_path, lane, missing_ok=True)
    lost = lost_rows(gate, old)
    given_up = given_up_rows(lost, without)
    new, moved_rows, left = moved_baseline(gate, old, {r.row for r in findings}, given_up)
    after = {context.lock_path: lock_text(lock), declaration: row}
    required = requirements_file(root, context.declared)  # a guest may declare its lane in the same file
    if (text := after.get(required) or read(required)) is not None:
        after[required] = moved_requirements(context, text, lock, without, taken_back(context, lock))
    after[context.baseline_path] = file_text(new)
    edits = [
        Edit(p.relative_to(root).as_posix(), before, text)
        for p, text in after.items()
        if text is not None and (before := read(p)) != text
    ]
    versions = context.lock.versions if context.lock else {}
    entry = Adoption(
        lane=lane,
        day=accepted.today(),
        candidate=measured.candidate,
        old=str(gate.adopted.packages.get("torch") or versions.get("torch", "")),
        new=str(gate.candidate.packages.get("torch") or lock.versions.get("torch", "")),
        decision=gate.decision.name,
        gate=hashlib.sha256(path.read_bytes()).hexdigest(),
        commit=binding.commit,
        before={e.path: digest(e.before) for e in edits},
        after={e.path: digest(e.after) for e in edits},
        reviewed=findings,
        without=without,
        not_in_lock=measured.unlocked,
    )
    log = adoptions.load(root).adding(entry)
    edits.append(Edit(adoptions.FILE, read(root / adoptions.FILE), adoptions.text(log)))
    packages = changes(versions, lock.versions)
    rows = baseline_diff(old, new, moved_rows)
    others = [f"{row} ({why})" for row, why in lost.items() if row not in given_up]
    return Adopting(
        tuple(edits), measured, _summary(gate, entry, packages, rows, left, len(given_up), others)
    )


def _summary(
    gate: GateFile,
    entry: Adoption,
    packages: Sequence[str],
    rows: str,
    left: Sequence[str],
    given_up: int,
    others: Sequence[str],
) -> str:
    """Return the summary: what moved, old -> new, and the reasons."""
    lines = [
        f"lane {entry.lane}: torch {entry.old} -> {entry.new}, {entry.decision} of the gate of {gate.started[:10]}",
        *(f"  reviewed {r.row} ({r.finding}): {r.reason}" for r in entry.reviewed),
        f"packages: {len(packages)} moved",
        *(f"  {line}" for line in packages),
        *([f"not in the lock: {_listed(entry.not_in_lock)}"] if entry.not_in_lock else []),
        *(
            [f"given up: {', '.join(entry.without)}, with {given_up} row{'s' * (given_up != 1)}"]
            if entry.without
            else []
        ),
        *([f"not run in the candidate, kept in the baseline: {some(others)}"] if others else []),
        "baseline:" if rows else "baseline: nothing moved",
        *(f"  {line}" for line in rows.splitlines()),
        *(f"  stays red: {row}" for row in left),
    ]
    return "".join(f"{line}\n" for line in lines)


def _listed(packages: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in packages.items())
