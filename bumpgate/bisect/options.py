"""Options of a bisect, declared once for the command line: their checks, environments, and test."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from packaging.utils import canonicalize_name
from typer import Argument, Option

from bumpgate.bisect import gate_finding, wheel_metadata
from bumpgate.bisect.bisection import Setup
from bumpgate.bisect.candidates import Prepared, Range, between, needs_prereleases
from bumpgate.bisect.gate_finding import GateFinding
from bumpgate.bisect.journal import BisectPlan
from bumpgate.bisect.probe import Build, CommandTest, SuiteTest, Test, exactly
from bumpgate.bisect.timed_probe import TimedTest
from bumpgate.core import lanes
from bumpgate.core.baseline import find_root, tier
from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.core.text import redacted
from bumpgate.env.build import Environment, build
from bumpgate.env.cached import Disk
from bumpgate.env.lane import LaneContext, lane_request
from bumpgate.env.mirror import copies
from bumpgate.env.request import RUNNING, Request
from bumpgate.env.versions import versions
from bumpgate.process.child import require_syntax
from bumpgate.process.runner import NOTHING_SELECTED, USAGE
from bumpgate.wheels import fitting
from bumpgate.wheels.fitting import Fitter

# What torch.compile imports, which not every torch requires. torch.utils.cpp_extension of an old torch needs
# pkg_resources, which setuptools 82 removed.
COMPILING = {"numpy": "numpy", "setuptools": "setuptools<82"}
NAME = re.compile(r"[\w.-]+")


class BisectError(BumpgateError):
    """Invalid bisect: bad options, or an endpoint that does not have the claimed result."""


@dataclass(frozen=True)
class Options:
    """Options of `bumpgate bisect`.

    `resolved` gives the options that the other methods take. index and find_links have uv's format; passwords in their
    URLs are not saved. finding: what `from_gate` names, from which lane and selection then come.
    """

    good: Annotated[str, Option(help="A good version, or the date of a good nightly (2026-10-01).")] = ""
    bad: Annotated[str, Option(help="A bad version or date; later, unless --find-fix.")] = ""
    selection: Annotated[tuple[str, ...], Argument(help="After --: what pytest runs.")] = ()
    lane: Annotated[str, Option(help="A declared lane; its set is installed around the package.")] = ""
    package: Annotated[str, Option(help="torch, triton, or any package of the set.")] = "torch"
    command: Annotated[
        str, Option(help="Your own test instead: exit 0 good, 1-124 bad, 125 skip; {python}.")
    ] = ""
    from_gate: Annotated[
        Path | None,
        Option(help="gate.json: bisect its worst finding between its two sides, SLOWER included."),
    ] = None
    environments: Annotated[
        str, Option(help="Build nothing: the candidates are the environments DIR/NAME.")
    ] = ""
    row: Annotated[str, Option(help="With --from-gate: the finding of this row, not the worst.")] = ""
    index: Annotated[str | None, Option(help="An index that takes precedence over the host's.")] = None
    find_links: Annotated[tuple[str, ...], Option(help="A folder or page of wheels; repeatable.")] = ()
    store: Annotated[tuple[str, ...], Option(help="A store of `bumpgate mirror`; repeatable.")] = ()
    extra: Annotated[tuple[str, ...], Option("--with", help="A requirement to add; repeatable.")] = ()
    find_fix: Annotated[bool, Option("--find-fix", help="Find the first good version after a bad one.")] = (
        False
    )
    timeout: Annotated[float | None, Option(help="Seconds after which a probe has no verdict.")] = None
    false_bad: Annotated[
        float | None, Option(help="How often a good version reads bad; estimated by default.")
    ] = None
    false_good: Annotated[
        float | None, Option(help="How often a bad version reads good; estimated by default.")
    ] = None
    confidence: Annotated[float, Option(help="The posterior at which an answer is sure.")] = 0.98
    budget: Annotated[
        int | None, Option(help="Readings after which the likeliest answer is given; 60 by default.")
    ] = None
    out: Annotated[Path | None, Option(help="Where state, logs and bisect.json go.")] = None
    resume: Annotated[bool, Option("--resume", help="Continue the bisect in --out.")] = False
    attribution: Annotated[bool, Option(help="Then find the package of the set that is at fault.")] = True
    disk: Disk = None
    finding: GateFinding | None = None

    def resolved(self) -> Options:
        """Return the options with the finding of a gate, canonical names, and the folders of stores in find_links."""
        links = (*self.find_links, *copies(self.store))
        named = replace(self, package=canonicalize_name(self.package), find_links=links, store=())
        if self.from_gate is None:
            if self.row:
                raise BisectError("--row names a row of --from-gate GATE_JSON, which is missing")
            return named
        if self.lane or self.selection or self.command:
            raise BisectError(
                "--from-gate takes lane and tests from the gate: leave out --lane, --command and --"
            )
        found = gate_finding.load(self.from_gate, self.row)
        ends = (self.good, self.bad) if self.good and self.bad else found.versions(named.package)
        return replace(
            named,
            good=self.good or ends[0],
            bad=self.bad or ends[1],
            lane=found.lane,
            selection=(*found.options, *found.nodes),
            from_gate=Path(os.path.abspath(self.from_gate)),
            finding=found,
        )

    @property
    def folder(self) -> Path:
        return self.out or Path(f"bisect-{self.package}-{self.good}-{self.bad}".replace("/", "-"))

    @cached_property
    def prepared(self) -> Prepared | None:
        """The prepared environments, None if the candidates are built."""
        return Prepared(Path(self.environments), self.package) if self.environments else None

    @property
    def timed(self) -> bool:
        return self.finding is not None and bool(self.finding.ratios)

    def line(self) -> tuple[str, ...]:
        """Return the arguments that repeat this bisect, without those that only say how to run it.

        A resumed bisect must have the same ones: the order is part of the journal's format.
        """
        valued = {
            "--from-gate": self.from_gate,
            "--row": self.row,
            "--lane": "" if self.from_gate else self.lane,
            "--package": self.package,
            "--good": self.good,
            "--bad": self.bad,
            "--index": redacted(self.index or ""),
            "--environments": self.environments,
            "--command": self.command,
            "--timeout": self.timeout,
            "--false-bad": self.false_bad,
            "--false-good": self.false_good,
            "--confidence": self.confidence,
            "--budget": self.budget,
        }
        pairs = [(name, value) for name, value in valued.items() if value not in (None, "")]
        pairs += [("--find-links", redacted(place)) for place in self.find_links]
        pairs += [("--with", requirement) for requirement in self.extra]
        words = [w for name, v in pairs for w in (name, f"{v:g}" if isinstance(v, float) else str(v))]
        words += ["--find-fix"] if self.find_fix else []
        return (*words, *(["--", *self.selection] if self.selection and not self.from_gate else []))

    def resume_line(self) -> str:
        """Return the command that continues this bisect."""
        line = self.line()
        cut = line.index("--") if "--" in line else len(line)
        flags = [] if self.attribution else ["--no-attribution"]
        flags += ["--disk", self.disk] if self.disk else []
        more = ("--out", str(self.folder), *flags, "--resume")
        return shlex.join(["bumpgate", "bisect", *line[:cut], *more, *line[cut:]])

    def check(self) -> Path | None:
        """Check the options and return the source tree, if the bisect needs one. Raises BumpgateError, one line."""
        fault = ""
        if not (self.good and self.bad):
            fault = "name the range: --good VERSION --bad VERSION, or --from-gate GATE_JSON"
        elif self.command and self.selection:
            fault = "--command and a pytest selection: use one, not both"
        elif not (self.command or (self.lane and self.selection)):
            fault = "name what to run: --lane LANE -- PYTEST-SELECTION, or --command '{python} test.py'"
        elif self.timeout is not None and self.timeout <= 0:
            fault = f"--timeout {self.timeout:g}: must be greater than 0"
        elif self.timeout and self.timed:
            fault = "--timeout does not apply to timed rows, whose tests have the gate's limit: leave it out"
        elif self.environments and (self.index or self.find_links or self.extra):
            fault = "--environments gives the complete environment: leave out --index, --find-links, --with"
        if fault:
            raise BisectError(fault)
        require_syntax(self.command)
        return self.root()

    def root(self) -> Path | None:
        """Return the source tree of the lane, None without a lane. Raises BumpgateError on an unknown lane."""
        if not self.lane:
            return None
        root = find_root(Path.cwd())
        lanes.require(root, self.lane)
        return root

    def check_selection(self, root: Path) -> None:
        """Raise BisectError if this interpreter's pytest selects no test or rejects an option.

        A collection error is ignored: this interpreter may lack torch. A tier is not checked, because its package
        is only installed with the candidate.
        """
        if any(tier(f"{part}/") for part in self.selection):
            return
        line = [sys.executable, "-m", "pytest", "-m", self.lane, "-n", "0", "-q", "--collect-only"]
        done = subprocess.run([*line, *self.selection], cwd=root, capture_output=True, text=True)
        if done.returncode == NOTHING_SELECTED:
            raise BisectError(f"{shlex.join(self.selection)} selects no test of lane {self.lane}")
        if done.returncode == USAGE:
            words = [w for w in (done.stdout + done.stderr).splitlines() if w.startswith("ERROR: ")]
            raise BisectError(one_line(words[0].removeprefix("ERROR: ") if words else done.stderr))

    def range(self, root: Path | None) -> Range:
        """Return the versions from endpoint to endpoint, in the index and the folders, or of prepared environments."""
        if self.prepared:
            found = self.prepared.versions()
        else:
            python = lane_request(root, self.lane).python if root else RUNNING
            pre = needs_prereleases(self.good, self.bad)
            found = versions(
                self.package, index=self.index, find_links=self.find_links, python=python, pre=pre
            )
        return between(self.package, found, self.good, self.bad, find_fix=self.find_fix)

    def plan(self, span: Range, test: Test) -> BisectPlan:
        """Return the plan of the search.

        A probe of timed rows is a test with bounded errors: these bounds are its misread rates, and a repeat is only
        made if they leave a doubt.
        """
        false_bad, false_good = test.misreads if isinstance(test, TimedTest) else (None, None)
        return BisectPlan(
            candidates=span.versions,
            good=span.good,
            bad=span.bad,
            command=self.line(),
            false_bad=false_bad if self.false_bad is None else self.false_bad,
            false_good=false_good if self.false_good is None else self.false_good,
            confidence=self.confidence,
            find_fix=self.find_fix,
            budget=self.budget,
            confirm=1 if isinstance(test, TimedTest) else BisectPlan.confirm,
            finding=self.finding.digest if self.finding else "",
        )

    def setup(self, root: Path | None, good: str, say: Callable[[str], None]) -> Setup:
        """Return the environments and the test of this bisect.

        root: the source tree of the lane. good: the version of the good endpoint, with which timed rows are paired.
        say: prints a line while another process has the device.
        """
        prepared = self.prepared
        fitter = Fitter(LaneContext(root, self.lane), self.find_links) if root and not prepared else None
        make: Build = prepared or fitter or build
        request = prepared.request if prepared else self._request(root)

        def variables(environment: Environment) -> Mapping[str, str]:
            if prepared and root:
                return fitting.variables(fitting.missing(LaneContext(root, self.lane), environment.python))
            return fitter.variables(environment) if fitter else {}

        test: Test
        if self.command or root is None:
            test = CommandTest(self.command, self.package, Path.cwd(), self.timeout)
        elif self.finding and self.timed:
            paired = self.finding, lambda: make(request(good)), self.package, say, variables
            test = TimedTest(root, self.lane, *paired)
        else:
            test = SuiteTest(root, self.lane, self.selection, self.package, self.timeout, variables)
        return Setup(
            self.package,
            request,
            exactly(make, self.package),
            test,
            reliable=self.timed,
            together=prepared.together if prepared else wheel_metadata.together,
            follow=fitter.names - {self.package} if fitter else frozenset(),
        )

    def _request(self, root: Path | None) -> Callable[[str], Request]:
        """Return a function from a version to its request. A package replaces the version that torch requires."""

        def request(version: str) -> Request:
            # "==2.13.0" also matches 2.13.0+cpu, which is a different build.
            requirement, name = f"{self.package}==={version}", f"{self.package} {version}"
            if root is None:
                found = Request((requirement, *self._compiling()), name=name)
            else:
                found = lane_request(root, self.lane, requirement, name=name)
            requirements = (*found.requirements, *self.extra)
            return replace(found, requirements=requirements, index=self.index, find_links=self.find_links)

        return request

    def _compiling(self) -> tuple[str, ...]:
        """Return what torch.compile imports, unless --with names it."""
        named = {canonicalize_name(found[0]) for text in self.extra if (found := NAME.match(text))}
        needed = COMPILING if "torch" in {self.package, *named} else {}
        return tuple(text for name, text in needed.items() if name not in named)
