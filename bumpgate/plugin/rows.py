"""The `row` fixture: a test reports measured values, and fails at its end if any of its rows is red.

Each row is judged immediately against the lane's baseline and attached to the test's reports, so that it reaches the
session (bumpgate/plugin/session.py) from any xdist worker.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from bumpgate.core import accepted, hosts, rules
from bumpgate.core.baseline import CALIBRATION, Baseline, inherited, judge, load
from bumpgate.core.errors import one_line
from bumpgate.core.lanes import how_to_declare, is_foreign
from bumpgate.core.lanes import load as declared_lanes
from bumpgate.core.rows import Judgement, Row, RowError, Value, Verdict
from bumpgate.core.rules import NO_RULE
from bumpgate.core.text import printable
from bumpgate.plugin.lanes import lane_of, lanes_of, named_lanes
from bumpgate.plugin.provenance import versions
from bumpgate.plugin.scheduling import alone
from bumpgate.process.host import cpu_model, host_cores

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Properties of a test report: a row in JSON, lines of rows that are not run, and that the gate does not require these.
ROW_PROPERTY = "bumpgate_row"
NOT_RUN_PROPERTY = "bumpgate_not_run"
EXCUSED_PROPERTY = "bumpgate_not_run_excused"
# pytest shows the line of the test that reported an invalid row, and not this module.
__tracebackhide__ = True


class InfraError(Exception):
    """Raised by a test or fixture if the machine cannot measure (contention, throttled clocks).

    The rows that the test has not yet reported are INFRA.
    """


# On the configuration: canaries that ran in this process, by name: the reason of a failure, "" for a pass. A row that
# requires another one is INSTRUMENT: its canary never ran.
CANARY_RESULTS = pytest.StashKey[dict[str, str]]()
# On the configuration: properties of the host that this process has measured, by row id (bumpgate.core.hosts).
CALIBRATIONS = pytest.StashKey[dict[str, float]]()
# On an item: a function that returns the state of the machine in lines, shown with a timed row. Raises InfraError if
# the state invalidates times.
MACHINE_STATE = pytest.StashKey[Callable[[], list[str]]]()
# On an item: canaries that its fixtures checked; each of its rows requires them.
INSTRUMENTS = pytest.StashKey[tuple[str, ...]]()


class Report(Protocol):
    """What an instrument observed. Every report in bumpgate.plugin.instruments and bumpgate.plugin.timing is one.

    witness: number of items that the instrument observed; at 0 or less its rows are INSTRUMENT.
    instruments: canaries that must have passed in this process.
    """

    @property
    def witness(self) -> int: ...

    @property
    def instruments(self) -> tuple[str, ...]: ...

    def evidence(self) -> Iterable[object]:
        """Return lines that a reader of a red row needs."""


class Interval(Protocol):
    """A median with the interval that encloses it: a Ratio, Timing or Rate. A Report, too, if it has a witness."""

    @property
    def median(self) -> float: ...

    @property
    def low(self) -> float: ...

    @property
    def high(self) -> float: ...


@dataclass(frozen=True)
class Seen:
    """A report that a test makes itself, for several rows. The fields are those of Report."""

    witness: int
    lines: tuple[object, ...] = ()
    instruments: tuple[str, ...] = ()

    def evidence(self) -> Iterable[object]:
        return self.lines


class About(TypedDict, total=False):
    """What every verb of the fixture `row` also takes.

    seen: the report of what was measured, the number of items that the check covered, or the items. Required, except
        for `timed` with a Report.
    rule: the contract row that this one checks, such as "C6".
    evidence: lines for the reader of a red row, in front of the report's own.
    instruments: canaries that must have passed, in addition to the report's and the fixtures' own.
    per_build, series, paired, work, own, bound: see bumpgate.core.rows.Row.
    program: the function of the smallest program that shows the row (bumpgate reproduce). It takes no argument, and
        returns a list with a line for each fault, or a number of which less is better.
    measured: calibrations by id that the measured process has read itself.
    """

    seen: Report | Sized | int
    rule: str
    evidence: Iterable[object]
    instruments: Iterable[str]
    per_build: bool
    series: Mapping[str, Iterable[float]]
    paired: bool
    work: str
    own: str
    bound: str
    program: Callable[[], object]
    measured: Mapping[str, float]


class Bounds(About, total=False):
    """What the test derives, not from an earlier run."""

    expected: Value
    at_most: float | None
    at_least: float | None


class Counted(Bounds, total=False):
    unit: str


class Cost(About, total=False):
    """better: "lower", the default, or "higher". tolerance: relative to the reviewed value, 0.02 is 2 %."""

    better: str
    tolerance: float
    at_most: float | None
    at_least: float | None


Acceptances = Mapping[str, tuple[accepted.Acceptance, ...]]


class RowRecorder:
    """The fixture `row`: reports the measured values of one test, one verb for each kind of row.

    Each verb takes `seen`, which says what was observed (see About), judges the row immediately, and returns the
    judgement. Each raises RowError (one line) on an invalid row or an id that this run has already used.
    """

    def __init__(
        self, item: pytest.Item, baseline: Baseline, acceptances: Acceptances, reported: dict[str, str]
    ) -> None:
        self._item = item
        self._baseline = baseline
        self._acceptances = acceptances
        self._reported = reported
        self._unreported: list[Judgement] = []
        self.failure: BaseException | None = None
        self.ended = False

    def count(self, id: str, found: Collection[object] | int | None, **about: Unpack[Counted]) -> Judgement:
        """Judge a number of things: against the expectation of the test, or without one against the reviewed number.

        found: the number, or the things themselves, which are then evidence. None: the instrument returned no value.
        unit: "count" by default.
        """
        if isinstance(found, str):
            raise RowError(f"row {id!r}: found must be a number or a collection of things, got {found!r}")
        if isinstance(found, Collection):
            things = sorted(found, key=str) if isinstance(found, (set, frozenset)) else found
            about["evidence"] = (*things, *about.get("evidence", ()))
            found = len(found)
        derived = any(about.get(bound) is not None for bound in ("expected", "at_most", "at_least"))
        return self._report(id, found, about.pop("unit", "count"), "derived" if derived else "exact", about)

    def bound(self, id: str, value: Value, unit: str, **about: Unpack[Bounds]) -> Judgement:
        """Judge a value against bounds that the test derives: expected, at_most or at_least."""
        return self._report(id, value, unit, "derived", about)

    def exact(self, id: str, value: Value, unit: str, **about: Unpack[About]) -> Judgement:
        """Judge a value against the reviewed one: any difference is red."""
        return self._report(id, value, unit, "exact", about)

    def cost(self, id: str, value: float | None, unit: str, **about: Unpack[Cost]) -> Judgement:
        """Judge a number that may be worse than the reviewed one by `tolerance`, and not beyond a bound of the test.

        Raises InfraError if the machine's state invalidates measured costs.
        """
        return self._report(id, value, unit, about.pop("better", "lower"), about)

    def timed(self, id: str, timing: Interval, unit: str, **about: Unpack[Cost]) -> Judgement:
        """As `cost`, of a median with its interval. A timing that is a Report is its own `seen`; its series is kept."""
        about.setdefault("seen", timing)  # type: ignore[typeddict-item]
        about.setdefault("series", getattr(timing, "series", {}))
        better, interval = about.pop("better", "lower"), (timing.low, timing.high)
        return self._report(id, timing.median, unit, better, about, interval=interval)

    def calibration(self, id: str, value: float, unit: str, **about: Unpack[Bounds]) -> Judgement:
        """Report a property of the host as `calibration/<bound>/<metric>`, before the times that it bounds.

        at_most: what no such host can reach; an instrument that reads more is broken. Nothing else makes it red.
        """
        if not id.startswith(CALIBRATION):
            raise RowError(f"row {id!r}: the id of a calibration must start with {CALIBRATION!r}")
        self._item.config.stash.setdefault(CALIBRATIONS, {})[id] = value
        about["at_least"] = 0.0
        return self._report(id, value, unit, "derived", about)

    def code(self, id: str, counts: str, **about: Unpack[About]) -> Judgement:
        """Judge the counts of a compiled kernel (bumpgate.core.kernel_code) against the review of this triton."""
        return self._report(id, counts, "counts", "code", about)

    def defect(
        self, id: str, present: bool, *, known_in: str, reason: str, witness: int = 0, **about: Unpack[About]
    ) -> Judgement:
        """Judge a known upstream defect: 1 if its signature was seen, 0 if the result was right.

        Any other failure of the reproducer must raise: it is neither. known_in: the package and the versions that have
        the defect, "torch>=2.13,<2.16"; a pre-release counts as the release that it leads to. reason: what is wrong,
        with its upstream link. Raises RowError if that package is not installed or known_in is not a requirement,
        and on a `present` such as 0.5.
        """
        if present not in (False, True):
            raise RowError(f"row {id!r}: present must be True or False, got {present!r}")
        try:
            requirement = Requirement(known_in)
            of_torch = requirement.name == "torch"
            installed = versions()["torch"] if of_torch else metadata.version(requirement.name)
            version = Version(str(installed))
        except (ValueError, metadata.PackageNotFoundError) as error:
            raise RowError(f"row {id!r}: known_in {known_in!r}: {one_line(error)}") from None
        public = version.base_version if version.is_prerelease else version.public
        known = f"known in {known_in}, installed {installed}: {one_line(reason)}"
        about["evidence"] = (known, *about.get("evidence", ()))
        about.setdefault("seen", witness)
        at_most = int(requirement.specifier.contains(public))
        return self._report(id, int(present), "present", "defect", about, at_most=at_most)

    def not_run(self, ids: Iterable[str], reason: str, *, excused: bool = False) -> None:
        """List rows that this machine or environment cannot measure as NOT RUN, with the reason.

        The test leaves them out, or calls pytest.skip if it has no others. Under --gate they are red unless `excused`,
        which is for rows that the adopted set lacks, too. Raises RowError on a string of ids, on none, and on one that
        is already reported.
        """
        if isinstance(ids, str) or not (ids := list(ids)):
            raise RowError(f"not_run: ids must be a list of row ids, got {ids!r}")
        for id in ids:
            if id in self._reported:
                raise RowError(f"row {id!r}: not run, but already reported by {self._reported[id]}")
        list_not_run(self._item, ids, reason, excused=excused)

    def fail_if_red(self) -> None:
        """Fail the test with all red rows that it has not yet failed for, in one message."""
        __tracebackhide__ = False  # its message stands alone
        red = [j for j in self._unreported if j.red]
        self._unreported.clear()
        if red:
            self.failure = pytest.fail.Exception("\n".join(map(_explain, red)), pytrace=False)
            raise self.failure

    def _report(
        self, id: str, value: Value, unit: str, better: str, about: About, **fields: Any
    ) -> Judgement:
        """Judge a row whose witness, evidence and instruments come from `seen`, and attach it to the test's reports."""
        fields |= about
        seen, measured = fields.pop("seen", None), fields.pop("measured", None)
        program = fields.pop("program", None)
        for name in ("evidence", "instruments"):
            if isinstance(fields.get(name), str):
                raise RowError(f"row {id!r}: {name} must be a list of strings, got {fields[name]!r}")
        evidence, instruments = [*fields.pop("evidence", ())], [*fields.pop("instruments", ())]
        if hasattr(seen, "witness"):
            evidence += seen.evidence()
            instruments += seen.instruments
            seen = seen.witness
        elif isinstance(seen, Sized) and not isinstance(seen, str):
            seen = len(seen)
        elif seen is None:
            fix = "a report, the items that it covered, or their number"
            raise RowError(f"row {id!r}: seen is missing; say what the check observed: {fix}")
        if fields.get("at_most") is not None and is_wall_clock(id, unit) and has_neighbours(self._item):
            raise RowError(
                f"row {id!r}: at_most limits seconds of wall time next to other workers: measure CPU seconds "
                "(an id with cpu_seconds), or request the fixture exclusive_machine"
            )
        state = self._item.stash.get(MACHINE_STATE, None)
        if state and better in ("lower", "higher"):
            evidence += state()
        fields["expected"] = _printable(fields.get("expected"))
        fields["series"] = {name: tuple(points) for name, points in (fields.get("series") or {}).items()}
        row = Row(
            id,
            _printable(value),
            unit,
            seen,
            fields.pop("rule", "") or self._no_rule(),
            better=better,
            evidence=tuple(printable(str(e)) for e in evidence),
            instruments=tuple(dict.fromkeys((*instruments, *self._item.stash.get(INSTRUMENTS, ())))),
            test=self._item.nodeid,
            place=self._place(),
            program=self._program(program) if program else "",
            **fields,
        )
        if self.ended:  # no report of its test would carry it
            raise RowError(f"row {id!r}: reported after {self._item.nodeid} had ended")
        if id in self._reported:
            raise RowError(f"row {id!r}: {row.place} reports it again, after {self._reported[id]}")
        self._reported[id] = f"{self._item.nodeid} at {row.place}"
        judgement = self._judge(row, measured)
        self._item.user_properties.append((ROW_PROPERTY, json.dumps(judgement.to_json())))
        self._unreported.append(judgement)
        return judgement

    def _judge(self, row: Row, measured: Mapping[str, float] | None) -> Judgement:
        results = self._item.config.stash.get(CANARY_RESULTS, {})
        why = {name: results.get(name, "its canary never ran in this process") for name in row.instruments}
        unproved = {name: reason for name, reason in why.items() if reason}
        judgement = judge(row, self._baseline, failed_instruments=unproved, build=versions())
        if not compared_between_sides():
            host = {"cpu": cpu_model(), "cores": host_cores()}
            measured = measured or self._item.config.stash.get(CALIBRATIONS, {})
            judgement = hosts.on_this_host(judgement, self._baseline, host, measured)
        return accepted.apply(judgement, self._baseline, self._acceptances, accepted.today())

    def _no_rule(self) -> str:
        """Return the rule of a row that names none; "", which a row rejects, if the repository has a file of rules."""
        return "" if (self._item.config.rootpath / rules.FILE).is_file() else NO_RULE

    def _program(self, function: Callable[[], object]) -> str:
        """Return where the source of a function is, as "path:name"."""
        source = Path(function.__code__.co_filename)
        return f"{source.relative_to(self._item.config.rootpath)}:{function.__name__}"

    def _place(self) -> str:
        """Return where the test file reports a row, as "path:line"; for a helper elsewhere, the line of the test."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename == str(self._item.path):
                return f"{self._item.nodeid.split('::')[0]}:{frame.f_lineno}"
            frame = frame.f_back
        file, line, _ = self._item.location
        return f"{file}:{(line or 0) + 1}"


class Unjudged(RowRecorder):
    """The fixture `row` in a run without a lane: its rows are shown, and never red."""

    def _judge(self, row: Row, measured: Mapping[str, float] | None) -> Judgement:
        return Judgement(row, Verdict.PASS, "", explains=True)


def judged(item: pytest.Item) -> bool:
    """Return whether -m names a lane. In another repository, pytest may run the tests of a lane without it."""
    return bool(named_lanes(item.config)) or item.config.option.gate or not is_foreign(item.config.rootpath)


def is_wall_clock(id: str, unit: str) -> bool:
    """Return whether a row measures wall time. CPU time has "cpu" in the name of its metric."""
    return unit in ("s", "ms", "us") and "cpu" not in id.rpartition("/")[2]


def has_neighbours(item: pytest.Item) -> bool:
    """Return whether other workers of this run test at the same time."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1 and not alone(item)


