"""Baselines: the reviewed value of every row of a lane, and the judgement of a measured row against it.

Standard library only: this file must import under any candidate torch, and under none.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bumpgate.core import kernel_code
from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.core.lanes import is_root
from bumpgate.core.rows import (
    BETTER,
    ROW_ID,
    SCHEMA,
    Judgement,
    Record,
    Row,
    Value,
    Verdict,
    is_finite,
    is_number,
    is_time,
    of_time,
    regular,
    same_value,
    tolerance_fault,
    write_atomic,
)

# With another version of one of these, a per-build value (a hash of generated code) is expected to differ.
BUILD = ("torch", "triton")
# Two times are comparable if the class of the host and the work of their rows (Row.work) are equal. The times of an
# accelerator are also compared if the host has other cores: a virtual machine with two GPUs has twice those of one.
HOST = ("lane", "device", "cpu", "cores")
# First part of the ids of rows that measure a property of the host. No value of theirs is a fault of the build.
CALIBRATION = "calibration/"
# Fields of a reviewed row that its file leaves out if they are empty.
OPTIONAL = ("work", "bound")
# Tiers of a lane that run in their own environments, separate from the lane's: tox envs interpret and codegen-*.
TIERS = ("suites/kernels/interpret/", "suites/kernels/codegen/")
ROW_FIELDS = ("value", "unit", "better", "tolerance", "note", "test", "per_build")


class BaselineError(BumpgateError):
    """Invalid baseline file. One line: the fault, and the command that fixes it."""


@dataclass(frozen=True)
class Reviewed:
    """One accepted row. `tolerance` and `note` may be edited by hand; rebaseline writes all the rest.

    values: for a row whose better is "code", the value by version of triton; such a row has no `value`.
    """

    value: Value
    unit: str
    better: str
    tolerance: float = 0.0
    note: str = ""
    test: str = ""
    per_build: bool = False
    values: Mapping[str, str] = field(default_factory=dict, hash=False)
    work: str = ""
    bound: str = ""

    def at(self, triton: str | None) -> Value:
        """Return the reviewed value for a version of triton; for a "code" row, that of the nearest reviewed version."""
        return self.values[kernel_code.nearest(triton or "", self.values)] if self.values else self.value

    def to_json(self) -> dict[str, Any]:
        """Return the fields as they are in the file."""
        of_code = {"values": dict(sorted(self.values.items(), key=lambda item: kernel_code.numbers(item[0])))}
        fields = {name: getattr(self, name) for name in ROW_FIELDS}
        fields |= {name: value for name in OPTIONAL if (value := getattr(self, name))}
        return of_code | {n: x for n, x in fields.items() if n != "value"} if self.values else fields


@dataclass(frozen=True)
class Baseline:
    """The reviewed rows of one lane; `made_with` holds the versions and the machine that measured them.

    elsewhere: ids of times that the lane which this one inherits has reviewed, and this one has not.
    """

    lane: str
    made_with: Mapping[str, str | None] = field(default_factory=dict)
    rows: Mapping[str, Reviewed] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()

    def unexpected(self, triton: str | None) -> frozenset[str]:
        """Return the "code" rows of kernels that a version of triton does not launch.

        They have no value for the nearest version that their test was reviewed with: an op may launch other kernels
        from one version on.
        """
        rows = {id: row for id, row in self.rows.items() if row.values}
        nearest = {
            t: kernel_code.nearest(triton or "", self.tritons(t)) for t in {r.test for r in rows.values()}
        }
        return frozenset(id for id, row in rows.items() if nearest[row.test] not in row.values)

    def tritons(self, test: str) -> set[str]:
        """Return the versions of triton that the "code" rows of a test were reviewed with."""
        return {version for row in self.rows.values() if row.test == test for version in row.values}


def find_root(start: Path) -> Path:
    """Return the root of the repository that contains `start`. Raises BaselineError outside of one."""
    for directory in (start, *start.parents):
        if is_root(directory):
            return directory
    raise BaselineError("no pyproject.toml or bumpgate.toml here or above: run inside the repository")


def load(path: Path, lane: str, *, missing_ok: bool = False) -> Baseline:
    """Read baselines/<lane>.json; with `missing_ok` an absent file is an empty baseline (every row NEW).

    Raises BaselineError (one line) if the file is not a complete baseline of this lane.
    """
    name = f"{path.parent.name}/{path.name}"
    restore = f"restore it with: git checkout {name}"
    try:
        text = regular(path).read_text(encoding="utf-8")
        raw = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
    except FileNotFoundError:
        if missing_ok:
            return Baseline(lane)
        raise BaselineError(f"{name}: no such file; {restore}, or make it with: {accept(lane)}") from None
    except OSError as error:
        raise BaselineError(f"{name}: cannot be read ({error.strerror}); {restore}") from None
    except json.JSONDecodeError as error:
        where = f"{name} line {error.lineno} column {error.colno}"
        raise BaselineError(f"{where}: not JSON ({error.msg}); {restore}") from None
    except (ValueError, RecursionError) as error:
        raise BaselineError(f"{name}: {one_line(error)}; {restore}") from None
    fault = _file_fault(raw, lane)
    if fault:
        raise BaselineError(f"{name}: {fault}; {restore}")
    return Baseline(
        lane,
        raw["made_with"],
        {id: Reviewed(**{"value": None, **fields}) for id, fields in raw["rows"].items()},
    )


def inherited(own: Baseline, parent: Baseline) -> Baseline:
    """Return a lane's baseline with the rows that it takes from the lane that it inherits.

    A row is taken unless the host decides its value: counts, bytes, compiled code and derived bounds travel between
    machines; times and rates do not. The lane's own row wins. An id and a test that name the parent name the lane.
    """
    name = re.compile(rf"(?<!\w){re.escape(parent.lane)}(?!\w)")
    rows = {name.sub(own.lane, id): row for id, row in parent.rows.items() if not id.startswith(CALIBRATION)}
    times = {id for id, row in rows.items() if row.better in ("lower", "higher") and of_time(id, row.unit)}
    taken = {
        id: replace(row, test=name.sub(own.lane, row.test)) for id, row in rows.items() if id not in times
    }
    made_with = own.made_with or {k: v for k, v in parent.made_with.items() if k not in (*HOST, "driver")}
    elsewhere = frozenset(times - own.rows.keys())
    return replace(own, made_with=made_with, rows={**taken, **own.rows}, elsewhere=elsewhere)


def save(path: Path, baseline: Baseline) -> None:
    """Write a baseline atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, file_text(baseline))


