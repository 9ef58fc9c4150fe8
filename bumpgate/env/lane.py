"""One lane of a repository: its files, its adopted set, and the requests for its environments."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from bumpgate.core import lanes
from bumpgate.core.errors import BumpgateError, one_fault
from bumpgate.core.lanes import Lane
from bumpgate.core.text import redacted
from bumpgate.env import requirements, store
from bumpgate.env.locks import Lock, read_lock
from bumpgate.env.packages import KernelWheel, PackageSet, Smoke, adopted, exact_version
from bumpgate.env.request import RUNNING, Request
from bumpgate.env.uv import local_path

# Packages that the pytest plugin and a gate's command lines import in an environment without bumpgate.
OF_PLUGIN = {
    "packaging": ">=24.2",
    "psutil": ">=6.0",
    "pytest": ">=8.3",
    "pytest-xdist": ">=3.6",
    "rich": ">=13.7",
    **({"tomli": ">=2.0"} if sys.version_info < (3, 11) else {}),
}
# Packages that torch itself requires in one version: they follow the torch of a candidate.
OF_TORCH = ("triton",)


@dataclass(frozen=True)
class LaneContext:
    """A lane of the repository at `root`. Raises LaneError if the repository does not declare it.

    use_lock: False for a lane whose lock cannot be read, as if it had none.
    """

    root: Path
    name: str
    use_lock: bool = True

    def __post_init__(self) -> None:
        _ = self.declared

    @cached_property
    def declared(self) -> Lane:
        return lanes.require(self.root, self.name)

    @property
    def table(self) -> tuple[Path, tuple[str, ...]]:
        """The file that declares the lane, and the keys of its table there."""
        file, _, keys = self.declared.where.partition(": ")
        return self.root / file, tuple(keys.split(".")) if keys else ()

    @property
    def lock_path(self) -> Path:
        return self.root / self.declared.lock

    @property
    def baseline_path(self) -> Path:
        return self.root / "baselines" / f"{self.name}.json"

    @cached_property
    def lock(self) -> Lock | None:
        """The adopted set, read once; None if the lane has no lock. Raises LockError."""
        return read_lock(self.lock_path) if self.use_lock and self.lock_path.exists() else None

    @cached_property
    def packages(self) -> PackageSet:
        """What an installed environment of the lane must have. Raises LockError, PackagesError."""
        return adopted(self.declared, self.lock)

    @property
    def adopted(self) -> PackageSet:
        """The adopted set of a lane that has a lock. Raises LockError (one line) if it has none."""
        if self.lock is None:
            read_lock(self.lock_path)
        return self.packages

    @property
    def kernel_wheels(self) -> tuple[str, ...]:
        """Names of the kernel wheels that the adopted environment has."""
        return tuple(wheel.name for wheel in self.packages.wheels)

    @property
    def known_kernel_wheels(self) -> tuple[str, ...]:
        """Names of all kernel wheels: also of those that the lane has given up, which a candidate may have."""
        return tuple(wheel.name for wheel in self.packages.known_wheels)

    def require_kernel_wheels(self, names: Iterable[str]) -> None:
        """Raise BumpgateError (one line) if a name, of the option --without, is not a kernel wheel of the lane."""
        known = self.known_kernel_wheels
        for name in names:
            if name not in known:
                listed = ", ".join(known) or "none"
                raise BumpgateError(f"--without {name}: not a kernel wheel of lane {self.name} ({listed})")

    def patch(self, wheel: KernelWheel) -> Path | None:
        """Return the edit of a wheel's sources. Raises BumpgateError if the file is missing."""
        path = self.root / self.declared.path(wheel.patch) if wheel.patch else None
        if path and not path.is_file():
            fix = "restore it: git checkout lanes"
            raise BumpgateError(f"{path}: the patch of {wheel.name} is missing; {fix}")
        return path

    @property
    def python(self) -> str:
        """The Python version of the lock, else the single one of the declaration, else the running one."""
        if self.lock and self.lock.python:
            return self.lock.python
        exact = re.fullmatch(r"==(\d+\.\d+)\.\*", self.declared.python)
        return exact[1] if exact else RUNNING

    @property
    def overrides(self) -> Path | None:
        return self._existing(self.declared.overrides)

    @property
    def script(self) -> Path | None:
        """The program that completes an environment."""
        return self._existing(self.declared.script)

    def _existing(self, name: str) -> Path | None:
        path = self.root / self.declared.path(name) if name else None
        return path if path is not None and path.exists() else None

    def requirements(self) -> tuple[str, ...]:
        """Return the declared requirements and the kernel wheels; in other repositories also what the plugin imports.

        bumpgate is left out: a lane run imports the controller's.
        """
        every = {text: _name(text) for text in requirements.of_lane(self.root, self.declared)}
        texts = [text for text, name in every.items() if name != "bumpgate"]
        more = {w.name: f"=={w.version}" if w.version else "" for w in self.packages.wheels}
        more |= OF_PLUGIN if lanes.is_foreign(self.root) else {}
        return (*texts, *(f"{name}{pin}" for name, pin in more.items() if name not in every.values()))

    def request(self, candidate: str | None = None, *, locked: bool = True, **changes: Any) -> Request:
        """Request the adopted set, with `candidate` ("torch==2.14.0", a wheel file) installed into it if given.

        Without a candidate the lane's lock is installed as it is. A candidate names one package: what torch requires
        in one version follows torch, and every other pin of the lane is a version of the lock that is kept unless it
        conflicts. The lane's kernel wheels are built for one torch, so a candidate of torch has none of them;
        `bumpgate wheels plan` selects those that fit. Any other candidate replaces what torch requires of that
        package.

        locked: False also resolves the adopted set.
        changes: fields of Request.
        Raises BumpgateError on an invalid candidate, or a folder of find_links that does not exist.
        """
        for place in changes.get("find_links", ()):
            if (path := local_path(place)) and not path.exists():
                fix = "name a folder, or the URL of a page"
                raise BumpgateError(f"--find-links {place}: no such folder of wheels: {fix}")
        lock = self.lock_path if self.lock else None
        if candidate is None and locked and lock:
            request = Request(lock=lock, python=self.python, script=self.script, name=f"adopted {self.name}")
            return replace(request, **changes)
        request = Request(
            self.requirements(),
            python=self.python,
            prefer=lock,
            overrides=self.overrides,
            script=self.script,
            name=candidate or f"adopted {self.name}",
        )
        if candidate is not None:
            chosen = _candidate(candidate, self.python)
            own = (Requirement(text) for text in request.requirements if _name(text) == _name(chosen))
            chosen.extras = chosen.extras.union(*(r.extras for r in own))
            request = replace(
                request,
                requirements=self._with_candidate(request.requirements, chosen),
                forced=() if _name(chosen) == "torch" else (str(chosen),),
                refresh=not (chosen.url or exact_version(chosen.specifier)),
            )
        return replace(request, **changes)

    def _with_candidate(self, texts: tuple[str, ...], chosen: Requirement) -> tuple[str, ...]:
        """Return the requirements with `chosen` replacing its own, as `request` describes."""
        locked = {p.name: p for p in self.lock.packages} if self.lock else {}
        kernels, name, version = self.known_kernel_wheels, _name(chosen), exact_version(chosen.specifier)
        pair = self.declared.paired
        kept = []
        for text in texts:
            own, other = Requirement(text), _name(text)
            extras = f"[{','.join(sorted(own.extras))}]" if own.extras else ""
            if other == name or (name == "torch" and other in (*kernels, *OF_TORCH)):
                continue
            if name in pair and other in pair and version:
                text = f"{other}{extras}=={'.'.join(map(str, Version(version).release[:2]))}.*"
            elif other in kernels:
                wheels = locked[other].wheels if other in locked else ()
                if stored := [found for wheel in wheels if (found := store.find(wheel))]:
                    text = f"{other}{extras} @ {stored[0].as_uri()}"
            elif other in locked and other != "torch" and exact_version(own.specifier):
                text = f"{own.name}{extras}"
            kept.append(text)
        return (str(chosen), *kept)


