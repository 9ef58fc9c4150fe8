"""Build requests: a request names requirements or a lock; its hash is the key of its environment."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.env.locks import read_lock
from bumpgate.env.uv import deciding_files, deciding_settings, local_path

SCHEMA = 1
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


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

    @property
    def title(self) -> str:
        if self.name:
            return self.name
        return self.lock.name if self.lock else " ".join(self.requirements[:1]) or "an empty environment"


def check_request(request: Request) -> None:
    """Validate a request. Raises BumpgateError."""
    if request.lock is not None and request.requirements:
        raise BumpgateError("a request has a lock or requirements, not both")
    for text in request.requirements:
        try:
            Requirement(text)
        except ValueError as error:
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
