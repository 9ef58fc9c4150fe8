"""Rows: one measured value with its id, the verdict on it, and record.json, which carries both and a run's problems.

Standard library only: this file must import under any candidate torch, and under none.
"""

from __future__ import annotations

import errno
import hashlib
import json
import lzma
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeGuard

from bumpgate.core import kernel_code
from bumpgate.core.errors import BumpgateError, loads, one_line
from bumpgate.core.text import redacted

__tracebackhide__ = True  # pytest shows the line of the test that made an invalid row
SCHEMA = 1
# Of record.json. Schema 1, in which a problem was a line of text, can still be read.
RECORD_SCHEMA = 2
RECORD_KEYS = {"schema", "complete", "provenance", "problems", "rows"}
XZ = b"\xfd7zXZ\0"  # the first bytes of a file that xz wrote
ROW_ID = re.compile(r"[a-z][a-z0-9_]*/[A-Za-z0-9][A-Za-z0-9._+=-]*/[a-z][a-z0-9_]*")
# A cost may be this much worse, relative to the reviewed one; more would be no limit.
MOST_TOLERANCE = 10
RULE = re.compile(r"[A-Z]\d+")
BETTER = ("exact", "lower", "higher", "derived", "defect", "code")
# Curves are only plotted: more points than a plot has pixels would only enlarge the record.
MAX_CURVES, MAX_POINTS = 8, 4096
# Series that paired sessions compare point by point: cost of each round of a timed row, lower is better.
COST_PER_ROUND = "cost_per_round"

# Values that depend on rounding and on the order of a sum, by name and by unit.
ERRORS = re.compile(r"error|residual|leak|difference")
# Ratios that are not of times, errors aside: of losses, and of counts.
NO_TIMES = re.compile(r"loss_growth|operators")
# What can bound a time: properties of a host, each with its calibrations, the rows `calibration/<bound>/...`. Between
# two ranks it is `exchange-2`.
BOUNDS = ("memory", "matmul", "launch", "exchange", "compiler", "host")
# Units of times and rates, and how much worse a single reading must look to be measured again: beyond what two H200s
# read under one build (ms 2.5 %, fraction 3.4 %, ratios 5.5 %, seconds of a compile next to other tests 31 %, of a
# kernel's first call 62 %).
TIMES = {"ms": 1.05, "us": 1.05, "ns": 1.05, "s": 1.4, "fraction": 1.07, "ratio": 1.1}
RATE = re.compile(r".+/s|tokens")

# None: the instrument returned no value. It is never a good value, and differs from 0.
Value = int | float | str | bool | None


class RowError(BumpgateError):
    """Invalid row: bad id, type or expectation."""


class RecordError(BumpgateError):
    """A record.json that cannot be read."""


class Verdict(Enum):
    """The verdict on a row, worst first. Everything but WIN, FIXED and PASS is red."""

    REGRESSION = "REGRESSION"
    """Worse than the limit, against the derived expectation, or not a finite number."""
    CHANGED = "CHANGED"
    """Another value, unit or kind of row than the reviewed one, or an exact cost that fell: counted in part?"""
    MISSING = "MISSING"
    """Reviewed but not measured in this run. Records before NEW also have it for rows that were never reviewed."""
    NEW = "NEW"
    """Measured but never reviewed: nothing says yet that its value is right."""
    INSTRUMENT = "INSTRUMENT"
    """The instrument broke: a canary disagreed or never ran, or the check observed nothing."""
    INFRA = "INFRA"
    """The machine failed: no memory, a full disk, a device in use by another process."""
    INCONCLUSIVE = "INCONCLUSIVE"
    """The interval of a timed row contains the limit: measure again."""
    WIN = "WIN"
    """Better than the tolerance. Never blocks; proposes a new review."""
    FIXED = "FIXED"
    """A known upstream defect is absent from a version listed as having it. Never blocks; narrow its range."""
    PASS = "PASS"
    """Measured, and right."""

    @property
    def red(self) -> bool:
        return self not in (Verdict.PASS, Verdict.WIN, Verdict.FIXED)

    @property
    def severity(self) -> int:
        """0 is the worst."""
        return list(Verdict).index(self)


