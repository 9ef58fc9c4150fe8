"""The versions of triton side by side: `python -m suites.kernels.codegen.report [RECORD...]`.

Reads records, one a version (`tox -e codegen-triton37` writes .tox/codegen-triton37.json), or without any the
reviewed rows of baselines/cpu.json. One line a kernel, one column a version, and what differs.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from bumpgate.baseline import load
from bumpgate.rows import BumpgateError, Value, read_record

BASELINE = Path(__file__).parents[3] / "baselines" / "cpu.json"
ROW = re.compile(r"kernels/(?P<case>.+)-triton(?P<version>\d[\w.]*)/(?P<metric>\w+)")
# By metric, the largest difference between versions that is none. Shared memory may differ: it fits or it does not.
FREE = {
    "registers": 8,
    "spills": 0,
    "wgmma": 0,
    "fitting_configurations": 0,
    "spilling_configurations": 0,
}

# case -> version -> metric -> value
Table = Mapping[str, Mapping[str, Mapping[str, Value]]]


def table(rows: Iterable[tuple[str, Value]]) -> Table:
    """Of (row id, value); rows that name no version of triton are left out."""
    cases: defaultdict[str, defaultdict[str, dict[str, Value]]] = defaultdict(lambda: defaultdict(dict))
    for row_id, value in rows:
        if found := ROW.fullmatch(row_id):
            cases[found["case"]][found["version"]][found["metric"]] = value
    return cases


def differences(versions: Mapping[str, Mapping[str, Value]]) -> list[str]:
    """What differs between the versions of one kernel beyond FREE, and versions that lack it."""
    found = []
    for metric, free in FREE.items():
        values = {v: m[metric] for v, m in sorted(versions.items()) if metric in m}
        if values and max(values.values()) - min(values.values()) > free:
            found.append(f"{metric} " + ", ".join(f"{value} on {v}" for v, value in values.items()))
    return found


def lines(cases: Table) -> Iterator[str]:
    """The report: kernels that have the same metrics stand in one table, under a line that names these."""
    versions = sorted({v for by_version in cases.values() for v in by_version}, key=_numbers)
    groups: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for case, by_version in sorted(cases.items()):
        groups[tuple(next(iter(by_version.values())))].append(case)
    for metrics, members in groups.items():
        body = [[case, *(_cell(cases[case].get(v), metrics) for v in versions)] for case in members]
        body = [
            ["kernel", *versions, "differs"],
            *([*b, "; ".join(_told(cases[b[0]], versions))] for b in body),
        ]
        widths = [max(len(row[i]) for row in body) for i in range(len(versions) + 1)]
        yield " / ".join(metrics)
        for row in body:
            yield "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[-1]]).rstrip()
        yield ""
    differing = sum(bool(_told(by_version, versions)) for by_version in cases.values())
    yield f"{len(cases)} kernels, {len(versions)} versions, {differing} kernels differ"


def _told(by_version: Mapping[str, Mapping[str, Value]], versions: Iterable[str]) -> list[str]:
    absent = [v for v in versions if v not in by_version]
    return differences(by_version) + [f"not on {v}" for v in absent]


def _cell(values: Mapping[str, Value] | None, metrics: Iterable[str]) -> str:
    return "/".join(str(values.get(metric, "-")) for metric in metrics) if values else "-"


def _numbers(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version)]


def main(arguments: list[str]) -> int:
    """Exit code 0 with a report, 4 with one line where there is nothing to report on."""
    try:
        if arguments:
            records = [read_record(Path(name)) for name in arguments]
            cases = table(
                (j.row.id, j.row.value) for r in records for j in r.judgements if not j.row.unmeasured
            )
        else:
            cases = table((row_id, reviewed.value) for row_id, reviewed in load(BASELINE, "cpu").rows.items())
    except BumpgateError as error:
        print(error, file=sys.stderr)
        return 4
    if not cases:
        print(f"no row of {' '.join(arguments) or BASELINE.name} names a version of triton", file=sys.stderr)
        return 4
    print("\n".join(lines(cases)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
