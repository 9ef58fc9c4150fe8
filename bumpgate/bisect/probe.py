"""One probe of a candidate: its saved reading, and how a command or the rows of a lane decide it.

A probe saves its reading next to its log before the bisect uses it, so that a killed bisect repeats no finished probe.
Outcomes are a pure function of the readings: a resumed bisect gets the same ones.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from bumpgate.bisect.search import BAD, GOOD, OTHER, SKIP, UNKNOWN, ProbeOutcome
from bumpgate.core import census
from bumpgate.core.baseline import investigate
from bumpgate.core.errors import BumpgateError, one_line, text_lines
from bumpgate.core.findings import PRODUCT, Decision, Finding
from bumpgate.core.rows import ROW_ID, Judgement, ProblemKind, Record, Row, Verdict, read_record, write_atomic
from bumpgate.core.text import some
from bumpgate.env.build import BuildError, Environment, NotInstallable, release
from bumpgate.env.packages import lock_variables
from bumpgate.env.request import Request
from bumpgate.gate.compare_rows import ValueChange, change
from bumpgate.gate.verdict import Side, judge_gate
from bumpgate.process import child, runner
from bumpgate.process.child import ChildFault, Interpreter, ending
from bumpgate.process.host import read_or_empty
from bumpgate.process.runner import NOTHING_SELECTED, USAGE, LaneCall, LaneRun, child_environment, run_lane

READING, LOG, RECORD = "reading.json", "test.log", "record.json"
IMPORT = f"""
import importlib, importlib.util, sys
{child.TOKEN}
did = []
for name in sys.argv[1:]:
    if importlib.util.find_spec(name):
        importlib.import_module(name)
    did.append(name)
print(token(*did))
"""
NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)'")
# Lines with an exception: the one after the frames of a traceback, and any that begins with the name of an error, as
# after a traceback that rich draws.
FRAMES = r"Traceback \(most recent call last\):\n(?:[ \t].*\n)*"
RAISED = re.compile(rf"^(?:{FRAMES}(?=\S)|(?=(?:\w+\.)*\w*(?:Error|Exception)\b))(.*)", re.MULTILINE)
LAST_SIGNAL = 64
LOG_LINES = 3
# Problems in a record that are not a test's fault: a skip, a selection, an interrupt.
THE_RUN = "the run"
# How a deciding row is red: by its value, or because its test raised an exception of this type.
BY_VALUE = "its value"
EXCEPTION = re.compile(
    r"(?:^|: )(?:[a-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Failed|Unsupported))\b"
)


class ProbeError(BumpgateError):
    """The test itself cannot be run, for any candidate; ends the bisect."""


class Cause(Enum):
    """How a reading ended."""

    RAN = "ran"
    BROKEN = "broken"
    """It does not install or does not import; a repeat would not change that."""
    MACHINE = "machine"
    """Disk, index, memory or time ran out: a repeat may succeed, so the bisect makes one."""


@dataclass(frozen=True)
class Reading:
    """Saved result of one probe.

    code: exit code of the command or of pytest, or minus the signal number; None if it never ran.
    failure: why it never ran, or ended early; one line. seconds: of only the test. packages: name to version.
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

    @property
    def whole(self) -> bool:
        return self.record is not None and self.record.complete

    @property
    def crash(self) -> str:
        """`died of SIGSEGV` if the test crashed, else empty."""
        ended = ending(self.code)
        return str(ended) if ended.crash else ""


@dataclass(frozen=True)
class ProbeResult:
    """Outcome of a reading, and its reason in one line."""

    outcome: ProbeOutcome
    reason: str


class Test:
    """Test that judges a candidate.

    deciding: names of the rows and tests that decide. differs: False if they are red at both endpoints.
    """

    deciding: tuple[str, ...] = ()
    differs: bool = True

    def run(self, environment: Environment, place: Path) -> Reading:
        """Run once. Raises ProbeError if no candidate could ever pass, KeyboardInterrupt on ctrl-C."""
        raise NotImplementedError

    def learn(self, good: Sequence[Reading], bad: Sequence[Reading]) -> None:
        """Learn the deciding rows from all endpoint readings so far: the rows that differ between the endpoints."""

    def judge(self, reading: Reading) -> ProbeResult:
        """Return the outcome of a reading: SKIP if the candidate does not install or import, or the machine failed."""
        if reading.cause is Cause.RAN:
            return self.judge_run(reading)
        return ProbeResult(SKIP, "the machine: " * (reading.cause is Cause.MACHINE) + reading.failure)

    def judge_run(self, reading: Reading) -> ProbeResult:
        """Return the outcome of a test that ran."""
        raise NotImplementedError

    def unusable(self, reading: Reading) -> ProbeResult | None:
        """Return why a reading cannot represent an endpoint, whatever the other one reads; None if it can."""
        result = self.judge(reading)
        return None if result.outcome in (GOOD, BAD) else result

    def findings(self, names: tuple[str, str], good: Reading, bad: Reading) -> list[Finding]:
        """Return how the bad neighbour differs from the good one, one finding per cause. names: of both, good first."""
        raise NotImplementedError

    def repro(self, environment: Environment, reading: Reading | None) -> str:
        """Return the command that repeats the failure in the environment of the bad neighbour."""
        raise NotImplementedError

    def program(self, reading: Reading | None) -> str:
        """Return the place of a program that shows the failure, as `bumpgate reproduce` takes it; "" without one."""
        return ""