# Fields that a record leaves out if they are empty.
OPTIONAL = ("paired", "work", "place", "own", "bound", "program")


@dataclass(frozen=True)
class Row:
    """One measured value. Raises RowError (one line) on an invalid field.

    id: `suite/case/metric`, the metric in snake_case with its unit in the name, if any.
    unit: of the value ("breaks", "bytes", "ratio"). A renamed unit is a change.
    witness: number of items that the check covered; at 0 or less the check was vacuous and the row is not evidence.
    rule: the contract row that this one checks, e.g. "C6".
    expected, at_most, at_least: bounds that the test derives from the model, not from an earlier run.
    better: "exact" any change is red; "lower"/"higher" judged against the baseline with `tolerance`;
        "derived" judged by the expectation alone; "defect" 1 where a known upstream defect is present and 0 where
        it is fixed, with at_most 1 inside the range of versions in which it is known and 0 outside. The first line
        of its evidence names that range; "code" counts of a kernel's compiled code in one text
        (bumpgate.core.kernel_code), with a reviewed text for each version of triton.
    tolerance: relative to the baseline value, 0.02 is 2 %.
    interval: (low, high) around the value, for timed rows.
    instruments: canaries that must have passed for this value to be valid.
    test: pytest node id.
    per_build: the value belongs to one torch build (a hash of generated code): under another build than the
        baseline's a difference is shown and not judged.
    series: name -> points of a curve (a loss by step) for the report's plots. The gate compares `cost_per_round`
        round by round; the others do not affect a verdict.
    paired: the gate compares the row between its sides although it has no reviewed value: an exact value as it is,
        another one in paired sessions although a process reads it once and gives no interval.
    work: what a timed row ran: "pattern AEME, dtype float32, batch 2, tokens 64". Times of different work are
        never compared.
    place: "suites/compile/test_a.py:42", where the test reports it.
    own: of a ratio to another implementation, the id of the row with the measured program's own time. A gate judges
        that row; if the ratio alone is worse, the other implementation became faster.
    bound: which of BOUNDS decide a time, "memory, matmul"; it is judged only where their calibrations agree with
        the reviewed ones (bumpgate.core.hosts).
    program: "FILE.py:function" of the smallest program that shows the row, for `bumpgate reproduce`.
    """

    id: str
    value: Value
    unit: str
    witness: int
    rule: str
    expected: Value = None
    at_most: float | None = None
    at_least: float | None = None
    better: str = "exact"
    tolerance: float = 0.0
    interval: tuple[float, float] | None = None
    evidence: tuple[str, ...] = ()
    instruments: tuple[str, ...] = ()
    test: str = ""
    per_build: bool = False
    series: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    paired: bool = False
    work: str = ""
    place: str = field(default="", compare=False)
    own: str = ""
    bound: str = ""
    program: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for fault in _faults(self):
            raise RowError(f"row {self.id!r}: {fault}")

    @property
    def unmeasured(self) -> bool:
        """Whether this is a placeholder for a reviewed row that a run did not report: no value, witness or rule."""
        return self.value is None and self.witness == 0 and not self.rule

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON types; numbers that JSON cannot represent become {"float": "nan"}."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["value"] = _encode(self.value)
        out["interval"] = None if self.interval is None else [_encode(x) for x in self.interval]
        out |= {"evidence": list(self.evidence), "instruments": list(self.instruments)}
        curves = {name: [_encode(x) for x in points] for name, points in out.pop("series").items()}
        out |= {"series": curves} if curves else {}
        return {name: x for name, x in out.items() if x or name not in OPTIONAL}

    @classmethod
    def from_json(cls, raw: Any) -> Row:
        """Create a row from the output of to_json. Raises RowError on anything else."""
        if not isinstance(raw, dict) or raw.keys() | {"series", *OPTIONAL} != {f.name for f in fields(cls)}:
            raise RowError("a row has the wrong fields")
        interval, series = raw["interval"], raw.get("series", {})
        try:
            return cls(
                **raw
                | {
                    "value": _decode(raw["value"]),
                    "interval": None if interval is None else tuple(_decode(x) for x in interval),
                    "evidence": tuple(raw["evidence"]),
                    "instruments": tuple(raw["instruments"]),
                    "series": {name: tuple(map(_decode, points)) for name, points in series.items()},
                }
            )
        except (TypeError, AttributeError):
            raise RowError(f"row {raw['id']!r}: a field has the wrong type") from None


