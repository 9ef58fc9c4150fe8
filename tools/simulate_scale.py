"""Simulate batches of parallel probes, and measure a history of synthetic gates: the tables of docs/scale.md.

python -m tools.simulate_scale --write    # some minutes; rewrites the tables between their marks
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import psutil

from bumpgate.bisect.batch import batch
from bumpgate.bisect.journal import BisectPlan
from bumpgate.bisect.search import ProbeOutcome
from bumpgate.core.baseline import load
from bumpgate.history.archive import Archive
from bumpgate.report import dashboard
from tests.support.postgres import server
from tests.support.reports import gate_of_day
from tests.support.searching import labels, noisy
from tests.support.tree import ROOT

DOCS = ROOT / "docs" / "scale.md"
COMMAND = "python -m tools.simulate_scale --write"
MARK = "<!-- {}: {} -->"
END = "<!-- end of {} -->"
WORKERS = (1, 2, 4, 8, 16)
RUNS = {60: 100, 365: 20}
LANES = 40
# Gates a night, by what is gated.
FLEETS = {
    "each of 40 lanes on one host": 40,
    "each of 1,000 hosts gates one lane": 1000,
    "each of 1,000 hosts gates 40 lanes": 40_000,
}
LANE = "cpu"
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
    plan = BisectPlan(names, names[0], names[-1], (), case.misreads, case.misreads)
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
                search.record(index, ProbeOutcome[read(index)])
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


def fill(archive: Archive, gates: int, per_side: int, lanes: int) -> None:
    """Store a gate per lane and night, up to the last one, two runs of `per_side` readings each, of 5 hosts in turn.

    Row ids are those of the lane cpu, repeated. Nine of ten rows are counts, the tenth is timed. One finding of the
    lane cpu is seen by every tenth of its gates.
    """
    sql, tables = archive.sql, archive.tables
    names = names_of(per_side)
    dice = random.Random(1)
    texts = dict.fromkeys(("head", "repro", "decision", "module"), "")
    detail = json.dumps(texts | {"rows": names[:1], "good": ["13"], "bad": ["14"]})
    hosts, shared = 5, {"device": "cpu", "torch_git": "a" * 40, "commit": "b" * 40, "red": False}
    with archive.transaction() as connection:
        connection.execute(
            sql.insert(tables["findings"]),
            [{"key": "f" * 12, "lane": LANE, "package": "torch", "label": "CHANGED"}],
        )
        for gate in range(1, gates + 1):
            nights, number = divmod(gates - gate, lanes)
            head = {
                "started": f"{LAST - timedelta(nights)}T02:00:00+00:00",
                "lane": f"{LANE}{number or ''}",
            }
            runs = {side: 2 * gate - 1 + side for side in (0, 1)}
            for side, run in runs.items():
                where = {"host": f"host{nights % hosts}", "host_class": "16 cores, Xeon"}
                made = {"id": run, "digest": f"{run:064x}", "torch": f"2.{14 + side}.0"}
                connection.execute(sql.insert(tables["runs"]), [shared | head | where | made])
                readings = [_reading(run, i, name, dice) for i, name in enumerate(names)]
                connection.execute(sql.insert(tables["readings"]), readings)
            made = {"id": gate, "digest": f"{gate:064x}", "decision": "ADOPT", "whole": True}
            sides = {"good": runs[0], "bad": runs[1], "package": "torch", "moved": "[]"}
            connection.execute(sql.insert(tables["gates"]), [head | made | sides])
            if number == 0 and nights % 10 == 0:
                connection.execute(
                    sql.insert(tables["sightings"]), [{"gate": gate, "finding": "f" * 12, "detail": detail}]
                )
    if archive.name.startswith("postgresql"):  # inserted without the sequences of the keys
        with archive.transaction() as connection:
            for name in ("runs", "gates"):
                table = tables[name].name
                connection.exec_driver_sql(
                    f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), (SELECT max(id) FROM {table}))"
                )
            connection.exec_driver_sql("ANALYZE")


def _rows() -> list[str]:
    return sorted(load(ROOT / "baselines" / "cpu.json", LANE).rows)


def names_of(number: int) -> list[str]:
    known = _rows()
    rounds, _ = divmod(number, len(known))
    return [name + (f"-{n}" if n else "") for n in range(rounds + 1) for name in known][:number]


def _reading(run: int, i: int, name: str, dice: random.Random) -> dict[str, object]:
    timed = i % 10 == 9
    number = dice.gauss(1.0, 0.01) if timed else 13
    spread = (number * 0.98, number * 1.02) if timed else (None, None)
    return {
        "run": run,
        "row": name,
        "value": json.dumps(number),
        "number": number,
        "low": spread[0],
        "high": spread[1],
        "unit": "s" if timed else "count",
        "verdict": "PASS",
        "row_red": False,
    }


@dataclass(frozen=True)
class Stored:
    """A measured history. sizes: bytes. cells: of its column."""

    readings: int
    size: int
    cells: dict[str, str]


def stored(
    archive: Archive, size: Callable[[], int], cpu: Callable[[], float], gates: int, readings: int, lanes: int
) -> Stored:
    """Measure a history. cpu: the CPU seconds so far of what runs its queries."""

    def seconds(call: Callable[[], object]) -> str:
        before = cpu()
        call()
        return f"{cpu() - before:.3g} s"

    per_side = readings // (2 * gates)
    total = 2 * gates * per_side
    wrote = seconds(lambda: fill(archive, gates, per_side, lanes))
    found = size()
    row, year = names_of(1)[0], LAST - timedelta(364)
    dashboard.changes([0.0, 1.0] * 6)  # imports what it needs
    with tempfile.TemporaryDirectory() as folder:
        path = gate_of_day(Path(folder), LAST.day)
        cells = {
            "gates, lanes, readings": f"{gates:,}, {lanes}, {total:,}",
            "size": f"{found / 1e6:,.0f} MB, {found / total:.0f} bytes per reading",
            "all of it written": wrote,
            f"`history ROW --lane {LANE}`": (
                f"{seconds(lambda: archive.points(row, LANE))}, {len(archive.points(row, LANE)):,} readings"
            ),
            f"`findings list --lane {LANE}`": seconds(lambda: archive.findings(LANE)),
            "`findings list`": seconds(archive.findings),
            f"`dashboard --lane {LANE}`: reading 365 days": seconds(
                lambda: dashboard.read(archive, year, LANE)
            ),
            "`dashboard`: reading 365 days": seconds(lambda: dashboard.read(archive, year)),
            "`history add` of one gate more": seconds(lambda: archive.add(path)),
        }
    return Stored(total, found, cells)


def in_sqlite(gates: int, readings: int, lanes: int) -> Stored:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.sqlite"
        archive = Archive(f"sqlite:///{path}")
        return stored(archive, lambda: path.stat().st_size, time.process_time, gates, readings, lanes)


def in_postgresql(gates: int, readings: int, lanes: int) -> Stored:
    with tempfile.TemporaryDirectory(prefix="scale", dir="/tmp") as folder, server(Path(folder)) as url:
        archive = Archive(url)
        process = psutil.Process(int((Path(folder) / "data/postmaster.pid").read_text().split()[0]))

        def size() -> int:
            with archive.reading() as connection:
                return int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar())

        def cpu() -> float:
            live = sum(sum(child.cpu_times()[:2]) for child in process.children())
            return time.process_time() + live + sum(process.cpu_times()[:4])

        return stored(archive, size, cpu, gates, readings, lanes)


def storage_table(columns: Mapping[str, Stored]) -> str:
    """Format one column per history, by the name of its database."""
    labels = [*next(iter(columns.values())).cells]
    lines = [f"| | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    lines += [f"| {name} | {' | '.join(c.cells[name] for c in columns.values())} |" for name in labels]
    return "\n".join(lines)


def year_table(size: float, per_gate: int) -> str:
    """Extrapolate a year of a fleet. size: measured bytes per reading. per_gate: readings of both sides."""
    lines = [
        "| every night | gates a night | readings a year | size of a year | host hours a night at 30 min | at 58 min |",
        "|---|---|---|---|---|---|",
    ]
    for what, gates in FLEETS.items():
        readings = gates * 365 * per_gate
        hours = [f"{gates * minutes / 60:,.0f}" for minutes in (30, 58)]
        lines.append(
            f"| {what} | {gates:,} | {readings:.2g} | {readings * size / 1e9:,.0f} GB | {' | '.join(hours)} |"
        )
    return "\n".join(lines)


def replaced(text: str, name: str, table: str, command: str = COMMAND) -> str:
    """Return a document with the table of that name replaced. command: what makes it, named in its mark."""
    begin, end = MARK.format(name, command), END.format(name)
    head, rest = text.split(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    columns = {
        "SQLite": in_sqlite(1000, 500_000, LANES),
        "PostgreSQL": in_postgresql(1000, 500_000, LANES),
    }
    measured = columns["PostgreSQL"]
    tables = {
        "storage": storage_table(columns),
        "year": year_table(measured.size / measured.readings, 2 * len(_rows())),
    }
    print("\n\n".join(tables.values()), flush=True)
    tables["rounds"] = rounds_table(lambda text: print(text, flush=True))
    if chosen.write:
        document = DOCS.read_text()
        for name, table in tables.items():
            document = replaced(document, name, table)
        DOCS.write_text(document)