Build = Callable[[Request], Environment]


def exactly(build: Build, package: str) -> Build:
    """Return a function that builds a request and refuses another version of the package than it pins."""

    def checked(request: Request) -> Environment:
        environment = build(request)
        installed = environment.packages.get(package)
        named = [r for r in map(Requirement, request.requirements) if canonicalize_name(r.name) == package]
        pins = [pin.version for found in named for pin in found.specifier if pin.operator == "==="]
        if pins and (installed is None or Version(installed) != Version(pins[0])):
            raise NotInstallable(f"{request.title}: {installed} was installed instead", Path(), "")
        return environment

    return checked


def take(place: Path, request: Request, build: Build, test: Test) -> Reading:
    """Return the reading saved at `place`, or take a new one and save it there atomically."""
    if kept := load(place):
        return kept
    place.mkdir(parents=True, exist_ok=True)
    try:
        environment = build(request)
        try:
            reading = test.run(environment, place)
        finally:
            # Later environments may need its space; another use builds it again, or finds it in the cache.
            release(environment)
    except NotInstallable as error:
        reading = Reading(place, Cause.BROKEN, failure=f"does not install: {one_line(error, 200)}")
    except BuildError as error:
        reading = Reading(place, Cause.MACHINE, failure=one_line(error, 200))
    keep(reading)
    return reading


def keep(reading: Reading) -> None:
    raw = asdict(reading) | {"cause": reading.cause.value, "place": reading.place.name}
    write_atomic(reading.place / READING, json.dumps(raw, indent=1) + "\n")


def load(place: Path) -> Reading | None:
    """Load the reading at `place`; None if it is missing or unreadable, in which case it is taken again."""
    try:
        raw = json.loads((place / READING).read_text(encoding="utf-8"))
        return Reading(**raw | {"place": place, "cause": Cause(raw["cause"])})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


@contextmanager
def fresh_caches(place: Path) -> Iterator[dict[str, str]]:
    """Yield env_vars that point torch, Triton and the C++ compiler at empty caches, which are deleted at the end.

    No reading may depend on an earlier one. The caches of a killed probe are deleted when it is repeated.
    """
    caches = place / "caches"
    shutil.rmtree(caches, ignore_errors=True)
    caches.mkdir(parents=True)
    try:
        yield cache_variables(caches)
    finally:
        shutil.rmtree(caches, ignore_errors=True)


def cache_variables(folder: Path) -> dict[str, str]:
    """Return env_vars that point torch and Triton at compile caches in a folder."""
    folder = folder.absolute()
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "BUMPGATE_OBJECTS": str(folder / "objects"),
    }


def import_fault(environment: Environment, *packages: str) -> str:
    """Return why an installed package does not import in the environment, in one line; "" if all do."""
    names = [name.replace("-", "_") for name in dict.fromkeys(packages) if name in environment.packages]
    if not names:
        return ""
    python = environment.python
    # Do not import from the working directory: it may hold a folder named torch.
    importing = Interpreter(python, python.parent, child_environment(python, None))
    options = ("-I", "-X", "faulthandler", "-c", IMPORT)
    try:
        importing.prove(*options, *names, did=names, timeout=runner.IMPORT_SECONDS)
    except ChildFault as fault:
        return f"import {', '.join(names)}: {one_line(fault, 160)}"
    return ""


