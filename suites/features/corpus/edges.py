"""Judge every case of the corpus between its good and its bad releases by the gate's comparison of two records.

    pytest -m cpu suites/features/test_corpus.py --record=torch-2.12.0.json     # once under each release
    python -m suites.features.corpus.edges torch-*.json                         # one line for each pair of releases
    python -m suites.features.corpus.edges --bisects ENVS | sh -e    # find every edge by bumpgate bisect

An edge is a pair of neighbouring releases of a case, one bad and one good. Exit codes: 0 every pair holds and every
value is the stated one; 1 one does not; 2 usage error or an unusable record.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from pathlib import Path

from packaging.version import Version

from bumpgate.core.findings import Decision
from bumpgate.core.rows import Record, RecordError, read_record
from bumpgate.gate.verdict import Side, judge_gate
from suites.features.corpus import CASES, Case


def release(record: Record) -> str:
    """The public version of torch that a record was measured with."""
    return Version(str(record.provenance["torch"])).public


def held(case: Case, good: Record, bad: Record) -> bool:
    """Whether a gate from one release to the other holds because of this case."""
    verdict = judge_gate("cpu", Side("good", good), Side("bad", bad))
    return any(f.decision is Decision.HOLD and case.row in f.rows for f in verdict.findings)


def judged(records: Mapping[str, Record]) -> Iterator[tuple[bool, str]]:
    """For each case and pair of its releases that have a record: whether the gate between them holds, and a line."""
    for case in CASES:
        for bad in case.bad:
            for good in case.good:
                if good in records and bad in records:
                    holds = held(case, records[good], records[bad])
                    yield holds, f"{'HOLD' if holds else 'MISSED':6}  {case.name}: {good} -> {bad}"


def contradictions(records: Mapping[str, Record]) -> Iterator[str]:
    """A line for each record that contradicts what its case states of that release, or that lacks the case."""
    for version, record in records.items():
        found = {j.row.id: j.row.value for j in record.judgements}
        for case in CASES:
            stated = {**dict.fromkeys(case.bad, 1), **dict.fromkeys(case.good, 0)}.get(version)
            if stated is not None and found.get(case.row) != stated:
                yield f"{case.name}: {found.get(case.row)} in the record of {version}, stated {stated}"


def bisects(case: Case, environments: str) -> Iterator[str]:
    """Yield a command for each edge of a case, which bisects the widest stretch of releases without another edge.

    environments: folder of environments, each with bin/python. The comment states the right answer.
    """
    releases = sorted((*case.bad, *case.good), key=Version)
    runs = [(bad, list(group)) for bad, group in groupby(releases, case.bad.__contains__)]
    test = f"suites/features/test_corpus.py::test_regression[{case.name}-cpu]"
    for (repair, before), (_, after) in pairwise(runs):
        good, bad = (after[-1], before[0]) if repair else (before[0], after[-1])
        fix = "--find-fix " if repair else ""
        yield (
            f"bumpgate bisect --lane cpu --environments {environments} --good {good} --bad {bad} {fix}"
            f"-- '{test}' -n 0  # {before[-1]} -> {after[0]}"
        )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="edges", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORD")
    parser.add_argument("--bisects", metavar="ENVS", help="print the commands that find every edge")
    chosen = parser.parse_args(arguments)
    if chosen.bisects:
        print("\n".join(text for case in CASES for text in bisects(case, chosen.bisects)))
        return 0
    if not chosen.records:
        parser.error("no record and no --bisects: name the records of two releases or more")
    try:
        read = [read_record(path) for path in chosen.records]
    except RecordError as error:
        print(f"edges: {error}", file=sys.stderr)
        return 2
    records = {release(record): record for record in read}
    wrong = list(contradictions(records))
    pairs = list(judged(records))
    print("\n".join([text for _, text in pairs] + wrong))
    print(f"{sum(holds for holds, _ in pairs)} of {len(pairs)} pairs hold")
    return int(bool(wrong) or not all(holds for holds, _ in pairs))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
