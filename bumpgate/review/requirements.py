"""The pins of a lane, moved to an adopted set: in its requirements file, or in its extra in pyproject.toml."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from bumpgate.core import lanes
from bumpgate.env.freeze import keeps
from bumpgate.env.lane import lane_lock
from bumpgate.env.locks import Lock, read_lock
from bumpgate.env.packages import satisfies
from bumpgate.env.request import RUNNING
from bumpgate.process.file_transaction import AdoptionError, read

# What pip ignores in a line of a requirements file.
COMMENT = re.compile(r"(^|\s)#.*")


@dataclass(frozen=True)
class Moving:
    """One adoption. versions, python: of the set. without: requirements that it gives up.

    kind: what lists the requirements of the lane. locked: lane -> versions, of the other lanes with their own lock.
    """

    lane: str
    versions: Mapping[str, str]
    python: str
    without: Collection[str]
    kind: str
    locked: Mapping[str, Mapping[str, str]]

    def moved(self, text: str, where: str, users: Iterable[str]) -> str:
        """Return a requirement with its exact pin moved, "" if it is given up; the same if it is not for this platform.

        where: the place of the requirement. users: other lanes that have it. Raises AdoptionError (one line) if their
        locks contradict the change, or if the requirement contradicts the set and is no exact pin.
        """
        requirement = Requirement(text)
        name = str(canonicalize_name(requirement.name))
        if not self._applies(requirement):
            return text
        new = None if name in self.without else self._repinned(requirement)
        if new == requirement:
            self.check(text, where)
            return text
        for lane in users:
            theirs = self.locked[lane].get(name)
            if theirs and not (new and keeps(theirs, new.specifier)):
                raise AdoptionError(
                    f"{where} has {text}, which is also a pin of lane {lane}, whose lock has {name} {theirs}: write"
                    f" the pin into the own {self.kind} of each lane ({self.lane}, {lane}) instead, and gate again"
                )
        return str(new or "")

    def check(self, text: str, where: str) -> None:
        """Raise AdoptionError (one line) if a requirement that stays contradicts the set."""
        requirement = Requirement(text)
        version = self.versions.get(canonicalize_name(requirement.name))
        if version and self._applies(requirement) and not keeps(version, requirement.specifier):
            raise AdoptionError(
                f"{where} has {text}, which contradicts the new set ({requirement.name} {version}), and the next"
                f" bumpgate freeze would obey it: change it to allow {version}, and gate again"
            )

    def _applies(self, requirement: Requirement) -> bool:
        here = {"python_version": self.python, "python_full_version": f"{self.python}.0"}
        other = self.python not in ("", RUNNING)
        return requirement.marker is None or requirement.marker.evaluate(here if other else None)

    def _repinned(self, requirement: Requirement) -> Requirement:
        """Return a requirement with its exact pin moved; the same if it has none, or the set keeps it."""
        version = self.versions.get(canonicalize_name(requirement.name))
        exact = [s for s in requirement.specifier if s.operator in ("==", "===")]
        if version is None or not exact or satisfies(version, requirement.specifier):
            return requirement
        # A local label in the pin names one build; without it any build of the release is accepted, as before.
        label = any(Version(s.version).local for s in exact if "*" not in s.version)
        new = Requirement(str(requirement))
        new.specifier = SpecifierSet(f"=={version if label else Version(version).public}")
        return new


def moved_requirements(
    root: Path, lane: str, lock: Lock, without: Collection[str] = (), back: Collection[str] = ()
) -> dict[Path, str]:
    """Return path -> text of the file that has the requirements of a lane, with the set's pins; empty if it stays.

    Comments and order are kept. back: packages of the set that are required again.
    Raises AdoptionError (one line) if a requirement that contradicts the set would remain, or one would change that the
    lock of another lane needs.
    """
    known = lanes.load(root)
    own = lanes.choose(known, lane)
    others = [other for other in known if other != lane and lane_lock(root, other).exists()]
    locked = {other: read_lock(lane_lock(root, other)).versions for other in others}
    kind = "requirements file" if own.requirements else "extra"
    moving = Moving(lane, lock.versions, lock.python, without, kind, locked)
    pins = [f"{name}=={Version(lock.versions[name]).public}" for name in sorted(back)]
    path = root / (own.requirements or lanes.PROJECT)
    text = read(path)
    if text is None:
        return {}
    if own.requirements:
        users = [other for other in locked if known[other].requirements == own.requirements]
        new = _moved_file(text, partial(moving.moved, where=own.requirements, users=users))
        new = "\n".join([new.rstrip("\n"), *pins, ""]) if pins else new
    else:
        starts = {name: known[name].extra or name for name in locked if not known[name].requirements}
        new = _moved_project(text, moving, own.extra or lane, starts, pins, whole=lanes.is_foreign(root))
    return {path: new} if new != text else {}


def _moved_file(text: str, moved: Callable[[str], str]) -> str:
    lines = []
    for line in text.splitlines(keepends=True):
        old = COMMENT.sub("", line).strip()
        new = moved(old) if old else old
        if new or not old:
            lines.append(line.replace(old, new, 1))
    return "".join(lines)


def _moved_project(
    text: str,
    moving: Moving,
    start: str,
    starts: Mapping[str, str],
    pins: Sequence[str],
    *,
    whole: bool,
) -> str:
    """Return pyproject.toml with the pins of an extra, and of those that it includes, moved, and `pins` added to it.

    starts: the extra of each other lane. whole: the project's own dependencies belong to the lane, too.
    """
    import tomlkit

    document = tomlkit.parse(text)
    project: Any = document.get("project", {})
    extras: Any = project.get("optional-dependencies", {})
    name = canonicalize_name(str(project.get("name", "")))
    reached = {lane: _reached(extras, extra, name) for lane, extra in starts.items()}
    changed = False
    for extra in _reached(extras, start, name):
        users = [lane for lane, found in reached.items() if extra in found]
        where = f"{lanes.PROJECT}: extra {extra}"
        for index in reversed(range(len(extras[extra]))):
            old = str(extras[extra][index])
            new = moving.moved(old, where, users)
            if not new:
                del extras[extra][index]
            elif new != old:
                extras[extra][index] = new
            changed = changed or new != old
    for pin in pins:
        one_line = "\n" not in extras[start].as_string()
        (extras[start].append if one_line else extras[start].add_line)(pin)
        changed = True
    for old in project.get("dependencies", ()) if whole else ():
        moving.check(str(old), f"{lanes.PROJECT}: dependencies")
    return tomlkit.dumps(document) if changed else text


def _reached(extras: Mapping[str, Sequence[str]], start: str, project: str) -> list[str]:
    """Return an extra and those that it includes, each once."""
    waiting, found = [start], list[str]()
    while waiting:
        extra = waiting.pop(0)
        if extra in found or extra not in extras:
            continue
        found.append(extra)
        for text in extras[extra]:
            requirement = Requirement(str(text))
            if canonicalize_name(requirement.name) == project:
                waiting += sorted(requirement.extras)
    return found