@dataclass
class CommandTest(Test):
    """User command: exit 0 is GOOD, 1 to 124 BAD, 125 SKIP; a crash is BAD if the package imports.

    command: for /bin/sh; {python} and {version} are substituted, and the environment's bin folder is first on PATH.
    timeout: seconds; a run that takes longer has no verdict.
    """

    command: str
    package: str
    folder: Path
    timeout: float | None = None

    def line(self, environment: Environment) -> str:
        line = self.command.replace("{python}", shlex.quote(str(environment.python)))
        return line.replace("{version}", environment.packages.get(self.package, ""))

    def run(self, environment: Environment, place: Path) -> Reading:
        log = place / LOG
        line = ["/bin/sh", "-c", self.line(environment)]
        with fresh_caches(place) as caches:
            variables = child_environment(environment.python, None, caches)
            code, seconds = child.run_child(line, self.folder, variables, self.timeout, log)
        ended = ending(code, seconds, self.timeout)
        cause, failure = Cause.RAN, str(ended)
        if ended.limit is not None:
            cause = Cause.MACHINE
        elif code > 125 or code < -LAST_SIGNAL:
            status, why = code if code > 0 else child.SIGNALLED - code, child.last_line(log)
            raise ProbeError(f"--command ended with {status} ({why}): 0 is good, 1-124 bad, 125 skip")
        elif ended.signal == "SIGINT":
            raise KeyboardInterrupt
        elif code < 0 and not ended.crash:
            cause = Cause.MACHINE
        if (code or failure) and code != 125 and (fault := import_fault(environment, self.package, "torch")):
            cause, failure = Cause.BROKEN, fault
        elif code > 0 and code != 125 and (missing := _missing_module(log, environment)):
            cause, failure = Cause.BROKEN, f"no module {missing} in this environment; add --with {missing}"
        return Reading(place, cause, code, failure, seconds, dict(environment.packages))

    def judge_run(self, reading: Reading) -> ProbeResult:
        if reading.code == 125:
            return ProbeResult(SKIP, "the command skipped it (exit 125)")
        how = reading.failure or f"exit {reading.code}"
        return ProbeResult(BAD if reading.code else GOOD, how)

    def findings(self, names: tuple[str, str], good: Reading, bad: Reading) -> list[Finding]:
        reason = self.judge(bad).reason
        return [Finding(Decision.HOLD, "BAD", "", reason, (), _last_lines(good), _last_lines(bad))]

    def repro(self, environment: Environment, reading: Reading | None) -> str:
        path = "" if "{python}" in self.command else f"PATH={environment.python.parent}:$PATH "
        return f"{path}{self.line(environment)}"


def _missing_module(log: Path, environment: Environment) -> str:
    """Return the missing module that the last exception in a log names; "" if a package of the environment has it."""
    raised = RAISED.findall(read_or_empty(log))
    missing = NO_MODULE.match(raised[-1]) if raised else None
    return missing[1] if missing and canonicalize_name(missing[1]) not in environment.packages else ""


def _last_lines(reading: Reading) -> tuple[str, ...]:
    log = reading.place / LOG
    if not log.exists():
        return ()
    lines = text_lines(read_or_empty(log))[-LOG_LINES:]
    return tuple(one_line(line, 160) for line in lines) or ("(it printed nothing)",)


