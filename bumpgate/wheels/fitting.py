"""Adds the kernel wheels that fit to an environment of a lane, and audits what is installed there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.utils import canonicalize_name

from bumpgate.core.errors import BumpgateError
from bumpgate.doctor import abi
from bumpgate.env import store
from bumpgate.env.build import BuildError, Environment, NotInstallable, Request, build, release
from bumpgate.env.cached import Say
from bumpgate.env.inventory import Inventory, take
from bumpgate.env.lane import LaneContext
from bumpgate.process.child import Interpreter
from bumpgate.process.runner import child_environment
from bumpgate.wheels.plan import BUILD, Choice, make_target, plan

# Read by the suites: JSON, package to the reason why the environment has no wheel of it.
VARIABLE = "BUMPGATE_ABSENT"


@dataclass(frozen=True)
class Fitted:
    """An environment with the kernel wheels that fit it.

    request: builds it again. absent: package to the reason why it has no wheel.
    """

    environment: Environment
    request: Request
    absent: Mapping[str, str]


def fit(
    lane: LaneContext,
    request: Request,
    environment: Environment,
    find_links: Sequence[str],
    say: Say = lambda line: None,
) -> Fitted:
    """Add the kernel wheels that pass their audit to a built environment, then audit the installed ones.

    Refused wheels are left out; a lock already has its wheels. A wheel that the lane has given up is added if it fits,
    and not mentioned otherwise. Raises BuildError, ChildFault, BumpgateError.
    """
    own = lane.kernel_wheels
    unaudited = not own and abi.missing_tool()
    if request.lock is not None or not lane.known_kernel_wheels or unaudited:
        return Fitted(environment, request, missing(lane, environment.python))
    target = make_target(lane, environment.python)
    planned = (c for c in plan(lane, target, find_links) if c.package not in environment.packages)
    choices = [c for c in planned if c.wheel or c.package in own]
    for choice in choices:
        for reason in choice.refused:
            say(f"refused: {reason}")
        say(f"{choice.package} {choice.version}: {choice.action}: {choice.reason}")
    absent = {c.package: _why(c) for c in choices if not c.wheel}
    files = {c.package: store.keep(c.wheel) for c in choices if c.wheel}
    if files:
        wheels = tuple(f"{package} @ {path.as_uri()}" for package, path in files.items())
        request = replace(request, requirements=(*request.requirements, *wheels))
        environment = build(request, say=say)
    missing(lane, environment.python)
    return Fitted(environment, request, absent)


def names(reason: str, package: str) -> bool:
    """Return whether a reason why rows are not run names a package: as one word, or by a wheel file."""
    words = re.findall(r"[\w.+-]+", reason)
    found = (word.partition("-")[0] if word.endswith(".whl") else word.rstrip(".-") for word in words)
    return canonicalize_name(package) in map(canonicalize_name, found)


def _why(choice: Choice) -> str:
    """Return a reason that names the package: `bumpgate adopt --without` finds the package's rows by it."""
    reason = f"not built: {choice.reason}" if choice.action == BUILD else choice.reason
    return reason if names(reason, choice.package) else f"{choice.package}: {reason}"


def missing(lane: LaneContext, python: Path) -> dict[str, str]:
    """Return the kernel wheels of the lane's adopted row that an interpreter lacks, with the reason.

    Raises BumpgateError, one line, if anything installed there that is linked against torch fails its audit.
    """
    names = lane.kernel_wheels
    if not names and abi.missing_tool():
        return {}
    found = _inventory(lane, python)
    named = [wheel for name in names if (wheel := found.installed(name))]
    others = [wheel for wheel in abi.built_on_torch(found) if canonicalize_name(wheel.name) not in names]
    for fault in abi.audit_all([*named, *others], found):
        raise BumpgateError(f"{fault.reason}: {fault.wheel} was not built for this torch; uninstall it")
    return {name: f"{name} is not installed" for name in names if found.installed(name) is None}


def contents(lane: LaneContext, python: Path) -> dict[str, str]:
    """Return the digest of the files of each kernel wheel of the lane that an interpreter has. Raises ChildFault."""
    names = lane.known_kernel_wheels
    found = _inventory(lane, python) if names else None
    return {name: wheel.content for name in names if found and (wheel := found.installed(name))}


def _inventory(lane: LaneContext, python: Path) -> Inventory:
    return take(Interpreter(python, lane.root, child_environment(python, lane.root)))


def variables(absent: Mapping[str, str]) -> dict[str, str]:
    """Return the env_vars that list, for the suites, the peers that a gate does not expect."""
    return {VARIABLE: json.dumps(absent)} if absent else {}


@dataclass
class Fitter:
    """Builds environments of a lane with the kernel wheels that fit each, as a gate does: the builds of a bisect."""

    lane: LaneContext
    find_links: Sequence[str]
    _fitted: dict[str, Fitted] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Return the kernel wheels of the lane, which follow the other packages."""
        return frozenset(self.lane.known_kernel_wheels)

    def __call__(self, request: Request) -> Environment:
        """Return the environment of a request. Raises NotInstallable if its packages contradict each other."""
        bare = build(request)
        if known := self._fitted.get(bare.key):
            return build(known.request)
        try:
            fitted = fit(self.lane, request, bare, self.find_links)
        except BuildError:
            raise
        except BumpgateError as error:
            raise NotInstallable(f"{request.title}: {error}", bare.python.parents[1], "") from None
        if fitted.environment.key != bare.key:
            release(bare)
        # Found by either key: variables() gets the environment, the next call the bare one.
        self._fitted |= {bare.key: fitted, fitted.environment.key: fitted}
        return fitted.environment

    def variables(self, environment: Environment) -> dict[str, str]:
        """Return the env_vars of the suites for an environment that was built here."""
        return variables(self._fitted[environment.key].absent)
