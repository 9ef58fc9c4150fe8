"""Build requests: a request names requirements or a lock; its hash is the key of its environment."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from bumpgate.core import lanes
from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.core.toml import tomllib
from bumpgate.env.locks import lane_lock, read_lock
from bumpgate.env.manifest import ManifestRow, load
from bumpgate.env.store import find
from bumpgate.env.uv import deciding_files, deciding_settings, local_path

SCHEMA = 1
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
# Completes an environment whose overrides left libraries out.
SCRIPTS = {"v6e": "xla/make_cuda_stubs.py"}
# Packages of a lane that are built against one minor release of each other, which their metadata does not state.
PAIRS = {"v6e": ("torch", "torch-xla")}
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
class Request:
    """Specification of an environment to build.

    requirements: PEP 508 strings. A path is written `name @ file:///...`.
    python: "3.11", or a path; by default the version that runs.
    lock: a committed lock file, installed exactly and with hashes checked; `requirements` is empty then.
    prefer: a lock file whose versions are kept wherever the requirements allow them.
    index: URL of an index that takes precedence over the host's. find_links: additional folders or pages of wheels.
    overrides: a uv file of requirements that replace those of the packages. forced: further such requirements.
    script: a program that the new interpreter runs once everything is installed.
    offline: nothing but `find_links`, the wheel store and uv's cache; no index.
    dependencies: False installs the requirements alone (mixtures whose own pins contradict each other).
    refresh: resolve again although the same request was built ("torch" without a version).
    only_wheels: False lets uv build source distributions.
    name: its name in messages.
    """

    requirements: tuple[str, ...] = ()
    python: str = RUNNING
    lock: Path | None = None
    index: str | None = None
    find_links: tuple[str, ...] = ()
    prefer: Path | None = None
    overrides: Path | None = None
    forced: tuple[str, ...] = ()
    script: Path | None = None
    offline: bool = False
    dependencies: bool = True
    refresh: bool = False
    only_wheels: bool = True
    name: str = ""

    def without_preferences(self) -> Request:
        """Return a copy without the lock of preferred versions."""
        return replace(self, prefer=None)

    @property
    def title(self) -> str:
        if self.name:
            return self.name
        return self.lock.name if self.lock else " ".join(self.requirements[:1]) or "an empty environment"


def lane_request(
    root: Path, lane: str, candidate: str | None = None, *, locked: bool = True, **changes: Any
) -> Request:
    """Request the adopted set of a lane, with `candidate` ("torch==2.14.0", a wheel file) installed into it if given.

    Without a candidate the lane's lock is installed as it is. A candidate names one package: what torch requires in
    one version follows torch, and every other pin of the lane is a version of the lock that is kept unless it
    conflicts. The lane's kernel wheels are built for one torch, so a candidate of torch has none of them;
    `bumpgate wheels plan` selects those that fit. Any other candidate replaces what torch requires of that package.
    A lane without a lock takes its extra from pyproject.toml and its manifest row. locked: False also resolves the
    adopted set. changes: fields of Request. Raises BumpgateError on an unknown lane, an invalid candidate, or a folder
    of find_links that does not exist.
    """
    for place in changes.get("find_links", ()):
        if (path := local_path(place)) and not path.exists():
            raise BumpgateError(
                f"--find-links {place}: no such folder of wheels: name a folder, or the URL of a page"
            )
    lock = lane_lock(root, lane)
    script = lane_script(root, lane)
    if candidate is None and locked and lock.exists():
        request = Request(lock=lock, python=lane_python(root, lane), script=script, name=f"adopted {lane}")
        return replace(request, **changes)
    requirements = lane_requirements(root, lane)
    exact = True
    forced: tuple[str, ...] = ()
    if candidate is not None:
        chosen = _candidate(candidate)
        own = (r for r in map(Requirement, requirements) if _same_package(r, chosen))
        chosen.extras = chosen.extras.union(*(r.extras for r in own))
        exact = chosen.url is not None or _exact(chosen) is not None
        requirements = _with_candidate(root, lane, requirements, chosen)
        if canonicalize_name(chosen.name) != "torch":
            forced = (str(chosen),)
    request = Request(
        requirements,
        python=lane_python(root, lane),
        prefer=lock if lock.exists() else None,
        overrides=lane_overrides(root, lane),
        forced=forced,
        script=script,
        refresh=not exact,
        name=candidate or f"adopted {lane}",
    )
    return replace(request, **changes)


def _with_candidate(
    root: Path, lane: str, requirements: tuple[str, ...], chosen: Requirement
) -> tuple[str, ...]:
    """Return the requirements of a lane with `chosen` replacing its own, as lane_request describes."""
    lock = lane_lock(root, lane)
    locked = {p.name: p for p in read_lock(lock).packages} if lock.exists() else {}
    kernels, name, version = known_kernel_wheels(root, lane), canonicalize_name(chosen.name), _exact(chosen)
    pair = PAIRS.get(lane, ())
    kept = []
    for text in requirements:
        own = Requirement(text)
        other = canonicalize_name(own.name)
        if other == name or (name == "torch" and other in (*kernels, *OF_TORCH)):
            continue
        if name in pair and other in pair and version:
            kept.append(f"{_with_extras(own, other)}=={'.'.join(map(str, Version(version).release[:2]))}.*")
        elif other in kernels:
            stored = [found for w in locked[other].wheels if (found := find(w))] if other in locked else []
            kept.append(f"{_with_extras(own, other)} @ {stored[0].as_uri()}" if stored else text)
        elif other in locked and other != "torch" and _exact(own):
            kept.append(_with_extras(own, own.name))
        else:
            kept.append(text)
    return (str(chosen), *kept)


def _same_package(a: Requirement, b: Requirement) -> bool:
    return canonicalize_name(a.name) == canonicalize_name(b.name)


def _with_extras(requirement: Requirement, name: str) -> str:
    extras = ",".join(sorted(requirement.extras))
    return f"{name}[{extras}]" if extras else name


def _exact(requirement: Requirement) -> str | None:
    """Return the single version that a requirement allows; None if it allows several."""
    pins = [s.version for s in requirement.specifier if s.operator in ("==", "===") and "*" not in s.version]
    return pins[0] if pins else None


def lane_requirements(root: Path, lane: str) -> tuple[str, ...]:
    """Return the requirements of a lane: its requirements file, or its extra in pyproject.toml with the pins of its
    adopted row in wheels/manifest.toml; outside bumpgate's own repository also what the pytest plugin imports.

    An extra's references to its own project are unfolded. bumpgate is left out: a lane run imports the controller's.
    """
    declared = lanes.require(root, lane)
    if declared.requirements:
        texts = _file_requirements(root, declared.requirements)
    else:
        texts = _extra_requirements(root, declared.extra or lane)
    texts = [text for text in texts if canonicalize_name(Requirement(text).name) != "bumpgate"]
    named = {canonicalize_name(Requirement(text).name) for text in texts}
    pinned = _row_pins(root, lane) | (OF_PLUGIN if lanes.is_foreign(root) else {})
    return (*texts, *(f"{name}{pin}" for name, pin in pinned.items() if name not in named))


def _file_requirements(root: Path, name: str) -> list[str]:
    try:
        lines = (root / name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BumpgateError(
            f"{name}: cannot be read ({getattr(error, 'strerror', None) or 'not text'})"
        ) from None
    texts = [text for line in lines if (text := re.sub(r"(^|\s)#.*", "", line).strip())]
    for text in texts:
        try:
            Requirement(text)
        except InvalidRequirement:
            raise BumpgateError(f"{name}: {text!r} is not a requirement such as torch==2.13.0") from None
    return texts


def _extra_requirements(root: Path, lane: str) -> list[str]:
    """Return the requirements of an extra; of another project than bumpgate also its dependencies, as pip does."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"]
    except (OSError, ValueError, KeyError) as error:
        raise BumpgateError(f"pyproject.toml has no extra {lane!r} ({one_line(error, 80)})") from None
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
    return list(dict.fromkeys((*own, *unfold(lane))))


