"""Runs the test in one environment and classifies the outcome (good, bad, skip).

A probe saves its reading next to its log before the bisect uses it, so that a killed bisect repeats no finished probe.
Outcomes are a pure function of the readings: a resumed bisect gets the same ones.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Protocol

from packaging.utils import canonicalize_name

from bumpgate.bisect.search import Outcome
from bumpgate.environments import reference
from bumpgate.environments.build import BuildError, Environment, NotInstallable
from bumpgate.environments.interpreter import ChildFault, Interpreter
from bumpgate.environments.request import Request
from bumpgate.gate.between import Change, change
from bumpgate.gate.verdict import PRODUCT
from bumpgate.processes.runner import (
    IMPORT_SECONDS,
    NOTHING_SELECTED,
    USAGE,
    LaneRun,
    child_environment,
    run_child,
    run_lane,
)
from bumpgate.processes.supervise import SIGNALLED
from bumpgate.rows import (
    ROW_ID,
    BumpgateError,
    Judgement,
    Record,
    Row,
    Verdict,
    one_line,
    read_record,
    write_atomic,
)

READING, LOG, RECORD = "reading.json", "test.log", "record.json"
# Signals that a program causes itself; any other one was sent to it, and says nothing about the candidate.
CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP")
# Problems in a record that are not a test's fault: a skip, a selection, an interrupt.
NO_FAULT = ("under --gate", "the run was cut short")
THE_RUN = "the run"
# How a deciding row is red: by its value, or because its test raised an exception of this type.
BY_VALUE = "its value"
EXCEPTION = re.compile(
    r"(?:^|: )(?:[a-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Failed|Unsupported))\b"
)
NO_MODULE = re.compile(r"^ModuleNotFoundError: No module named '(\w+)'", re.MULTILINE)
LAST_SIGNAL = 64
IMPORT = """
import importlib, importlib.util, sys
for name in sys.argv[1:]:
    if importlib.util.find_spec(name):
        importlib.import_module(name)
"""


class ProbeError(BumpgateError):
    """The test itself cannot be run, for any candidate; ends the bisect."""


class Cause(Enum):
    """How a reading ended."""

    RAN = "ran"
    BROKEN = "broken"
    """It does not install or does not import: no repeat will change that."""
    MACHINE = "machine"
    """No disk, no index, no memory, no time: a repeat may, so the bisect makes one."""


@dataclass(frozen=True)
class Reading:
    """Saved result of one probe.

    code: exit code of the command or of pytest, or minus the signal number; None if it never ran.
    failure: why it never ran, or ended early; one line. seconds: of the test alone. packages: name to version.
    """

    place: Path
    cause: Cause
    code: int | None = None
    failure: str = ""
    seconds: float = 0.0
    packages: dict[str, str] = field(default_factory=dict)

    @cached_property
    def record(self) -> Record | None:
        path = self.place / RECORD
        return read_record(path) if path.exists() else None

    @cached_property
    def rows(self) -> Mapping[str, Row]:
        """The rows of the record, by id."""
        return {j.row.id: j.row for j in self.record.judgements} if self.record else {}

    @property
    def whole(self) -> bool:
        return self.record is not None and self.record.complete

    @cached_property
    def signals(self) -> dict[str, Verdict]:
        """Row id or test -> REGRESSION if red, PASS if green, else the verdict that explains why it is neither."""
        found = {THE_RUN: Verdict.REGRESSION} if self.crash else {}
        record = self.record
        if record is None:
            return found
        skipped = {_node(p) for p in record.problems if "under --gate" in p}
        found |= {j.row.id: _row_signal(j, record, skipped) for j in record.judgements}
        faults = [p for p in record.problems if not any(words in p for words in NO_FAULT)]
        return found | {_node(p): Verdict.REGRESSION for p in faults}

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Row id or test -> how it is red, if it is: BY_VALUE, an exception type, or the signal of a crash."""
        found = {THE_RUN: self.crash} if self.crash else {}
        if self.record:
            found |= {p.partition(": ")[0]: _exception(p.partition(": ")[2]) for p in self.record.problems}
            found |= {
                j.row.id: _exception(j.reason) if j.row.unmeasured else BY_VALUE
                for j in self.record.judgements
            }
        return found

    def signal(self, name: str) -> Verdict:
        """Return the signal of a row or test. A test missing from the record of a whole run has passed."""
        silent = Verdict.PASS if self.whole and not ROW_ID.fullmatch(name) else Verdict.MISSING
        return self.signals.get(name, silent)

    @property
    def crash(self) -> str:
        """`died of SIGSEGV` if the test crashed, else empty."""
        return _crash(self.failure)


@dataclass(frozen=True)
class Said:
    """Outcome of a reading, and its reason in one line."""

    outcome: Outcome
    reason: str


