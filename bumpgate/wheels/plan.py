"""Chooses the kernel wheels for a torch: one that fits is reused, else built if possible, else absent."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from bumpgate.core.errors import BumpgateError
from bumpgate.doctor import abi
from bumpgate.doctor.checks import driver_version
from bumpgate.env import store as wheel_store
from bumpgate.env.inventory import take
from bumpgate.env.lane import LaneContext
from bumpgate.env.packages import KernelWheel, satisfies
from bumpgate.env.store import sha256_of
from bumpgate.env.versions import Offer, offers
from bumpgate.process.child import Interpreter
from bumpgate.process.runner import child_environment
from bumpgate.wheels import store
from bumpgate.wheels.audit import Target, WheelFile, audit
from bumpgate.wheels.store import Build

REUSE, BUILD, ABSENT = "reuse", "build", "absent"


@dataclass(frozen=True)
class Choice:
    """Decision on one package. wheel: the file that is reused. refused: why others were not, one line each."""

    package: str
    version: str
    action: str
    reason: str
    wheel: Path | None = None
    refused: tuple[str, ...] = ()


def make_target(lane: LaneContext, python: Path) -> Target:
    """Return the environment of an interpreter. Raises ChildFault if it gives no result."""
    interpreter = Interpreter(python, lane.root, child_environment(python, lane.root))
    devices = ("cpu", "cuda") if driver_version(interpreter.environment, lane.root) else ("cpu",)
    arch = int(lane.declared.capability.replace(".", "") or 0)
    return Target(interpreter, take(interpreter), arch, devices)


def plan(lane: LaneContext, target: Target, find_links: Sequence[str] = ()) -> list[Choice]:
    """Return a choice for each kernel wheel of the lane, also for those that it has given up.

    Raises BumpgateError (one line) without binutils, and on a place of find_links that cannot be read.
    """
    offered = offers(find_links)
    wheels = lane.packages.known_wheels
    if wheels and (tool := abi.missing_tool()):
        raise BumpgateError(f"{tool} is not on PATH, so no wheel can be audited: apt-get install binutils")
    return [_choose(lane, wheel, target, offered) for wheel in wheels]


def _choose(lane: LaneContext, wheel: KernelWheel, target: Target, offered: Sequence[Offer]) -> Choice:
    refused: dict[str, None] = {}
    smoke = wheel.smoke
    for file in _wheel_files(lane, wheel, target, offered):
        found = audit(file, target, smoke)
        if not found.faults:
            ran = "run over shapes of the model" if smoke and smoke.device in target.devices else ""
            reason = "; ".join([f"{file.path.name} passes its audit", *filter(None, (ran, *found.notes))])
            return Choice(wheel.name, wheel.version, REUSE, reason, file.path, tuple(refused))
        refused[found.reason] = None
    action, why = ABSENT, next(iter(refused), f"no wheel of {wheel.name} {wheel.version} was found")
    if wheel.sdist and target.arch and shutil.which("nvcc"):
        torch = Version(target.found.torch_version).public  # an index may have it without the local label
        action, why = (
            BUILD,
            f"bumpgate wheels build --lane {lane.name} --torch {torch} --package {wheel.name}",
        )
    return Choice(wheel.name, wheel.version, action, why, refused=tuple(refused))


def build_of(lane: LaneContext, wheel: KernelWheel, target: Target) -> Build:
    """Return what a wheel of this package for this target is built from and for."""
    patch = lane.patch(wheel)
    version = target.found.version
    return Build(
        wheel.name,
        wheel.version,
        wheel.sdist,
        target.found.torch_version,
        str(version.get("git_version", "")),
        str(version.get("cuda") or ""),
        target.arch,
        target.python,
        sha256_of(patch) if patch else "",
    )


def _wheel_files(
    lane: LaneContext, wheel: KernelWheel, target: Target, offered: Sequence[Offer]
) -> Iterator[WheelFile]:
    """Yield the kernel store's wheel for this target, then the adopted one, then those of the folders and pages."""
    if stored := store.find(build_of(lane, wheel, target)):
        yield WheelFile(stored, wheel.name, built_for=target.found.torch_version)
    packages = lane.lock.packages if lane.lock else ()
    locked = [p for p in packages if p.name == wheel.name and _is_version(p.version, wheel)]
    adopted = {w.file: w for package in locked for w in package.wheels}
    for each in adopted.values():
        if path := wheel_store.find(each):
            yield WheelFile(path, wheel.name, each.sha256, wheel.torch)
    for offer in (offer for offer in offered if _is_of(offer, wheel)):
        path = offer.path()
        # The adopted torch uses the adopted file; another torch has a different one, possibly of the same name.
        same = satisfies(wheel.torch, SpecifierSet(f"=={target.found.torch_version}", prereleases=True))
        own = adopted.get(path.name) if same else None
        known = wheel.sha256 and sha256_of(path) == wheel.sha256
        expected = own.sha256 if own else offer.sha256
        yield WheelFile(path, wheel.name, expected, wheel.torch if known else "")


def _is_of(offer: Offer, wheel: KernelWheel) -> bool:
    """Return whether a file is of a package and version, with any label; also one whose name is not a wheel's."""
    try:
        name, version, *_ = parse_wheel_filename(offer.file)
    except ValueError:
        return offer.file.lower().replace("-", "_").startswith(wheel.name.replace("-", "_"))
    return name == wheel.name and _is_version(str(version), wheel)


def _is_version(version: str, wheel: KernelWheel) -> bool:
    """Return whether a version is that of a kernel wheel, with any label."""
    try:
        return not wheel.version or Version(version).public == Version(wheel.version).public
    except ValueError:
        return False