def _row(root: Path, lane: str) -> ManifestRow | None:
    path = root / "wheels" / "manifest.toml"
    if not path.exists():
        return None
    rows = load(path).environments
    return next((row for row in rows if (row.status, row.lane) == ("adopted", lane)), None)


def _row_pins(root: Path, lane: str) -> dict[str, str]:
    row = _row(root, lane)
    if row is None:
        return {}
    wheels = {w.name: f"=={w.version}" if w.version else "" for w in row.wheels}
    # An index may name a build without its local label, as PyPI does: torch 2.11.0 is 2.11.0+cu130.
    torch = re.sub(r"\+[\w.]+", "", str(row.torch))
    pins = {"torch": torch, **{name: str(pin) for name, pin in row.packages.items()}, **wheels}
    return {canonicalize_name(name): pin for name, pin in pins.items()}


def kernel_wheels(root: Path, lane: str) -> tuple[str, ...]:
    """Return the names of the kernel wheels that the adopted environment of the lane has."""
    row = _row(root, lane)
    return tuple(wheel.name for wheel in row.wheels) if row else ()


def known_kernel_wheels(root: Path, lane: str) -> tuple[str, ...]:
    """Return the names of the lane's kernel wheels: also of those that it has given up, which a candidate may have."""
    row = _row(root, lane)
    return tuple(wheel.name for wheel in row.known_wheels) if row else ()