class Test(Protocol):
    """Test that judges a candidate."""

    def run(self, environment: Environment, place: Path) -> Reading:
        """Run once. Raises ProbeError if no candidate could ever pass, KeyboardInterrupt on ctrl-C."""

    def void(self, reading: Reading) -> Said | None:
        """Return why a reading cannot represent an endpoint, whatever the other one reads; None if it can."""

    def learn(self, good: Sequence[Reading], bad: Sequence[Reading]) -> None:
        """Learn the deciding rows from all endpoint readings so far: those that differ between the endpoints."""

    def judge(self, reading: Reading) -> Said:
        """Return the outcome of a reading."""


Build = Callable[[Request], Environment]


def take(place: Path, request: Request, build: Build, test: Test) -> Reading:
    """Return the reading saved at `place`, or take a new one and save it there atomically."""
    if kept := load(place):
        return kept
    place.mkdir(parents=True, exist_ok=True)
    try:
        reading = test.run(build(request), place)
    except NotInstallable as error:
        reading = Reading(place, Cause.BROKEN, failure=f"does not install: {one_line(error, 200)}")
    except BuildError as error:
        reading = Reading(place, Cause.MACHINE, failure=one_line(error, 200))
    keep(reading)
    return reading


def keep(reading: Reading) -> None:
    """Write a reading to its place."""
    raw = asdict(reading) | {"cause": reading.cause.value, "place": reading.place.name}
    write_atomic(reading.place / READING, json.dumps(raw, indent=1) + "\n")


