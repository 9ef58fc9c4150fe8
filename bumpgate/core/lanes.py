"""Lanes: where rows are measured, as data. `[tool.bumpgate.lanes.NAME]` in pyproject.toml, or `[lanes.NAME]` in
bumpgate.toml, which takes precedence if both exist.

Standard library only: read by the controller and, in every lane run, by the pytest plugin.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from bumpgate.core.errors import BumpgateError, one_line

PROJECT, OWN = "pyproject.toml", "bumpgate.toml"
DEVICES = ("cpu", "cuda", "xla")
NAME = re.compile(r"[a-z][a-z0-9_]*")
# What a machine of the lane must have, next to its device.
NEEDS = ("c++", "avx2")


class LaneError(BumpgateError):
    """A lane that is not declared, or a declaration that cannot be read. One line."""


@dataclass(frozen=True)
class Lane:
    """One lane; its name is a pytest marker and the file name of its baseline, baselines/<name>.json.

    device: the torch device type. gpu: a regular expression that is found in the GPU's name; "" for any.
    count: minimum number of GPUs. capability: the compute capability, "9.0"; "" for any. needs: of NEEDS.
    extra, requirements: the extra of pyproject.toml, or the requirements file, of a lane run.
    overrides: a uv file of requirements that replace what packages ask for. canaries: the folder or file of canary
    tests that a gate runs first; "" for none. smoke: tests that a rollback runs, by path or node id; by default the
    canaries.
    tests: files and folders whose tests belong to the lane without its marker; the outcome of each is a row.
    margins: (pattern of row ids, change) of timed rows that vary too much between processes on this lane to be compared
    within the usual margin: the paired sessions call them SAME within that change. A table in the file.
    """

    name: str
    device: str = "cpu"
    gpu: str = ""
    count: int = 1
    capability: str = ""
    needs: tuple[str, ...] = ()
    extra: str = ""
    requirements: str = ""
    overrides: str = ""
    canaries: str = ""
    smoke: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    margins: tuple[tuple[str, float], ...] = ()


def load(root: Path) -> dict[str, Lane]:
    """Return the declared lanes of a repository by name, in order; empty if it has no such table.

    Raises LaneError on a file that cannot be read or an invalid lane.
    """
    for name, path in ((OWN, ("lanes",)), (PROJECT, ("tool", "bumpgate", "lanes"))):
        try:
            found: Any = _read(root / name)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise LaneError(f"{name}: cannot be read ({one_line(error, 120)})") from None
        for key in path:
            found = found.get(key, {}) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            raise LaneError(f"{name}: {'.'.join(path)} must be a table of lanes")
        if found or name == OWN:
            where = f"{name}: {'.'.join(path)}"
            lanes = {lane: _lane(f"{where}.{lane}", lane, raw) for lane, raw in found.items()}
            for lane in lanes.values():
                for tests in lane.tests:
                    if PurePosixPath(tests).is_absolute() or ".." in PurePosixPath(tests).parts:
                        raise LaneError(
                            f"{where}.{lane.name}: tests: {tests} must be a path below the repository"
                        )
                    if not (root / tests).exists():
                        raise LaneError(f"{where}.{lane.name}: tests: {tests} does not exist")
            return lanes
    return {}


def require(root: Path, name: str) -> Lane:
    """Return the lane of that name. Raises LaneError, with how to declare it, if the repository has none."""
    return choose(load(root), name)


def choose(lanes: Mapping[str, Lane], name: str) -> Lane:
    """Return a lane like `require`, from lanes that have been read already."""
    if name in lanes:
        return lanes[name]
    raise LaneError(f"unknown lane {name!r}; lanes: {', '.join(lanes) or 'none'}; {how_to_declare(name)}")


def unused_margins(lane: Lane, rows: Collection[str]) -> list[str]:
    """Return one line per pattern of the lane's margins that matches none of the rows of a whole run."""
    return [
        f"no row of this run or of the baseline matches {pattern!r} of lanes.{lane.name}.margins: correct it"
        for pattern, _ in lane.margins
        if not any(fnmatchcase(row, pattern) for row in rows)
    ]


