"""`bumpgate rollback LANE`: restores the adopted set offline from our wheel store, verified by its smoke suite."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from bumpgate.core import lanes
from bumpgate.core.accepted import today
from bumpgate.core.baseline import find_root
from bumpgate.core.errors import BumpgateError, RefusedError
from bumpgate.env import store
from bumpgate.env.build import Environment, build, release
from bumpgate.env.cached import discard
from bumpgate.env.lane import LaneContext
from bumpgate.env.locks import Lock, read_lock
from bumpgate.env.request import RUNNING, Request, request_key
from bumpgate.env.store import StoreError
from bumpgate.history import adoptions
from bumpgate.process.file_transaction import ADOPTION, Operation, recover, writing
from bumpgate.process.home import home
from bumpgate.process.runner import LaneCall, LaneRun, run_lane

SMOKE_SECONDS = 1800


def command(
    lane: Annotated[str, typer.Argument(help="A declared lane.")],
    lock: Annotated[
        Path | None, typer.Option(help="Another lock than the lane's, e.g. an older one.")
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke/--no-smoke", help="Run the smoke suite in it.")] = True,
    adoption: Annotated[
        bool, typer.Option("--adoption", help="First undo the lane's last `bumpgate adopt`.")
    ] = False,
) -> None:
    """Rebuild the last adopted set of a lane offline from the wheel store, every checksum verified first.

    With --adoption, first restore the files that the last adoption wrote. If the wheel store lacks a wheel of the
    earlier set, the index of this host is used and the hash is checked. If the rebuild or the smoke suite then fails,
    the same command, with or without --adoption, finishes that rollback and undoes no other adoption.

    Exit codes: 0 done, 1 refused (a wheel is missing or corrupt, or the smoke suite is red), 4 bad input, 125 the
    machine failed.
    """
    root = find_root(Path.cwd())
    lanes.require(root, lane)
    if adoption and lock:
        raise BumpgateError("--adoption restores the lane's own lock: leave out --lock")
    if adoption:
        _undo(root, lane)
    undone = not lock and lane in adoptions.load(root).unverified
    path = lock or LaneContext(root, lane).lock_path
    try:
        typer.echo(_restored(root, lane, path, smoke=smoke, undone=undone))
    except BaseException:
        if undone:
            words = f"the files of lane {lane} are restored, but its set is not verified"
            typer.echo(f"{words}: finish it with: bumpgate rollback {lane}", err=True)
        raise
    if undone:
        with writing(root):
            adoptions.set_unverified(root, lane, False)


def _restored(root: Path, lane: str, path: Path, *, smoke: bool, undone: bool) -> str:
    """Rebuild the set of a lock and run the smoke suite; return what was done.

    undone: the lock is from before an adoption, so that there may be none, or the wheel store may lack some of it.
    Raises RefusedError, BumpgateError.
    """
    if undone and not path.exists():
        return f"rollback {lane}: the lane had no lock before the adoption, so there is no set to rebuild"
    started = time.monotonic()
    found = read_lock(path)
    stored = all(store.find(wheel) for package in found.packages for wheel in package.wheels)
    offline = stored or not undone
    if offline:
        verify(found, lane)
    environment = rebuild(root, path, found, lane, offline=offline)
    how = "verified, built offline" if offline else "built by their hashes"
    line = f"rollback {lane}: {len(found.packages)} wheels {how} in {time.monotonic() - started:.0f} s"
    try:
        tests = smoke_tests(root, lane) if smoke else ()
        if tests:
            run = run_smoke(environment, root, lane, tests)
            files = dict.fromkeys(test.partition("::")[0] for test in tests)
            line += f", {'; '.join(files)} green in {run.seconds:.0f} s"
        elif smoke:
            line += f", nothing run: lane {lane} declares no smoke tests"
    finally:
        release(environment)
    return f"{line}: {environment.python}"


def _undo(root: Path, lane: str) -> None:
    """Restore the files that the last adoption of the lane changed, unless that is done and not verified yet.

    Of an adoption that was cut short, that is all to undo.
    """
    with writing(root):
        if undone := recover(root):
            typer.echo(f"restored {', '.join(undone.paths) or 'nothing'}: {undone.operation} was cut short")
            if undone.operation == Operation(ADOPTION, lane):
                adoptions.set_unverified(root, lane, True)
        if lane in adoptions.load(root).unverified:
            words = "its set is rebuilt now: nothing else is undone"
            typer.echo(f"the files of lane {lane} are restored, {words}")
            return
        entry = adoptions.undo(root, lane, today())
    typer.echo(f"restored {', '.join(entry.after)}: lane {lane}, torch {entry.new} -> {entry.old}")


def _cache() -> Path:
    """Return the folder for restored environments, separate from the cache: they are rebuilt each time."""
    return home() / "rollback"


def verify(lock: Lock, lane: str) -> None:
    """Verify every wheel of a lane's lock in the store.

    Raises RefusedError with a line for each missing or corrupt one, and the command that fetches them.
    """
    faults = []
    for package in lock.packages:
        for wheel in package.wheels:
            try:
                store.verify(wheel)
            except StoreError as error:
                faults.append(str(error))
    if faults:
        raise RefusedError(*faults, f"fetch what is missing with: bumpgate freeze --lane {lane}")


def rebuild(root: Path, path: Path, lock: Lock, lane: str, *, offline: bool = True) -> Environment:
    """Rebuild the environment of a lock, since a cached one may be damaged. Raises RefusedError if it is in use."""
    python, script = lock.python or RUNNING, LaneContext(root, lane).script
    request = Request(lock=path, python=python, script=script, offline=offline, name=f"rollback {lane}")
    if not discard(request_key(request, None), _cache()):
        raise RefusedError(f"the last rollback of {lane} is in use; end what runs in it first")
    return build(request, root=_cache())


def smoke_tests(root: Path, lane: str) -> tuple[str, ...]:
    """Return the tests that verify a restored environment: the lane's smoke tests, by default its canaries."""
    declared = lanes.require(root, lane)
    return declared.smoke or tuple(filter(None, [declared.canaries]))


def run_smoke(environment: Environment, root: Path, lane: str, tests: tuple[str, ...]) -> LaneRun:
    """Run the smoke suite. Raises RefusedError (one line) if it is not green."""
    record = environment.python.parents[1] / "smoke.json"
    run = run_lane(LaneCall(environment.python, root, lane, tests, record), SMOKE_SECONDS)
    if run.failure or run.code or run.record is None or run.record.red:
        red = [j.row.id for j in run.record.judgements if j.red] if run.record else []
        ended = f"{len(red)} red rows, first {red[0]}" if red else f"pytest ended with {run.code}"
        why = run.failure or ended
        raise RefusedError(f"rebuilt, but its smoke suite is not green: {why} (log: {run.log})")
    return run
