"""Environments of a gate's sides: how each is built or taken over, its compile caches and its name."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.core.text import redacted
from bumpgate.env import compiled, project
from bumpgate.env.build import BuildError, Environment, NotInstallable, build
from bumpgate.env.lane import LaneContext, lane_request
from bumpgate.env.locks import file_digests
from bumpgate.env.packages import lock_variables
from bumpgate.env.request import Request
from bumpgate.env.versions import require
from bumpgate.gate.state import GateConfig, GateError
from bumpgate.gate.view import View
from bumpgate.process.host import PROJECT
from bumpgate.process.tree_digest import Binding
from bumpgate.wheels import fitting as wheels

SIDES = ("adopted", "candidate")
# Rounds that a timed test keeps per process. Enough for a median: the remaining error is per-process bias.
ROUNDS = 15
# Variables that name the folder of a compile cache.
CACHE = re.compile(r"\w+_CACHE_DIR")
# Above pytest's own timeout per test, which names the test; this one only catches what that cannot stop.
TEST_SECONDS = 660


def side_name(title: str, candidate: str, packages: Mapping[str, str]) -> str:
    """Return the name of a side: the package that the candidate names, else torch, with this side's version."""
    named = re.match(r"([A-Za-z0-9][\w.-]*)\s*[=<>~!]", candidate)
    package = str(canonicalize_name(named[1])) if named else "torch"
    package = package if package in packages else "torch"
    return f"{package} {packages[package]} ({title})" if package in packages else title


@dataclass(frozen=True)
class EnvSpec:
    """Interpreter of a side, with its compile caches.

    variables: env_vars of its first pair of compile caches.
    failure: why the interpreter is missing.
    command: rebuilds the environment, or investigates why it could not be built.
    lock: its resolved lock.
    more: env_vars of independent further pairs, for timed tests.
    wheels: of an interpreter without a lock, the digest of the files of each kernel wheel.
    artifacts: package -> sha256 of its files in the lock.
    """

    python: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""
    command: str = ""
    lock: Path | None = None
    more: tuple[Mapping[str, str], ...] = ()
    wheels: Mapping[str, str] = field(default_factory=dict)
    artifacts: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def cache_folders(self) -> dict[str, str]:
        """Return the variables that name the folders of its first pair of compile caches."""
        return {name: folder for name, folder in self.variables.items() if CACHE.fullmatch(name)}

    def caches(self, pair: int) -> Mapping[str, str]:
        """Return the env_vars of one pair of compile caches."""
        return (self.variables, *self.more)[pair]

    def mark_filled(self, pair: int, tree: Binding | None) -> None:
        """Note next to a pair of compile caches that this work tree has filled them."""
        mark = self._mark(pair)
        if mark.parent.is_dir():
            mark.write_text(tree.tree if tree else "", encoding="utf-8")

    def is_filled(self, pair: int, tree: Binding | None) -> bool:
        """Return whether this work tree has filled them: not if a gate is resumed on another machine."""
        mark = self._mark(pair)
        return mark.is_file() and mark.read_text(encoding="utf-8") == (tree.tree if tree else "")

    def _mark(self, pair: int) -> Path:
        inductor = self.caches(pair).get("TORCHINDUCTOR_CACHE_DIR", "/nonexistent/inductor")
        return Path(inductor).parent / "filled"


def environments(
    config: GateConfig, root: Path, view: View, wanted: Mapping[str, Sequence[Request]], *, new: bool
) -> dict[str, EnvSpec]:
    """Return an environment for each side. A side that cannot be built has its `failure` set.

    wanted: side -> its requests, of `requests`.
    new: the gate is not resumed.
    Raises GateError if an interpreter of the user lacks a kernel wheel that `--without` does not name.
    """
    found = {
        name: _of_set(name, wanted[name], root, config.lane, view)
        if name in wanted
        else _of_interpreter(name, python, root, config, new=new)
        for name, (python, _) in config.requests.items()
    }
    if not (config.base or LaneContext(root, config.lane).declared.install):
        return found
    made = {name: _with_project(name, spec, root, config, view) for name, spec in found.items()}
    folders = [Path(spec.variables[PROJECT]) for spec in made.values() if PROJECT in spec.variables]
    if config.base and len(folders) == 2 and project.same(*folders):
        raise GateError(
            f"the sides are equal: the work tree has the project of commit {config.base[:12]}; change it, or name "
            "another --base"
        )
    return made


def _with_project(name: str, spec: EnvSpec, root: Path, config: GateConfig, view: View) -> EnvSpec:
    """Build the project for a side: the adopted one at the base, if there is one."""
    if spec.failure:
        return spec
    commit = config.base if name == "adopted" else ""
    try:
        with view.doing(f"{name}: building the project"):
            key = str(spec.python.parent.parent.resolve())
            folder = project.installed(root, spec.python, key, view.say, commit)
    except BuildError as error:
        return replace(spec, failure=one_line(error), command=f"less {shlex.quote(str(error.log))}")
    # Tests inside of the package are collected in the work tree, and imported from the side's own build.
    own = {PROJECT: str(folder), "PY_IGNORE_IMPORTMISMATCH": "1"}
    return replace(spec, variables={**spec.variables, **own}, more=tuple({**m, **own} for m in spec.more))