def file_text(baseline: Baseline) -> str:
    """Format a baseline as its file: one row per line, sorted by id, so that a diff shows only rows."""
    rows = [
        f"  {json.dumps(id)}: {json.dumps(r.to_json(), allow_nan=False)}"
        for id, r in sorted(baseline.rows.items())
    ]
    body = "{\n" + ",\n".join(rows) + "\n }" if rows else "{}"
    made_with = json.dumps(dict(sorted(baseline.made_with.items())))
    head = f'{{\n "schema": {SCHEMA},\n "lane": {json.dumps(baseline.lane)},\n "made_with": {made_with},\n'
    return f'{head} "rows": {body}\n}}\n'


def comparable(made_with: Mapping[str, Any], provenance: Mapping[str, Any]) -> str | None:
    """Return why this run's timed rows cannot be compared with the baseline's, in one line; None if they can.

    The class of the host must be the same; facts that one side lacks are ignored.
    """
    for key in HOST if made_with.get("device", "cpu") == "cpu" else HOST[:-1]:
        ours, theirs = provenance.get(key), made_with.get(key)
        if str(ours) != str(theirs) and None not in (ours, theirs):  # a record has the cores as a number
            return (
                f"timed rows are not comparable: baseline made with {key} '{theirs}', this run has '{ours}'"
            )
    return None


