"""`bumpgate freeze`: records the adopted set of a lane, so that it can be restored bitwise.

wheels/pylock.<lane>.toml names each wheel by file name and sha256, the wheel store takes the files, and the lane's row
in wheels/manifest.toml is updated. Nothing is written before every wheel is in the store.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from bumpgate.core import lanes as declared
from bumpgate.core.baseline import find_root
from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.core.rows import write_atomic
from bumpgate.env import store
from bumpgate.env.build import resolve
from bumpgate.env.locks import Lock, Locked, LockError, Wheel, lane_lock, parse_lock, read_lock, write_lock
from bumpgate.env.manifest import ManifestRow, load, satisfies
from bumpgate.env.request import lane_request
from bumpgate.env.uv import http_options, local_path, public_url
from bumpgate.env.versions import tag_ranks


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
    """Write the lock of a lane, its wheels into the wheel store, and its manifest row.

    Versions of the old lock stay where the requirements allow them. The diff of wheels/ is what a human reviews.

    Exit codes: 0 done, 4 bad input or a set that cannot be installed, 125 the index or the machine failed.
    """
    root = find_root(Path.cwd())
    known = declared.load(root)
    lanes = [lane] if lane else [name for name in known if lane_lock(root, name).exists()]
    if not lanes:
        raise BumpgateError(
            f"no lane has a lock; name one: bumpgate freeze --lane {next(iter(known), 'LANE')}"
        )
    if lane:
        declared.choose(known, lane)
    for name in lanes:
        old = read_lock(lane_lock(root, name)).versions if lane_lock(root, name).exists() else {}
        lock = freeze(root, name, candidate, upgrade=upgrade, index=index, find_links=tuple(find_links or ()))
        for line in changes(old, lock.versions):
            typer.echo(f"  {line}")
        typer.echo(
            f"froze {len(lock.packages)} packages in wheels/{lane_lock(root, name).name}; review: git diff wheels"
        )


def freeze(
    root: Path,
    lane: str,
    candidate: str = "",
    *,
    upgrade: bool = False,
    index: str | None = None,
    find_links: tuple[str, ...] = (),
) -> Lock:
    """Resolve a lane, fill the wheel store and write lock and manifest row. Raises BumpgateError, OSError."""
    path = lane_lock(root, lane)
    request = lane_request(root, lane, candidate or None, locked=False, index=index, find_links=find_links)
    if upgrade:
        request = request.without_preferences()
    lock, sources = lock_of(path.name, resolve(request), request.python)
    fill_store(lock, sources)
    path.parent.mkdir(exist_ok=True)
    write_lock(path, lock)
    manifest = root / "wheels" / "manifest.toml"
    if row := moved_row(manifest, lane, lock):
        write_atomic(manifest, row)
    return lock


def lock_of(name: str, resolution: str, python: str) -> tuple[Lock, dict[Wheel, str]]:
    """Return the lock of uv's resolution for this platform, and the place of each wheel. Raises LockError."""
    found, sources = pinned(name, resolution, python)
    machine = f"platform_machine == '{platform.machine()}'"
    implementation = f"implementation_name == '{sys.implementation.name}'"
    environments = (f"sys_platform == '{sys.platform}' and {machine} and {implementation}",)
    return Lock(found, python, environments), sources


def fill_store(
    lock: Lock, sources: Mapping[Wheel, str], say: Callable[[str], None] = lambda line: None
) -> None:
    """Put every wheel of a lock into the wheel store; intact ones are kept. say: called with a line per download."""
    for package in lock.packages:
        for wheel in package.wheels:
            fetch(wheel, sources[wheel], say)


def fetch(wheel: Wheel, place: str, say: Callable[[str], None] = lambda line: None) -> Path:
    """Put a wheel into the wheel store, unless it is there, and return its path. say: called before a download."""
    if store.find(wheel) is None:
        say(f"fetching {wheel.file}")
    return store.put(wheel, blocks(place))


def store_adopted(root: Path, lane: str, say: Callable[[str], None] = lambda line: None) -> list[str]:
    """Put the wheels of a lane's lock into the wheel store. Returns the files that cannot be found any more.

    The lock names no URL, so its requirements are resolved again, with its versions preferred. Raises OSError, and
    BumpgateError if a wheel that was found cannot be fetched.
    """
    path = lane_lock(root, lane)
    wheels = {wheel for package in read_lock(path).packages for wheel in package.wheels}
    missing = sorted((wheel for wheel in wheels if store.find(wheel) is None), key=lambda wheel: wheel.file)
    if not missing:
        return []
    request = lane_request(root, lane, None, locked=False)
    try:
        _, sources = pinned(path.name, resolve(request), request.python)
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
        fitting = [(rank, wheel) for wheel in package.wheels if (rank := _rank(wheel, ranks)) is not None]
        if not fitting:
            raise LockError(f"{name}: no wheel of {package.name} {package.version} fits Python {python}")
        best = min(fitting, key=lambda pair: pair[0])[1]
        packages.append(Locked(package.name, package.version, (best,)))
        sources[best] = urls[best]
    return tuple(packages), sources


def _rank(wheel: Wheel, ranks: Mapping[Tag, int]) -> int | None:
    return min((ranks[tag] for tag in parse_wheel_filename(wheel.file)[3] if tag in ranks), default=None)


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the difference of two sets, one line per package."""
    return [
        f"{name} {old.get(name, '(absent)')} -> {new.get(name, '(absent)')}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def blocks(place: str) -> Iterator[bytes]:
    """Yield the bytes of a wheel, from a file or over HTTP. Raises BumpgateError, OSError."""
    if path := local_path(place):
        with path.open("rb") as f:
            while block := f.read(1 << 20):
                yield block
        return
    import requests

    try:
        with requests.get(place, stream=True, **http_options()) as answer:
            answer.raise_for_status()
            yield from answer.iter_content(1 << 20)
    except requests.RequestException as error:
        raise BumpgateError(f"{public_url(place)} cannot be fetched: {one_line(error, 120)}") from None


def moved_row(path: Path, lane: str, lock: Lock) -> str | None:
    """Return manifest.toml with the lane's adopted row updated to the frozen set, or None if nothing changes.

    Only the pins that the set violates are changed; comments stay.
    """
    if not path.exists():
        return None
    row = next((r for r in load(path).environments if (r.status, r.lane) == ("adopted", lane)), None)
    broken = _broken(row, lock.versions) if row else {}
    if row is None or not broken:
        return None
    import tomlkit

    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    table = document["environment"][row.name]
    for name, version in broken.items():
        if name == "torch":
            table["torch"] = f"=={version}"
        else:
            table["packages"][name] = f"=={version}"
    return tomlkit.dumps(document)


def _broken(row: ManifestRow, versions: Mapping[str, str]) -> dict[str, str]:
    """Return the pins of a row that the set violates: name in the row -> version that replaces it."""
    pins = {"torch": row.torch, **row.packages}
    have = {name: versions.get(canonicalize_name(name), "") for name in pins}
    return {name: have[name] for name, pin in pins.items() if have[name] and not keeps(have[name], pin)}


def keeps(version: str, pin: SpecifierSet) -> bool:
    """Return whether a version satisfies a pin; an index may omit the local label that the pin has."""
    without = re.sub(r"\+[\w.]+", "", str(pin)) if Version(version).local is None else str(pin)
    return satisfies(version, SpecifierSet(without))
