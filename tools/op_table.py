"""The kernels on an H200 in one table: error, speed next to the peer's, and the resources of their code.

`python -m tools.op_table [--out docs/kernels.md]` prints Markdown from the reviewed rows: baselines/h200.json for
what ran, baselines/cpu.json for the codegen tier's counts of the same triton. The peers' names and times are from the
kept record RUN; COUNTERS names the build that Nsight Compute counted. A cell without a row reads "-".
Exit codes: 0 the table is written; 2 usage error, or an unusable baseline, record or --out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bumpgate.core import kernel_code
from bumpgate.core.baseline import Baseline, BaselineError, Reviewed, load
from bumpgate.core.rows import Record, Value, read_record
from suites.ops import specs
from suites.support.comparison import AT_MOST
from suites.support.tables import publish, table

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "baselines" / "records" / "h200-wheels.json.xz"
PEER = re.compile(r"(.+): (\S+) ms")
COUNTERS = Path(__file__).with_name("kernel_counters.json")
WAYS = {"forward": "forward", "both": "forward + backward"}
HEAD = (
    "op, shape",
    f"error, forward (at most {AT_MOST['forward']:g})",
    f"error, gradients (at most {AT_MOST['gradient']:g})",
    "pass",
    "ours, ms",
    "fastest peer, ms",
    "ours / peer",
    "share of the roofline",
    "registers",
    "spilled bytes",
)
NOTES = """
Error: the largest over all tensors of the error against fp64, relative to that of the plain formula in bf16. Median
times over cold caches, B 4, T 4096, in bf16. The peer is the fastest of all that are installed, in the same process:
flash-attn 2 and 4, cuDNN and SDPA's flash kernel for attention, mamba-ssm, causal-conv1d, torch.
Roofline: the larger of the bytes that must move at the copy rate, and the products at the matmul rate, both measured
in the run. Registers and spills: the most that any of the op's kernels takes, and of all kernels together, a thread,
in the code that triton {triton} makes of that shape. `tools/kernel_counters.json` has the counters of Nsight Compute
from which the last column of the marks is read.
"""
MARKS_HEAD = ("row", "mark", "measured", "beyond the mark by", "what bounds it")


def marks(rows: Mapping[str, Value], measured_on: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return a line per target of the specs: by how much it is met, or missed and then what bounds the row.

    A target is at most so many milliseconds or so much of the peer's time, or at least such a share of the roofline.
    measured_on: case -> the build of its counters, if it is another one than that of the rows.
    """
    found = []
    for id, (mark, bound) in all_marks().items():
        value = rows.get(f"kernels/{id}")
        build = measured_on.get(id.partition("/")[0], "")
        of_build = f" (on {build})" if build else ""
        if value is None:
            found.append((f"`{id}`", f"{mark:g}", "-", "-", ""))
            continue
        gain = value / mark - 1 if id.endswith("_fraction") else 1 - value / mark
        why = bound + of_build if bound else "not measured"
        outcome = (f"{gain:.1%}", "") if gain >= 0 else (f"missed by {-gain:.1%}", why)
        found.append((f"`{id}`", f"{mark:g}", f"{value:.3f}", *outcome))
    return found


def all_marks() -> dict[str, tuple[float, str]]:
    """Return the targets of all ops: row -> the target, and what bounds it."""
    return {id: mark for spec in specs().values() for id, mark in spec.marks.items()}


def number(rows: Mapping[str, Value], id: str, places: int) -> str:
    """Format a row's value; "-" if there is no such row."""
    value = rows.get(id)
    return "-" if value is None else f"{value:.{places}f}"


def fastest_peer(
    rows: Mapping[str, Value], id: str, peers: Mapping[str, tuple[str, float]]
) -> tuple[str, str]:
    """Return milliseconds and name of the fastest peer, and our time over it; "-" if there is no peer.

    id: of a row without its metric, such as kernels/attention-P64/forward. peers: by the same id.
    """
    ours = rows.get(f"{id}_milliseconds")
    if ours is None or id not in peers:
        return "-", "-"
    name, ms = peers[id]
    return f"{ms:.3f} {name}", f"{ours / ms:.2f}"


