"""Lanes: where rows are measured, as data.

A repository declares its lanes in one of three places: folders `lanes/NAME/` with a lane.toml, `[lanes.NAME]` in
bumpgate.toml, or `[tool.bumpgate.lanes.NAME]` in pyproject.toml. The fields are the same, and the first place that has
lanes counts. Whatever the place, `lanes/NAME/pylock.toml` is the adopted set of the lane and of its heirs.

Standard library only: read by the controller and, in every lane run, by the pytest plugin.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from bumpgate.core.errors import BumpgateError, one_line

PROJECT, OWN = "pyproject.toml", "bumpgate.toml"
FOLDER, FILE, LOCK = "lanes", "lane.toml", "pylock.toml"
DEVICES = ("cpu", "cuda", "xla")
NAME = re.compile(r"[a-z][a-z0-9_]*")
# What a machine of the lane must have, next to its device.
NEEDS = ("c++", "avx2")
# How much a lane's name must resemble a mistyped one, of 1.
LIKE = 0.75
# When a variable of a lane is set: in each run; unless it is set; unless it is set, where workers run the tests.
VARIABLES = ("always", "default", "workers")
WORDS = {str: "a string", int: "a number", bool: "true or false", list: "a list of strings", dict: "a table"}
Table = Mapping[str, Any]


class LaneError(BumpgateError):
    """A lane that is not declared, or a declaration that cannot be read. One line."""


@dataclass(frozen=True)
class Lane:
    """One lane; its name is a pytest marker and the file name of its baseline, baselines/<name>.json.

    description: of its marker.
    device: the torch device type.
    gpu: a regular expression that is found in the GPU's name; "" for any.
    count: minimum number of GPUs.
    capability: the compute capability, "9.0"; "" for any.
    driver: the oldest GPU driver.
    needs: of NEEDS.
    inherits: a lane whose fields this one has unless it sets them, and whose reviewed rows hold here, too, unless a
        host decides them (`baseline.inherited`).
    extra, requirements: the group or extra of pyproject.toml, or the requirements file, of a lane run.
    python: a specifier of the Pythons that the lane runs with; by default the one of its lock.
    pins: packages whose locked versions an installed environment must have.
    paired: packages that are built against one minor release of each other.
    overrides: a uv file of requirements that replace what packages ask for. script: a program that completes an
    environment. Both, and the patches of kernel wheels, are next to the lane.toml; else paths from the root.
    canaries: the folder or file of canary tests that a gate runs first; "" for none.
    smoke: tests that a rollback runs, by path or node id; by default the canaries.
    install: whether each side of a gate installs the project itself, with the dependencies of its pyproject.toml.
    tests: files and folders whose tests belong to the lane without its marker; the outcome of each is a row.
    slow_modes: whether a gate takes enough sessions to find processes that are slow as a whole.
    margins: (pattern of row ids, change) of timed rows that vary too much between processes on this lane to be compared
    within the usual margin: the paired sessions call them SAME within that change. A table in the file.
    variables: when (of VARIABLES) -> name -> value, set before torch is imported; `{cache}` is bumpgate's cache.
    wheels, without: kernel wheels, and the given-up ones (`bumpgate.env.packages`).
    folder: of its lane.toml, from the root; "" for a table of another file.
    where: the table, for messages.
    """

    name: str
    device: str = "cpu"
    gpu: str = ""
    count: int = 1
    capability: str = ""
    driver: str = ""
    needs: tuple[str, ...] = ()
    inherits: str = ""
    extra: str = ""
    requirements: str = ""
    python: str = ""
    pins: tuple[str, ...] = ("torch",)
    paired: tuple[str, ...] = ()
    overrides: str = ""
    script: str = ""
    canaries: str = ""
    smoke: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    install: bool = False
    slow_modes: bool = False
    margins: tuple[tuple[str, float], ...] = ()
    description: str = ""
    without: tuple[str, ...] = ()
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict, hash=False)
    wheels: Table = field(default_factory=dict, hash=False)
    folder: str = field(default="", compare=False)  # of the files that it names
    where: str = field(default="", compare=False)

    @property
    def lock(self) -> str:
        """Path of the lane's lock from the root: the adopted set. An heir has the set that its counts belong to."""
        return f"{FOLDER}/{self.inherits or self.name}/{LOCK}"

    def path(self, name: str) -> str:
        """Return the path from the root of a file that the declaration names."""
        return (PurePosixPath(self.folder) / name).as_posix()


