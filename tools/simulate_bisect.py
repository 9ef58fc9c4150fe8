"""Simulate the bisect search over 60 builds, with the fault at each place in turn: the table of docs/bisect.md.

python -m tools.simulate_bisect --write    # some minutes; rewrites the table between its two marks
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bumpgate.bisect.journal import BisectPlan
from tests.support.searching import drive, labels, noisy
from tests.support.tree import ROOT

BUILDS = 60
DOCS = ROOT / "docs" / "bisect.md"
BEGIN, END = "<!-- table: python -m tools.simulate_bisect --write -->", "<!-- end of table -->"


@dataclass(frozen=True)
class Case:
    """One row. repeats: runs per place (59 places); budget: readings after which the answer is forced.

    stated: whether --false-bad and --false-good pass the true rates to the search; otherwise it estimates them.
    """

    title: str
    false_bad: float = 0.0
    false_good: float = 0.0
    budget: int | None = None
    repeats: int = 1
    stated: bool = False


@dataclass(frozen=True)
class Row:
    """Counts of a case. right: the reported build is the first bad one; wrong_sure: it is not, but the exit code is 0.

    unsure: no answer, or one reported as likely. probes include the two endpoints and all repeats.
    """

    title: str
    runs: int
    right: int
    wrong_sure: int
    unsure: int
    median: float
    most: int


TABLE = (
    Case("none"),
    Case("10 % false BAD", 0.1, 0.0, repeats=20),
    Case("5 % both ways", 0.05, 0.05, repeats=20),
    Case("10 % both ways", 0.1, 0.1, repeats=20),
    Case("20 % both ways", 0.2, 0.2, repeats=5),
    Case("the fault shows in half of the probes", 0.0, 0.5, repeats=5),
    Case("5 % both ways, stated", 0.05, 0.05, repeats=20, stated=True),
    Case("10 % both ways, stated", 0.1, 0.1, repeats=20, stated=True),
    Case("10 % both ways, stated, budget of 22", 0.1, 0.1, budget=22, repeats=20, stated=True),
)


def simulated(case: Case, seed: int = 6) -> Row:
    """Run a case: each place `repeats` times, each run with its own generator."""
    names = tuple(labels(BUILDS))
    rates = {"false_bad": case.false_bad, "false_good": case.false_good} if case.stated else {}
    plan = BisectPlan(names, names[0], names[-1], (), **rates, budget=case.budget)  # type: ignore[arg-type]
    probes, right, wrong_sure, unsure = [], 0, 0, 0
    for first_bad in range(1, BUILDS):
        for repeat in range(case.repeats):
            dice = random.Random(f"{seed} {first_bad} {repeat}")
            result = drive(plan.search(), noisy(first_bad, case.false_bad, case.false_good, dice))
            probes.append(result.probes)
            hit, sure = result.suspects == (first_bad,), result.sure(plan.confidence)
            right += hit
            wrong_sure += sure and not hit
            unsure += not sure
    median = statistics.median(probes)
    return Row(case.title, len(probes), right, wrong_sure, unsure, median, max(probes))


def table(rows: Iterable[Row]) -> str:
    """Format the rows as Markdown."""
    lines = ["| misreads | runs | right | wrong and sure | not sure | probes, median | most |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for r in rows:
        shares = (f"{count} ({100 * count / r.runs:.1f} %)" for count in (r.right, r.wrong_sure, r.unsure))
        lines.append(f"| {r.title} | {r.runs} | {' | '.join(shares)} | {r.median:g} | {r.most} |")
    return "\n".join(lines)


def write(path: Path, text: str) -> None:
    """Replace the text between the marks."""
    head, rest = path.read_text().split(BEGIN)
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    rows = []
    for case in TABLE:
        rows.append(simulated(case))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    if parser.parse_args().write:
        write(DOCS, table(rows))
