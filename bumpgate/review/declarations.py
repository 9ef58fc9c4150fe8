"""What an adoption writes where its lane is declared: the tables of kernel wheels, and the pins of requirements."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from bumpgate.core import lanes
from bumpgate.core.toml import tomllib
from bumpgate.env.lane import LaneContext
from bumpgate.env.locks import Lock
from bumpgate.env.packages import PackagesError, adopted, label
from bumpgate.env.project import relocked
from bumpgate.env.requirements import Pins, keeps, pinned, places, requirements_file, with_more
from bumpgate.process.file_transaction import AdoptionError, read


def check_without(lane: LaneContext, packages: Mapping[str, str], without: Sequence[str]) -> None:
    """Check the kernel wheels that an adoption gives up. packages: of the candidate, by canonical name.

    Raises AdoptionError (one line) if the candidate lacks one that is not named, or has one that is; BumpgateError on a
    name that is not a kernel wheel of the lane.
    """
    lane.require_kernel_wheels(without)
    if kept := [name for name in without if name in packages]:
        found = f"{kept[0]} {packages[kept[0]]}"
        raise AdoptionError(f"--without {kept[0]}: the candidate has {found}: leave the option out")
    if lacking := [n for n in lane.kernel_wheels if n not in packages and n not in without]:
        torch = Version(packages["torch"]).public if "torch" in packages else "X"
        built = "".join(f" --package {name}" for name in lacking)
        raise AdoptionError(
            f"the candidate has no {', '.join(lacking)} of lane {lane.name}: build it and gate again (bumpgate wheels"
            f" build --lane {lane.name} --torch {torch}{built}), or give it up:"
            f"{''.join(f' --without {n}' for n in lacking)}"
        )


def moved_declaration(
    lane: LaneContext, lock: Lock, torch: str, without: Collection[str]
) -> tuple[Path, str | None]:
    """Return the file that declares the lane, with its kernel wheels moved to the set; None if it stays.

    torch: that the wheels were measured with. A wheel of another build than the declared one gets its version and hash,
    and the torch of its label, else this one. One that is given up is named in `without` and keeps its table, from
    which it can be built for another torch; one that the set has again is not.
    Raises AdoptionError if the new set contradicts a kernel wheel: it was built for another torch.
    """
    import tomlkit

    path, keys = lane.table
    text = read(path) or ""
    document: Any = tomlkit.parse(text)
    table = document
    for key in keys:
        table = table[key]
    before = {p.name: p.wheels[0].sha256 for p in lane.lock.packages} if lane.lock else {}
    tables = {str(canonicalize_name(name)): name for name in table.get("wheels", ())}
    locked = {p.name: p for p in lock.packages if p.name in tables}
    for declared in lane.packages.known_wheels:
        package = locked.get(declared.name)
        if package is None or package.wheels[0].sha256 == (declared.sha256 or before.get(declared.name)):
            continue
        version, wheel = package.version, package.wheels[0]
        found = table["wheels"][tables[declared.name]]
        was = str(found.get("version", ""))
        claimed = label(version).torch or label(wheel.file).torch
        found |= {"version": version, "torch": str(claimed or torch), "sha256": wheel.sha256}
        if was and Version(was).public != Version(version).public:  # these state the sources of one version
            found.pop("sdist", None)
            found.pop("patch", None)
    left_out = sorted({*lane.packages.without, *without} - {*taken_back(lane, lock)})
    if left_out:
        table["without"] = left_out
    else:
        table.pop("without", None)
    plain = table.unwrap()
    try:
        adopted(replace(lane.declared, wheels=plain.get("wheels", {}), without=tuple(left_out)), lock)
    except PackagesError as error:
        raise AdoptionError(
            f"{path.relative_to(lane.root).as_posix()} would contradict itself with the new set: {error}: build that"
            " wheel for the new torch (bumpgate wheels build), and gate again"
        ) from None
    new = tomlkit.dumps(document)
    return path, None if new == text else new


def taken_back(lane: LaneContext, lock: Lock) -> tuple[str, ...]:
    """Return the kernel wheels that the lane has given up and that the set has again."""
    own = lane.kernel_wheels
    return tuple(name for name in lane.known_kernel_wheels if name in lock.versions and name not in own)


def moved_requirements(
    lane: LaneContext, text: str, lock: Lock, without: Collection[str] = (), back: Collection[str] = ()
) -> str:
    """Return the text of the lane's requirements file with the pins of the set.

    without: kernel wheels that the lane gives up, whose requirements are dropped.
    back: kernel wheels that it takes back, which are required again.
    Raises AdoptionError (one line) if a requirement that contradicts the set would remain, or if the lock of another
    lane needs a pin that would change.
    """
    if Path(lane.declared.requirements).name == "uv.lock":
        return relocked(lane.root, lock.versions)
    pins = Pins(lock, without)
    _check_others(lane, text, pins)
    more = [f"{name}=={Version(lock.versions[name]).public}" for name in sorted(back)]
    new = with_more(lane.declared, pinned(lane.declared, text, pins), more)
    found = places(lane.declared, new)
    if not lane.declared.requirements and lanes.is_foreign(lane.root):
        own = tomllib.loads(new).get("project", {}).get("dependencies", ())
        found += [(f"{lanes.PROJECT}: dependencies", str(each)) for each in own]
    for where, requirement in found:
        if pins.contradicts(requirement):
            name = Requirement(requirement).name
            version = lock.versions[canonicalize_name(name)]
            raise AdoptionError(
                f"{where} has {requirement}, which contradicts the new set ({name} {version}), and the next"
                f" bumpgate freeze would obey it: change it to allow {version}, and gate again"
            )
    return new


def _check_others(lane: LaneContext, text: str, pins: Pins) -> None:
    """Raise AdoptionError if a pin would change that is also a pin of another lane, whose lock needs it."""
    own = [(where, old) for where, old in places(lane.declared, text) if pins.moved(old) != old]
    kind = "requirements file" if lane.declared.requirements else "extra"
    for name in lanes.load(lane.root):
        other = LaneContext(lane.root, name)
        file = requirements_file(lane.root, other.declared)
        heir = other.lock_path == lane.lock_path
        if heir or other.lock is None or file != requirements_file(lane.root, lane.declared):
            continue
        theirs = places(other.declared, text)
        for where, old in reversed([each for each in own if each in theirs]):
            package = canonicalize_name(Requirement(old).name)
            version, new = other.lock.versions.get(package), pins.moved(old)
            if version and not (new and keeps(version, Requirement(new).specifier)):
                raise AdoptionError(
                    f"{where} has {old}, which is also a pin of lane {name}, whose lock has {package} {version}: write"
                    f" the pin into the own {kind} of each lane ({lane.name}, {name}) instead, and gate again"
                )