@dataclass(frozen=True)
class Judgement:
    """A verdict on a row, the reason in one line, and the one command that accepts or investigates it.

    explains: shown, but not judged (a per-build value under another build).
    accepted: who accepted this difference, until when and why (baselines/accepted.toml); it is not red until then.
    gone: the run was complete and nothing measures this row any more, so `rebaseline --prune` may drop it.
    reviewed, tolerance: the baseline's. limit: the allowed values, such as "<= 105"; "" if they are not limited.
    unreached: the run ended before the row's test; one red test with -x leaves many such rows.
    """

    row: Row
    verdict: Verdict
    reason: str
    command: str = ""
    explains: bool = False
    gone: bool = False
    accepted: str = ""
    reviewed: Value = field(default=None, compare=False)
    limit: str = field(default="", compare=False)
    unreached: bool = False
    tolerance: float = field(default=0.0, compare=False)

    @property
    def red(self) -> bool:
        return self.verdict.red and not self.explains and not self.accepted

    @property
    def label(self) -> str:
        """The verdict as shown to a reader."""
        note = "accepted" if self.accepted else "not judged" if self.explains else ""
        return f"{self.verdict.value} ({note})" if note else self.verdict.value

    def to_json(self) -> dict[str, Any]:
        shown = {
            "accepted": self.accepted,
            "reviewed": self.reviewed is not None,
            "limit": self.limit,
            "unreached": self.unreached,
            "tolerance": self.tolerance,
        }
        out = {f.name: getattr(self, f.name) for f in fields(self) if shown.get(f.name, True)}
        return out | {"row": self.row.to_json(), "verdict": self.verdict.value}

    @classmethod
    def from_json(cls, raw: Any) -> Judgement:
        """Create a judgement from the output of to_json. Raises RowError on anything else."""
        optional = {"accepted", "reviewed", "limit", "unreached", "tolerance"}
        if not isinstance(raw, dict) or raw.keys() | optional != {f.name for f in fields(cls)}:
            raise RowError("a judgement has the wrong fields")
        row = Row.from_json(raw["row"])
        if raw["verdict"] not in Verdict.__members__:
            raise RowError(f"row {row.id!r}: unknown verdict {raw['verdict']!r}")
        return cls(**raw | {"row": row, "verdict": Verdict[raw["verdict"]]})


class ProblemKind(Enum):
    """What happened. Only FAILED, UNCOLLECTED and NOTHING can be a fault of the product."""

    FAILED = "failed"  # a test raised, or reported a row of another test
    INFRA = "infra"  # the machine stopped a test that has no reviewed rows: no memory, other processes
    UNCOLLECTED = "uncollected"  # a file could not be imported
    NOTHING = "nothing"  # nothing was measured: the workers died, or every test was skipped
    LOST = "lost"  # a reviewed test was not collected, was left out undeclared, did not run, or failed as expected
    GAP = "gap"  # under --gate: a test was skipped, deselected or not run, or passed where a failure is expected
    CUT_SHORT = "cut short"  # tests did not finish


FAULTS = (ProblemKind.FAILED, ProblemKind.UNCOLLECTED, ProblemKind.NOTHING)
# Words of the problems in records of schema 1, which were lines of text.
WORDS = {
    ": could not be collected: ": ProblemKind.UNCOLLECTED,
    "under --gate": ProblemKind.GAP,
    "part of the lane: ": ProblemKind.GAP,
    "the run was cut short": ProblemKind.CUT_SHORT,
    "no row measured: ": ProblemKind.NOTHING,
    "rows missing: ": ProblemKind.NOTHING,
    "nothing was checked": ProblemKind.NOTHING,
}


