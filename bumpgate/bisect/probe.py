"""One probe of a bisect: a test in an environment, what it left on disk, and what that says.

A probe leaves its reading beside its log before the bisect acts on it, so that a killed bisect repeats none that
ended. What a reading says is a pure function of readings: a resumed bisect comes to the same outcomes.
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
# Signals that a program earns by what it does; any other one was sent to it, and says nothing about the candidate.
CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP")
# Lines of a record's problems that accuse no test: a skip, a selection, an interrupt.
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
    """The test itself cannot be run: no candidate is to blame, and the bisect ends."""


class Cause(Enum):
    """Why a reading says what it says."""

    RAN = "ran"
    BROKEN = "broken"
    """It does not install or does not import: no repeat will change that."""
    MACHINE = "machine"
    """No disk, no index, no memory, no time: a repeat may, so the bisect makes one."""


@dataclass(frozen=True)
class Reading:
    """What one probe left. code: of the command, or of pytest, minus the signal that ended it; None: it never ran.

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
        """Row id or test -> REGRESSION where it is red, PASS where it is green, else why it cannot be told."""
        found = {THE_RUN: Verdict.REGRESSION} if self.crash else {}
        record = self.record
        if record is None:
            return found
        skipped = {_node(p) for p in record.problems if "under --gate" in p}
        found |= {j.row.id: _row_signal(j, record, skipped) for j in record.judgements}
        told = [p for p in record.problems if not any(words in p for words in NO_FAULT)]
        return found | {_node(p): Verdict.REGRESSION for p in told}

    @cached_property
    def kinds(self) -> dict[str, str]:
        """How each row or test is red, if it is: BY_VALUE, an exception type, or the signal of a crash."""
        found = {THE_RUN: self.crash} if self.crash else {}
        if self.record:
            found |= {p.partition(": ")[0]: _exception(p.partition(": ")[2]) for p in self.record.problems}
            found |= {
                j.row.id: _exception(j.reason) if j.row.unmeasured else BY_VALUE
                for j in self.record.judgements
            }
        return found

    def signal(self, name: str) -> Verdict:
        """As seen; a test that is not spoken of has passed, where the run is whole."""
        silent = Verdict.PASS if self.whole and not ROW_ID.fullmatch(name) else Verdict.MISSING
        return self.signals.get(name, silent)

    @property
    def crash(self) -> str:
        """`died of SIGSEGV`, where that is how the test ended."""
        return _crash(self.failure)


@dataclass(frozen=True)
class Said:
    """The outcome of a reading and its reason, in one line."""

    outcome: Outcome
    reason: str


class Test(Protocol):
    """What judges a candidate."""

    def run(self, environment: Environment, place: Path) -> Reading:
        """Runs once. Raises ProbeError where no candidate could ever pass, KeyboardInterrupt on ctrl-C."""

    def void(self, reading: Reading) -> Said | None:
        """Why a reading cannot stand for an end, whatever the other one reads; None where it can."""

    def learn(self, good: Sequence[Reading], bad: Sequence[Reading]) -> None:
        """All readings of the two ends so far: what differs between them decides from now on."""

    def judge(self, reading: Reading) -> Said:
        """What a reading says."""


Build = Callable[[Request], Environment]


def take(place: Path, request: Request, build: Build, test: Test) -> Reading:
    """The reading that lies at `place`, or a new one, written there whole before this returns."""
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
    """Writes a reading to its place."""
    raw = asdict(reading) | {"cause": reading.cause.value, "place": reading.place.name}
    write_atomic(reading.place / READING, json.dumps(raw, indent=1) + "\n")