def compared_between_sides() -> bool:
    """Return whether this run is one of a gate whose times are compared between its sides, or not used at all."""
    return not {"BUMPGATE_DUET", "BUMPGATE_SESSION", "BUMPGATE_UNTIMED"}.isdisjoint(os.environ)


def calibrate(item: pytest.Item, lane: str) -> None:
    """Measure the host's properties once per process, before its first test that has the machine to itself."""
    if not alone(item) or compared_between_sides():
        return
    known = item.config.stash.setdefault(CALIBRATIONS, {})
    for programs in item.ihook.pytest_bumpgate_calibrations(lane=lanes_of(item.config)[lane]):
        known.update({id: measure() for id, measure in programs.items() if id not in known})


def list_not_run(item: pytest.Item, ids: Iterable[str], reason: str, *, excused: bool = False) -> None:
    """List what a test does not measure; see RowRecorder.not_run. An id may also be that of a test without rows."""
    lines = [f"{id}: {one_line(reason)}" for id in ids]
    item.user_properties.append((NOT_RUN_PROPERTY, json.dumps(lines)))
    if excused:
        item.user_properties.append((EXCUSED_PROPERTY, "1"))


def _printable(value: Value) -> Value:
    """Return a value as a record has it when it is read, so that it equals the reviewed one."""
    return printable(value) if isinstance(value, str) else value