def is_foreign(root: Path) -> bool:
    """Whether a repository is not bumpgate's own, whose lanes install and load the plugin themselves."""
    if (root / "bumpgate" / "plugin" / "__init__.py").is_file():
        return False
    try:
        project = _read(root / PROJECT).get("project", {})
    except (OSError, ValueError):
        return True
    return bool(project.get("name") != "bumpgate")


def how_to_declare(name: str, gpu: str = "") -> str:
    """Return how to declare a lane, as the end of a sentence."""
    name = name if NAME.fullmatch(name) else "mine"
    device = f"'cuda', gpu = {gpu!r}" if gpu else "'cpu'"
    return f"declare one: [tool.bumpgate.lanes.{name}] in {PROJECT} or [lanes.{name}] in {OWN}, device = {device}"


def known(path: Path) -> tuple[str, ...]:
    """Return the lanes of the repository that contains `path`; () if it declares none."""
    for folder in path.absolute().parents:
        if (folder / OWN).is_file() or (folder / PROJECT).is_file():
            return tuple(load(folder))
    return ()


def _read(path: Path) -> dict[str, Any]:
    """Parse a TOML file. Imports the parser after the file was read: most repositories of a user have no lanes."""
    text = path.read_text(encoding="utf-8")
    from bumpgate.core.toml import tomllib

    found: dict[str, Any] = tomllib.loads(text)
    return found


def _lane(where: str, name: str, raw: Any) -> Lane:
    if not NAME.fullmatch(name):
        raise LaneError(f"{where}: a lane's name is a pytest marker in lower case such as h100 or cuda_2")
    if not isinstance(raw, Mapping):
        raise LaneError(f"{where}: must be a table")
    kinds = {field.name: type(field.default) for field in fields(Lane) if field.name != "name"}
    margins = _margins(where, raw.get("margins", {}))
    for key, value in raw.items():
        if key not in kinds:
            raise LaneError(f"{where}: unknown field {key!r}; fields: {', '.join(kinds)}")
        if key == "margins":
            continue
        kind = list if kinds[key] is tuple else kinds[key]
        texts = not isinstance(value, list) or all(isinstance(text, str) for text in value)
        if not isinstance(value, kind) or isinstance(value, bool) or not texts:
            words = {str: "a string", int: "a number", list: "a list of strings"}
            raise LaneError(f"{where}: {key} must be {words[kind]}, got {value!r}")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    lane = Lane(name, **values | {"margins": margins})
    if lane.device not in DEVICES:
        raise LaneError(f"{where}: device must be one of {', '.join(DEVICES)}, got {lane.device!r}")
    if unknown := [need for need in lane.needs if need not in NEEDS]:
        raise LaneError(f"{where}: needs must be of {', '.join(NEEDS)}, got {unknown[0]!r}")
    if lane.device != "cuda" and (lane.gpu or lane.capability or lane.count != 1):
        raise LaneError(f"{where}: gpu, count and capability are for device = 'cuda'")
    if lane.count < 1:
        raise LaneError(f"{where}: count must be at least 1, got {lane.count}")
    if lane.extra and lane.requirements:
        raise LaneError(f"{where}: extra or requirements, not both")
    try:
        re.compile(lane.gpu)
    except re.error as error:
        raise LaneError(f"{where}: gpu is not a regular expression ({error})") from None
    return lane


def _margins(where: str, raw: Any) -> tuple[tuple[str, float], ...]:
    if not isinstance(raw, Mapping):
        raise LaneError(f'{where}: margins must be a table such as {{"throughput/*" = 0.2}}, got {raw!r}')
    for pattern, margin in raw.items():
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 < margin < 1:
            raise LaneError(f"{where}: margins: {pattern!r} must be between 0 and 1, got {margin!r}")
    return tuple((str(pattern), float(margin)) for pattern, margin in raw.items())
