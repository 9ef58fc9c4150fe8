"""Tests of the lane that a gate runs once more: those that the machine disturbed, and times just outside of a bound.

A time that is read once, next to other tests, can miss a bound of its test by chance. Where it does so on one side
alone, both sides read it once more while nothing else runs, and the better reading of each counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bumpgate.core.baseline import violation
from bumpgate.core.rows import (
    Judgement,
    ProblemKind,
    Record,
    Verdict,
    is_finite,
    is_time,
    read_record,
    write_record,
)
from bumpgate.gate.compare_rows import direction, kinds, timed
from bumpgate.gate.environments import ROUNDS, SIDES
from bumpgate.gate.runner import Bench
from bumpgate.gate.state import Gate
from bumpgate.gate.timed import MEASURED
from bumpgate.gate.view import cut

# More tests than these are not outside of their bounds by chance.
MOST_TESTS = 8


def spoiled_again(bench: Bench, gate: Gate, name: str, record: Record) -> Record:
    """Rerun the tests of a side that the machine disturbed (INFRA), and merge the new results into its record."""
    disturbed = {j.row.test for j in record.judgements if j.verdict is Verdict.INFRA}
    tests = sorted(disturbed | {p.test for p in record.problems if p.kind is ProblemKind.INFRA})
    if not tests:
        return record
    what = "again the tests that the machine disturbed"
    selection = [*bench.options(gate, record), *tests]
    again = bench.run_sides([name], what, selection, "again-{}.json")[name].record
    if again is None or not again.complete:
        return record
    kept = [j for j in record.judgements if j.row.test not in tests]
    problems = [p for p in record.problems if p.test not in tests]
    return write_record(
        bench.out / f"{name}.json",
        record.provenance,
        [*kept, *again.judgements],
        complete=record.complete,
        problems=[*problems, *again.problems],
        tests={**record.tests, **{test: again.tests[test] for test in tests if test in again.tests}},
    )


def outside_on_one_side(adopted: Record, candidate: Record) -> dict[str, str]:
    """Return row id -> node id of the times read once that miss a bound of their test on one side and are right on the
    other; empty if they are of more than MOST_TESTS tests.
    """
    before = {j.row.id: j for j in adopted.judgements}
    both = ((before[j.row.id], j) for j in candidate.judgements if j.row.id in before)
    found = {j.row.id: j.row.test for other, j in both if _outside_on_one(other, j)}
    return found if len(set(found.values())) <= MOST_TESTS else {}


def _outside_on_one(adopted: Judgement, candidate: Judgement) -> bool:
    if kinds(adopted.row, candidate.row) or adopted.red == candidate.red:
        return False
    red = adopted if adopted.red else candidate
    return all(_read_once(j) for j in (adopted, candidate)) and violation(red.row) is not None


def _read_once(j: Judgement) -> bool:
    """Whether this is a usable single reading of a time that has a bound on one end."""
    usable = j.verdict in MEASURED and is_finite(j.row.value) and j.row.expected is None
    return usable and is_time(j.row) and not timed(j.row) and direction(j.row) != 0


def read_again(bench: Bench, gate: Gate) -> Gate:
    """Read the times that miss a bound on one side alone once more on both sides, and save each record and the gate."""
    records = {name: bench.record(gate, name) for name in SIDES}
    adopted, candidate = records["adopted"], records["candidate"]
    if adopted is None or candidate is None or gate.failed:
        return gate
    rows = outside_on_one_side(adopted, candidate)
    names = [name for name in SIDES if not gate.sides[name].read_again]
    if not rows or not names:
        return gate
    started, lost, tests = time.monotonic(), "", sorted(set(rows.values()))
    # On a CPU the two sides would disturb each other; shares of a machine with several GPUs do not.
    for group in bench.groups(names) if bench.shares else [[name] for name in names]:
        with TemporaryDirectory() as folder:
            runs = bench.run_sides(
                group,
                "again the times outside of a bound",
                [*bench.options(gate), "-n", "0", *tests],
                "bounds-{}.json",
                env_vars={"BUMPGATE_ROUNDS": str(ROUNDS)},
                # On filled caches a time that includes a compilation would pass whatever the build.
                by_side={
                    name: {x: str(Path(folder, name, x)) for x in bench.environments[name].cache_folders}
                    for name in group
                },
            )
        for name, run in runs.items():
            if run.record and run.record.complete:
                _merge(bench.out / f"{name}.json", run.record, rows)
            else:
                lost += f"; {name}: not read, {run.failure or 'the run was cut short'} (log: {run.log})"
            gate = gate.changed(name, read_again=True)
        gate = bench.save(gate)
    left = outside_on_one_side(*(read_record(bench.out / f"{name}.json") for name in SIDES))
    bench.view.say(
        f"{len(rows)} time{'s' * (len(rows) != 1)} outside of a bound on one side, read once more on both: "
        f"{', '.join(cut([*rows]))}; still outside: {', '.join(cut([*left])) or 'none'}; "
        f"{time.monotonic() - started:.0f} s{lost}"
    )
    return gate


def _merge(path: Path, again: Record, rows: Mapping[str, str]) -> None:
    """Write the better readings of these rows into a record, and what only the second run has: rows and faults.

    All other rows keep their first value.
    """
    record = read_record(path)
    second = {j.row.id: j for j in again.judgements}
    merged = [
        better_reading(j, second[j.row.id]) if j.row.id in rows and j.row.id in second else j
        for j in record.judgements
    ]
    known, failed = {j.row.id for j in merged}, {p.test for p in record.problems}
    write_record(
        path,
        record.provenance,
        [*merged, *(j for id, j in second.items() if id not in known)],
        complete=record.complete,
        problems=[*record.problems, *(p for p in again.problems if p.fault and p.test not in failed)],
        tests=record.tests,
    )


def better_reading(first: Judgement, second: Judgement) -> Judgement:
    """Return the better of two readings of a row, with the other one in its evidence; the first if one is unusable."""
    if kinds(first.row, second.row) or not (_read_once(first) and _read_once(second)):
        return first
    assert is_finite(first.row.value)
    assert is_finite(second.row.value)
    gain = direction(first.row) * (first.row.value - second.row.value)
    best, other = (second, first) if gain > 0 else (first, second)
    line = f"read twice, the better reading counts; the other: {other.row.value:.6g} {other.row.unit}"
    return replace(best, row=replace(best.row, evidence=(*best.row.evidence, line)))
