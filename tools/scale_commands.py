"""Time the commands on many rows, gates and versions, each as a process: two tables of docs/scale.md.

python -m tools.scale_commands --write    # some minutes; rewrites the tables between their marks
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from bumpgate.core.baseline import Baseline, Reviewed, save
from bumpgate.core.findings import TimedOutcome
from bumpgate.core.rows import read_record
from bumpgate.gate.verdict import Side
from bumpgate.history.archive import Archive
from tests.support.loopback import Loopback
from tests.support.reports import paired, write_gate
from tests.support.tree import ROOT
from tools.simulate_scale import DOCS, fill, names_of, replaced

COMMAND = "python -m tools.scale_commands --write"
LANE = "mine"
ROWS = (100, 1000, 10_000)
GATES, READINGS, VERSIONS = 1000, 500_000, 5000
REPEATS = 3
TESTS = """
import pytest

@pytest.mark.mine
@pytest.mark.parametrize("case", range({rows}))
def test_count(case, row):
    row(f"model/case{{case}}/parameters", 256 * case, unit="parameters", witness=1)
"""


class Index(Loopback):
    """An index with VERSIONS nightlies of one package, a day apart, in JSON with the size and day of each."""

    def __enter__(self) -> str:
        days = [date(2026, 11, 30) - timedelta(n) for n in range(VERSIONS)]
        names = [f"torch-2.{15 - n // 400}.0.dev{day:%Y%m%d}-py3-none-any.whl" for n, day in enumerate(days)]
        entry = '{{"filename":"{0}","url":"{0}","hashes":{{}},"size":9,"upload-time":"{1}T02:00:00Z"}}'
        files = ",".join(entry.format(name, day) for name, day in zip(names, days))
        page = f'{{"meta":{{"api-version":"1.1"}},"name":"torch","files":[{files}],"versions":[]}}'.encode()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)

            def log_message(self, *_: object) -> None:
                pass

        self.serve(Handler)
        host, port = self._server.server_address[:2]
        return f"http://{host}:{port}/"


@dataclass
class Project:
    """A repository with one lane and one test per row, and a separate $BUMPGATE_HOME."""

    root: Path
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, *command: str) -> float:
        """Return the wall seconds of a command of this interpreter. Raises SystemExit, with its output, on failure."""
        paths = {"PYTHONPATH": str(ROOT), "BUMPGATE_HOME": str(self.root / "home")}
        started = time.perf_counter()
        done = subprocess.run(
            [Path(sys.executable).with_name(command[0]), *command[1:]],
            cwd=self.root,
            env={**os.environ, **paths},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return time.perf_counter() - started

    def bumpgate(self, *arguments: str, shown: str = "") -> None:
        """Time a command of bumpgate REPEATS times. shown: how the table names it."""
        name = shown or " ".join(arguments)
        self.seconds[name] = statistics.median(self.run("bumpgate", *arguments) for _ in range(REPEATS))

    def fill(self, rows: int) -> None:
        """Write the tests of so many rows, and their reviewed values."""
        (self.root / "bumps/test_bump.py").write_text(TESTS.format(rows=rows))
        reviewed = {
            f"model/case{case}/parameters": Reviewed(
                256 * case, "parameters", "exact", test=f"bumps/test_bump.py::test_count[{case}]"
            )
            for case in range(rows)
        }
        save(self.root / f"baselines/{LANE}.json", Baseline(LANE, {"torch": None, "triton": None}, reviewed))

    def lane(self, workers: int) -> float:
        return self.run("pytest", "-m", LANE, "-n", str(workers), "-q")


@contextmanager
def project() -> Iterator[Project]:
    with tempfile.TemporaryDirectory() as folder:
        made = Project(Path(folder))
        made.run("bumpgate", "init", "--lane", LANE, "--torch", "2.13.0")
        yield made


def lane_table(say: Callable[[str], None]) -> str:
    """Measure a lane of tests that take no time: what a row costs."""
    lines = ["| rows | no worker | 2 workers | size of the record |", "|---|---|---|---|"]
    for rows in ROWS:
        with project() as made:
            made.fill(rows)
            alone, two = (made.lane(workers) for workers in (0, 2))
            size = (made.root / "record.json").stat().st_size
        lines.append(f"| {rows:,} | {alone:.1f} s | {two:.1f} s | {size / 1e6:.1f} MB |")
        say(lines[-1])
    return "\n".join(lines)


def command_table() -> str:
    """Measure the commands on the largest lane, a history and an index."""
    with project() as made, Index() as url, tempfile.TemporaryDirectory() as elsewhere:
        made.fill(ROWS[-1])
        made.lane(0)
        record = read_record(made.root / "record.json")
        out = Path(elsewhere)
        store, gate = f"sqlite:///{out / 'history.sqlite'}", str(out / "gate.json")
        fill(Archive(store), GATES, READINGS // (2 * GATES), 1)
        sides = [Side(f"torch 2.{n}.0", record) for n in (14, 15)]
        timed = {j.row.id: paired(TimedOutcome.SAME, 1.0) for j in record.judgements[:100]}
        write_gate(out, *sides, timed, lane=LANE)
        made.bumpgate("--help")
        made.bumpgate("rebaseline", "--lane", LANE, "--dry-run")
        made.bumpgate("report", "record.json")
        made.bumpgate("report", gate, shown="report gate.json")
        kept = ("--store", store)
        made.bumpgate("history", "add", gate, *kept, shown="history add gate.json")
        made.bumpgate("history", names_of(1)[0], "--lane", "cpu", *kept, shown="history ROW --lane cpu")
        made.bumpgate("findings", "list", *kept, shown="findings list")
        made.bumpgate("notify", "--dry-run", "--hook", "cat", *kept, shown="notify --dry-run --hook CMD")
        made.bumpgate("dashboard", str(out / "site"), *kept, shown="dashboard site")
        made.bumpgate("versions", "torch", "--pre", "--index", url, shown="versions torch --pre")
        made.bumpgate("environments")
        return command_lines(made.seconds)


def command_lines(seconds: Mapping[str, float]) -> str:
    """Format a line per command."""
    lines = [f"| `{name}` | {spent:.2f} s |" for name, spent in seconds.items()]
    return "\n".join(["| command of bumpgate | median of 3 |", "|---|---|", *lines])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    tables = {"commands": command_table()}
    print(tables["commands"], flush=True)
    tables["lane"] = lane_table(lambda line: print(line, flush=True))
    if chosen.write:
        document = DOCS.read_text()
        for name, table in tables.items():
            document = replaced(document, name, table, COMMAND)
        DOCS.write_text(document)
