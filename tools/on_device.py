"""Inject one fault of each class in a copy of the tree on an H200, and check that the expected row turns red.

`python -m tools.on_device [--only NAME]` prints a line per fault: its row's verdict, other red rows, seconds.
The tests first run in an unchanged copy; a row that is red there does not count as turned red by the fault.

A training step slowed by SLOWDOWN is compared with the unchanged tree on the same machine a minute before, and must
lose more than LIMIT; the unchanged tree, measured again after it, must not. The lane's own row allows 4 %, because it
compares machines. LIMIT is resolvable: the model keeps the device busy, and the 99 % interval of its median step is
1 % wide, so that neither half of it crosses LIMIT.

Exit code 1 if a fault survived, 2 on bad usage and without an H200.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bumpgate.core.baseline import Baseline, Reviewed, load, save
from bumpgate.plugin.devices import detect
from suites.support.lanes import LANES
from tests.support.mutants import ON_DEVICE, Mutant, slower_step
from tests.support.tree import RUN_SECONDS, LaneRun, copy_tree, run_lane

LANE = "h200"
WORKERS = "4"  # for the run of the unchanged copy, which has no timed rows
SLOWDOWN = 0.05
LIMIT = SLOWDOWN / 2


@dataclass(frozen=True)
class Outcome:
    """Result of one fault. also_red: other rows that turned red. survived: the reason, "" if it was killed."""

    fault: str
    row: str
    verdict: str
    also_red: tuple[str, ...]
    seconds: float
    survived: str
    note: str = ""

    def __str__(self) -> str:
        others = ", ".join(self.also_red[:3]) + (" ..." if len(self.also_red) > 3 else "") or "-"
        line = f"{self.fault:12} {self.verdict:12} {self.seconds:5.0f} s  {self.row}  also red: {others}"
        notes = [f"SURVIVED: {self.survived}" if self.survived else "", self.note]
        return "\n".join([line, *(f"{'':12} {note}" for note in notes if note)])


def outcome(
    fault: str, mutant: Mutant, run: LaneRun, unchanged: LaneRun, seconds: float, note: str = ""
) -> Outcome:
    """Return the result of a fault's row in `run`, given a run of the same tests in the unchanged tree."""
    survived = mutant.survived(run, unchanged)
    return Outcome(fault, mutant.row, run.verdict(mutant.row), mutant.also_red(run), seconds, survived, note)


def run(root: Path, *arguments: str) -> LaneRun:
    """Run the lane in a copy. A run that times out has measured nothing."""
    try:
        return run_lane(root, *arguments, lane=LANE)
    except subprocess.TimeoutExpired:
        return LaneRun(124, f"no end within {RUN_SECONDS} s", {})


def run_faults(names: list[str], directory: Path) -> Iterator[Outcome]:
    """Run each named fault of ON_DEVICE in its own copy."""
    tests = dict.fromkeys(ON_DEVICE[name].test for name in names)
    unchanged = run(copy_tree(directory / "unchanged"), "-n", WORKERS, *tests)
    for name in names:
        started, mutant = time.monotonic(), ON_DEVICE[name]
        root = copy_tree(directory / name)
        mutant.plant(root)
        yield outcome(name, mutant, run(root, mutant.test), unchanged, time.monotonic() - started)


def slowdown(directory: Path) -> Outcome:
    """Time the unchanged step, the slower one and the unchanged one again."""
    started, mutant = time.monotonic(), slower_step(0.0)
    unchanged, slower = (copy_tree(directory / name) for name in ("unchanged_step", "slower_step"))
    first = run(unchanged, mutant.test)
    rate = first.rows.get(mutant.row)
    if rate is None or not rate["row"]["interval"]:
        return outcome("slowdown", mutant, first, first, time.monotonic() - started)
    milliseconds = step_milliseconds(mutant.row, rate["row"]["value"])
    mutant = slower_step(round(SLOWDOWN * milliseconds, 3))
    mutant.plant(slower)
    for root in (unchanged, slower):
        review(root / f"baselines/{LANE}.json", rate["row"])
    faulty, again = run(slower, mutant.test), run(unchanged, mutant.test)
    found = (r.rows.get(mutant.row) for r in (first, faulty, again))
    values = [row["row"]["value"] if row else None for row in found]
    note = f"tokens/s unchanged, slower by {SLOWDOWN:.0%}, unchanged again: {values}"
    return outcome("slowdown", mutant, faulty, again, time.monotonic() - started, note)


def step_milliseconds(row: str, tokens_per_second: float) -> float:
    """Convert to milliseconds per step of B x T tokens, as given by the row's id."""
    batch, tokens = map(int, re.search(r"-(\d+)x(\d+)/", row).groups())
    return 1e3 * batch * tokens / tokens_per_second


def review(path: Path, row: dict) -> None:
    """Write a measured row as the reviewed one, with tolerance LIMIT."""
    known = load(path, LANE, missing_ok=True)
    reviewed = Reviewed(row["value"], row["unit"], row["better"], LIMIT, test=row["test"])
    save(path, Baseline(LANE, known.made_with, {**known.rows, row["id"]: reviewed}))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.on_device", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*ON_DEVICE, "slowdown"], help="one fault instead of all")
    only = parser.parse_args(arguments).only
    if missing := detect(LANES[LANE]):
        parser.error(missing)
    survived = 0
    print(f"{'fault':12} {'verdict':12} {'time':>7}  row")
    with tempfile.TemporaryDirectory() as directory:
        for found in chosen(only, Path(directory)):
            print(found, flush=True)
            survived += bool(found.survived)
    print(f"{survived} survived" if survived else "every fault was killed")
    return 1 if survived else 0


def chosen(only: str | None, directory: Path) -> Iterator[Outcome]:
    if names := [name for name in ON_DEVICE if only in (None, name)]:
        yield from run_faults(names, directory)
    if only in (None, "slowdown"):
        yield slowdown(directory)


if __name__ == "__main__":
    sys.exit(main())
