"""How often rows that a gate reads once would hold an unchanged build: `python -m tools.pairs RECORD.json ...`

The records are of complete runs of one lane on one build, such as good.json and bad.json of gates of a build against
itself. Every ordered pair of them is judged as a gate would judge it, with all rows of the sessions SAME. Pairs share
records, so they are not independent. Prints a table in Markdown.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

from bumpgate.core.findings import Decision, TimedOutcome
from bumpgate.core.rows import BumpgateError, Record, read_record
from bumpgate.gate.between import timed
from bumpgate.gate.sequential import Timed
from bumpgate.gate.timed import timed_rows
from bumpgate.gate.verdict import Side, judge_gate
from tests.support.simulation import wilson

SAME = Timed(TimedOutcome.SAME, 1.0, (0.99, 1.01), 6, 1.0, 1.0)
BUILD = ("lane", "torch", "torch_git", "triton", "wheel_set")


def same_build(paths: Sequence[str]) -> list[Record]:
    """Read complete records of one build. Raises BumpgateError on an incomplete one, or on another build."""
    records = [read_record(Path(path)) for path in paths]
    for path, record in zip(paths, records):
        if not record.complete:
            raise BumpgateError(f"{path}: the run was cut short")
        for name in BUILD:
            if record.provenance.get(name) != records[0].provenance.get(name):
                raise BumpgateError(f"{path}: another {name} than {paths[0]}")
    return records


def judged(good: Record, bad: Record) -> tuple[Decision, list[str], int]:
    """Return the decision, a line per finding that does not adopt, and how many rows would be measured again."""
    paired = timed_rows(good, bad)
    once = {j.row.id for j in bad.judgements if not timed(j.row)}
    lane = str(good.provenance["lane"])
    sides = Side("adopted", good), Side("candidate", bad)
    verdict = judge_gate(lane, *sides, dict.fromkeys(paired, SAME))
    held = [f for f in verdict.findings if f.decision is not Decision.ADOPT]
    return verdict.decision, [f"{f.label} {row}" for f in held for row in f.rows], len(once & paired.keys())


def main(paths: Sequence[str]) -> None:
    if len(paths) < 2:
        raise SystemExit("usage: python -m tools.pairs RECORD.json RECORD.json ...")
    found = [judged(*pair) for pair in permutations(same_build(paths), 2)]
    counts = Counter(decision.name for decision, _, _ in found)
    print("| records | ordered pairs | HOLD | UNKNOWN | ADOPT | rows measured again, a pair |")
    print("|---|---|---|---|---|---|")
    cells = []
    for name in ("HOLD", "UNKNOWN", "ADOPT"):
        low, high = wilson(counts[name], len(found))
        cells.append(f"{counts[name]} [{low:.1%}, {high:.1%}]")
    again = sum(rows for _, _, rows in found) / len(found)
    print(f"| {len(paths)} | {len(found)} | {' | '.join(cells)} | {again:.2g} |")
    for line, times in Counter(line for _, lines, _ in found for line in lines).most_common():
        print(f"{times} pairs: {line}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
