"""The set that a gate measured, as a lock.

A gate of a requirement keeps uv's resolution. The set of an interpreter is resolved again for the requirement that the
user names, and must be what the gate recorded.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidWheelFilename,
    canonicalize_name,
    canonicalize_version,
    parse_wheel_filename,
)
from packaging.version import Version

from bumpgate.core.baseline import Baseline
from bumpgate.core.gate_file import GateFile, GateSide
from bumpgate.core.rows import Record
from bumpgate.core.text import some
from bumpgate.env.build import resolve
from bumpgate.env.freeze import changes, fetch, lock_of
from bumpgate.env.inventory import content_of, version_of
from bumpgate.env.lane import LaneContext
from bumpgate.env.locks import Lock, Wheel
from bumpgate.env.store import sha256_of, store_root
from bumpgate.env.versions import Offer, offers
from bumpgate.process.file_transaction import AdoptionError, read
from bumpgate.wheels.store import kernel_store

# Of an interpreter's image, and of the program that measures.
OF_IMAGE = ("bumpgate", "pip", "setuptools", "wheel")


@dataclass(frozen=True)
class Named:
    """Options that name the set of a candidate that was an interpreter: its requirement, and where to find wheels."""

    candidate: str = ""
    index: str | None = None
    find_links: tuple[str, ...] = ()


@dataclass(frozen=True)
class MeasuredSet:
    """A set that was measured. sources: the URL of each wheel of the lock.

    unlocked: packages that an interpreter had in addition, on both sides in the same version.
    """

    candidate: str
    lock: Lock
    sources: Mapping[Wheel, str]
    unlocked: Mapping[str, str] = field(default_factory=dict)


def check_named(path: Path, gate: GateFile, named: Named) -> None:
    """Raise AdoptionError (one line) if the gate and the options both name the candidate's set, or neither does."""
    if gate.config.get("python_candidate"):
        if not named.candidate:
            torch = gate.candidate.packages.get("torch", "X")
            raise AdoptionError(
                f"{path}: the candidate was an interpreter (--python-candidate): name the requirement whose set it is:"
                f" bumpgate adopt {shlex.quote(str(path))} --candidate 'torch=={torch}'"
            )
        return
    links = ", ".join(named.find_links)
    given = {"--candidate": named.candidate, "--index": named.index, "--find-links": links}
    for option, value in given.items():
        if value:
            raise AdoptionError(
                f"{option} {value}: {path} is of --candidate {gate.config.get('candidate')}, whose set it has"
                f" resolved: leave {option} out"
            )


def measured_set(lane: LaneContext, path: Path, gate: GateFile, named: Named) -> MeasuredSet:
    """Return the set that a gate measured.

    Raises AdoptionError (one line) if it cannot be known, or the set of the named requirement is another one;
    NotInstallable or BuildError if that cannot be resolved.
    """
    record = gate.candidate.record
    assert record is not None
    python = ".".join(str(record.provenance.get("python")).split(".")[:2])
    if gate.config.get("python_candidate"):
        return _of_interpreter(lane, path, gate, named, python)
    resolution = path.parent / "candidate.pylock.toml"
    resolved = read(resolution)
    if resolved is None:
        raise AdoptionError(f"{resolution} does not exist, so the candidate's wheels are unknown: gate again")
    lock, sources = lock_of(resolution.name, resolved, python)
    have = canonical(gate.candidate.packages)
    if moved := changes(lock.versions, {name: have.get(name, "(absent)") for name in lock.versions}):
        raise AdoptionError(f"{resolution} is not the set that was measured ({moved[0]}): gate again")
    return MeasuredSet(str(gate.config.get("candidate")), lock, sources)


def canonical(packages: Mapping[str, str]) -> dict[str, str]:
    """Return packages by canonical name."""
    return {str(canonicalize_name(name)): version for name, version in packages.items()}


def differences(lock: Lock, packages: Mapping[str, str], known: Collection[str] = ()) -> list[str]:
    """Return the packages of a lock that an interpreter has in another version, one line each: lock -> interpreter.

    known: packages whose build is shown to be the same, so that their version may lack the label in the lock.
    """
    have = canonical(packages)
    others = {name: have.get(name, "(absent)") for name in lock.versions}
    same = {n: v for n, v in others.items() if _same(lock.versions[n], v, labelled=n in known)}
    return changes(lock.versions, others | {name: lock.versions[name] for name in same})


def _same(locked: str, installed: str, *, labelled: bool) -> bool:
    """Return whether two versions are equal. labelled: the installed one may have a local label that the lock omits."""
    try:
        ours, theirs = Version(locked), Version(installed)
    except ValueError:
        return locked == installed
    return ours == theirs or (labelled and ours.local is None and ours == Version(theirs.public))


def _torch(stated: Mapping[str, Any], version: str = "torch", git: str = "torch_git") -> tuple[str, str]:
    """Return the version of torch with its variant, and its commit; "" where unknown."""
    return str(stated.get(version) or ""), str(stated.get(git) or "")


def _measured_torch(record: Record | None) -> tuple[str, str]:
    """Return the torch that a run has imported."""
    return _torch(record.provenance if record else {})


def _named_build(build: tuple[str, str]) -> str:
    return f"{build[0] or 'of an unknown version'} (git {build[1][:12] or 'unknown'})"