@dataclass
class SuiteTest(Test):
    """Selection of a lane's tests, decided by the rows and tests that are red at the bad endpoint only.

    A row that is worse than in the first complete record of the good endpoint, by the gate's margins, is red as well,
    and so is a test that ran there and that a complete run has lost: it was not collected, or was left out.

    A candidate is GOOD if its run is complete and all deciding rows are green, and BAD if one is red in the same way as
    at an endpoint. Other red rows are not counted. If a deciding row is red only in another way (its test raised,
    while at the bad endpoint the value is worse), another fault hides the answer: OTHER.

    deciding: row ids and node ids. kinds: how each is red at the endpoints.
    variables: env_vars of an environment, in addition to its lock.
    """

    root: Path
    lane: str
    selection: tuple[str, ...]
    package: str
    timeout: float | None = None
    variables: Callable[[Environment], Mapping[str, str]] = lambda environment: {}
    run_lane: Callable[..., LaneRun] = run_lane
    reference: Mapping[str, Row] = field(default_factory=dict)
    expected: frozenset[str] = frozenset()
    kinds: dict[str, set[str]] = field(default_factory=dict)

    def run(self, environment: Environment, place: Path) -> Reading:
        own = {**lock_variables(environment.lock), **self.variables(environment)}
        with fresh_caches(place) as caches:
            call = LaneCall(
                environment.python,
                self.root,
                self.lane,
                self.selection,
                place / RECORD,
                environment=own | caches,
                log=place / LOG,
            )
            # A complete run has imported torch; for an incomplete one, import_fault below checks the import.
            done = self.run_lane(call, self.timeout, check_import=False)
        if done.code == USAGE:
            raise ProbeError(f"pytest rejects the selection: {done.failure} (log: {place / LOG})")
        if done.code == NOTHING_SELECTED:
            raise ProbeError(f"{shlex.join(self.selection)} selects no test of lane {self.lane}")
        record, cause, failure = done.record, Cause.RAN, done.failure
        whole = record is not None and record.complete and not failure
        if not whole or (self.package != "torch" and record and record.red):
            if fault := import_fault(environment, "torch", self.package):
                cause, failure = Cause.BROKEN, fault
            elif failure and not ending(done.code).crash:
                cause = Cause.MACHINE
        return Reading(place, cause, done.code, failure, done.seconds, dict(environment.packages))

    def learn(self, good: Sequence[Reading], bad: Sequence[Reading]) -> None:
        first = next((Signals(reading) for reading in good if reading.whole), None)
        self.reference = first.rows if first else {}
        self.expected = census.ran(first.tests) if first else frozenset()
        good_seen, bad_seen = ([Signals(reading, self.expected) for reading in ends] for ends in (good, bad))
        names = sorted({name for seen in (*good_seen, *bad_seen) for name in seen.verdicts})
        at_good, at_bad = (
            {name: self._red_share(name, ends) for name in names} for ends in (good_seen, bad_seen)
        )
        worse = tuple(name for name in names if at_good[name] < at_bad[name])
        better = tuple(name for name in names if at_good[name] > at_bad[name])
        # If nothing is worse at the bad end, rows that are better there refute the endpoints, else rows red at both.
        self.differs = bool(worse or better)
        self.deciding = worse or better or tuple(name for name in names if at_good[name] > 0)
        every = (*good_seen, *bad_seen)
        self.kinds = {
            name: {seen.kinds[name] for seen in every if self._red(seen, name)} for name in self.deciding
        }

    def unusable(self, reading: Reading) -> ProbeResult | None:
        if reading.cause is not Cause.RAN:
            return self.judge(reading)
        seen = Signals(reading, self.expected)
        usable = reading.whole or any(self._red(seen, name) for name in seen.verdicts)
        return None if usable else _cut_short(reading)

    def judge_run(self, reading: Reading) -> ProbeResult:
        seen = Signals(reading, self.expected)
        states = {name: self._verdict(seen, name) for name in self.deciding}
        every = [name for name, state in states.items() if state is Verdict.REGRESSION]
        red = [name for name in every if seen.kinds[name] in self.kinds[name]]
        if red:
            return ProbeResult(BAD, f"red: {some(red, 1)}")
        if every:
            kind, at_end = seen.kinds[every[0]], " or ".join(sorted(self.kinds[every[0]]))
            return ProbeResult(OTHER, f"another fault: {every[0]}: {kind}; at the end it is {at_end}")
        if not reading.whole:
            return _cut_short(reading)
        unread = [(name, state) for name, state in states.items() if state is not Verdict.PASS]
        if unread:
            name, state = unread[0]
            again = state in (Verdict.INFRA, Verdict.INCONCLUSIVE)
            return ProbeResult(UNKNOWN if again else SKIP, f"{name}: {state.value}")
        others = sum(self._red(seen, name) for name in seen.verdicts if name not in states)
        return ProbeResult(GOOD, f"{len(states)} green" + (f"; {others} red, not counted" if others else ""))

    def findings(self, names: tuple[str, str], good: Reading, bad: Reading) -> list[Finding]:
        first, last = (Side(name, end.record, end.failure) for name, end in zip(names, (good, bad)))
        verdict = judge_gate(self.lane, first, last)
        deciding = set(self.deciding)
        ours = [f for f in verdict.findings if deciding & {*f.rows, *f.tests}]
        if bad.crash:
            seen = ("ran to its end",), (bad.failure,)
            ours.append(Finding(Decision.HOLD, "CRASH", "", bad.crash, (), *seen))
        return ours

    def repro(self, environment: Environment, reading: Reading | None) -> str:
        record = reading.record if reading else None
        rows = {j.row.id: j.row.test for j in record.judgements} if record else {}
        node = next((n for n in (rows.get(name, name) for name in self.deciding) if "::" in n), "")
        options = runner.options_of(self.selection, record)
        return runner.by_hand(environment.python, self.root, investigate(self.lane, node), options)

    def program(self, reading: Reading | None) -> str:
        record = reading.record if reading else None
        programs = {j.row.id: j.row.program for j in record.judgements} if record else {}
        return next(filter(None, map(programs.get, self.deciding)), "")

    def _verdict(self, seen: Signals, name: str) -> Verdict:
        """Return a row's verdict in a reading; REGRESSION also if its value is worse than at the good endpoint.

        Compiled code is compared with the good endpoint only, not with the baselines of the reviewed tritons.
        """
        state = seen.verdict(name)
        before, now = self.reference.get(name), seen.rows.get(name)
        if before is None or now is None or before.unmeasured or now.unmeasured:
            return state
        unread = state is Verdict.INSTRUMENT or before.value is None or now.value is None
        if state is not Verdict.PASS and (now.better != "code" or unread):
            return state
        return Verdict.REGRESSION if change(before, now) is ValueChange.WORSE else Verdict.PASS

    def _red(self, seen: Signals, name: str) -> bool:
        return self._verdict(seen, name) is Verdict.REGRESSION

    def _red_share(self, name: str, readings: Sequence[Signals]) -> float:
        """Return the share of conclusive readings in which a row is red; NaN (all comparisons false) without any."""
        states = [self._verdict(seen, name) for seen in readings]
        shown = [s for s in states if s in (Verdict.PASS, Verdict.REGRESSION)]
        return sum(s is Verdict.REGRESSION for s in shown) / len(shown) if shown else math.nan


