"""Kernel wheels in an adoption: which the adopted set gives up or takes back, and their manifest row."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from bumpgate.core.baseline import Baseline
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import Record
from bumpgate.env.freeze import moved_row
from bumpgate.env.locks import Lock, Wheel, lane_lock, read_lock
from bumpgate.env.manifest import KernelWheel, ManifestError, label, load
from bumpgate.env.request import kernel_wheels, known_kernel_wheels, require_kernel_wheels
from bumpgate.process.file_transaction import AdoptionError, read
from bumpgate.wheels.fitting import names

# What a manifest states of the sources of one version.
OF_SOURCES = ("sdist", "patch")


def check_without(root: Path, lane: str, packages: Mapping[str, str], without: Sequence[str]) -> None:
    """Check the kernel wheels that an adoption gives up. packages: of the candidate, by canonical name.

    Raises AdoptionError (one line) if the candidate lacks one that is not named, or has one that is; BumpgateError on a
    name that is not a kernel wheel of the lane.
    """
    require_kernel_wheels(root, lane, without)
    if kept := [name for name in without if name in packages]:
        raise AdoptionError(
            f"--without {kept[0]}: the candidate has {kept[0]} {packages[kept[0]]}: leave the option out"
        )
    lacking = [n for n in kernel_wheels(root, lane) if n not in packages and n not in without]
    if lacking:
        torch = Version(packages["torch"]).public if "torch" in packages else "X"
        built = "".join(f" --package {name}" for name in lacking)
        raise AdoptionError(
            f"the candidate has no {', '.join(lacking)} of lane {lane}: build it and gate again (bumpgate wheels build"
            f" --lane {lane} --torch {torch}{built}), or give it up:{''.join(f' --without {n}' for n in lacking)}"
        )


def moved_manifest(root: Path, lane: str, lock: Lock, torch: str, without: Collection[str]) -> str | None:
    """Return manifest.toml with the lane's adopted row moved to the set; None if nothing changes.

    torch: that the wheels were measured with. A wheel of another build than the row's gets its version and hash, and
    the torch of its label, else this one. One that is given up is named in `without` and keeps its table, from which it
    can be built for another torch; one that the set has again is not.
    """
    import tomlkit

    path = root / "wheels/manifest.toml"
    if not path.exists():
        return None
    row = next((r for r in load(path).environments if (r.status, r.lane) == ("adopted", lane)), None)
    built = _rebuilt(root, lane, row.known_wheels, lock) if row else {}
    back = taken_back(root, lane, lock)
    moved = moved_row(path, lane, lock)
    if row is None or not (built or without or back):
        return moved
    document: Any = tomlkit.parse(moved or read(path) or "")
    table = document["environment"][row.name]
    tables = {str(canonicalize_name(name)): name for name in table["wheels"]}
    for name, (version, wheel) in built.items():
        found = table["wheels"][tables[name]]
        was = str(found.get("version", ""))
        claimed = label(version).torch or label(wheel.file).torch
        found |= {"version": version, "torch": str(claimed or torch), "sha256": wheel.sha256}
        if was and Version(was).public != Version(version).public:
            for key in OF_SOURCES:
                found.pop(key, None)
    if names_left := sorted({*row.without, *without} - {*back}):
        table["without"] = names_left
    else:
        table.pop("without", None)
    return tomlkit.dumps(document)


def taken_back(root: Path, lane: str, lock: Lock) -> tuple[str, ...]:
    """Return the kernel wheels that the lane has given up and that the set has again."""
    known, own = known_kernel_wheels(root, lane), kernel_wheels(root, lane)
    return tuple(name for name in known if name in lock.versions and name not in own)


def check_manifest(path: Path, text: str | None) -> None:
    """Raise AdoptionError if the new manifest contradicts itself: a kernel wheel that was built for another torch."""
    if text is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / path.name
        probe.write_text(text, encoding="utf-8")
        try:
            load(probe)
        except ManifestError as error:
            raise AdoptionError(
                f"wheels/{path.name} would contradict itself with the new set: {error}: build that wheel for the new"
                " torch (bumpgate wheels build), and gate again"
            ) from None


def _rebuilt(
    root: Path, lane: str, wheels: Sequence[KernelWheel], lock: Lock
) -> dict[str, tuple[str, Wheel]]:
    """Return version and file of each kernel wheel that the set has in another build than the adopted one."""
    path = lane_lock(root, lane)
    before = {p.name: p.wheels[0].sha256 for p in read_lock(path).packages} if path.exists() else {}
    locked = {p.name: p for p in lock.packages}
    return {
        w.name: (locked[w.name].version, locked[w.name].wheels[0])
        for w in wheels
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
