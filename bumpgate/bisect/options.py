"""Options of a bisect: their checks, the command line that repeats them, and their resolution."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from packaging.utils import canonicalize_name

from bumpgate.bisect import commits, ranges
from bumpgate.bisect.builder import Builder
from bumpgate.bisect.candidates import Range, between, needs_prereleases, one
from bumpgate.bisect.command_probe import CommandTest
from bumpgate.bisect.gate_finding import GateFinding
from bumpgate.bisect.journal import BisectPlan
from bumpgate.bisect.prepared import Prepared
from bumpgate.bisect.probe import Test
from bumpgate.bisect.shell import InteractiveTest
from bumpgate.bisect.suite_probe import SuiteTest
from bumpgate.bisect.times_probe import TimedTest
from bumpgate.core import lanes
from bumpgate.core.baseline import find_root, tier
from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.env.build import Environment
from bumpgate.env.request import RUNNING, Request, lane_request
from bumpgate.env.uv import public_url
from bumpgate.env.versions import FoundVersion, versions
from bumpgate.process.child import require_syntax

USAGE, NOTHING_SELECTED = 4, 5
COMPILING = {"numpy": "numpy", "setuptools": "setuptools<82"}
NAME = re.compile(r"[\w.-]+")


class BisectError(BumpgateError):
    """Invalid bisect: bad options, or an endpoint that does not have the claimed result."""


@dataclass(frozen=True)
class Options:
    """Bisect options, apart from the output folder. A resumed bisect must use the same ones.

    index and find_links have uv's format; passwords in their URLs are not saved. gate: path of the gate.json that
    `finding` was read from, "" without one; lane and selection are then those of the finding. row: of the finding.
    builder: makes the environment of a commit of the first `repository`; good and bad are commits then.
    interactive: the user judges each version. environments: the folder of the prepared environments, "" without one.
    """

    package: str
    good: str
    bad: str
    lane: str
    selection: tuple[str, ...]
    command: str
    index: str | None
    find_links: tuple[str, ...]
    extra: tuple[str, ...]
    timeout: float | None
    find_fix: bool
    false_bad: float | None
    false_good: float | None
    confidence: float
    budget: int | None
    gate: str = ""
    row: str = ""
    finding: GateFinding | None = None
    builder: str = ""
    repository: tuple[str, ...] = ()
    interactive: bool = False
    environments: str = ""

    @cached_property
    def prepared(self) -> Prepared | None:
        """The prepared environments, None if the candidates are built."""
        return Prepared(Path(self.environments), self.package) if self.environments else None

    @property
    def timed(self) -> bool:
        """Whether timed rows decide."""
        return self.finding is not None and bool(self.finding.ratios)

    def line(self) -> tuple[str, ...]:
        """Return the command-line arguments that repeat this bisect."""
        valued = {
            "--from-gate": self.gate,
            "--row": self.row,
            "--lane": "" if self.gate else self.lane,
            "--package": self.package,
            "--good": self.good,
            "--bad": self.bad,
            "--index": public_url(self.index or ""),
            "--builder": self.builder,
            "--environments": self.environments,
            "--command": self.command,
            "--timeout": "" if self.timeout is None else f"{self.timeout:g}",
            "--false-bad": "" if self.false_bad is None else f"{self.false_bad:g}",
            "--false-good": "" if self.false_good is None else f"{self.false_good:g}",
            "--confidence": f"{self.confidence:g}",
            "--budget": "" if self.budget is None else str(self.budget),
        }
        parts = [part for option, value in valued.items() if value for part in (option, value)]
        parts += [part for place in self.find_links for part in ("--find-links", public_url(place))]
        parts += [part for requirement in self.extra for part in ("--with", requirement)]
        parts += [part for place in self.repository for part in ("--repository", place)]
        parts += ["--find-fix"] if self.find_fix else []
        parts += ["--interactive"] if self.interactive else []
        return (*parts, *(["--", *self.selection] if self.selection and not self.gate else []))

    def check(self) -> Path | None:
        """Check the options and return the source tree, if the bisect needs one. Raises BumpgateError, one line."""
        if not (self.good and self.bad):
            raise BisectError("name the range: --good VERSION --bad VERSION, or --from-gate GATE_JSON")
        if self.command and self.selection:
            raise BisectError("--command and a pytest selection: use one, not both")
        require_syntax(self.command)
        if self.interactive and self.selection:
            raise BisectError("--interactive and a pytest selection: use one, not both")
        if not (self.command or self.interactive or (self.lane and self.selection)):
            raise BisectError(
                "name what to run: --lane LANE -- PYTEST-SELECTION, or --command '{python} test.py'"
            )
        if self.timeout is not None and self.timeout <= 0:
            raise BisectError(f"--timeout {self.timeout:g}: must be greater than 0")
        if self.timeout is not None and self.timed:
            raise BisectError(
                "--timeout does not apply to timed rows, whose tests have the gate's limit: leave it out"
            )
        self._check_builder()
        ranges.check(self.repository)
        return self.root()

    def root(self) -> Path | None:
        """Return the source tree of the lane, None without a lane. Raises BumpgateError on an unknown lane."""
        if not self.lane:
            return None
        root = find_root(Path.cwd())
        lanes.require(root, self.lane)
        return root

    def _check_builder(self) -> None:
        if self.builder and self.environments:
            raise BisectError("--builder and --environments: use one, not both")
        if (self.builder or self.environments) and (self.index or self.find_links or self.extra):
            named = "--builder" if self.builder else "--environments"
            raise BisectError(
                f"{named} gives the complete environment: leave out --index, --find-links, --with"
            )
        if not self.builder:
            return
        if not self.repository:
            raise BisectError("--builder builds the commits of a clone: name it with --repository DIR")
        if self.timed:
            raise BisectError(
                "--builder keeps one commit at a time, and times are compared in pairs: bisect the versions"
            )

    def commit_builder(self, out: Path) -> Builder:
        """Return the builder of commits. out: the folder of the bisect."""
        return Builder(self.builder, commits.Clone(Path(self.repository[0])), self.package, out)

    def check_selection(self, root: Path) -> None:
        """Raise BisectError if this interpreter's pytest selects no test or rejects an option.

        A collection error is ignored: this interpreter may lack torch. A tier is not checked, because its package
        is only installed with the candidate.
        """
        if any(tier(f"{part}/") for part in self.selection):
            return
        flags = ["-m", self.lane, "-n", "0", "-q", "--collect-only", *self.selection]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *flags], cwd=root, capture_output=True, text=True
        )
        if done.returncode == NOTHING_SELECTED:
            raise BisectError(f"{shlex.join(self.selection)} selects no test of lane {self.lane}")
        if done.returncode == USAGE:
            words = [w for w in (done.stdout + done.stderr).splitlines() if w.startswith("ERROR: ")]
            raise BisectError(one_line(words[0].removeprefix("ERROR: ") if words else done.stderr))

    def range(self, root: Path | None) -> Range:
        """Return the versions from endpoint to endpoint, from the index; with a builder, the commits."""
        if self.builder:
            clone = commits.Clone(Path(self.repository[0]))
            return commits.between(clone, self.package, self.good, self.bad, find_fix=self.find_fix)
        found = self._listed(root, self.good, self.bad)
        return between(self.package, found, self.good, self.bad, find_fix=self.find_fix)

    def version(self, root: Path | None, name: str) -> str:
        """Return the version that a version or a date names."""
        return one(self.package, self._listed(root, name), name)

    def _listed(self, root: Path | None, *names: str) -> list[FoundVersion]:
        """Return the versions in the index and the folders; prereleases if a name is one, or a date."""
        if self.prepared:
            return self.prepared.versions()
        return versions(
            self.package,
            index=self.index,
            find_links=self.find_links,
            python=lane_request(root, self.lane).python if root else RUNNING,
            pre=needs_prereleases(*names),
        )

    def plan(self, span: Range, test: Test) -> BisectPlan:
        """Return the plan of the search.

        A probe of timed rows is a test with bounded errors: these bounds are its misread rates, and a repeat is only
        made if they leave a doubt.
        """
        false_bad, false_good, confirm = self.false_bad, self.false_good, BisectPlan.confirm
        if isinstance(test, TimedTest):
            bounds, confirm = test.misreads, 1
            false_bad = bounds[0] if false_bad is None else false_bad
            false_good = bounds[1] if false_good is None else false_good
        if self.interactive:
            # A user repeats a test before the answer (retry), and corrects an answer (back).
            confirm, false_bad, false_good = 0, false_bad or 0.0, false_good or 0.0
        return BisectPlan(
            span.versions,
            span.good,
            span.bad,
            self.line(),
            false_bad,
            false_good,
            self.confidence,
            self.find_fix,
            self.budget,
            confirm,
            self.finding.digest if self.finding else "",
        )

    def request(self, root: Path | None) -> Callable[[str], Request]:
        """Return a function from a version to its environment request.

        A package other than torch replaces the version that torch requires.
        """

        def request(version: str) -> Request:
            # "==2.13.0" also matches 2.13.0+cpu, which is a different build.
            requirement = f"{self.package}==={version}"
            name = f"{self.package} {version}"
            if root is None:
                found = Request((requirement, *self._compiling()), name=name)
            else:
                found = lane_request(root, self.lane, requirement, name=name)
            requirements = (*found.requirements, *self.extra)
            return replace(found, requirements=requirements, index=self.index, find_links=self.find_links)

        return request

    def _compiling(self) -> tuple[str, ...]:
        """Return what torch.compile imports, which not every torch requires: numpy, and setuptools up to torch 2.10.

        torch.utils.cpp_extension of an old torch needs pkg_resources, which setuptools 82 removed.
        """
        named = {canonicalize_name(found[0]) for text in self.extra if (found := NAME.match(text))}
        return tuple(
            text
            for name, text in COMPILING.items()
            if name not in named and "torch" in {self.package, *named}
        )

    def test(
        self,
        root: Path | None,
        good: Callable[[], Environment],
        say: Callable[[str], None],
        variables: Callable[[Environment], Mapping[str, str]],
    ) -> Test:
        """Return the test that judges a candidate.

        good: builds the environment of the good endpoint. variables: env_vars of an environment.
        """
        command = CommandTest(self.command, self.package, Path.cwd(), self.timeout)
        if self.interactive:
            return InteractiveTest(command if self.command else None)
        if self.command or root is None:
            return command
        finding = self.finding
        if finding and finding.ratios:
            return TimedTest(
                root,
                self.lane,
                finding.tests,
                finding.ratios,
                good,
                self.package,
                finding.sessions,
                say,
                variables,
                options=finding.options,
            )
        return SuiteTest(root, self.lane, self.selection, self.package, self.timeout, variables=variables)