def judge(
    row: Row,
    baseline: Baseline,
    *,
    failed_instruments: Mapping[str, str],
    build: Mapping[str, str | None] | None = None,
) -> Judgement:
    """Return the verdict on one row: the result of the first rule below that applies.

    failed_instruments: canary name -> reason, for those that disagreed or never ran.
    build: versions of the BUILD packages in the environment that measured the row; None means the baseline's.
    """
    for rule in (_instrument, _derived, _calibration, _review, _exact, _code, _ordered, _fixed):
        judgement = rule(row, baseline, failed_instruments, build)
        if judgement is not None:
            break
    else:
        judgement = Judgement(row, Verdict.PASS, "")
    old = baseline.rows.get(row.id)
    if old is None:
        return replace(judgement, limit=limit(row, old))
    return replace(judgement, reviewed=old.at(_triton(build)), limit=limit(row, old), tolerance=old.tolerance)


def limit(row: Row, old: Reviewed | None) -> str:
    """Return the limits of a row's value, from the test and the baseline: "= 13", "<= 105, >= 1"; "" if unlimited."""
    bounds = []
    if row.expected is not None:
        bounds.append(f"= {row.expected!r}")
    elif row.better == "exact" and old is not None:
        bounds.append(f"= {old.value!r}")
    if old is not None and row.better in ("lower", "higher") and is_number(old.value):
        slack = old.tolerance * abs(old.value)
        bounds.append(
            f"<= {old.value + slack:.6g}" if row.better == "lower" else f">= {old.value - slack:.6g}"
        )
    bounds += [f"<= {row.at_most:.6g}"] if row.at_most is not None else []
    bounds += [f">= {row.at_least:.6g}"] if row.at_least is not None else []
    return ", ".join(bounds)


def in_tier(test: str) -> bool:
    """Return whether a row is measured in an environment of its tier.

    A complete run of the lane is not required to report it. It is accepted from its tier, whatever build the lane was
    adopted with.
    """
    return bool(tier(test))


def tier(test: str) -> str:
    """Return the folder of the tier that a test belongs to; "" for a test of every run of its lane."""
    return next((folder for folder in TIERS if test.startswith(folder)), "")


def violation(row: Row) -> str | None:
    """Return how a row violates the test's derived expectation, or that it is not finite; None if it does neither.

    No baseline can excuse either, so `rebaseline` rejects such a row.
    """
    value = row.value
    if is_number(value) and not is_finite(value):
        return f"measured {value}, not a finite number"
    for name, points in row.series.items():
        if wrong := [(i, x) for i, x in enumerate(points) if not is_finite(x)]:
            return f"curve {name!r}: point {wrong[0][0]} is {wrong[0][1]}, not a finite number"
    if row.expected is not None and not same_value(value, row.expected):
        return f"expected {row.expected!r} (derived), measured {value!r}"
    if row.better == "defect" and value == 1 and row.at_most == 0:
        return f"present outside its range ({row.evidence[0]}): it is back, or the range is too narrow"
    if row.at_most is not None and is_number(value) and value > row.at_most:
        return f"expected at most {row.at_most!r} (derived), measured {value!r}"
    if row.at_least is not None and is_number(value) and value < row.at_least:
        return f"expected at least {row.at_least!r} (derived), measured {value!r}"
    return None


def accept(lane: str, row_id: str = "", *, prune: bool = False, new: bool = False) -> str:
    """Return the command that accepts one row, all new ones, or a whole record."""
    only = f" --only {shlex.quote(row_id)}" if row_id else ""
    return f"bumpgate rebaseline --lane {lane}{only}{' --prune' * prune}{' --new' * new}"


def _accept(row: Row, baseline: Baseline, build: Build) -> str:
    """Return the command that accepts a row. Another build is accepted as a whole."""
    other = build is not None and baseline.made_with and other_build(baseline.made_with, build)
    return accept(baseline.lane, "" if other else row.id)