def _explain(j: Judgement) -> str:
    lines = [f"{j.label} {j.row.id}: {j.reason}", *(f"  {line}" for line in j.row.evidence)]
    return "\n".join([*lines, f"  -> {j.command}"] if j.command else lines)


def baseline_path(config: pytest.Config, lane: str) -> Path:
    """Return the path of a lane's reviewed rows."""
    return config.rootpath / "baselines" / f"{lane}.json"


@cache
def lane_baseline(path: Path, lane: str) -> Baseline:
    """Return the lane's baseline, read once per process, with what it inherits. Without any row, each is NEW.

    Also reads the acceptances next to it, so that errors in either file are reported before a test runs.
    """
    lane_acceptances(path, lane)
    own = load(path, lane, missing_ok=True)
    declared = declared_lanes(path.parents[1]).get(lane)
    if declared is None or not declared.inherits:
        return own
    parent = path.with_name(f"{declared.inherits}.json")
    return inherited(own, load(parent, declared.inherits, missing_ok=True))


@cache
def lane_acceptances(path: Path, lane: str) -> Acceptances:
    """Return the lane's accepted differences by row id, from the file next to its baseline; read once per process."""
    return accepted.of_lane(accepted.load(path.with_name(accepted.FILE)), lane)


RECORDER = pytest.StashKey[RowRecorder]()
REPORTED = pytest.StashKey[dict[str, str]]()