@dataclass(frozen=True)
class Problem:
    """test: a node id, or the path of a file; "" if the problem belongs to none. why: one line."""

    test: str
    kind: ProblemKind
    why: str

    def __str__(self) -> str:
        return f"{self.test}: {self.why}" if self.test else self.why

    @property
    def fault(self) -> bool:
        """Whether the product can have caused it."""
        return self.kind in FAULTS

    @property
    def subject(self) -> str:
        """Key by which the same problem is found in another run: the test, else the kind."""
        return self.test or self.kind.value

    def to_json(self) -> dict[str, str]:
        return {"test": self.test, "kind": self.kind.value, "why": self.why}

    @classmethod
    def from_json(cls, raw: Any) -> Problem:
        """Create a problem from to_json's output, or from a line of schema 1. Raises KeyError or ValueError."""
        if isinstance(raw, Mapping):
            return cls(str(raw["test"]), ProblemKind(raw["kind"]), str(raw["why"]))
        line = str(raw)
        kind = next((kind for words, kind in WORDS.items() if words in line), ProblemKind.FAILED)
        test, separator, why = line.partition(": ")
        return cls(test, kind, why) if separator and ".py" in test else cls("", kind, line)


@dataclass(frozen=True)
class Record:
    """Result of one run: provenance, one judgement per row, and problems that belong to no row.

    complete: every selected test ran to its end.
    problems: each red: a failed test whose red rows do not show why, a skip under --gate.
    tests: node id -> outcome (bumpgate.core.census); empty in a record of an older bumpgate or of a killed run.
    sealed: read from a file that has a digest of itself, as every run writes now.
    """

    provenance: Mapping[str, Any]
    judgements: tuple[Judgement, ...]
    complete: bool = True
    problems: tuple[Problem, ...] = ()
    tests: Mapping[str, str] = field(default_factory=dict, hash=False)
    sealed: bool = field(default=False, compare=False)

    @property
    def red(self) -> bool:
        return not self.complete or bool(self.problems) or any(j.red for j in self.judgements)

    @property
    def not_run(self) -> dict[str, str]:
        """Return row id -> why the run was not required to report it. Problems of such rows are in `problems`."""
        lines = (str(line).partition(": ") for line in self.provenance.get("not_run", ()))
        return {row: reason for row, _, reason in lines}


def write_record(
    path: Path,
    provenance: Mapping[str, Any],
    judgements: Iterable[Judgement],
    *,
    complete: bool = True,
    problems: Iterable[Problem] = (),
    tests: Mapping[str, str] | None = None,
) -> Record:
    """Write record.json atomically, rows sorted by id, without secrets."""
    ordered = tuple(sorted(judgements, key=lambda j: j.row.id))
    record = Record(provenance, ordered, complete, tuple(problems), dict(sorted((tests or {}).items())))
    raw = {
        "schema": RECORD_SCHEMA,
        "complete": record.complete,
        "provenance": dict(record.provenance),
        "problems": [problem.to_json() for problem in record.problems],
        "tests": record.tests,
        "rows": [j.to_json() for j in record.judgements],
    }
    raw = json.loads(redacted(json.dumps(raw, allow_nan=False)))
    write_atomic(path, json.dumps({**raw, "digest": digest_of(raw)}, indent=1) + "\n")
    return record