def load(root: Path) -> dict[str, Lane]:
    """Return the declared lanes of a repository by name; empty if it has none.

    Folders are in the order of their names, tables in the order of the file. Raises LaneError on a file that cannot be
    read or an invalid lane.
    """
    files = sorted(root.glob(f"{FOLDER}/*/{FILE}"))
    raw: Mapping[str, Any] = {path.parent.name: _read_file(path, root) for path in files}
    places = {name: f"{FOLDER}/{name}/{FILE}" for name in raw}
    if not raw:
        where, raw = _tables(root)
        places = {name: f"{where}.{name}" for name in raw}
    lanes = {name: _lane(places[name], name, _with_inherited(places[name], name, raw)) for name in raw}
    for name, lane in lanes.items():
        if lane.inherits and lane.folder and not {"overrides", "script", "wheels"} & raw[name].keys():
            lanes[name] = replace(lane, folder=f"{FOLDER}/{lane.inherits}")
        _check_paths(root, lane)
    return lanes


def _with_inherited(where: str, name: str, raw: Mapping[str, Any]) -> Any:
    """Return the fields of a lane with those that it takes from the lane that it inherits.

    Ids of tests and rows that name the parent name the lane.
    """
    own = raw[name]
    parent = own.get("inherits") if isinstance(own, Mapping) else None
    if not parent:
        return own
    table = raw.get(parent) if isinstance(parent, str) and parent != name else None
    if not isinstance(table, Mapping) or "inherits" in table:
        raise LaneError(f"{where}: inherits must name a lane that does not inherit, got {parent!r}")
    rename = partial(re.sub, rf"(?<!\w){re.escape(parent)}(?!\w)", name)
    taken = {key: value for key, value in table.items() if key != "description"}
    if isinstance(margins := taken.get("margins"), Mapping):
        taken["margins"] = {rename(pattern): margin for pattern, margin in margins.items()}
    if isinstance(smoke := taken.get("smoke"), list):
        taken["smoke"] = [rename(str(test)) for test in smoke]
    extra = {} if "requirements" in taken else {"extra": parent}
    return {**extra, **taken, **own}


def _tables(root: Path) -> tuple[str, Table]:
    for name, path in ((OWN, ("lanes",)), (PROJECT, ("tool", "bumpgate", "lanes"))):
        try:
            found: Any = _read_file(root / name, root)
        except FileNotFoundError:
            continue
        for key in path:
            found = found.get(key, {}) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            raise LaneError(f"{name}: {'.'.join(path)} must be a table of lanes")
        if found or name == OWN:
            return f"{name}: {'.'.join(path)}", found
    return "", {}


def _check_paths(root: Path, lane: Lane) -> None:
    for tests in lane.tests:
        if PurePosixPath(tests).is_absolute() or ".." in PurePosixPath(tests).parts:
            raise LaneError(f"{lane.where}: tests: {tests} must be a path below the repository")
        if not (root / tests).exists():
            raise LaneError(f"{lane.where}: tests: {tests} does not exist")


def require(root: Path, name: str) -> Lane:
    """Return the lane of that name; of an empty name, the only one. Raises LaneError, with how to declare it."""
    return choose(load(root), name)


