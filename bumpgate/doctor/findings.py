"""Check results: ok, warning, defect (with code and fix), or not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from bumpgate.env.inventory import Inventory, take
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
    """A defect. code: BG and three digits, one per kind of defect. fix: the command or edit that fixes it."""

    code: str
    reason: str
    fix: str
    warning: bool = False


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
        fields = {"code": self.code, "part": self.part.value, "check": self.check}
        return fields | {"status": self.status.value, "reason": self.reason, "fix": self.fix}


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
        """Expected packages."""
        own = self.own_lock
        return reference(self.adopted, self.inventory, self.env_vars) if own else of_lane(self.adopted)

    @property
    def row(self) -> PackageSet:
        return self.reference.row

    @cached_property
    def inventory(self) -> Inventory:
        """Inventory of the interpreter. Raises ChildFault if it gives no result."""
        return take(self.interpreter)


@dataclass(frozen=True)
class NotRun:
    """Reason why a check could not run here; it must not count as ok."""

    reason: str


@dataclass(frozen=True)
class Check:
    """One check. code: of the check itself, and of the first kind of defect that it finds.

    examine: yields defects, NotRun, and a text on success, which is shown if there is nothing else. needs: finding
    codes, or prefixes of codes, that make this check inapplicable.
    """

    code: str
    part: Part
    title: str
    examine: Callable[[Site], Iterator[Defect | NotRun | str]]
    needs: tuple[str, ...] = ()

    def run(self, site: Site) -> list[CheckResult]:
        """Return all findings of this check; a single ok finding if there are none."""
        seen, found = "", []
        for each in self.examine(site):
            if isinstance(each, str):
                seen = each
                continue
            if isinstance(each, NotRun):
                found.append(self.not_run(each.reason))
                continue
            status = Status.WARNING if each.warning else Status.DEFECT
            found.append(CheckResult(each.code, self.part, self.title, status, each.reason, each.fix))
        return found or [CheckResult(self.code, self.part, self.title, Status.OK, seen)]

    def not_run(self, why: str) -> CheckResult:
        return CheckResult(self.code, self.part, self.title, Status.NOT_RUN, why)