def require_kernel_wheels(root: Path, lane: str, names: Iterable[str]) -> None:
    """Raise BumpgateError (one line) if a name, of the option --without, is not a kernel wheel of the lane."""
    known = known_kernel_wheels(root, lane)
    for name in names:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise BumpgateError(f"--without {name}: not a kernel wheel of lane {lane} ({listed})")


def lane_python(root: Path, lane: str) -> str:
    """Return the Python version of the lane's lock or manifest row; else the running one."""
    lock = lane_lock(root, lane)
    if lock.exists() and (python := read_lock(lock).python):
        return python
    row = _row(root, lane)
    exact = re.fullmatch(r"==(\d+\.\d+)\.\*", str(row.python)) if row else None
    return exact[1] if exact else RUNNING


def lane_overrides(root: Path, lane: str) -> Path | None:
    """Return the lane's file of uv overrides, or None."""
    return _existing(root, lanes.require(root, lane).overrides)


def lane_script(root: Path, lane: str) -> Path | None:
    """Return the program that completes an environment of the lane, or None."""
    return _existing(root, SCRIPTS.get(lane, ""))


def _existing(root: Path, name: str) -> Path | None:
    path = root / name if name else None
    return path if path is not None and path.exists() else None


def _candidate(text: str) -> Requirement:
    try:
        if text.endswith(".whl") and "://" not in text:
            path = Path(text).expanduser().absolute()
            if not path.is_file():
                raise BumpgateError(f"{text}: no such wheel file")
            return Requirement(f"{parse_wheel_filename(path.name)[0]} @ {path.as_uri()}")
        return Requirement(text)
    except (InvalidRequirement, InvalidWheelFilename) as error:
        raise BumpgateError(
            f"invalid candidate {text!r} (expected a requirement such as torch==2.14.0): {one_line(error, 80)}"
        ) from None


def check_request(request: Request) -> None:
    """Validate a request. Raises BumpgateError."""
    if request.lock is not None and request.requirements:
        raise BumpgateError("a request has a lock or requirements, not both")
    for text in request.requirements:
        try:
            Requirement(text)
        except InvalidRequirement as error:
            raise BumpgateError(f"invalid requirement {text!r} ({one_line(error, 80)})") from None
    if request.lock is not None:
        python = read_lock(request.lock).python
        if python and request.python.count(".") == 1 and request.python != python:
            raise BumpgateError(
                f"{request.lock.name} is for Python {python}, not {request.python}: freeze it again"
            )


def request_key(request: Request, resolved: str | None) -> str:
    """Hash everything that determines the content of the environment, and nothing else."""
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "requirements": sorted(request.requirements),
        "files": sorted(_file_stamp(Requirement(r)) for r in request.requirements),
        "python": platform.python_version() if request.python == RUNNING else request.python,
        "platform": [sysconfig.get_platform(), platform.python_implementation(), *platform.libc_ver()],
        "lock": request.lock.read_text(encoding="utf-8") if request.lock else None,
        "prefer": request.prefer.read_text(encoding="utf-8") if request.prefer and resolved is None else None,
        "overrides": request.overrides.read_text(encoding="utf-8") if request.overrides else None,
        "index": request.index,
        "find_links": list(request.find_links),
        "switches": [request.offline, request.dependencies, request.only_wheels],
        "host": deciding_settings(),
        "resolved": resolved,
    }
    if request.forced:
        content["forced"] = sorted(request.forced)
    if request.script:
        content["script"] = request.script.read_text(encoding="utf-8")
    # A lock determines every byte by hash, so the sources of the files do not matter.
    if request.lock:
        content |= {"index": None, "find_links": [], "host": {}, "switches": []}
    else:
        content["folders"] = _folder_stamps(request)
        if files := deciding_files():
            content["host_files"] = files
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]


def _file_stamp(requirement: Requirement) -> list[Any]:
    """Return facts that identify a local file: one version may be built many times under the same file name."""
    path = local_path(requirement.url) if requirement.url else None
    return [requirement.url, *_stamp(path)] if path else []


def _folder_stamps(request: Request) -> list[Any]:
    places = [*request.find_links, *deciding_settings().get("UV_FIND_LINKS", "").split(",")]
    folders = [local_path(place) for place in places if place]
    return [
        [str(f), sorted([w.name, *_stamp(w)] for w in f.glob("*.whl"))] for f in folders if f and f.is_dir()
    ]


def _stamp(path: Path) -> list[int]:
    try:
        found = path.stat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]


def without_url(text: str) -> str:
    """Strip the URL, which may hold a password."""
    requirement = Requirement(text)
    return f"{requirement.name} @ ..." if requirement.url else text