def choose(lanes: Mapping[str, Lane], name: str) -> Lane:
    """Return a lane like `require`, from lanes that have been read already."""
    if name in lanes:
        return lanes[name]
    if not name and len(lanes) == 1:
        return next(iter(lanes.values()))
    if not name and lanes:
        raise LaneError(f"name the lane: --lane {' or '.join(lanes)}")
    close = get_close_matches(name, lanes, 1, LIKE)
    fix = f"did you mean {close[0]}?" if close else how_to_declare(name)
    raise LaneError(f"unknown lane {name!r}; lanes: {', '.join(lanes) or 'none'}; {fix}")


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
    root = next(filter(is_root, path.absolute().parents), None)
    return tuple(load(root)) if root else ()


def is_root(folder: Path) -> bool:
    """Return whether a folder is the root of a repository: it declares lanes, or has a project's file."""
    named = (folder / PROJECT).is_file() or (folder / OWN).is_file()
    return named or any(folder.glob(f"{FOLDER}/*/{FILE}"))


def _read_file(path: Path, root: Path) -> dict[str, Any]:
    """Parse a file. Raises LaneError, and FileNotFoundError."""
    try:
        return _read(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        name = path.relative_to(root).as_posix()
        raise LaneError(f"{name}: cannot be read ({one_line(error, 120)})") from None


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
    blank = Lane(name)
    kinds = {f.name: type(getattr(blank, f.name)) for f in fields(Lane) if f.compare and f.name != "name"}
    for key, value in raw.items():
        if key not in kinds:
            raise LaneError(f"{where}: unknown field {key!r}; fields: {', '.join(kinds)}")
        if key != "margins":
            _check_kind(where, key, value, list if kinds[key] is tuple else kinds[key])
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()
    }
    values["margins"] = tuple(_margins(where, raw.get("margins", {})))
    folder = f"{FOLDER}/{name}" if where.endswith(f"/{FILE}") else ""
    lane = Lane(name, **values, folder=folder, where=where)
    _check(lane)
    return lane


def _check_kind(where: str, key: str, value: Any, kind: type) -> None:
    texts = not isinstance(value, list) or all(isinstance(text, str) for text in value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or not texts:
        raise LaneError(f"{where}: {key} must be {WORDS[kind]}, got {value!r}")


def _check(lane: Lane) -> None:
    if lane.device not in DEVICES:
        raise LaneError(f"{lane.where}: device must be one of {', '.join(DEVICES)}, got {lane.device!r}")
    if unknown := [need for need in lane.needs if need not in NEEDS]:
        raise LaneError(f"{lane.where}: needs must be of {', '.join(NEEDS)}, got {unknown[0]!r}")
    if lane.device != "cuda" and (lane.gpu or lane.capability or lane.count != 1):
        raise LaneError(f"{lane.where}: gpu, count and capability are for device = 'cuda'")
    if lane.count < 1:
        raise LaneError(f"{lane.where}: count must be at least 1, got {lane.count}")
    if lane.extra and lane.requirements:
        raise LaneError(f"{lane.where}: extra or requirements, not both")
    for when, variables in lane.variables.items():
        if when not in VARIABLES or not isinstance(variables, Mapping):
            raise LaneError(f"{lane.where}: variables must be tables {', '.join(VARIABLES)}, got {when!r}")
        if wrong := [value for value in variables.values() if not isinstance(value, str)]:
            raise LaneError(f"{lane.where}: variables.{when}: a value must be a string, got {wrong[0]!r}")
    try:
        re.compile(lane.gpu)
    except re.error as error:
        raise LaneError(f"{lane.where}: gpu is not a regular expression ({error})") from None


def _margins(where: str, raw: Any) -> Iterator[tuple[str, float]]:
    if not isinstance(raw, Mapping):
        raise LaneError(f'{where}: margins must be a table such as {{"throughput/*" = 0.2}}, got {raw!r}')
    for pattern, margin in raw.items():
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 < margin < 1:
            raise LaneError(f"{where}: margins: {pattern!r} must be between 0 and 1, got {margin!r}")
        yield str(pattern), float(margin)