def peers_of(record: Record) -> dict[str, tuple[str, float]]:
    """Return the name and milliseconds of the fastest peer by case and way, from the evidence of the ratios to it."""
    found = {}
    for row in (j.row for j in record.judgements):
        if row.id.endswith("_over_peer") and (peer := PEER.fullmatch(next(iter(row.evidence), ""))):
            found[row.id.removesuffix("_over_peer")] = peer[1], float(peer[2])
    return found


def counts(rows: Mapping[str, Reviewed], name: str, triton: str) -> list[dict[str, int]]:
    """Return the code counts of each kernel that an op launches at a timed shape, forward and backward, in bf16."""
    op, _, shape = name.partition("-")
    end = f"-{shape}-bf16/code"
    named = [row for id, row in rows.items() if id.startswith(f"kernels/{op}.") and id.endswith(end)]
    return [kernel_code.parse(row.values[triton]) for row in named if triton in row.values]


def lines(
    name: str,
    ran: Mapping[str, Value],
    compiled: Mapping[str, Reviewed],
    triton: str,
    peers: Mapping[str, tuple[str, float]],
) -> list[tuple[str, ...]]:
    """Return two lines of a case, forward and both; shared cells are in the first. peers: as of fastest_peer."""
    case = f"kernels/{name}"
    kernels = counts(compiled, name, triton)
    most, spilled = max((k["registers"] for k in kernels), default=0), sum(k["spills"] for k in kernels)
    of_both = (str(most), str(spilled)) if kernels else ("-", "-")
    errors = tuple(number(ran, f"{case}/{way}_error_ratio", 2) for way in AT_MOST)
    found = []
    for i, (way, title) in enumerate(WAYS.items()):
        speed = (
            title, number(ran, f"{case}/{way}_milliseconds", 3), *fastest_peer(ran, f"{case}/{way}", peers),
            number(ran, f"{case}/{way}_roofline_fraction", 2),
        )  # fmt: skip
        found.append((f"`{name}`", *errors, *speed, *of_both) if i == 0 else ("", "", "", *speed, "", ""))
    return found


def markdown(ran: Baseline, compiled: Baseline, run: Record, counters: Mapping[str, Any]) -> str:
    """Return the page: every case that has a timed row, the marks.

    run: names the peers, if it is of this build. Raises BaselineError if there is no timed row.
    """
    end = "/forward_milliseconds"
    values = {id: row.value for id, row in ran.rows.items()}
    names = [id.split("/")[1] for id in values if id.startswith("kernels/") and id.endswith(end)]
    if not names:
        raise BaselineError("baselines/h200.json: no kernel was timed; pytest -m h200 suites/kernels")
    made = ran.made_with
    triton = str(made.get("triton"))
    # Times of peers, and counters, of another build explain nothing about these rows.
    peers = peers_of(run) if _build(run.provenance) == _build(made) else {}
    builds = {name: _build(case["made_with"]) for name, case in counters.items()}
    elsewhere = {name: build for name, build in builds.items() if build != _build(made)}
    body = [cells for name in names for cells in lines(name, values, compiled.rows, triton, peers)]
    machine = f"{made.get('device')}, driver {made.get('driver')}, {_build(made)}"
    page = ["# The kernels on an H200", "", f"{machine}.", "", *table(HEAD, body)]
    page += [NOTES.format(triton=triton)]
    every = marks(values, elsewhere)
    missed = [mark for mark in every if not mark[3].endswith("%") or mark[3].startswith("missed")]
    met = f"{len(every) - len(missed)} of {len(every)} marks of `suites/ops` are met. The others:"
    page += ["## Marks", "", met, "", *table(MARKS_HEAD, missed), ""]
    return "\n".join(page)


def _build(made_with: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {made_with.get(name)}" for name in ("torch", "triton"))


def measured() -> tuple[Record, Mapping[str, Any]]:
    """Return the run RUN, and COUNTERS. Raises OSError, or RecordError if the run is not a record."""
    return read_record(RUN), json.loads(COUNTERS.read_text())


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code; argparse itself exits with 2."""
    parser = argparse.ArgumentParser(prog="python -m tools.op_table", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="writes the table there instead of printing it")
    given = parser.parse_args(arguments)
    try:
        ran, compiled = (load(ROOT / "baselines" / f"{lane}.json", lane) for lane in ("h200", "cpu"))
        text = markdown(ran, compiled, *measured())
    except (BaselineError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return publish(text, given.out)


if __name__ == "__main__":
    sys.exit(main())
