"""One lane of a repository: its files, its adopted set, and the requests for its environments."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
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
from bumpgate.core.toml import tomllib
from bumpgate.env.locks import Lock, read_lock
from bumpgate.env.packages import KernelWheel, PackageSet, Smoke, adopted
from bumpgate.env.request import RUNNING, Request
from bumpgate.env.store import find
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
        """The declaration."""
        return lanes.require(self.root, self.name)

    @property
    def folder(self) -> Path:
        """The folder of the lane's files."""
        return self.root / lanes.FOLDER / self.name

    @property
    def table(self) -> tuple[Path, tuple[str, ...]]:
        """The file that declares the lane, and the keys of its table there."""
        file, _, keys = self.declared.where.partition(": ")
        return self.root / file, tuple(keys.split(".")) if keys else ()

    @property
    def lock_path(self) -> Path:
        """The path of the adopted set."""
        return self.root / self.declared.lock

    @property
    def baseline_path(self) -> Path:
        """The path of the reviewed rows."""
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
            raise BumpgateError(
                f"{path}: the patch of {wheel.name} is missing; restore it: git checkout lanes"
            )
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
        """The file of uv overrides."""
        return self._existing(self.declared.overrides)

    @property
    def script(self) -> Path | None:
        """The program that completes an environment."""
        return self._existing(self.declared.script)

    def _existing(self, name: str) -> Path | None:
        path = self.root / self.declared.path(name) if name else None
        return path if path is not None and path.exists() else None

    def requirements(self) -> tuple[str, ...]:
        """Return the requirements: of the requirements file or the extra in pyproject.toml, and the kernel wheels;
        outside bumpgate's own repository also what the pytest plugin imports.

        An extra's references to its own project are unfolded. bumpgate is left out: a lane run imports the
        controller's.
        """
        if self.declared.requirements:
            texts = _file_requirements(self.root, self.declared.requirements)
        else:
            texts = _extra_requirements(self.root, self.declared.extra or self.name)
        texts = [text for text in texts if canonicalize_name(Requirement(text).name) != "bumpgate"]
        named = {canonicalize_name(Requirement(text).name) for text in texts}
        more = {w.name: f"=={w.version}" if w.version else "" for w in self.packages.wheels}
        more |= OF_PLUGIN if lanes.is_foreign(self.root) else {}
        return (*texts, *(f"{name}{pin}" for name, pin in more.items() if name not in named))

    def request(self, candidate: str | None = None, *, locked: bool = True, **changes: Any) -> Request:
        """Request the adopted set, with `candidate` ("torch==2.14.0", a wheel file) installed into it if given.

        Without a candidate the lane's lock is installed as it is. A candidate names one package: what torch requires
        in one version follows torch, and every other pin of the lane is a version of the lock that is kept unless it
        conflicts. The lane's kernel wheels are built for one torch, so a candidate of torch has none of them;
        `bumpgate wheels plan` selects those that fit. Any other candidate replaces what torch requires of that
        package. locked: False also resolves the adopted set. changes: fields of Request. Raises BumpgateError on an
        invalid candidate, or a folder of find_links that does not exist.
        """
        for place in changes.get("find_links", ()):
            if (path := local_path(place)) and not path.exists():
                raise BumpgateError(
                    f"--find-links {place}: no such folder of wheels: name a folder, or the URL of a page"
                )
        lock = self.lock_path if self.lock else None
        if candidate is None and locked and lock:
            request = Request(lock=lock, python=self.python, script=self.script, name=f"adopted {self.name}")
            return replace(request, **changes)
        requirements = self.requirements()
        exact = True
        forced: tuple[str, ...] = ()
        if candidate is not None:
            chosen = _candidate(candidate, self.python)
            name = canonicalize_name(chosen.name)
            own = (r for r in map(Requirement, requirements) if canonicalize_name(r.name) == name)
            chosen.extras = chosen.extras.union(*(r.extras for r in own))
            exact = chosen.url is not None or _exact(chosen) is not None
            requirements = self._with_candidate(requirements, chosen)
            if name != "torch":
                forced = (str(chosen),)
        request = Request(
            requirements,
            python=self.python,
            prefer=lock,
            overrides=self.overrides,
            forced=forced,
            script=self.script,
            refresh=not exact,
            name=candidate or f"adopted {self.name}",
        )
        return replace(request, **changes)

    def _with_candidate(self, requirements: tuple[str, ...], chosen: Requirement) -> tuple[str, ...]:
        """Return the requirements with `chosen` replacing its own, as `request` describes."""
        locked = {p.name: p for p in self.lock.packages} if self.lock else {}
        kernels, name, version = self.known_kernel_wheels, canonicalize_name(chosen.name), _exact(chosen)
        pair = self.declared.paired
        kept = []
        for text in requirements:
            own = Requirement(text)
            other = canonicalize_name(own.name)
            if other == name or (name == "torch" and other in (*kernels, *OF_TORCH)):
                continue
            if name in pair and other in pair and version:
                kept.append(
                    f"{_with_extras(own, other)}=={'.'.join(map(str, Version(version).release[:2]))}.*"
                )
            elif other in kernels:
                stored = (
                    [found for w in locked[other].wheels if (found := find(w))] if other in locked else []
                )
                kept.append(f"{_with_extras(own, other)} @ {stored[0].as_uri()}" if stored else text)
            elif other in locked and other != "torch" and _exact(own):
                kept.append(_with_extras(own, own.name))
            else:
                kept.append(text)
        return (str(chosen), *kept)


