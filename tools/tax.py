"""What each rule of the compile contract costs or gains, in one table, from the rows of a run.

`python -m tools.tax RECORD.json [MORE.json ...] [--out tax.md]` prints GitHub Markdown. A line reads
"not measured" if no record holds its row, or if the row's instrument or machine failed. If several records hold a row,
the first one counts: rows that only another lane has, such as the cpu lane's recompiles, come from its record.

Exit codes: 0 the table is written; 2 usage error, or an unusable record or --out, reported in one line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bumpgate.core.rows import Judgement, Record, RecordError, Verdict, is_finite, read_record
from suites.support.tables import line, publish

# A row with one of these verdicts holds no measurement, whatever its value reads.
UNTRUSTED = (Verdict.INSTRUMENT, Verdict.INFRA)
NOT_MEASURED = "not measured"


class Line(NamedTuple):
    """question: what the ratio first / second answers. claim: the corresponding claim of the sources.

    `ratio` is a ratio row of one test that measured both at once; it takes precedence over the quotient of the two.
    """

    question: str
    first: str
    second: str
    claim: str = "no number"
    ratio: str = ""


def rate(case: str) -> str:
    """Return the row of tokens per second of a full-size case."""
    return f"throughput/{case}-2x4096/tokens_per_second"


def busy(case: str) -> str:
    """Return the row of the device time in a step of a full-size case."""
    return f"throughput/{case}-2x4096/device_milliseconds_per_step"


BREAKS = "24 % lost on an H200 (2.12 notes); 1 to 2 % on eight (Dynamo notes)"
OPAQUE = "a win at the target shapes (compile-tax notes)"
WHOLE = "within noise (compile-tax notes)"
EAGER = "a low-double-digit percentage of the step (compile-tax notes)"
PADDING = "about 25 % in the worst case (Dynamo notes)"
EXPERTS = "throughput/nam52-full-experts"
RESTART = "cache/nam52-full-regional-restart"
MISS = "compile/nam52-{}-guard_miss/graphs_recompiled"

LINES = (
    Line("13 graph breaks: whole_disabled over regional, tokens/s", rate("nam52-full-whole_disabled"),
         rate("nam52-full-regional"), BREAKS),
    Line("- the time that the device works a step", busy("nam52-full-whole_disabled"), busy("nam52-full-regional"),
         BREAKS),
    Line("breaks alone: whole_disabled over whole_opaque, tokens/s, 12 layers", rate("nam12-full-whole_disabled"),
         rate("nam12-full-whole_opaque"), BREAKS),
    Line("- the time that the device works a step", busy("nam12-full-whole_disabled"),
         busy("nam12-full-whole_opaque"), BREAKS),
    Line("M as a custom op in a region: regional over per_block (M eager), tokens/s", rate("nam52-full-regional"),
         rate("nam52-full-per_block"), OPAQUE),
    Line("- the time that the device works a step", busy("nam52-full-regional"), busy("nam52-full-per_block"), OPAQUE),
    Line("one graph: whole_opaque over regional, tokens/s, 12 layers", rate("nam12-full-whole_opaque"),
         rate("nam12-full-regional"), WHOLE),
    Line("- the time that the device works a step", busy("nam12-full-whole_opaque"), busy("nam12-full-regional"),
         WHOLE),
    Line("one graph: whole_opaque over regional, first compile, 12 layers",
         "throughput/nam12-full-whole_opaque-2x4096/cold_first_step_seconds",
         "throughput/nam12-full-regional-2x4096/cold_first_step_seconds", "strictly worse (compile-tax notes)"),
    Line("one guard miss in an expert block: regional over whole_opaque, operators recompiled",
         MISS.format("regional"), MISS.format("whole_opaque"),
         "all 52 blocks against one region (compile-tax notes)",
         ratio="compile/nam52-guard_miss/operators_regional_over_whole"),
    Line("compiled over eager, tokens/s, nam52", rate("nam52-full-regional"), rate("nam52-full-eager"), EAGER),
    Line("- the time that the device works a step", busy("nam52-full-regional"), busy("nam52-full-eager"), EAGER),
    Line("compiled over eager, tokens/s, nam56r", rate("nam56r-full-regional"), rate("nam56r-full-eager"), EAGER),
    Line("caches: warm over cold, first step", f"{RESTART}/warm_first_step_seconds",
         f"{RESTART}/cold_first_step_seconds", "15 minutes to 30 s, 0.033 (Dynamo notes)",
         ratio=f"{RESTART}/warm_over_cold"),
    Line("padding: slots over assignments", f"{EXPERTS}/padded_slots", f"{EXPERTS}/assignments", PADDING),
    Line("padding: padded experts over grouped_mm, step of a layer", f"{EXPERTS}-padded/layer_milliseconds",
         f"{EXPERTS}-grouped/layer_milliseconds", "dropless was slower (Dynamo notes)",
         ratio=f"{EXPERTS}/layer_padded_over_grouped"),
    Line("padding: the experts' products alone", f"{EXPERTS}-padded/products_milliseconds",
         f"{EXPERTS}-grouped/products_milliseconds", ratio=f"{EXPERTS}/products_padded_over_grouped"),
    Line("padding: peak memory of a layer", f"{EXPERTS}-padded/layer_peak_bytes",
         f"{EXPERTS}-grouped/layer_peak_bytes"),
    Line("kernels: ours over the peers', eager, tokens/s, nam52", rate("nam52-full-ours"),
         rate("nam52-full-upstream"), ratio="throughput/nam52-full-upstream-2x4096/speedup_over_upstream"),
    Line("- the time that the device works a step, the peers' over ours", busy("nam52-full-upstream"),
         busy("nam52-full-ours"), ratio="throughput/nam52-full-upstream-2x4096/kernels_speedup_over_upstream"),
    Line("kernels: ours over the peers', eager, tokens/s, nam56r", rate("nam56r-full-ours"),
         rate("nam56r-full-upstream"), ratio="throughput/nam56r-full-upstream-2x4096/speedup_over_upstream"),
    Line("- the time that the device works a step, the peers' over ours", busy("nam56r-full-upstream"),
         busy("nam56r-full-ours"), ratio="throughput/nam56r-full-upstream-2x4096/kernels_speedup_over_upstream"),
)  # fmt: skip

HEAD = ("what", "first row", "second row", "first / second", "stated in the sources")


class Measured(NamedTuple):
    """A positive number, with its interval if its row has one."""

    value: float
    unit: str
    interval: tuple[float, float] | None


def measured(rows: Mapping[str, Judgement], id: str) -> Measured | None:
    """Return the row's number; None if the row is absent or not trustworthy, or its number is not above 0.

    A row that reads MISSING because it has not been reviewed was still measured. A row that replaces a test which did
    not run has no witness.
    """
    judged = rows.get(id)
    if judged is None or judged.verdict in UNTRUSTED or judged.row.witness <= 0:
        return None
    value, interval = judged.row.value, judged.row.interval
    if not is_finite(value) or value <= 0:
        return None
    positive = interval is not None and all(is_finite(end) and end > 0 for end in interval)
    return Measured(float(value), judged.row.unit, interval if positive else None)


def quotient(first: Measured, second: Measured) -> str:
    """Format first / second, with the interval that follows from theirs; without one if either has none."""
    text = f"{first.value / second.value:.3f}"
    if first.interval is None or second.interval is None:
        return text
    low, high = first.interval[0] / second.interval[1], first.interval[1] / second.interval[0]
    return f"{text} ({low:.3f} to {high:.3f})"


def cells(line: Line, rows: Mapping[str, Judgement]) -> tuple[str, ...]:
    """Return the cells of a line. The quotient of two rows of different units, or with one absent, is not measured."""
    ids = (line.first, line.second)
    found = [measured(rows, id) for id in ids]
    sides = [
        f"`{id}`: {f'{number.value:.6g} {number.unit}' if number else NOT_MEASURED}"
        for id, number in zip(ids, found)
    ]
    ratio = NOT_MEASURED
    together = measured(rows, line.ratio) if line.ratio else None
    if together is not None:
        ratio = f"{together.value:.3f} (`{line.ratio}`)"
    elif not line.ratio and all(found) and found[0].unit == found[1].unit:
        ratio = quotient(*found)
    return line.question, *sides, ratio, line.claim


def markdown(records: Sequence[Record], lines: Sequence[Line] = LINES) -> str:
    """Return the table over all records' rows, the first record's before the others', and the measured environment."""
    rows: dict[str, Judgement] = {}
    for record in reversed(records):
        rows |= {judged.row.id: judged for judged in record.judgements}
    text = ["# What the compile contract costs", ""]
    for record in records:
        p = record.provenance
        whole = "" if record.complete else "; the run was cut short"
        text.append(
            f"- lane {p.get('lane')} on {p.get('device')}: torch {p.get('torch')}, triton {p.get('triton')}, "
            f"commit {str(p.get('commit'))[:12]}, {p.get('started')}{whole}"
        )
    table = [cells(line, rows) for line in lines]
    text += ["", line(HEAD), line(("---",) * len(HEAD)), *map(line, table), ""]
    count = sum(NOT_MEASURED not in cells[3] for cells in table)
    text.append(f"{count} of {len(table)} lines measured. An interval is what those of its two rows allow.")
    return "\n".join(text) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code; argparse itself exits with 2."""
    parser = argparse.ArgumentParser(prog="python -m tools.tax", description=__doc__.splitlines()[0])
    parser.add_argument(
        "record", nargs="+", type=Path, help="record.json of a run; the first one's rows count first"
    )
    parser.add_argument("--out", type=Path, help="writes the table there instead of printing it")
    given = parser.parse_args(arguments)
    try:
        text = markdown([read_record(path) for path in given.record])
    except RecordError as error:
        print(error, file=sys.stderr)
        return 2
    return publish(text, given.out)


if __name__ == "__main__":
    sys.exit(main())