def digest_of(raw: Mapping[str, Any]) -> str:
    """Return the sha256 of a record's content, without its own "digest"."""
    content = {name: value for name, value in raw.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_record(path: Path) -> Record:
    """Read record.json, also one that `xz` compressed. Raises RecordError (one line) on an incomplete or edited one."""
    remake = "write it again with: pytest -m LANE"
    try:
        content = regular(path).read_bytes()
        content = lzma.decompress(content) if content.startswith(XZ) else content
        raw = loads(content)
        if not isinstance(raw, dict) or raw.get("schema") not in (1, RECORD_SCHEMA):
            raise RecordError(f"{path.name}: not a record of schema {RECORD_SCHEMA}; {remake}")
        judgements = tuple(Judgement.from_json(j) for j in raw["rows"])
        if "digest" in raw and raw["digest"] != digest_of(json.loads(content)):
            raise RecordError(f"{path.name}: was edited after the run wrote it; {remake}")
        if not isinstance(raw["complete"], bool):
            raise RecordError(
                f"{path.name}: complete must be true or false, got {raw['complete']!r}; {remake}"
            )
        if twice := [id for id, n in Counter(j.row.id for j in judgements).items() if n > 1]:
            raise RecordError(f"{path.name}: has the row {twice[0]} more than once; {remake}")
        problems = tuple(Problem.from_json(problem) for problem in raw["problems"])
        provenance = dict(raw["provenance"])
        tests = {str(test): str(outcome) for test, outcome in raw.get("tests", {}).items()}
        return Record(provenance, judgements, raw["complete"], problems, tests, sealed="digest" in raw)
    except OSError as error:
        raise RecordError(f"{path.name}: cannot be read ({error.strerror}); {remake}") from None
    except RowError as error:
        raise RecordError(f"{path.name}: {error}; {remake}") from None
    except RecordError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, lzma.LZMAError) as error:
        raise RecordError(f"{path.name}: not a record ({one_line(error)}); {remake}") from None


def regular(path: Path) -> Path:
    """Return the path of a file that may not exist. Raises OSError on a device or a pipe, whose content may not end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path


def write_atomic(path: Path, text: str | bytes) -> None:
    """Replace a file atomically, through a temporary file in the same directory. Links are followed.

    Raises OSError, also on a folder, a device or a pipe: the file would take its place.
    """
    path = path.resolve()
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder: name a file", str(path))
    regular(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as f:
            f.write(text.encode("utf-8") if isinstance(text, str) else text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_output(path: Path, text: str, begins: str) -> None:
    """Write a text that begins so to a path of the user. Raises BumpgateError on a file that is no earlier output."""
    if path.is_file() and (old := path.read_bytes()) and not old.startswith(begins.encode()):
        raise BumpgateError(f"{path}: this file is no earlier output of this command: name another path")
    write_atomic(path, text)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number that fits a float: not NaN, inf, or an integer of 400 digits."""
    return is_number(value) and abs(value) < 1e300


def metric(row: Row) -> str:
    """Return the last part of the row's id."""
    return row.id.rsplit("/", 1)[1]


def is_time(row: Row) -> bool:
    """Whether readings of this row vary with the machine: a time, a rate, or a ratio of times."""
    return of_time(row.id, row.unit)


def of_time(id: str, unit: str) -> bool:
    """Return the same for the id and the unit of a row."""
    if unit == "ratio":
        name = id.rpartition("/")[2]
        return not (ERRORS.search(name) or NO_TIMES.search(name))
    return unit in TIMES or RATE.fullmatch(unit) is not None


