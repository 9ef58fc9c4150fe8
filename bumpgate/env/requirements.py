"""The requirements of a lane, with exact pins as in a lock.

They are in a requirements file, or in pyproject.toml as a group of [dependency-groups] or as an extra.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from bumpgate.core import lanes
from bumpgate.core.errors import BumpgateError, one_fault
from bumpgate.core.lanes import Lane
from bumpgate.core.toml import tomllib
from bumpgate.env.locks import Lock
from bumpgate.env.packages import satisfies
from bumpgate.env.request import RUNNING

# Locks of package managers: a lane takes the versions of the project's own dependencies from them.
LOCKS = ("uv.lock", "poetry.lock", "pdm.lock", "pylock.toml")
# Packages that are built for one torch: a candidate of torch moves them, so that no version is taken from a lock.
WITH_TORCH = ("torchvision", "torchaudio", "torchtext", "triton")
# What pip ignores in a line of a requirements file.
COMMENT = re.compile(r"(^|\s)#.*")


@dataclass(frozen=True)
class Pins:
    """Moves exact pins to the versions of a lock. without: packages whose requirements are dropped."""

    lock: Lock
    without: Collection[str] = ()

    def moved(self, text: str) -> str:
        """Return a requirement with its exact pin moved, "" if it is dropped; the same if the lock keeps it."""
        requirement = Requirement(text)
        name = str(canonicalize_name(requirement.name))
        if not self._applies(requirement):
            return text
        if name in self.without:
            return ""
        version = self.lock.versions.get(name)
        exact = [s for s in requirement.specifier if s.operator in ("==", "===")]
        if version is None or not exact or satisfies(version, requirement.specifier):
            return text
        # A local label in the pin names one build; without it any build of the release is accepted.
        label = any(Version(s.version).local for s in exact if "*" not in s.version)
        requirement.specifier = SpecifierSet(f"=={version if label else Version(version).public}")
        return str(requirement)

    def contradicts(self, text: str) -> bool:
        """Return whether the lock has a package in a version that a requirement does not allow."""
        requirement = Requirement(text)
        version = self.lock.versions.get(canonicalize_name(requirement.name))
        return bool(version and self._applies(requirement) and not keeps(version, requirement.specifier))

    def _applies(self, requirement: Requirement) -> bool:
        """Return whether a requirement is for this platform and the lock's Python."""
        here = {"python_version": self.lock.python, "python_full_version": f"{self.lock.python}.0"}
        other = self.lock.python not in ("", RUNNING)
        return requirement.marker is None or requirement.marker.evaluate(here if other else None)


def keeps(version: str, pin: SpecifierSet) -> bool:
    """Return whether a version satisfies a pin; an index may omit the local label that the pin has."""
    without = re.sub(r"\+[\w.]+", "", str(pin)) if Version(version).local is None else str(pin)
    return satisfies(version, SpecifierSet(without))


def requirements_file(root: Path, lane: Lane) -> Path:
    return root / (lane.requirements or lanes.PROJECT)


def of_lane(root: Path, lane: Lane) -> list[str]:
    """Return the requirements of a lane; of another project than bumpgate also its dependencies, as pip does.

    Raises BumpgateError (one line) if the file cannot be read, or has neither such a group nor such an extra.
    """
    path, name = requirements_file(root, lane), lane.extra or lane.name
    if lane.requirements:
        if path.suffix in (".yml", ".yaml"):
            raise BumpgateError(
                f"{lane.requirements}: conda's file is not read: list its packages for pip instead"
            )
        fix = "restore it, or name another file as `requirements` of the lane"
        with one_fault(f"{lane.requirements}: cannot be read", fix=fix):
            text = path.read_text(encoding="utf-8")
            own: Sequence[str] = of_project(root) if lane.install or path.name in LOCKS else []
            found = _locked(text, own) if path.name in LOCKS else [each for _, each in places(lane, text)]
        for each in found:
            with one_fault(f"{lane.requirements}: {each!r} is not a requirement such as torch==2.13.0"):
                Requirement(each)
        named = set(map(_name, found))
        return [*found, *(each for each in own if _name(each) not in named)]
    with one_fault(f"{lanes.PROJECT} has no extra {name!r}"):
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
        project = document["project"]
        groups, extras = _tables(document)
        if name not in groups and name not in extras:
            known = ", ".join(sorted({*groups, *extras}))
            raise BumpgateError(f"no extra or group {name!r} in {lanes.PROJECT}; it has: {known}")
    fix = "write it as in torch==2.13.0"
    with one_fault(f"{lanes.PROJECT}: extra {name!r} has an invalid requirement", fix=fix):
        own = of_project(root) if lanes.is_foreign(root) else ()
        found = list(dict.fromkeys((*own, *(each for _, each in places(lane, text)))))
        itself = canonicalize_name(project["name"])
        return [each for each in found if canonicalize_name(Requirement(each).name) != itself]