def smoke_tests(root: Path) -> dict[str, Smoke]:
    """Return name -> smoke test of each kernel wheel that a lane of the repository declares."""
    every = [w for lane in lanes.load(root).values() for w in adopted(lane, None).known_wheels]
    return {wheel.name: wheel.smoke for wheel in every if wheel.smoke}


# Shorthands for a repository and the name of a lane.
def lane_lock(root: Path, lane: str) -> Path:
    return root / lanes.FOLDER / lane / lanes.LOCK


def lane_request(root: Path, lane: str, candidate: str | None = None, **changes: Any) -> Request:
    return LaneContext(root, lane).request(candidate, **changes)


def _name(requirement: str | Requirement) -> str:
    parsed = Requirement(requirement) if isinstance(requirement, str) else requirement
    return str(canonicalize_name(parsed.name))


def _candidate(text: str, python: str) -> Requirement:
    with one_fault(f"invalid candidate {text!r}", fix="name a requirement such as torch==2.14.0"):
        if text.endswith(".whl") and "://" not in text:
            path = Path(text).expanduser().absolute()
            if not path.is_file():
                raise BumpgateError(f"{text}: no such wheel file")
            return Requirement(f"{parse_wheel_filename(path.name)[0]} @ {path.as_uri()}")
        found = Requirement(text)
        here = {"python_version": python, "python_full_version": f"{python}.0"} if python != RUNNING else {}
        if found.marker and not found.marker.evaluate({"extra": "", **here}):
            raise BumpgateError(
                f"candidate {redacted(text)}: its marker excludes Python {python} here: leave it out"
            )
        return found