def accept_new(record: Record) -> str:
    """Return the one command that accepts the rows of a record that were never reviewed."""
    lane, whole = str(record.provenance.get("lane")), bool(record.provenance.get("full_run"))
    red = [j for j in record.judgements if j.red]
    new = [j for j in red if j.verdict is Verdict.NEW]
    if not record.complete or (not whole and any(j.command == accept(lane) for j in new)):
        return f"pytest -m {lane}"  # an incomplete run, and a part under another build, are not accepted
    return accept(lane, new=any(not j.gone for j in red if j not in new))


def times(lane: str) -> str:
    """Return the command that reviews this machine's times, with its calibrations."""
    return f"bumpgate rebaseline --lane {lane} --times"


def investigate(lane: str, test: str) -> str:
    """Return the command that reruns one test in a single process, where a debugger and a trace work."""
    single = "-n 0 " if importlib.util.find_spec("xdist") else ""  # another repository may be without xdist
    return f"pytest -m {lane} {single}{shlex.quote(test)}" if test else f"pytest -m {lane}"


Failed = Mapping[str, str]
Build = Mapping[str, str | None] | None
Rule = Callable[[Row, Baseline, Failed, Build], Judgement | None]


def _instrument(row: Row, baseline: Baseline, failed: Failed, build: Build) -> Judgement | None:
    broken = next((name for name in row.instruments if name in failed), None)
    if broken:
        reason = f"instrument {broken}: {one_line(failed[broken])}"
    elif row.witness <= 0:
        reason = f"witness {row.witness}: the check saw nothing"
    elif row.value is None:
        reason = "the instrument returned no value"
    else:
        return None
    return Judgement(row, Verdict.INSTRUMENT, reason, investigate(baseline.lane, row.test))


def _derived(row: Row, baseline: Baseline, failed: Failed, build: Build) -> Judgement | None:
    """Judge by the bound of the test. One that lies within the row's interval is INCONCLUSIVE, as in `_ordered`."""
    reason = violation(row)
    if reason is None:
        return None
    verdict = Verdict.REGRESSION
    if row.interval is not None and _within_bounds(row.interval, row):
        low, high = row.interval
        verdict, reason = Verdict.INCONCLUSIVE, f"{reason} in [{low:.6g}, {high:.6g}]"
    return Judgement(row, verdict, reason, investigate(baseline.lane, row.test))


def _within_bounds(interval: tuple[float, float], row: Row) -> bool:
    """Whether a part of the interval meets the bounds of a row's test, and its value is a finite number."""
    low, high = interval
    fits = (row.at_most is None or low <= row.at_most) and (row.at_least is None or high >= row.at_least)
    return fits and row.expected is None and is_finite(row.value)


def _calibration(row: Row, baseline: Baseline, failed: Failed, build: Build) -> Judgement | None:
    """Show a property of the host next to the reviewed host's."""
    if not row.id.startswith(CALIBRATION):
        return None
    old = baseline.rows.get(row.id)
    reason = (
        "this host, not reviewed"
        if old is None
        else f"this host; the reviewed one: {old.value:.6g} {old.unit}"
    )
    return Judgement(row, Verdict.PASS, reason)


def _review(row: Row, baseline: Baseline, failed: Failed, build: Build) -> Judgement | None:
    """Check that the baseline has this row with the same kind; otherwise the values are not comparable.

    A paired row needs no reviewed value: the gate compares it with the adopted build's.
    """
    command = _accept(row, baseline, build)
    old = baseline.rows.get(row.id)
    if old is None and row.paired:
        return Judgement(row, Verdict.PASS, "not reviewed: compared between the sides of a gate only")
    if row.id in baseline.elsewhere:
        reason = f"lane {baseline.lane} has no times of its own: measured {row.value!r} {row.unit}"
        return Judgement(row, Verdict.INCONCLUSIVE, reason, times(baseline.lane), explains=True)
    if old is None:
        return Judgement(row, Verdict.NEW, f"not reviewed: measured {row.value!r} {row.unit}", command)
    for name in ("unit", "better", "per_build", "work"):
        was, now = getattr(old, name), getattr(row, name)
        if was != now and (name != "work" or was):
            return Judgement(row, Verdict.CHANGED, f"{name} was {was!r} when reviewed, is {now!r}", command)
    return None


