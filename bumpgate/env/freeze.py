"""`bumpgate freeze`: records the adopted set of a lane, so that it can be restored bitwise.

lanes/<lane>/pylock.toml names each wheel by file name and sha256, the wheel store takes the files, and the exact pins
of the lane's requirements follow the lock. Nothing is written before every wheel is in the store.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from packaging.utils import parse_wheel_filename

from bumpgate.core import lanes as declared
from bumpgate.core.baseline import find_root
from bumpgate.core.errors import BumpgateError
from bumpgate.env import store
from bumpgate.env.build import resolve
from bumpgate.env.cached import Say
from bumpgate.env.lane import LaneContext
from bumpgate.env.locks import Lock, Locked, LockError, Wheel, lock_text, parse_lock
from bumpgate.env.requirements import Pins, requirements_file
from bumpgate.env.requirements import pinned as with_pins
from bumpgate.env.uv import blocks
from bumpgate.env.versions import tag_ranks
from bumpgate.process.file_transaction import Edit, read, replace_all, writing


def command(
    lane: Annotated[str, typer.Option(help="A declared lane; by default every lane with a lock.")] = "",
    candidate: Annotated[str, typer.Option(help="Adopt this too: torch==2.14.0, or a wheel file.")] = "",
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Use the newest version of everything that is not pinned.")
    ] = False,
    index: Annotated[str | None, typer.Option(help="An index that takes precedence over the host's.")] = None,
    find_links: Annotated[
        list[str] | None, typer.Option(help="A folder or page of wheels; repeatable.")
    ] = None,
) -> None:
    """Write the lock of a lane, its wheels into the wheel store, and the exact pins of its requirements.

    Versions of the old lock stay where the requirements allow them. The diff is what a human reviews.

    Exit codes: 0 done, 4 bad input or a set that cannot be installed, 125 the index or the machine failed.
    """
    root = find_root(Path.cwd())
    every = [LaneContext(root, name) for name in ([lane] if lane else declared.load(root))]
    lanes = every if lane else [each for each in every if each.lock_path.exists()]
    if not lanes:
        name = every[0].name if every else "LANE"
        raise BumpgateError(f"no lane has a lock; name one: bumpgate freeze --lane {name}")
    for each in lanes:
        try:
            _ = each.lock
        except LockError as error:
            typer.echo(f"{error.args[0]}: all versions are chosen anew", err=True)
            each = LaneContext(root, each.name, use_lock=False)
        old = each.lock.versions if each.lock else {}
        lock = freeze(each, candidate, upgrade=upgrade, index=index, find_links=tuple(find_links or ()))
        for line in changes(old, lock.versions):
            typer.echo(f"  {line}")
        typer.echo(f"froze {len(lock.packages)} packages in {each.declared.lock}; review: git diff")


def freeze(
    lane: LaneContext,
    candidate: str = "",
    *,
    upgrade: bool = False,
    index: str | None = None,
    find_links: tuple[str, ...] = (),
) -> Lock:
    """Resolve a lane, fill the wheel store, and write its lock and the pins of its requirements.

    Raises BumpgateError, OSError.
    """
    path = lane.lock_path
    before = read(path)
    request = lane.request(candidate or None, locked=False, index=index, find_links=find_links)
    request = replace(request, prefer=None) if upgrade else request
    lock, sources = lock_of(path.name, resolve(request), request.python)
    fill_store(lock, sources)
    with writing(lane.root):
        edits = [Edit(lane.declared.lock, before, lock_text(lock))]
        for file, text in pinned_requirements(lane, lock).items():
            edits.append(Edit(file.relative_to(lane.root).as_posix(), read(file), text))
        replace_all(lane.root, edits)
    return lock


def lock_of(name: str, resolution: str, python: str) -> tuple[Lock, dict[Wheel, str]]:
    """Return the lock of uv's resolution for this platform, and the place of each wheel. Raises LockError."""
    found, sources = pinned(name, resolution, python)
    machine = f"platform_machine == '{platform.machine()}'"
    implementation = f"implementation_name == '{sys.implementation.name}'"
    environments = (f"sys_platform == '{sys.platform}' and {machine} and {implementation}",)
    return Lock(found, python, environments), sources


def fill_store(lock: Lock, sources: Mapping[Wheel, str], say: Say = lambda line: None) -> None:
    """Put every wheel of a lock into the wheel store; intact ones are kept. say: called with a line per download."""
    for package in lock.packages:
        for wheel in package.wheels:
            fetch(wheel, sources[wheel], say)


def fetch(wheel: Wheel, place: str, say: Say = lambda line: None) -> Path:
    """Put a wheel into the wheel store, unless it is there, and return its path. say: called before a download."""
    if store.find(wheel) is None:
        say(f"fetching {wheel.file}")
    return store.put(wheel, blocks(place))


def store_adopted(lane: LaneContext, say: Say = lambda line: None) -> list[str]:
    """Put the wheels of a lane's lock into the wheel store. Returns the files that cannot be found any more.

    The lock names no URL, so its requirements are resolved again, with its versions preferred. Raises OSError, and
    BumpgateError if a wheel that was found cannot be fetched.
    """
    wheels = {wheel for package in lane.lock.packages for wheel in package.wheels} if lane.lock else set()
    missing = sorted((wheel for wheel in wheels if store.find(wheel) is None), key=lambda wheel: wheel.file)
    if not missing:
        return []
    request = lane.request(locked=False)
    try:
        _, sources = pinned(lane.lock_path.name, resolve(request), request.python)
    except BumpgateError:  # the index has another set than the lock by now
        sources = {}
    for wheel in missing:
        if wheel in sources:
            fetch(wheel, sources[wheel], say)
    return [wheel.file for wheel in missing if wheel not in sources]


def pinned(name: str, text: str, python: str) -> tuple[tuple[Locked, ...], dict[Wheel, str]]:
    """Return uv's resolution with the best matching wheel of each package, and the place of each wheel."""
    ranks = tag_ranks(python)
    packages, sources = [], {}
    for package, urls in parse_lock(name, text):
        tags = ((wheel, parse_wheel_filename(wheel.file)[3]) for wheel in package.wheels)
        fitting = [(ranks[tag], wheel) for wheel, own in tags for tag in own if tag in ranks]
        if not fitting:
            raise LockError(f"{name}: no wheel of {package.name} {package.version} fits Python {python}")
        best = min(fitting, key=lambda pair: pair[0])[1]
        packages.append(Locked(package.name, package.version, (best,)))
        sources[best] = urls[best]
    return tuple(packages), sources


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the difference of two sets, one line per package."""
    return [
        f"{name} {old.get(name, '(absent)')} -> {new.get(name, '(absent)')}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def without_cuda(moved: Sequence[str]) -> list[str]:
    """Return lines of `changes` with those of CUDA's libraries, which follow torch, as one line."""
    cuda = [line for line in moved if line.startswith(("nvidia-", "cuda-"))]
    if len(cuda) < 2:
        return [*moved]
    return [*(line for line in moved if line not in cuda), f"{len(cuda)} CUDA libraries: {'; '.join(cuda)}"]


def pinned_requirements(lane: LaneContext, lock: Lock) -> dict[Path, str]:
    """Return path -> text of the lane's requirements file with its pins as in the lock; empty if it stays."""
    path = requirements_file(lane.root, lane.declared)
    text = read(path)
    new = with_pins(lane.declared, text, Pins(lock)) if text is not None else None
    return {path: new} if new is not None and new != text else {}