def of_project(root: Path) -> list[str]:
    """Return the dependencies of pyproject.toml, also in Poetry's table, or of an sdist's metadata, without extras."""
    path = root / lanes.PROJECT
    document = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found = list(document.get("project", {}).get("dependencies", ()))
    poetry = document.get("tool", {}).get("poetry", {}).get("dependencies", {})
    found = found or [name for name in poetry if name != "python"]
    if not found and (info := root / "PKG-INFO").is_file():
        stated = HeaderParser().parsestr(info.read_text(encoding="utf-8")).get_all("Requires-Dist", [])
        found = [each for each in map(str, stated) if "extra ==" not in each]
    return found


def _locked(text: str, own: Sequence[str]) -> list[str]:
    """Return a project's own dependencies in the versions of its lock; those that torch moves keep their range."""
    versions, found = locked(text), []
    for each in own:
        requirement = Requirement(each)
        name = _name(each)
        if name in versions and name not in WITH_TORCH:
            requirement.specifier = SpecifierSet(f"=={versions[name]}")
        found.append(str(requirement))
    return found


def locked(text: str) -> dict[str, str]:
    """Return package -> version on this machine, of the text of a package manager's lock."""
    with one_fault("the lock cannot be read", fix="write it again"):
        raw = tomllib.loads(text)
    return {
        str(canonicalize_name(e["name"])): str(e["version"])
        for e in raw.get("package") or raw.get("packages") or []
        if "version" in e and (not (m := e.get("resolution-markers")) or any(Marker(x).evaluate() for x in m))
    }


def _name(requirement: str) -> str:
    return str(canonicalize_name(Requirement(requirement).name))


def places(lane: Lane, text: str) -> list[tuple[str, str]]:
    """Return (place, requirement) of each requirement of a lane. text: of its requirements file."""
    if lane.requirements:
        found = (COMMENT.sub("", line).strip() for line in text.splitlines())
        return [(lane.requirements, each) for each in found if each]
    lists = _lists(lane, tomllib.loads(text))
    return [
        (f"{lanes.PROJECT}: {of}", each) for of, found in lists for each in found if isinstance(each, str)
    ]


def pinned(lane: Lane, text: str, pins: Pins) -> str:
    """Return the text of a lane's requirements file with its pins moved. Comments and order are kept."""
    if Path(lane.requirements).name in LOCKS:
        moved = f"torch=={pins.lock.versions.get('torch', '')}".removesuffix("==")
        how = {"poetry.lock": f"poetry add '{moved}'", "pdm.lock": f"pdm add '{moved}'"}
        command = how.get(Path(lane.requirements).name, f"the one that wrote it, with {moved}")
        raise BumpgateError(
            f"lane {lane.name} takes its versions from {lane.requirements}, which only its package manager changes: "
            f"{command}, and then this lane has adopted it"
        )
    if lane.requirements:
        lines = []
        for line in text.splitlines(keepends=True):
            old = COMMENT.sub("", line).strip()
            new = pins.moved(old) if old else ""
            lines += [line.replace(old, new, 1)] if new or not old else []
        return "".join(lines)
    import tomlkit

    document = tomlkit.parse(text)
    changed = False
    for _, found in _lists(lane, document):
        for index in reversed(range(len(found))):
            if not isinstance(found[index], str):
                continue
            old = str(found[index])
            new = pins.moved(old)
            if not new:
                del found[index]
            elif new != old:
                found[index] = new
            changed = changed or new != old
    return tomlkit.dumps(document) if changed else text


def with_more(lane: Lane, text: str, requirements: Sequence[str]) -> str:
    """Return the text of a lane's requirements file with more requirements at its end, or at the end of its extra."""
    if not requirements:
        return text
    if lane.requirements:
        return "\n".join([text.rstrip("\n"), *requirements, ""])
    import tomlkit

    document: Any = tomlkit.parse(text)
    own = _lists(lane, document)[0][1]
    one_line = "\n" not in own.as_string()
    for each in requirements:
        (own.append if one_line else own.add_line)(each)
    return tomlkit.dumps(document)


def _tables(document: Any) -> tuple[Any, Any]:
    """Return the groups and the extras of a pyproject.toml, each name -> list."""
    return document.get("dependency-groups", {}), document.get("project", {}).get("optional-dependencies", {})


def _lists(lane: Lane, document: Any) -> list[tuple[str, Any]]:
    """Return (description, list) of the lane's group or extra, and of each one that it includes, each once."""
    groups, extras = _tables(document)
    project = canonicalize_name(str(document.get("project", {}).get("name", "")))
    start = lane.extra or lane.name
    waiting, found = [("group" if start in groups else "extra", start)], dict[str, Any]()
    while waiting:
        kind, name = waiting.pop(0)
        entries = (groups if kind == "group" else extras).get(name)
        if entries is None or f"{kind} {name}" in found:
            continue
        found[f"{kind} {name}"] = entries
        for each in entries:
            if not isinstance(each, str):
                waiting.append(("group", str(each["include-group"])))
            elif canonicalize_name((requirement := Requirement(each)).name) == project:
                waiting += [("extra", extra) for extra in sorted(requirement.extras)]
    return list(found.items())