def _exact(row: Row, baseline: Baseline, failed: Failed, build: Build) -> Judgement | None:
    old = baseline.rows[row.id]
    if row.better != "exact" or same_value(row.value, old.value):
        return None
    reason = f"reviewed {old.value!r}, measured {row.value!r} {row.unit}"
    other = row.per_build and build is not None and other_build(baseline.made_with, build)
    if other:
        reason += f"; {other}"
    return Judgement(row, Verdict.CHANGED, reason, _accept(row, baseline, build), explains=bool(other))


def _code(row: Row, baseline: Baseline, failed: Failed, build: Build) -> Judgement | None:
    """Compare compiled code: equal to the one reviewed for this triton, or not worse than the nearest reviewed one."""
    old = baseline.rows[row.id]
    if row.better != "code":
        return None
    triton = _triton(build) or "none"
    if triton in old.values:
        if row.value == old.values[triton]:
            return None
        reason = f"reviewed {old.values[triton]!r} with triton {triton}, measured {row.value!r}"
        return Judgement(row, Verdict.CHANGED, reason, _accept(row, baseline, build))
    if triton in baseline.tritons(old.test):
        reason = f"not reviewed with triton {triton}: measured {row.value!r} {row.unit}"
        return Judgement(row, Verdict.NEW, reason, _accept(row, baseline, build))
    other = kernel_code.nearest(triton, old.values)
    found = kernel_code.worse(kernel_code.parse(old.values[other]), kernel_code.parse(row.value))
    reason = f"triton {triton} is not reviewed, compared with {other}: "
    if not found:
        return Judgement(row, Verdict.PASS, f"{reason}no worse")
    reason += ", ".join(f"{name} {step}" for name, step in found.items())
    return Judgement(row, Verdict.REGRESSION, reason, investigate(baseline.lane, row.test))


def _triton(build: Build) -> str | None:
    return build.get("triton") if build else None


def _ordered(row: Row, baseline: Baseline, failed: Failed, build: Build) -> Judgement | None:
    """Judge "lower" and "higher" rows: the limit is the reviewed value plus or minus `tolerance` of its magnitude.

    Only an interval completely beyond a limit decides. One that contains the limit is INCONCLUSIVE if the value itself
    is beyond it, or if the interval is too wide to have shown such a regression. An exact cost that falls is CHANGED
    until it is reviewed. The tolerance is the baseline's: a test cannot loosen a reviewed row.
    """
    if row.better not in ("lower", "higher"):
        return None
    old = baseline.rows[row.id]
    assert is_number(old.value), row.id
    assert is_number(row.value), row.id
    sign = 1 if row.better == "lower" else -1  # as costs: more is worse, for both directions
    reviewed, value = sign * old.value, sign * row.value
    low, high = sorted(sign * x for x in row.interval) if row.interval else (value, value)
    slack = old.tolerance * abs(reviewed)
    # max and min: adding a small slack to a large integer may round below the integer itself.
    limit, gain = max(reviewed, reviewed + slack), min(reviewed, reviewed - slack)
    reason = f"reviewed {old.value!r}, limit {sign * limit:.6g}, measured {row.value!r} {row.unit}"
    if row.interval:
        reason += f" in [{row.interval[0]:.6g}, {row.interval[1]:.6g}]"
    if low > limit:
        return Judgement(row, Verdict.REGRESSION, reason, investigate(baseline.lane, row.test))
    if high < gain:
        verdict = Verdict.WIN
        if row.better == "lower" and row.interval is None and not is_time(row):
            verdict, reason = Verdict.CHANGED, f"{reason}: fewer, or an instrument that saw only a part"
        return Judgement(row, verdict, reason, _accept(row, baseline, build))
    if high > limit and (value > limit or high - low > 2 * slack):
        return Judgement(row, Verdict.INCONCLUSIVE, reason, investigate(baseline.lane, row.test))
    return None


