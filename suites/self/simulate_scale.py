"""Simulate batches of parallel probes, and measure a history of synthetic gates: the tables of docs/scale.md.

python -m suites.self.simulate_scale --write    # some minutes; rewrites the tables between their marks
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

from bumpgate.baseline import load
from bumpgate.bisect.batch import batch
from bumpgate.bisect.journal import Plan
from bumpgate.bisect.search import Outcome
from bumpgate.report import dashboard
from bumpgate.report.archive import Archive
from suites.self.searching import labels, noisy
from suites.self.tree import ROOT

DOCS = ROOT / "docs" / "scale.md"
MARK = "<!-- {}: python -m suites.self.simulate_scale --write -->"
END = "<!-- end of {} -->"
WORKERS = (1, 2, 4, 8, 16)
RUNS = {60: 100, 365: 20}
GATES, READINGS = 1000, 500_000
LAST = date(2026, 11, 30)


@dataclass(frozen=True)
class Case:
    """nights: number of versions, both ends included. misreads: rate of false BAD and of false GOOD, stated."""

    nights: int
    misreads: float
    workers: int


@dataclass(frozen=True)
class Cell:
    """Result of a case: rounds with that of the ends, probes with all repeats, and runs that named another version."""

    rounds: float
    most: int
    probes: float
    wrong: int
    runs: int


def simulated(case: Case) -> Cell:
    """Run a case with the change at random places."""
    names = tuple(labels(case.nights))
    plan = Plan(names, names[0], names[-1], (), case.misreads, case.misreads)
    rounds, probes, wrong = [], [], 0
    runs = RUNS[case.nights]
    for seed in range(runs):
        dice = random.Random(f"{case.nights} {case.misreads} {seed}")
        first_bad = dice.randrange(1, case.nights)
        read = noisy(first_bad, case.misreads, case.misreads, dice)
        search = plan.search()
        count = 0
        while due := batch(search, case.workers):
            count += 1
            for index in due:
                search.record(index, Outcome[read(index)])
        result = search.result()
        assert result is not None
        rounds.append(count)
        probes.append(result.probes)
        wrong += result.suspects != (first_bad,)
    return Cell(statistics.mean(rounds), max(rounds), statistics.mean(probes), wrong, runs)


def line(nights: int, misreads: float, cells: Sequence[Cell]) -> str:
    """Format one row of the table of rounds; cells: in the order of WORKERS."""
    parts = [f"{c.rounds:.1f}, {c.most} ({c.probes:.0f})" for c in cells]
    wrong = max(c.wrong for c in cells)
    return f"| {nights} | {misreads:.0%} | {' | '.join(parts)} | {wrong} of {cells[0].runs} |"


def rounds_table(report: Callable[[str], None]) -> str:
    head = ["nights", "misreads", *(f"{w} probe{'s' * (w > 1)}" for w in WORKERS), "wrong, at most"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for nights in RUNS:
        for misreads in (0.0, 0.05, 0.1):
            cells = [simulated(Case(nights, misreads, workers)) for workers in WORKERS]
            lines.append(line(nights, misreads, cells))
            report(lines[-1])
    return "\n".join(lines)


def fill(archive: Archive, gates: int, per_side: int) -> None:
    """Store gates of 5 hosts, two runs of `per_side` readings each; row ids are those of the lane cpu, repeated.

    Nine of ten rows are counts, the tenth is timed. One finding is seen by every tenth gate.
    """
    sql, tables = archive.sql, archive.tables
    known = sorted(load(ROOT / "baselines" / "cpu.json", "cpu").rows)
    names = [
        known[i % len(known)] + (f"-{i // len(known)}" if i >= len(known) else "") for i in range(per_side)
    ]
    dice = random.Random(1)
    texts = dict.fromkeys(("head", "repro", "decision", "module"), "")
    detail = texts | {"rows": names[:1], "good": ["13"], "bad": ["14"]}
    hosts, lane = 5, {"lane": "cpu", "device": "cpu", "torch_git": "a" * 40, "commit": "b" * 40}
    with archive.transaction() as connection:
        connection.execute(
            sql.insert(tables["findings"]),
            [{"key": "f" * 12, "lane": "cpu", "package": "torch", "label": "CHANGED"}],
        )
        for gate in range(1, gates + 1):
            started = f"{LAST - timedelta((gates - gate) // hosts)}T02:00:00+00:00"
            for side in (0, 1):
                run = 2 * gate - 1 + side
                head = {"id": run, "digest": f"{run:064x}", "started": started, "host": f"host{gate % hosts}"}
                more = {"torch": f"2.{14 + side}.0", "host_class": "16 cores, Xeon", "red": False}
                connection.execute(sql.insert(tables["runs"]), [lane | head | more])
                made = []
                for i, name in enumerate(names):
                    timed = i % 10 == 9
                    number = dice.gauss(1.0, 0.01) if timed else 13
                    fields = {"run": run, "row": name, "value": json.dumps(number), "number": number}
                    spread = (
                        {"low": number * 0.98, "high": number * 1.02}
                        if timed
                        else {"low": None, "high": None}
                    )
                    unit = "s" if timed else "count"
                    made.append(fields | spread | {"unit": unit, "verdict": "PASS", "row_red": False})
                connection.execute(sql.insert(tables["readings"]), made)
            head = {
                "id": gate,
                "digest": f"{gate:064x}",
                "started": started,
                "lane": "cpu",
                "decision": "ADOPT",
            }
            sides = {"good": 2 * gate - 1, "bad": 2 * gate, "package": "torch", "moved": "[]", "whole": True}
            connection.execute(sql.insert(tables["gates"]), [head | sides])
            if gate % 10 == 0:
                seen = {
                    "gate": gate,
                    "finding": "f" * 12,
                    "detail": json.dumps(detail),
                }
                connection.execute(sql.insert(tables["sightings"]), [seen])


def storage_table(gates: int, readings: int) -> str:
    """Measure a SQLite history: size, and CPU seconds of the commands' queries."""
    per_side = readings // (2 * gates)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.sqlite"
        archive = Archive(f"sqlite:///{path}")
        wrote = _cpu(lambda: fill(archive, gates, per_side))
        size = path.stat().st_size
        stored = 2 * gates * per_side
        row = sorted(load(ROOT / "baselines" / "cpu.json", "cpu").rows)[0]
        year = LAST - timedelta(364)
        points = len(archive.points(row))
        rows = [
            ("gates, readings", f"{gates:,}, {stored:,}"),
            ("size of the SQLite file", f"{size / 1e6:.1f} MB, {size / stored:.0f} bytes per reading"),
            ("all of it written", f"{wrote:.1f} s"),
            (f"`history ROW`: {points:,} readings of one row", f"{_cpu(lambda: archive.points(row)):.3f} s"),
            ("`findings list`", f"{_cpu(archive.findings):.3f} s"),
            (
                "`dashboard`: reading the last 365 days",
                f"{_cpu(lambda: dashboard.read(archive, year)):.1f} s",
            ),
        ]
        rows += [
            _extrapolated(size / stored, 2 * per_side, hosts, lanes)
            for hosts, lanes in ((1000, 1), (1000, 40))
        ]
    return "\n".join(
        ["| what | measured, or extrapolated |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]
    )


def _extrapolated(size: float, per_gate: int, hosts: int, lanes: int) -> tuple[str, str]:
    """Return the row of a fleet. size: bytes per reading. per_gate: readings of both sides."""
    readings = hosts * lanes * 365 * per_gate
    what = f"extrapolated: {hosts:,} hosts x {lanes} lane{'s' * (lanes > 1)} x 365 nights, one gate each"
    return (
        what,
        f"{readings:.2g} readings, {readings * size / 1e9:,.0f} GB ({readings * size / 365e9:.1f} GB per night)",
    )


def _cpu(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def replaced(text: str, name: str, table: str) -> str:
    """Return a document with the table of that name replaced."""
    begin, end = MARK.format(name), END.format(name)
    head, rest = text.split(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    tables = {"storage": storage_table(GATES, READINGS)}
    print(tables["storage"], flush=True)
    tables["rounds"] = rounds_table(lambda text: print(text, flush=True))
    if chosen.write:
        document = DOCS.read_text()
        for name, table in tables.items():
            document = replaced(document, name, table)
        DOCS.write_text(document)