def recorder(request: pytest.FixtureRequest) -> Iterator[RowRecorder]:
    """The fixture `row` (bumpgate/plugin/fixtures.py)."""
    item = request.node
    lane = lane_of(item)
    if not judged(item) and lanes_of(item.config):
        yield recorder_of(item, lane or "")
        return
    if lane is None:
        names = list(lanes_of(request.config))
        mark = f"mark it with @pytest.mark.{names[0]}" if names else how_to_declare("mine")
        raise RowError(f"{item.nodeid} has rows but no lane: {mark}")
    made = recorder_of(item, lane)
    calibrate(item, lane)
    yield made
    # Only rows that a finalizer reported remain; the others have failed the call.
    made.fail_if_red()


def recorder_of(item: pytest.Item, lane: str) -> RowRecorder:
    """Return the recorder of a test, created at the first call."""
    if RECORDER not in item.stash:
        reported = item.config.stash.setdefault(REPORTED, {})
        if not judged(item):
            item.stash[RECORDER] = Unjudged(item, Baseline(lane), {}, reported)
            return item.stash[RECORDER]
        path = baseline_path(item.config, lane)
        item.stash[RECORDER] = RowRecorder(
            item, lane_baseline(path, lane), lane_acceptances(path, lane), reported
        )
    item.stash[RECORDER].ended = False  # a plugin may run a test again
    return item.stash[RECORDER]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail the test's call phase, not its teardown, for a red row. The test's own exception takes precedence."""
    try:
        result = yield
    except InfraError as error:
        if judged(item):
            raise
        pytest.skip(f"not measured: {one_line(error)}")
    recorder = item.stash.get(RECORDER, None)
    if recorder is not None:
        recorder.fail_if_red()
    return result