def load(place: Path) -> Reading | None:
    """Load the reading at `place`; None if it is missing or unreadable, in which case it is taken again."""
    try:
        raw = json.loads((place / READING).read_text(encoding="utf-8"))
        return Reading(**raw | {"place": place, "cause": Cause(raw["cause"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def fresh_caches(place: Path) -> Iterator[dict[str, str]]:
    """Yield env_vars that point torch, Triton and the C++ compiler at empty caches.

    No reading may depend on an earlier one. The caches are deleted at the end; those of a killed probe are deleted when
    it is repeated.
    """
    caches = place / "caches"
    shutil.rmtree(caches, ignore_errors=True)
    caches.mkdir(parents=True)
    try:
        yield {
            "TORCHINDUCTOR_CACHE_DIR": str((caches / "inductor").absolute()),
            "TRITON_CACHE_DIR": str((caches / "triton").absolute()),
            "BUMPGATE_OBJECTS": str((caches / "objects").absolute()),
        }
    finally:
        shutil.rmtree(caches, ignore_errors=True)


def import_fault(environment: Environment, *packages: str) -> str:
    """Return why an installed package does not import in the environment, in one line; "" if all do."""
    names = [name.replace("-", "_") for name in dict.fromkeys(packages) if name in environment.packages]
    # Do not import from the working directory: it may hold a folder named torch.
    child = Interpreter(
        environment.python, environment.python.parent, child_environment(environment.python, None)
    )
    try:
        child.run("-I", "-X", "faulthandler", "-c", IMPORT, *names, timeout=IMPORT_SECONDS)
    except ChildFault as fault:
        return f"import {', '.join(names)}: {one_line(fault, 160)}"
    return ""


def _without_verdict(reading: Reading) -> Said | None:
    if reading.cause is Cause.BROKEN:
        return Said(Outcome.SKIP, reading.failure)
    if reading.cause is Cause.MACHINE:
        return Said(Outcome.SKIP, f"the machine: {reading.failure}")
    return None


@dataclass
class CommandTest:
    """User command: exit 0 is GOOD, 1 to 124 BAD, 125 SKIP; a crash is BAD if the package imports.

    command: for /bin/sh; {python} and {version} are substituted, and the environment's bin folder is first on PATH.
    timeout: seconds; a run that takes longer has no verdict.
    """

    command: str
    package: str
    folder: Path
    timeout: float | None = None
    deciding: tuple[str, ...] = ()
    differs: bool = True

    def line(self, environment: Environment) -> str:
        """Return the shell command line for an environment."""
        version = environment.packages.get(self.package, "")
        line = self.command.replace("{python}", shlex.quote(str(environment.python)))
        return line.replace("{version}", version)

    def run(self, environment: Environment, place: Path) -> Reading:
        log = place / LOG
        line = ["/bin/sh", "-c", self.line(environment)]
        with fresh_caches(place) as caches:
            variables = child_environment(environment.python, None, caches)
            code, seconds = run_child(line, self.folder, variables, self.timeout, log)
        cause, failure = Cause.RAN, ""
        if self.timeout is not None and seconds >= self.timeout:
            cause, failure = Cause.MACHINE, f"no end within {self.timeout:.0f} s"
        elif code > 125 or code < -LAST_SIGNAL:
            ended = code if code > 0 else SIGNALLED - code
            raise ProbeError(
                f"--command ended with {ended} ({last_line(log)}): 0 is good, 1-124 bad, 125 skip"
            )
        elif code < 0:
            name = _signal_name(-code)
            failure = f"died of {name}"
            if name == "SIGINT":
                raise KeyboardInterrupt
            cause = Cause.RAN if name in CRASHES else Cause.MACHINE
        if (code or failure) and code != 125 and (fault := import_fault(environment, self.package, "torch")):
            cause, failure = Cause.BROKEN, fault
        elif code > 0 and code != 125 and (missing := _missing_module(log, environment)):
            cause, failure = Cause.BROKEN, f"no module {missing} in this environment; add --with {missing}"
        return Reading(place, cause, code, failure, seconds, dict(environment.packages))

    def void(self, reading: Reading) -> Said | None:
        said = self.judge(reading)
        return None if said.outcome in (Outcome.GOOD, Outcome.BAD) else said

    def learn(self, good: Sequence[Reading], bad: Sequence[Reading]) -> None:
        """Do nothing: an exit code means the same for every candidate."""

    def judge(self, reading: Reading) -> Said:
        if said := _without_verdict(reading):
            return said
        if reading.code == 125:
            return Said(Outcome.SKIP, "the command says skip (exit 125)")
        how = reading.failure or f"exit {reading.code}"
        return Said(Outcome.GOOD, how) if reading.code == 0 else Said(Outcome.BAD, how)


@dataclass
class SuiteTest:
    """Selection of a lane's tests. The deciding rows and tests are those that are red at the bad endpoint only.

    A row that is worse than in the first whole record of the good endpoint, by the gate's margins, is red as well.

    A candidate is GOOD if its run is whole and all deciding rows are green, and BAD if one is red in the same way as
    at an endpoint. Other red rows are not counted. If a deciding row is red only in another way (its test raised,
    while at the bad endpoint the value is worse), another fault hides the answer: OTHER.

    deciding: row ids and node ids. kinds: how each is red at the endpoints. differs: False if red at both endpoints.
    """

    root: Path
    lane: str
    selection: tuple[str, ...]
    package: str
    timeout: float | None = None
    deciding: tuple[str, ...] = ()
    differs: bool = True
    run_lane: Callable[..., LaneRun] = run_lane
    reference: Mapping[str, Row] = field(default_factory=dict)
    kinds: dict[str, set[str]] = field(default_factory=dict)

    def run(self, environment: Environment, place: Path) -> Reading:
        with fresh_caches(place) as caches:
            done = self.run_lane(
                environment.python,
                self.root,
                self.lane,
                self.selection,
                place / RECORD,
                environment={**reference.variables(environment.lock), **caches},
                timeout=self.timeout,
                log=place / LOG,
                # A whole run has imported torch; for an incomplete one, import_fault below checks the import.
                check_import=False,
            )
        if done.code == USAGE:
            raise ProbeError(f"pytest refuses: {done.failure} (log: {place / LOG})")
        if done.code == NOTHING_SELECTED:
            raise ProbeError(f"{shlex.join(self.selection)} selects no test of lane {self.lane}")
        record, cause, failure = done.record, Cause.RAN, done.failure
        whole = record is not None and record.complete and not failure
        if not whole or (self.package != "torch" and record and record.red):
            if fault := import_fault(environment, "torch", self.package):
                cause, failure = Cause.BROKEN, fault
            elif failure and not _crash(failure):
                cause = Cause.MACHINE
        return Reading(place, cause, done.code, failure, done.seconds, dict(environment.packages))

    def learn(self, good: Sequence[Reading], bad: Sequence[Reading]) -> None:
        whole = [r.record for r in good if r.whole and r.record]
        self.reference = {j.row.id: j.row for j in whole[0].judgements} if whole else {}
        names = sorted({name for reading in (*good, *bad) for name in reading.signals})
        at_good, at_bad = ({name: self._red_share(name, ends) for name in names} for ends in (good, bad))
        worse = tuple(name for name in names if at_good[name] < at_bad[name])
        better = tuple(name for name in names if at_good[name] > at_bad[name])
        # If nothing is worse at the bad end, rows that are better there refute the ends, else rows red at both do.
        self.differs = bool(worse or better)
        self.deciding = worse or better or tuple(name for name in names if at_good[name] > 0)
        self.kinds = {name: self._ways(name, (*good, *bad)) for name in self.deciding}

    def void(self, reading: Reading) -> Said | None:
        if said := _without_verdict(reading):
            return said
        red = any(self._signal(reading, name) is Verdict.REGRESSION for name in reading.signals)
        return None if reading.whole or red else self._cut_short(reading)

    def judge(self, reading: Reading) -> Said:
        if said := _without_verdict(reading):
            return said
        states = {name: self._signal(reading, name) for name in self.deciding}
        every = [name for name, state in states.items() if state is Verdict.REGRESSION]
        red = [name for name in every if reading.kinds[name] in self.kinds[name]]
        if red:
            return Said(Outcome.BAD, f"red: {red[0]}{f' and {len(red) - 1} more' if len(red) > 1 else ''}")
        if every:
            ways = " or ".join(sorted(self.kinds[every[0]]))
            return Said(
                Outcome.OTHER,
                f"another fault: {every[0]}: {reading.kinds[every[0]]}; at the end it is {ways}",
            )
        if not reading.whole:
            return self._cut_short(reading)
        unread = [(name, state) for name, state in states.items() if state is not Verdict.PASS]
        if unread:
            name, state = unread[0]
            again = state in (Verdict.INFRA, Verdict.INCONCLUSIVE)
            return Said(Outcome.UNKNOWN if again else Outcome.SKIP, f"{name}: {state.value}")
        others = sum(
            self._signal(reading, n) is Verdict.REGRESSION for n in reading.signals if n not in states
        )
        return Said(Outcome.GOOD, f"{len(states)} green{f'; {others} red, not counted' if others else ''}")

    def _signal(self, reading: Reading, name: str) -> Verdict:
        """Return a row's signal in a reading; REGRESSION also if its value is worse than at the good endpoint.

        Compiled code is compared with the good endpoint only, not with the baselines of the reviewed tritons.
        """
        state = reading.signal(name)
        before, now = self.reference.get(name), reading.rows.get(name)
        if before is None or now is None or before.unmeasured or now.unmeasured:
            return state
        if state is not Verdict.PASS and now.better != "code":
            return state
        return Verdict.REGRESSION if change(before, now) is Change.WORSE else Verdict.PASS

    def _ways(self, name: str, readings: Sequence[Reading]) -> set[str]:
        """Return the ways in which a row or test is red in these readings."""
        return {r.kinds[name] for r in readings if self._signal(r, name) is Verdict.REGRESSION}

    def _red_share(self, name: str, readings: Sequence[Reading]) -> float:
        """Return the share of conclusive readings in which a row is red; NaN (all comparisons false) without any."""
        states = [self._signal(reading, name) for reading in readings]
        shown = [s for s in states if s in (Verdict.PASS, Verdict.REGRESSION)]
        return sum(s is Verdict.REGRESSION for s in shown) / len(shown) if shown else math.nan

    @staticmethod
    def _cut_short(reading: Reading) -> Said:
        """Classify an incomplete run: SKIP if a file cannot be collected, else UNKNOWN (possibly the machine)."""
        problems = reading.record.problems if reading.record else ()
        uncollected = [p for p in problems if "could not be collected" in p]
        why = one_line(next(iter((*uncollected, reading.failure, *problems)), "") or "the run was cut short")
        return Said(Outcome.SKIP if uncollected else Outcome.UNKNOWN, why)


def _row_signal(j: Judgement, record: Record, skipped: set[str]) -> Verdict:
    if j.row.better == "defect" and j.row.value is not None and j.verdict is not Verdict.INSTRUMENT:
        # A defect's expected range is keyed by version, and the version is what a bisect varies: use the value.
        return Verdict.REGRESSION if j.row.value else Verdict.PASS
    # A derived row has been judged by its test, reviewed or not.
    derived = j.row.better == "derived" and j.verdict is Verdict.MISSING and not j.row.unmeasured
    if not j.red or derived:
        return Verdict.PASS
    lost = j.row.unmeasured and j.verdict is Verdict.MISSING and record.complete and j.row.test not in skipped
    return Verdict.REGRESSION if lost or j.verdict in PRODUCT else j.verdict


def _exception(reason: str) -> str:
    """Return the exception type at the start of a reason, after the test's name; "a failed test" without one."""
    found = EXCEPTION.search(reason.removeprefix("not reported by "))
    if found:
        return found[1]
    return "AssertionError" if re.search(r"(?:^|: )assert ", reason) else "a failed test"


def _missing_module(log: Path, environment: Environment) -> str:
    """Return the missing module in a log if no package of the environment provides it, else ""."""
    missing = NO_MODULE.findall(log.read_text(encoding="utf-8", errors="replace"))
    return missing[-1] if missing and canonicalize_name(missing[-1]) not in environment.packages else ""


def _crash(failure: str) -> str:
    found = re.search(r"died of (\w+)", failure)
    return found[0] if found and found[1] in CRASHES else ""


def _node(problem: str) -> str:
    return problem.partition(": ")[0]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_line(log: Path) -> str:
    """Return the last non-empty line of a log."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return one_line(lines[-1], 120) if lines else "it printed nothing"