def load(place: Path) -> Reading | None:
    """None where there is none, or none that can be read: then it is taken anew."""
    try:
        raw = json.loads((place / READING).read_text(encoding="utf-8"))
        return Reading(**raw | {"place": place, "cause": Cause(raw["cause"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def fresh_caches(place: Path) -> Iterator[dict[str, str]]:
    """Variables that point torch and Triton at empty compile caches, so that no reading depends on an earlier one.

    The caches are deleted at the end; those of a killed probe when it is repeated.
    """
    caches = place / "caches"
    shutil.rmtree(caches, ignore_errors=True)
    caches.mkdir(parents=True)
    try:
        yield {
            "TORCHINDUCTOR_CACHE_DIR": str((caches / "inductor").absolute()),
            "TRITON_CACHE_DIR": str((caches / "triton").absolute()),
        }
    finally:
        shutil.rmtree(caches, ignore_errors=True)


def import_fault(environment: Environment, *packages: str) -> str:
    """Why one of the packages does not import there, in one line; "" where all do that are installed."""
    names = [name.replace("-", "_") for name in dict.fromkeys(packages) if name in environment.packages]
    # Not from the working directory: a folder named torch there is not the package.
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
    """A user's own command: exit 0 is GOOD, 1 to 124 BAD, 125 SKIP; so is a crash BAD where the package imports.

    command: for /bin/sh; {python} and {version} are put in, and the environment's programs come first on PATH.
    timeout: seconds; a run that takes longer says nothing.
    """

    command: str
    package: str
    folder: Path
    timeout: float | None = None
    deciding: tuple[str, ...] = ()
    differs: bool = True

    def line(self, environment: Environment) -> str:
        """What the shell is given."""
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
        """An exit code says the same at every candidate."""

    def judge(self, reading: Reading) -> Said:
        if said := _without_verdict(reading):
            return said
        if reading.code == 125:
            return Said(Outcome.SKIP, "the command says skip (exit 125)")
        how = reading.failure or f"exit {reading.code}"
        return Said(Outcome.GOOD, how) if reading.code == 0 else Said(Outcome.BAD, how)


@dataclass
class SuiteTest:
    """A selection of a lane's tests. What decides are the rows and tests that are red at the bad end alone.

    A row that is worse than in the first whole record of the good end, by the margins of a gate, is red as well.

    A candidate is GOOD where its run is whole and all of them are green, and BAD where one is red in the way it is at
    an end. What else is red there is not counted. Where a deciding row is red in another way only (its test raised,
    while at the bad end the value is worse), another fault hides the answer: OTHER.

    deciding: row ids and node ids. kinds: how each is red at the ends. differs: False where they are red at both ends.
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
                # A whole run has imported torch; import_fault below checks one that is not whole.
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
        # Where nothing is worse at the bad end, what is better there refutes the ends, or else what is red at both.
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
        """The signal of a reading, and REGRESSION where the value is worse than at the good end.

        Compiled code is compared with the good end alone: which tritons are reviewed is another question.
        """
        state = reading.signal(name)
        before, now = self.reference.get(name), reading.rows.get(name)
        if before is None or now is None or before.unmeasured or now.unmeasured:
            return state
        if state is not Verdict.PASS and now.better != "code":
            return state
        return Verdict.REGRESSION if change(before, now) is Change.WORSE else Verdict.PASS

    def _ways(self, name: str, readings: Sequence[Reading]) -> set[str]:
        """How a row or test is red in the readings in which it is."""
        return {r.kinds[name] for r in readings if self._signal(r, name) is Verdict.REGRESSION}

    def _red_share(self, name: str, readings: Sequence[Reading]) -> float:
        """In how many of the readings that can show it is red; NaN, which compares with nothing, where none can."""
        states = [self._signal(reading, name) for reading in readings]
        shown = [s for s in states if s in (Verdict.PASS, Verdict.REGRESSION)]
        return sum(s is Verdict.REGRESSION for s in shown) / len(shown) if shown else math.nan

    @staticmethod
    def _cut_short(reading: Reading) -> Said:
        """A file that cannot be collected will not be next time; anything else may have been the machine."""
        problems = reading.record.problems if reading.record else ()
        uncollected = [p for p in problems if "could not be collected" in p]
        why = one_line(next(iter((*uncollected, reading.failure, *problems)), "") or "the run was cut short")
        return Said(Outcome.SKIP if uncollected else Outcome.UNKNOWN, why)


def _row_signal(j: Judgement, record: Record, skipped: set[str]) -> Verdict:
    if j.row.better == "defect" and j.row.value is not None and j.verdict is not Verdict.INSTRUMENT:
        # Its range is a statement about versions, and a bisection asks which version it is.
        return Verdict.REGRESSION if j.row.value else Verdict.PASS
    # What a test derives it has judged itself, reviewed or not.
    derived = j.row.better == "derived" and j.verdict is Verdict.MISSING and not j.row.unmeasured
    if not j.red or derived:
        return Verdict.PASS
    lost = j.row.unmeasured and j.verdict is Verdict.MISSING and record.complete and j.row.test not in skipped
    return Verdict.REGRESSION if lost or j.verdict in PRODUCT else j.verdict


def _exception(reason: str) -> str:
    """The type of the exception that a reason begins with, after the test's name; "a failed test" without one."""
    found = EXCEPTION.search(reason.removeprefix("not reported by "))
    if found:
        return found[1]
    return "AssertionError" if re.search(r"(?:^|: )assert ", reason) else "a failed test"


def _missing_module(log: Path, environment: Environment) -> str:
    """The module that ended a command because no package of the environment provides it; "" for none."""
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
    """What a log ends with."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return one_line(lines[-1], 120) if lines else "it printed nothing"
