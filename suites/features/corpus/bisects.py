"""Bisect every edge of the corpus over prepared environments, and compare the answers with the stated releases.

    python -m suites.features.corpus.bisects --environments DIR --results edges.jsonl
    python -m suites.features.corpus.bisects --results edges.jsonl --table   # the answers as a table

An edge is a pair of neighbouring releases of a case, one bad and one good. The regression's edge is found by `bumpgate
bisect`, the repair's by `--find-fix`; each search starts at the two ends of the stretch of releases around its edge.
Answers are appended as they come, and a second run leaves out edges that have one. Exit codes: 0 every answer is sure
and is the stated one, 1 one is not, 2 usage error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path

from packaging.version import Version

from suites.features.corpus import CASES, Case
from suites.support.tables import line

HEAD = ("case", "edge", "answer", "probes")


@dataclass(frozen=True)
class Edge:
    """A change between two neighbouring releases of a case.

    last, first: the releases before and after it. good, bad: the ends of the search. fix: whether it is a repair.
    """

    case: str
    last: str
    first: str
    good: str
    bad: str
    fix: bool


@dataclass(frozen=True)
class Answer:
    """What the bisect of an edge found. sure: its exit code was 0."""

    case: str
    edge: str
    found: str
    sure: bool
    probes: int

    @property
    def right(self) -> bool:
        return self.sure and self.found == self.edge


def edges(case: Case) -> list[Edge]:
    """The edges of a case in ascending order, each with the largest search that has no other edge."""
    releases = sorted((*case.bad, *case.good), key=Version)
    runs = [(bad, list(group)) for bad, group in groupby(releases, case.bad.__contains__)]
    return [
        Edge(
            case.name, before[-1], after[0], *((after[-1], before[0]) if fix else (before[0], after[-1])), fix
        )
        for (fix, before), (_, after) in pairwise(runs)
    ]


def bisect(edge: Edge, environments: Path, out: Path) -> Answer:
    """Run `bumpgate bisect` of one edge as a user would, and read its answer."""
    command = [
        str(Path(sys.executable).with_name("bumpgate")),
        "bisect",
        "--lane",
        "cpu",
        "--environments",
        str(environments),
    ]
    command += [
        "--good",
        edge.good,
        "--bad",
        edge.bad,
        "--out",
        str(out),
        *(["--find-fix"] if edge.fix else []),
    ]
    selection = [f"suites/features/test_corpus.py::test_regression[{edge.case}-cpu]", "-n", "0"]
    code = subprocess.run([*command, "--", *selection], stdin=subprocess.DEVNULL).returncode
    path = out / "bisect.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    last, first = (Version(found[name]).public if found.get(name) else "" for name in ("last", "first"))
    return Answer(
        edge.case, _text(edge.last, edge.first), _text(last, first), code == 0, found.get("probes", 0)
    )


def _text(last: str, first: str) -> str:
    return f"{last} -> {first}"


def load(path: Path) -> list[Answer]:
    """The answers of a file of JSON lines; empty if it does not exist."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Answer(**json.loads(text)) for text in lines]


def run(chosen: Iterable[Case], environments: Path, results: Path) -> Iterator[Answer]:
    """Bisect the edges that have no answer in `results` yet; append each answer."""
    known = {(answer.case, answer.edge) for answer in load(results)}
    for edge in (edge for case in chosen for edge in edges(case)):
        if (edge.case, _text(edge.last, edge.first)) in known:
            continue
        with tempfile.TemporaryDirectory(prefix="bisect-") as folder:
            answer = bisect(edge, environments, Path(folder) / "out")
        with results.open("a", encoding="utf-8") as f:
            f.write(json.dumps(asdict(answer)) + "\n")
        yield answer


def summary(answers: Iterable[Answer]) -> str:
    found = list(answers)
    return f"{sum(answer.right for answer in found)} of {len(found)} edges found"


def table(answers: list[Answer]) -> str:
    """Return the answers as GitHub Markdown."""
    rows = [line(HEAD), line("---" for _ in HEAD)]
    for a in answers:
        found = "the same" if a.right else a.found if a.sure else f"not sure: {a.found}"
        rows.append(line((f"`{a.case}`", a.edge, found, str(a.probes))))
    return "\n".join(rows)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bisects", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--environments", type=Path, help="folder of environments, each with bin/python")
    parser.add_argument("--results", type=Path, required=True, help="file of answers, continued if there")
    parser.add_argument("--case", action="append", help="only this case; repeatable")
    parser.add_argument("--table", action="store_true", help="print the answers as a table")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.case or () if name not in {case.name for case in CASES}]:
        parser.error(f"--case {unknown[0]}: not a case of the corpus")
    if options.environments:
        chosen = [case for case in CASES if not options.case or case.name in options.case]
        for answer in run(chosen, options.environments, options.results):
            print(
                f"{'FOUND' if answer.right else 'WRONG'}  {answer.case}: {answer.edge}: {answer.found}",
                flush=True,
            )
    answers = load(options.results)
    if options.table:
        print(table(answers))
    print(summary(answers))
    return int(not all(answer.right for answer in answers))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