def _fixed(row: Row, baseline: Baseline, failed: Failed, build: Build) -> Judgement | None:
    """Judge a known defect that is absent inside its version range; outside, absence is expected."""
    if row.better != "defect" or row.value != 0 or row.at_most == 0:
        return None
    reason = f"absent inside its range ({row.evidence[0]}): narrow the range in its test"
    return Judgement(row, Verdict.FIXED, reason, investigate(baseline.lane, row.test))


def other_build(made_with: Mapping[str, str | None], build: Mapping[str, str | None]) -> str | None:
    """Return which package of BUILD differs from the baseline's, in a few words; None if none does."""
    for name in BUILD:
        if made_with.get(name) != build.get(name):
            return f"{name} {build.get(name)}, baseline made with {made_with.get(name)}"
    return None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"duplicate key {twice!r}")
    return out


def _no_constants(name: str) -> float:
    raise ValueError(f"{name} is not a valid baseline value")


def _file_fault(raw: Any, lane: str) -> str | None:
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        return f"not a baseline of schema {SCHEMA}"
    if raw.get("lane") != lane:
        return f"holds lane {raw.get('lane')!r}, not {lane!r}"
    made_with, rows = raw.get("made_with"), raw.get("rows")
    if not isinstance(made_with, dict) or not all(isinstance(v, str | None) for v in made_with.values()):
        return "made_with must map names to versions"
    if not isinstance(rows, dict):
        return "rows must map row ids to rows"
    return next((f"row {id!r}: {fault}" for id, r in rows.items() if (fault := _row_fault(id, r))), None)


def _row_fault(row_id: str, raw: Any) -> str | None:
    if not ROW_ID.fullmatch(row_id):
        return "the id must read suite/case/metric"
    fields = {*ROW_FIELDS} - {"value"} if isinstance(raw, dict) and "values" in raw else {*ROW_FIELDS}
    if not isinstance(raw, dict) or raw.keys() - {"values", *OPTIONAL} != fields:
        return f"a row has the fields {', '.join(ROW_FIELDS)}, or values in the place of value"
    value, tolerance = raw.get("value"), raw["tolerance"]
    if raw["better"] not in BETTER:
        return f"better must be one of {', '.join(BETTER)}"
    if ("values" in raw) != (raw["better"] == "code"):
        return "values (by version of triton) are for rows whose better is 'code', and required there"
    if "values" in raw and (fault := _values_fault(raw["values"])):
        return fault
    if "values" not in raw and not (isinstance(value, (str, bool)) or is_finite(value)):
        return f"value must be a finite number, a string or a boolean, got {value!r}"
    if raw["better"] in ("lower", "higher") and not is_number(value):
        return f"better={raw['better']!r} needs a number, got {value!r}"
    if fault := tolerance_fault(raw["better"], tolerance):
        return fault
    if raw["better"] not in ("lower", "higher") and tolerance:
        return f"a row whose better is {raw['better']!r} has no tolerance"
    if not all(isinstance(raw.get(name, ""), str) for name in ("unit", "note", "test", *OPTIONAL)):
        return "unit, note, test, work and bound must be strings"
    return None if isinstance(raw["per_build"], bool) else "per_build must be true or false"


def _values_fault(values: Any) -> str | None:
    if not isinstance(values, dict) or not values:
        return "values must map versions of triton to counts of the code"
    for version, text in values.items():
        try:
            kernel_code.parse(text)
        except ValueError as error:
            return f"triton {version}: {error}"
    return None
