"""Kernel wheels in an adoption: which the adopted set gives up or takes back, and their tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from bumpgate.core.baseline import Baseline
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import Record
from bumpgate.core.toml import tomllib
from bumpgate.env.lane import LaneContext
from bumpgate.env.locks import Lock, Wheel
from bumpgate.env.packages import PackagesError, adopted, label
from bumpgate.process.file_transaction import AdoptionError, read
from bumpgate.wheels.fitting import names

# What a table states of the sources of one version.
OF_SOURCES = ("sdist", "patch")


def check_without(lane: LaneContext, packages: Mapping[str, str], without: Sequence[str]) -> None:
    """Check the kernel wheels that an adoption gives up. packages: of the candidate, by canonical name.

    Raises AdoptionError (one line) if the candidate lacks one that is not named, or has one that is; BumpgateError on a
    name that is not a kernel wheel of the lane.
    """
    lane.require_kernel_wheels(without)
    if kept := [name for name in without if name in packages]:
        raise AdoptionError(
            f"--without {kept[0]}: the candidate has {kept[0]} {packages[kept[0]]}: leave the option out"
        )
    lacking = [n for n in lane.kernel_wheels if n not in packages and n not in without]
    if lacking:
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
    """
    import tomlkit

    path, keys = lane.table
    built = _rebuilt(lane, lock)
    back = taken_back(lane, lock)
    if not (built or without or back):
        return path, None
    document: Any = tomlkit.parse(read(path) or "")
    table = document
    for key in keys:
        table = table[key]
    tables = {str(canonicalize_name(name)): name for name in table["wheels"]}
    for name, (version, wheel) in built.items():
        found = table["wheels"][tables[name]]
        was = str(found.get("version", ""))
        claimed = label(version).torch or label(wheel.file).torch
        found |= {"version": version, "torch": str(claimed or torch), "sha256": wheel.sha256}
        if was and Version(was).public != Version(version).public:
            for key in OF_SOURCES:
                found.pop(key, None)
    if names_left := sorted({*lane.packages.without, *without} - {*back}):
        table["without"] = names_left
    else:
        table.pop("without", None)
    return path, tomlkit.dumps(document)


def taken_back(lane: LaneContext, lock: Lock) -> tuple[str, ...]:
    """Return the kernel wheels that the lane has given up and that the set has again."""
    own = lane.kernel_wheels
    return tuple(name for name in lane.known_kernel_wheels if name in lock.versions and name not in own)


def check_declaration(lane: LaneContext, text: str | None, lock: Lock) -> None:
    """Raise AdoptionError if the new set contradicts a kernel wheel: it was built for another torch.

    text: the new file that declares the lane; None if it stays.
    """
    path, keys = lane.table
    table: Any = tomllib.loads(text if text is not None else path.read_text(encoding="utf-8"))
    for key in keys:
        table = table[key]
    moved = replace(lane.declared, wheels=table.get("wheels", {}), without=tuple(table.get("without", ())))
    try:
        adopted(moved, lock)
    except PackagesError as error:
        raise AdoptionError(
            f"{path.relative_to(lane.root).as_posix()} would contradict itself with the new set: {error}: build that"
            " wheel for the new torch (bumpgate wheels build), and gate again"
        ) from None


def _rebuilt(lane: LaneContext, lock: Lock) -> dict[str, tuple[str, Wheel]]:
    """Return version and file of each kernel wheel that the set has in another build than the adopted one."""
    before = {p.name: p.wheels[0].sha256 for p in lane.lock.packages} if lane.lock else {}
    locked = {p.name: p for p in lock.packages}
    return {
        w.name: (locked[w.name].version, locked[w.name].wheels[0])
        for w in lane.packages.known_wheels
        if w.name in locked and locked[w.name].wheels[0].sha256 != (w.sha256 or before.get(w.name))
    }


def lost_rows(gate: GateFile, old: Baseline) -> dict[str, str]:
    """Return row id -> why it is NOT RUN, of the reviewed rows that only the adopted side measured.

    A row that the machine cannot show is NOT RUN on both sides, and not included.
    """
    adopted, candidate = (_measured(side.record) for side in (gate.adopted, gate.candidate))
    absent = gate.candidate.record.not_run if gate.candidate.record else {}
    return {row: absent[row] for row in sorted((adopted - candidate) & absent.keys() & old.rows.keys())}


def given_up_rows(lost: Mapping[str, str], without: Collection[str]) -> frozenset[str]:
    """Return the lost rows whose reason names a kernel wheel that is given up."""
    return frozenset(row for row, why in lost.items() if any(names(why, name) for name in without))


def _measured(record: Record | None) -> set[str]:
    return {j.row.id for j in record.judgements if not j.row.unmeasured} if record else set()