def adopted_differences(lock: Lock, side: GateSide, baseline: Baseline) -> list[str]:
    """Return the differences of a lane's lock to the adopted side of a gate.

    torch may lack its label in the lock if the baseline was made with that build: PyPI lists 2.11.0+cu130 as 2.11.0.
    """
    reviewed = _torch(baseline.made_with)
    same = all(reviewed) and reviewed == _measured_torch(side.record)
    return differences(lock, side.packages, ("torch",) if same else ())


def _of_interpreter(lane: LaneContext, path: Path, gate: GateFile, named: Named, python: str) -> MeasuredSet:
    """Resolve the named requirement with the kernel wheels that the interpreter had, and compare the two."""
    request = lane.request(named.candidate, index=named.index, find_links=named.find_links)
    if request.python != python:
        raise AdoptionError(
            f"{path}: the candidate ran Python {python}, and the set of lane {gate.lane} is for {request.python}:"
            f" gate an interpreter of Python {request.python}"
        )
    have = canonical(gate.candidate.packages)
    kernels = [name for name in lane.known_kernel_wheels if name in have]
    offered = offers(named.find_links) if kernels else []
    files = {name: _measured_file(gate, name, have[name], offered) for name in kernels}
    # The candidate itself may be a kernel wheel. Those that the interpreter lacked are left out.
    chosen, *others = request.requirements
    kept = [text for text in others if _name(text) not in lane.known_kernel_wheels]
    wheels = [f"{name} @ {file.as_uri()}" for name, file in files.items() if name != _name(chosen)]
    resolved = resolve(replace(request, requirements=(chosen, *kept, *wheels)))
    lock, sources = lock_of("pylock.toml", resolved, python)
    for package in lock.packages:
        if file_of := files.get(package.name):
            if package.wheels[0].sha256 != sha256_of(file_of):
                raise AdoptionError(
                    f"{path}: the set of {named.candidate} has another build of {package.name} {package.version} than"
                    f" the interpreter, {file_of}: name that file: --candidate {shlex.quote(str(file_of))}"
                )
            sources[package.wheels[0]] = file_of.as_uri()
    again = f"and gate again, or gate the set itself: bumpgate gate --lane {gate.lane} --candidate"
    again += f" {shlex.quote(named.candidate)}"
    known = {*files, *_known_torch(path, gate, lock, sources)}
    if moved := differences(lock, have, known):
        raise AdoptionError(
            f"{path}: the interpreter did not have the set of {named.candidate} (set -> interpreter: {some(moved)}):"
            f" install these versions in {gate.candidate.python} {again}"
        )
    # A package outside of the lock may have changed a row; one that both sides had cannot have.
    adopted = canonical(gate.adopted.packages)
    unlocked = {n: v for n, v in sorted(have.items()) if n not in lock.versions and n not in OF_IMAGE}
    if own := [f"{name} {version}" for name, version in unlocked.items() if adopted.get(name) != version]:
        raise AdoptionError(
            f"{path}: {gate.candidate.python} has packages that neither the set nor the adopted side has: {some(own)}:"
            f" uninstall them {again}"
        )
    return MeasuredSet(named.candidate, lock, sources, unlocked)


def _known_torch(path: Path, gate: GateFile, lock: Lock, sources: Mapping[Wheel, str]) -> tuple[str, ...]:
    """Return ("torch",) if the resolved torch lacks only the label of the interpreter's, and is the same build.

    Raises AdoptionError if it is another one. The wheel is fetched into the wheel store.
    """
    locked = next((p for p in lock.packages if p.name == "torch"), None)
    version = canonical(gate.candidate.packages).get("torch", "")
    if locked is None or [_same(locked.version, version, labelled=each) for each in (False, True)] != [0, 1]:
        return ()
    wheel = locked.wheels[0]
    found = _torch(version_of(fetch(wheel, sources[wheel])), "__version__", "git_version")
    measured = _measured_torch(gate.candidate.record)
    if not (all(found) and found == measured):
        raise AdoptionError(
            f"{path}: the interpreter had torch {version}, which is {_named_build(measured)}, and {wheel.file} of the"
            f" set is {_named_build(found)}: name the variant that was measured: --candidate"
            f" {shlex.quote(f'torch=={version}')} --index URL"
        )
    return ("torch",)


def _name(requirement: str) -> str:
    return str(canonicalize_name(Requirement(requirement).name))


def _measured_file(gate: GateFile, name: str, version: str, offered: Sequence[Offer]) -> Path:
    """Return the wheel file whose content the interpreter had. Raises AdoptionError if none is found."""
    content = gate.candidate.wheels.get(name)
    if not content:
        raise AdoptionError(
            f"the gate does not record the files of {name} {version} in {gate.candidate.python}: install it from its"
            " wheel and gate again"
        )
    for path in _wheel_files(name, version, offered):
        if content_of(path) == content:
            return path.absolute()
    raise AdoptionError(
        f"no wheel file has the content of the {name} {version} that was measured: name the folder or page of the"
        f" one that {gate.candidate.python} was prepared from, with --find-links PLACE"
    )


def _wheel_files(name: str, version: str, offered: Sequence[Offer]) -> Iterator[Path]:
    """Yield the wheel files of a package and version among the offered ones, in the kernel and in the wheel store."""
    stores = [*sorted((kernel_store() / name).glob("*")), *sorted(store_root().glob("*"))]
    public = canonicalize_version(version.partition("+")[0])
    for offer in (*offered, *offers(str(folder) for folder in stores if folder.is_dir())):
        try:
            found, its, *_ = parse_wheel_filename(offer.file)
        except InvalidWheelFilename:
            continue
        if found == name and canonicalize_version(its.public) == public:
            yield offer.path()
