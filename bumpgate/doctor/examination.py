"""Examines a machine: what a check is, what it finds, and which check needs which other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, reduce
from operator import getitem
from pathlib import Path
from typing import Any

from bumpgate.core.errors import BumpgateError, one_fault
from bumpgate.core.toml import tomllib
from bumpgate.env.inventory import Inventory, take
from bumpgate.env.lane import LaneContext, smoke_tests
from bumpgate.env.packages import PackageSet, Reference, Smoke, of_lane, reference
from bumpgate.process.child import Interpreter


class Status(Enum):
    OK = "ok"
    WARNING = "warning"
    DEFECT = "DEFECT"
    NOT_RUN = "not run"


class Part(Enum):
    """Parts in the order of the checks; a part runs only if the parts that it needs have no defect."""

    ENVIRONMENT = "environment"
    VERSIONS = "versions"
    INSTRUMENTS = "instruments"
    ACCELERATOR = "accelerator"


@dataclass(frozen=True)
class Defect:
    """A defect. fix: the command or edit that fixes it. code: BG and three digits, by default that of its check."""

    reason: str
    fix: str
    code: str = ""
    warning: bool = False


@dataclass(frozen=True)
class NotRun:
    """Reason why a check could not run here; it must not count as ok."""

    reason: str


@dataclass(frozen=True)
class CheckResult:
    """One line of doctor's report. code: of the defect, or of the check if there is none."""

    code: str
    part: Part
    check: str
    status: Status
    reason: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        return {**vars(self), "part": self.part.value, "status": self.status.value}


@dataclass(frozen=True)
class Site:
    """Subject of an examination: an interpreter, started as the suites start it, for one lane of one source tree.

    adopted: the set of the lane.
    smoke: name -> smoke test of each kernel wheel that some lane declares.

    own_lock: compare what is installed with the environment's own lock, named by the interpreter's variables, where
    there is one; by default always with the adopted row of the lane.
    """

    lane: str
    interpreter: Interpreter
    contract: Mapping[str, Any]
    adopted: PackageSet
    smoke: Mapping[str, Smoke]
    own_lock: bool = False

    @property
    def root(self) -> Path:
        return self.interpreter.root

    @property
    def env_vars(self) -> Mapping[str, str]:
        return self.interpreter.environment

    @cached_property
    def reference(self) -> Reference:
        own = self.own_lock
        return reference(self.adopted, self.inventory, self.env_vars) if own else of_lane(self.adopted)

    @property
    def row(self) -> PackageSet:
        return self.reference.row

    @cached_property
    def inventory(self) -> Inventory:
        """Inventory of the interpreter. Raises ChildFault if it gives no result."""
        return take(self.interpreter)


Found = Iterator[Defect | NotRun | str]
Examine = Callable[[Site], Found]


@dataclass(frozen=True)
class Check:
    """One check. code: of the check itself, and of the first kind of defect that it finds.

    examine: yields defects, NotRun, and a text on success, which is shown if there is nothing else. needs: finding
    codes, or prefixes of codes, that make this check inapplicable.
    """

    code: str
    part: Part
    title: str
    examine: Examine
    needs: tuple[str, ...] = ()

    def run(self, site: Site) -> list[CheckResult]:
        """Return all findings of this check; a single ok finding if there are none."""
        seen, found = "", []
        for each in self.examine(site):
            if isinstance(each, str):
                seen = each
            elif isinstance(each, NotRun):
                found.append(self.result(Status.NOT_RUN, each.reason))
            else:
                status = Status.WARNING if each.warning else Status.DEFECT
                found.append(self.result(status, each.reason, each.fix, each.code))
        return found or [self.result(Status.OK, seen)]

    def result(self, status: Status, reason: str, fix: str = "", code: str = "") -> CheckResult:
        return CheckResult(code or self.code, self.part, self.title, status, reason, fix)


# Tables of the contract that doctor reads -> the fields of each of their rules, apart from its reason.
RULES = {
    "environment.always": ("value",),
    "environment.rank": (),
    "environment.refused": (),
    "environment.inert": (),
    "caches.directory": ("folder",),
    "wheels.python": (),
    "wheels.cuda": ("published", "driver"),
}
# A part runs if no code with one of these prefixes was found. The instruments of a torch that the lane was not adopted
# with are still checked; a device is used only if all earlier parts are without defects.
NEEDS: Mapping[Part, tuple[str, ...]] = {
    Part.ENVIRONMENT: (),
    Part.VERSIONS: ("BG1",),
    Part.INSTRUMENTS: ("BG1", "BG201"),
    Part.ACCELERATOR: ("BG1", "BG2", "BG3"),
}


def make_site(
    root: Path, lane: str, python: Path, environment: Mapping[str, str], *, own_lock: bool = False
) -> Site:
    """Create the site to examine. own_lock: as in Site.

    Raises BumpgateError (one line) on a missing interpreter, or an unreadable contract, lane or lock.
    """
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise BumpgateError(f"--python {python}: no such interpreter")
    # Do not resolve: the python of a virtual environment is a link, and finds its packages relative to the link.
    python = python if python.is_absolute() else Path.cwd() / python
    contract = read_contract(root / "launch/contract.toml")
    adopted = LaneContext(root, lane).adopted
    return Site(lane, Interpreter(python, root, environment), contract, adopted, smoke_tests(root), own_lock)


def read_contract(path: Path) -> dict[str, Any]:
    """Read contract.toml and check the tables that doctor uses. Raises BumpgateError (one line)."""
    fix = f"restore it: git checkout launch/{path.name}"
    with one_fault(f"{path.name}: not the contract", fix=fix):
        raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw["caches"]["minimum_free_bytes"], int):
            raise TypeError("caches.minimum_free_bytes is not a number")
        for name, fields in RULES.items():
            for rule in reduce(getitem, name.split("."), raw).values():
                if missing := [field for field in ("reason", *fields) if field not in rule]:
                    raise KeyError(f"{name}: {missing[0]}")
    return raw


def examine(site: Site, checks: Iterable[Check]) -> list[CheckResult]:
    """Run the checks in order; a check whose prerequisites failed is reported as not run, with the reason."""
    findings: list[CheckResult] = []
    for check in checks:
        ground = (*NEEDS[check.part], *check.needs)
        first = next((f for f in findings if f.status is Status.DEFECT and f.code.startswith(ground)), None)
        reason = f"{first.code} ({first.check}) comes first" if first else ""
        findings += [check.result(Status.NOT_RUN, reason)] if first else check.run(site)
    return findings


def healthy(findings: Iterable[CheckResult]) -> bool:
    return not any(f.status is Status.DEFECT for f in findings)
