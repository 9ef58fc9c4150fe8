"""Compare the versions of triton: `python -m suites.kernels.codegen.report [RECORD...]`.

Reads records, one per version (`tox -e codegen-triton37` writes .tox/codegen-triton37.json), or without arguments the
reviewed rows of baselines/cpu.json. One line per kernel, one column per version, and what is worse than in the version
before, by the bounds of bumpgate/core/kernel_code.py.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from bumpgate.core import kernel_code
from bumpgate.core.baseline import load
from bumpgate.core.errors import BumpgateError
from bumpgate.core.rows import Value, read_record

BASELINE = Path(__file__).parents[3] / "baselines" / "cpu.json"
ROW = re.compile(r"kernels/(?P<case>.+)/code")

# case -> version -> count by name
Table = Mapping[str, Mapping[str, Mapping[str, int]]]


def table(rows: Iterable[tuple[str, str, Value]]) -> Table:
    """Build the table from (row id, version of triton, value); rows of anything but code are left out."""
    cases: defaultdict[str, dict[str, Mapping[str, int]]] = defaultdict(dict)
    for row_id, version, value in rows:
        if found := ROW.fullmatch(row_id):
            cases[found["case"]][version] = kernel_code.parse(value)
    return cases


def losses(versions: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return what is worse in each version of one kernel than in the version before it."""
    found = []
    for old, new in pairwise(sorted(versions, key=kernel_code.numbers)):
        worse = kernel_code.worse(versions[old], versions[new])
        found += [f"{new}: {name} {step}" for name, step in worse.items()]
    return found


def lines(cases: Table) -> Iterator[str]:
    """Format the report: kernels with the same counts share one table, under a line that lists them."""
    versions = sorted({v for by_version in cases.values() for v in by_version}, key=kernel_code.numbers)
    groups: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for case, by_version in sorted(cases.items()):
        groups[tuple(next(iter(by_version.values())))].append(case)
    for metrics, members in groups.items():
        body = [[case, *(_cell(cases[case].get(v), metrics) for v in versions)] for case in members]
        body = [
            ["kernel", *versions, "worse"],
            *([*b, "; ".join(_notes(cases[b[0]], versions))] for b in body),
        ]
        widths = [max(len(row[i]) for row in body) for i in range(len(versions) + 1)]
        yield " / ".join(metrics)
        for row in body:
            yield "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[-1]]).rstrip()
        yield ""
    worse = sum(bool(_notes(by_version, versions)) for by_version in cases.values())
    yield f"{len(cases)} kernels, {len(versions)} versions, {worse} kernels worse"


def _notes(by_version: Mapping[str, Mapping[str, int]], versions: Iterable[str]) -> list[str]:
    absent = [v for v in versions if v not in by_version]
    return losses(by_version) + [f"not on {v}" for v in absent]


def _cell(values: Mapping[str, int] | None, names: Iterable[str]) -> str:
    return "/".join(str(values.get(name, "-")) for name in names) if values else "-"


def main(arguments: list[str]) -> int:
    """Return exit code 0 with a report, 4 with one line if there is nothing to report on."""
    try:
        if arguments:
            records = [read_record(Path(name)) for name in arguments]
            cases = table(
                (j.row.id, str(r.provenance.get("triton")), j.row.value)
                for r in records
                for j in r.judgements
                if j.row.value is not None
            )
        else:
            rows = load(BASELINE, "cpu").rows.items()
            cases = table((row_id, v, value) for row_id, r in rows for v, value in r.values.items())
    except BumpgateError as error:
        print(error, file=sys.stderr)
        return 4
    if not cases:
        print(f"{' '.join(arguments) or BASELINE.name}: no row of compiled code", file=sys.stderr)
        return 4
    print("\n".join(lines(cases)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