def requests(
    config: GateConfig, root: Path, index: str | None, find_links: Sequence[str]
) -> dict[str, list[Request]]:
    """Return side -> the requests of its set, the first that can be built counts.

    A candidate of torch is requested in the adopted variant first, such as 2.15.0+cpu.
    Raises BumpgateError on bad input: also on a package or a version that no index has.
    """
    if index is not None and not re.match(r"(https?|file)://.", index):
        raise GateError(f"--index {redacted(index)}: must be a URL such as https://HOST/index")
    lane = LaneContext(root, config.lane)
    named = any(text and not python for python, text in config.requests.values())
    adopted = _adopted_torch(lane) if named else ""
    sources: dict[str, Any] = {"index": index, "find_links": tuple(find_links)}
    found = {
        name: [
            lane_request(root, config.lane, each or None, **sources)
            for each in (*same_variant(text, adopted), text)
        ]
        for name, (python, text) in config.requests.items()
        if not python
    }
    for name, (python, text) in config.requests.items():
        if text and not python and not text.endswith(".whl"):
            near = lane.lock.versions if lane.lock else [Requirement(r).name for r in lane.requirements()]
            require(Requirement(text), near, found[name][-1].python, **sources)
    return found


def _adopted_torch(lane: LaneContext) -> str:
    """Return the version of torch in a lane's lock, or that its requirements pin; "" without one."""
    if lane.lock:
        return lane.lock.versions.get("torch", "")
    pins = (re.match(r"torch\s*==\s*([\w.+]+)", each) for each in lane.requirements())
    return next((pin[1] for pin in pins if pin), "")


def same_variant(requirement: str, adopted: str) -> list[str]:
    """Return the requirement on one version of torch with the label of the adopted one, if that names a device.

    A label with a number, such as cu130, is a part of the bump.
    """
    label = adopted.partition("+")[2]
    named = re.fullmatch(r"torch\s*==\s*([\w.]+)", requirement)
    return [f"torch=={named[1]}+{label}"] if named and re.fullmatch("[a-z]+", label) else []


def _of_interpreter(name: str, python: str, root: Path, config: GateConfig, *, new: bool) -> EnvSpec:
    """Return the environment of an interpreter of the user. new: its gate is not resumed.

    Raises GateError if it lacks kernel wheels of the lane that `--without` does not name: an environment that was
    prepared badly would be judged without the rows of its peers.
    """
    quoted = shlex.quote(python)
    listing = f"{quoted} -m pip list"
    try:
        lane = LaneContext(root, config.lane)
        absent, contents = wheels.missing(lane, Path(python)), wheels.contents(lane, Path(python))
    except BumpgateError as error:
        return EnvSpec(Path(), {}, one_line(error), listing)
    if unnamed := [package for package in absent if package not in config.without]:
        options = " ".join(f"--without {package}" for package in unnamed)
        raise GateError(
            f"{python} lacks {', '.join(unnamed)} of lane {config.lane}: install them"
            f" (bumpgate wheels plan --lane {config.lane} --python {quoted} lists which fit),"
            f" or add, if that is intended: {options}"
        )
    lacking = wheels.variables({each: f"{why} (--without)" for each, why in absent.items()})
    key = compiled.HANDED_IN + hashlib.sha256(python.encode()).hexdigest()[:16]
    own = {**lock_variables(None), **lacking, **compiled.bytecode(key, name, new=new)}
    first, *more = ({**c, **own} for c in compiled.copies(key, name))
    return EnvSpec(Path(python), first, command=listing, more=tuple(more), wheels=contents)


def _of_set(name: str, wanted: Sequence[Request], root: Path, lane: str, view: View) -> EnvSpec:
    """Build the environment of a set of packages: of the first request, or the next if no index has it."""
    try:
        with view.doing(f"{name}: building its environment"):
            request, made = _first(wanted, view)
            fitted = wheels.fit(LaneContext(root, lane), request, made, request.find_links, view.say)
    except BumpgateError as error:
        log = f"less {shlex.quote(str(error.log))}" if isinstance(error, BuildError) else "bumpgate doctor"
        return EnvSpec(Path(), {}, one_line(error), log)
    made = fitted.environment
    own = {**lock_variables(made.lock), **wheels.variables(fitted.absent)}
    first, *more = ({**c, **own} for c in compiled.copies(made.key, name))
    listing = f"cat {made.lock}" if made.lock else ""
    files = file_digests(made.lock) if made.lock else {}
    return EnvSpec(made.python, first, command=listing, lock=made.lock, more=tuple(more), artifacts=files)


def _first(wanted: Sequence[Request], view: View) -> tuple[Request, Environment]:
    for request in wanted[:-1]:
        try:
            return request, build(request, say=view.say)
        except NotInstallable:
            other = "another variant is compared (--index URL names one that has it)"
            view.say(f"no index has {request.title}: {other}")
    return wanted[-1], build(wanted[-1], say=view.say)


def keep_locks(specs: Mapping[str, EnvSpec], out: Path) -> None:
    """Keep the resolved lock next to gate.json: `bumpgate adopt` needs it when the environment is gone."""
    for name, spec in specs.items():
        kept = out / f"{name}.pylock.toml"
        kept.unlink(missing_ok=True)
        if spec.lock:
            kept.write_text(redacted(spec.lock.read_text(encoding="utf-8")), encoding="utf-8")