def same_value(a: Value, b: Value) -> bool:
    """Return whether two values are equal and both or neither are bools: True != 1, but 13 == 13.0."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _faults(row: Row) -> Iterable[str]:
    if not isinstance(row.id, str) or not ROW_ID.fullmatch(row.id):
        yield "the id must read suite/case/metric, suite and metric in snake_case"
    if not isinstance(row.value, (int, float, str, bool, type(None))):
        yield f"value must be int, float, str, bool or None, got {type(row.value).__name__}"
    if not isinstance(row.unit, str) or not row.unit:
        yield "unit must name what is counted"
    if not isinstance(row.witness, int) or isinstance(row.witness, bool):
        yield f"witness must be an int, got {row.witness!r}"
    if not isinstance(row.rule, str) or not (RULE.fullmatch(row.rule) or row.unmeasured):
        yield f"rule must be a contract row such as C6, got {row.rule!r}"
    if row.better not in BETTER:
        yield f"better must be one of {', '.join(BETTER)}, got {row.better!r}"
    if not isinstance(row.expected, (int, float, str, bool, type(None))):
        yield f"expected must be int, float, str, bool or None, got {type(row.expected).__name__}"
    if is_number(row.expected) and not is_finite(row.expected):
        yield f"expected must be finite, got {row.expected!r}"
    for name in ("at_most", "at_least"):
        bound = getattr(row, name)
        if bound is not None and not is_finite(bound):
            yield f"{name} must be a finite number, got {bound!r}"
        if bound is not None and row.value is not None and not is_number(row.value):
            yield f"{name} needs a number, got {row.value!r}"
    if fault := tolerance_fault(row.better, row.tolerance):
        yield fault
    if not isinstance(row.paired, bool):
        yield f"paired must be True or False, got {row.paired!r}"
    if not isinstance(row.work, str):
        yield f"work must be a string, got {row.work!r}"
    if unknown := [
        name for name in row.bound.split(", ") if row.bound and name.partition("-")[0] not in BOUNDS
    ]:
        yield f"bound must be some of {', '.join(BOUNDS)}, got {unknown[0]!r}"
    if row.own and (not ROW_ID.fullmatch(str(row.own)) or row.own == row.id or row.unit != "ratio"):
        yield f"own must be the id of another row, of a ratio, got {row.own!r} and unit {row.unit!r}"
    if row.paired and row.better not in ("exact", "lower", "higher"):
        yield f"better of a paired row must be exact, lower or higher, got {row.better!r}"
    if row.better not in ("lower", "higher") and (row.tolerance or row.interval is not None):
        yield f"a row whose better is {row.better!r} has neither tolerance nor interval"
    if row.better in ("lower", "higher") and row.value is not None and not is_number(row.value):
        yield f"better={row.better!r} needs a number, got {row.value!r}"
    derived = row.expected is not None or row.at_most is not None or row.at_least is not None
    if row.better == "derived" and not (derived or row.unmeasured):
        yield "a derived row needs expected, at_most or at_least: nothing would judge it"
    valid = row.value in (0, 1, None) and row.at_most in (0, 1) and row.evidence
    if row.better == "defect" and not (valid or row.unmeasured):
        yield "a defect row has value and at_most 0 or 1, and evidence that names its range"
    if row.better == "code" and row.value is not None:
        try:
            kernel_code.parse(row.value)
        except ValueError as error:
            yield str(error)
    if row.per_build and row.better != "exact":
        yield "better of a per-build row must be exact"
    if row.interval is not None and not (len(row.interval) == 2 and all(map(is_number, row.interval))):
        yield f"the interval must be (low, high), got {row.interval!r}"
    # NaN is in no interval, but is allowed here, so that it is judged as a regression.
    if row.interval is not None and is_finite(row.value):
        low, high = row.interval
        if not low <= row.value <= high:
            yield f"the interval {row.interval!r} does not contain the value {row.value!r}"
    yield from _series_faults(row.series)


def tolerance_fault(better: object, tolerance: object) -> str:
    """Return what is wrong with the tolerance of a row or of its review; "" if it is valid."""
    if not is_finite(tolerance) or tolerance < 0:
        return f"tolerance must be a finite number of at least 0, got {tolerance!r}"
    most = MOST_TOLERANCE if better == "lower" else 1
    return (
        f"tolerance {tolerance:g} accepts any loss: it is relative, so 2 % is 0.02"
        if tolerance >= most
        else ""
    )


def _series_faults(series: Mapping[str, tuple[float, ...]]) -> Iterable[str]:
    if not isinstance(series, Mapping) or len(series) > MAX_CURVES:
        yield f"series must map at most {MAX_CURVES} names to points"
        return
    for name, points in series.items():
        if not isinstance(name, str) or not name:
            yield f"the name of a curve must be a string, got {name!r}"
        elif not isinstance(points, tuple) or not 1 <= len(points) <= MAX_POINTS:
            yield f"curve {name!r} must be a tuple of 1 to {MAX_POINTS} points"
        elif not all(map(is_finite if name == COST_PER_ROUND else is_number, points)):
            yield f"curve {name!r}: every point must be a number, and a cost finite"


def _encode(value: Value) -> Any:
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _decode(raw: Any) -> Any:
    return float(raw["float"]) if isinstance(raw, dict) and raw.keys() == {"float"} else raw
