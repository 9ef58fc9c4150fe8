"""How well the search of a bisect does over 60 builds, every place of the fault in turn: the table of docs/bisect.md.

python -m suites.self.simulate_bisect --write    # a minute; rewrites the table between its two marks
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bumpgate.bisect.search import Search
from suites.self.searching import drive, labels, noisy
from suites.self.tree import ROOT

BUILDS = 60
DOCS = ROOT / "docs" / "bisect.md"
BEGIN, END = "<!-- table: python -m suites.self.simulate_bisect --write -->", "<!-- end of table -->"


@dataclass(frozen=True)
class Case:
    """One row. repeats: runs of each of the 59 places; budget: readings after which the answer is forced."""

    title: str
    false_bad: float = 0.0
    false_good: float = 0.0
    budget: int | None = None
    repeats: int = 1


@dataclass(frozen=True)
class Row:
    """What came of a case. probes include the two ends."""

    title: str
    runs: int
    right: int
    mean: float
    most: int


TABLE = (
    Case("no misreads"),
    Case("10 % false BAD", 0.1, 0.0, repeats=20),
    Case("5 % both ways", 0.05, 0.05, repeats=20),
    Case("10 % both ways", 0.1, 0.1, repeats=20),
    Case("10 % both ways, at most 20 probes and the ends", 0.1, 0.1, budget=22, repeats=20),
)


def simulated(case: Case, seed: int = 6) -> Row:
    """Runs a case: each place `repeats` times, each run with dice of its own."""
    names = labels(BUILDS)
    probes, right = [], 0
    for first_bad in range(1, BUILDS):
        for repeat in range(case.repeats):
            dice = random.Random(f"{seed} {first_bad} {repeat}")
            search = Search(names, names[0], names[-1], case.false_bad, case.false_good, budget=case.budget)
            result = drive(search, noisy(first_bad, case.false_bad, case.false_good, dice))
            probes.append(result.probes)
            right += result.suspects == (first_bad,)
    return Row(case.title, len(probes), right, sum(probes) / len(probes), max(probes))


def table(rows: Iterable[Row]) -> str:
    """As Markdown."""
    lines = ["| misreads | runs | right | probes with ends, mean | most |", "|---|---|---|---|---|"]
    lines += [
        f"| {r.title} | {r.runs} | {r.right} ({100 * r.right / r.runs:.1f} %) | {r.mean:.1f} | {r.most} |"
        for r in rows
    ]
    return "\n".join(lines)


def write(path: Path, text: str) -> None:
    """Replaces what stands between the marks."""
    head, rest = path.read_text().split(BEGIN)
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    made = table(simulated(case) for case in TABLE)
    print(made)
    if parser.parse_args().write:
        write(DOCS, made)