def smoke_tests(root: Path) -> dict[str, Smoke]:
    """Return name -> smoke test of each kernel wheel that a lane of the repository declares."""
    every = [w for lane in lanes.load(root).values() for w in adopted(lane, None).known_wheels]
    return {wheel.name: wheel.smoke for wheel in every if wheel.smoke}


# Shorthands for a repository and the name of a lane.
def lane_lock(root: Path, lane: str) -> Path:
    """Return the path of a lane's lock."""
    return root / lanes.FOLDER / lane / lanes.LOCK


def lane_request(root: Path, lane: str, candidate: str | None = None, **changes: Any) -> Request:
    """Return `LaneContext.request`."""
    return LaneContext(root, lane).request(candidate, **changes)


def _with_extras(requirement: Requirement, name: str) -> str:
    extras = ",".join(sorted(requirement.extras))
    return f"{name}[{extras}]" if extras else name


def _exact(requirement: Requirement) -> str | None:
    """Return the single version that a requirement allows; None if it allows several."""
    pins = [s.version for s in requirement.specifier if s.operator in ("==", "===") and "*" not in s.version]
    return pins[0] if pins else None


def _file_requirements(root: Path, name: str) -> list[str]:
    with one_fault(
        f"{name}: cannot be read", fix="restore it, or name another file as `requirements` of the lane"
    ):
        lines = (root / name).read_text(encoding="utf-8").splitlines()
    texts = [text for line in lines if (text := re.sub(r"(^|\s)#.*", "", line).strip())]
    for text in texts:
        with one_fault(f"{name}: {text!r} is not a requirement such as torch==2.13.0"):
            Requirement(text)
    return texts


def _extra_requirements(root: Path, lane: str) -> list[str]:
    """Return the requirements of an extra; of another project than bumpgate also its dependencies, as pip does."""
    with one_fault(f"pyproject.toml has no extra {lane!r}"):
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"]
    if lane not in extras:
        raise BumpgateError(f"no extra {lane!r} in pyproject.toml; extras: {', '.join(sorted(extras))}")

    def unfold(extra: str) -> Iterator[str]:
        for text in extras[extra]:
            requirement = Requirement(text)
            if canonicalize_name(requirement.name) == canonicalize_name(project["name"]):
                for inner in sorted(requirement.extras):
                    yield from unfold(inner)
            else:
                yield text

    own = project.get("dependencies", ()) if lanes.is_foreign(root) else ()
    with one_fault(
        f"pyproject.toml: extra {lane!r} has an invalid requirement", fix="write it as in torch==2.13.0"
    ):
        return list(dict.fromkeys((*own, *unfold(lane))))


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