@dataclass(frozen=True)
class Signals:
    """Verdicts of all rows and tests in one reading. reading: of a lane run. expected: tests that it must have run."""

    reading: Reading
    expected: frozenset[str] = frozenset()

    @property
    def tests(self) -> Mapping[str, str]:
        return self.reading.record.tests if self.reading.record else {}

    @cached_property
    def lost(self) -> dict[str, str]:
        """The expected tests that a complete run has lost, and how; none if its record has no census."""
        return census.lost(self.expected, self.tests) if self.tests and self.reading.whole else {}

    @cached_property
    def rows(self) -> Mapping[str, Row]:
        record = self.reading.record
        return {j.row.id: j.row for j in record.judgements} if record else {}

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """Return row id or test -> REGRESSION if red, PASS if green, else the verdict that explains why neither."""
        found = {THE_RUN: Verdict.REGRESSION} if self.reading.crash else {}
        record = self.reading.record
        if record is None:
            return found
        skipped = {p.test for p in record.problems if p.kind is ProblemKind.GAP}
        found |= {j.row.id: _row_verdict(j, record, skipped) for j in record.judgements}
        found |= {p.subject: Verdict.INFRA for p in record.problems if p.kind is ProblemKind.INFRA}
        found |= {p.subject: Verdict.REGRESSION for p in record.problems if p.fault}
        return found | dict.fromkeys(self.lost, Verdict.REGRESSION)

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Return row id or test -> how it is red: BY_VALUE, an exception type, a signal, or how it was lost."""
        found = {THE_RUN: self.reading.crash} if self.reading.crash else {}
        if record := self.reading.record:
            found |= {p.subject: _exception(p.why) for p in record.problems}
            found |= {
                j.row.id: _exception(j.reason) if j.row.unmeasured else BY_VALUE for j in record.judgements
            }
        return found | self.lost

    def verdict(self, name: str) -> Verdict:
        """Return the verdict of a row or test. A test missing from the record of a complete run has passed."""
        silent = Verdict.PASS if self.reading.whole and not ROW_ID.fullmatch(name) else Verdict.MISSING
        return self.verdicts.get(name, silent)


def _cut_short(reading: Reading) -> ProbeResult:
    """Classify an incomplete run: SKIP if a file cannot be collected, else UNKNOWN (possibly the machine)."""
    problems = reading.record.problems if reading.record else ()
    uncollected = [str(p) for p in problems if p.kind is ProblemKind.UNCOLLECTED]
    causes = (*uncollected, reading.failure, *map(str, problems))
    return ProbeResult(
        SKIP if uncollected else UNKNOWN, one_line(next(iter(causes), "") or "the run was cut short")
    )


def _row_verdict(j: Judgement, record: Record, skipped: set[str]) -> Verdict:
    if j.row.better == "defect" and j.row.value is not None and j.verdict is not Verdict.INSTRUMENT:
        # A defect's expected range is keyed by version, and the version is what a bisect varies: use the value.
        return Verdict.REGRESSION if j.row.value else Verdict.PASS
    # What was never reviewed is right by its test, and is compared with the good endpoint.
    if not j.red or j.verdict is Verdict.NEW:
        return Verdict.PASS
    lost = j.row.unmeasured and j.verdict is Verdict.MISSING and record.complete and j.row.test not in skipped
    return Verdict.REGRESSION if lost or j.verdict in PRODUCT else j.verdict


def _exception(reason: str) -> str:
    """Return the exception type at the start of a reason, after the test's name; "a failed test" without one."""
    found = EXCEPTION.search(reason.removeprefix("not reported by "))
    if found:
        return found[1]
    return "AssertionError" if re.search(r"(?:^|: )assert ", reason) else "a failed test"
