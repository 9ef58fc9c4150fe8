"""The kernels on an H200 in one table: error, speed next to the peer's, and the resources of their code.

`python -m tools.op_table [--out docs/kernels.md]` prints Markdown from the reviewed rows: baselines/h200.json for
what ran, baselines/cpu.json for the codegen tier's counts of the same triton. The peers' times are from
tools.kernel_peers, and from WITH_WHEELS, a run next to wheels that the adopted environment lacks; COUNTERS names the
build that Nsight Compute counted. A cell without a row reads "-". Exit codes: 0 the table is written; 2 usage error, or
an unusable baseline, record or --out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bumpgate.core import kernel_code
from bumpgate.core.baseline import Baseline, BaselineError, Reviewed, load
from bumpgate.core.rows import Record, Value, read_record
from suites.ops import specs
from suites.support.comparison import AT_MOST
from suites.support.tables import publish, table
from tools import kernel_peers

ROOT = Path(__file__).resolve().parents[1]
WITH_WHEELS = ROOT / "baselines" / "records" / "h200-kernel-wheels.json.xz"
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
times over cold caches, B 4, T 4096, in bf16. The peer is the fastest that was measured on this build. Those with a
wheel were measured in a run with these wheels, baselines/records/{with_wheels}.
{own_attention}
Roofline: the larger of the bytes that must move at the copy rate, and the products at the matmul rate, both measured
in the run. Registers and spills: the most that any of the op's kernels takes, and of all kernels together, a thread,
in the code that triton {triton} makes of that shape. `tools/kernel_counters.json` has the counters of Nsight Compute
from which the last column of the marks is read.
"""
# Whether torch's own attention kernels are among the peers of the table.
COUNTED = "Torch's own attention kernels are among the peers."
NOT_COUNTED = (
    "Torch's own attention kernels are not among the peers: they were measured on another build,\n{build}."
)
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


def peer_of(case: str) -> str:
    """Return the name of a case's peer in the lane."""
    spec = specs().get(case.partition("-")[0])
    return spec.peer if spec and spec.peer else "peer"


def number(rows: Mapping[str, Value], id: str, places: int) -> str:
    """Format a row's value; "-" if there is no such row."""
    value = rows.get(id)
    return "-" if value is None else f"{value:.{places}f}"


def fastest_peer(
    rows: Mapping[str, Value], name: str, way: str, others: Mapping[str, Mapping[str, Sequence[float]]]
) -> tuple[str, str]:
    """Return milliseconds and name of the fastest peer of a case, and our time over it; "-" if there is no peer.

    others: case -> peer -> milliseconds of each way.
    """
    ours, ratio = (rows.get(f"kernels/{name}/{way}_{end}") for end in ("milliseconds", "over_peer"))
    found = [(times[list(WAYS).index(way)], which) for which, times in others.get(name, {}).items()]
    if ours is not None and ratio is not None:
        found.append((ours / ratio, peer_of(name)))
    if ours is None or not found:
        return "-", "-"
    ms, which = min(found)
    return f"{ms:.3f} {which}", f"{ours / ms:.2f}"


def times_of_peers(record: Record) -> dict[str, dict[str, list[float]]]:
    """Return case -> peer -> milliseconds of each way, from the rows of a run."""
    rows = {j.row.id: j.row.value for j in record.judgements}
    found: dict[str, dict[str, list[float]]] = {}
    for id in rows:
        _, name, last = f"{id}//".split("/")[:3]
        if last != f"{next(iter(WAYS))}_over_peer":
            continue
        case = f"kernels/{name}"
        times = [rows[f"{case}/{way}_milliseconds"] / rows[f"{case}/{way}_over_peer"] for way in WAYS]
        found[name] = {peer_of(name): times}
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
    others: Mapping[str, Mapping[str, Sequence[float]]],
) -> list[tuple[str, ...]]:
    """Return two lines of a case, forward and both; shared cells are in the first. others: as of fastest_peer."""
    case = f"kernels/{name}"
    kernels = counts(compiled, name, triton)
    most, spilled = max((k["registers"] for k in kernels), default=0), sum(k["spills"] for k in kernels)
    of_both = (str(most), str(spilled)) if kernels else ("-", "-")
    errors = tuple(number(ran, f"{case}/{way}_error_ratio", 2) for way in AT_MOST)
    found = []
    for i, (way, title) in enumerate(WAYS.items()):
        speed = (
            title, number(ran, f"{case}/{way}_milliseconds", 3), *fastest_peer(ran, name, way, others),
            number(ran, f"{case}/{way}_roofline_fraction", 2),
        )  # fmt: skip
        found.append((f"`{name}`", *errors, *speed, *of_both) if i == 0 else ("", "", "", *speed, "", ""))
    return found


def markdown(
    ran: Baseline, compiled: Baseline, wheels: Record, peers: Mapping[str, Any], counters: Mapping[str, Any]
) -> str:
    """Return the page: every case that has a timed row, the marks.

    wheels: a run with the wheels of the peers. Raises BaselineError if there is no timed row.
    """
    end = "/forward_milliseconds"
    values = {id: row.value for id, row in ran.rows.items()}
    names = [id.split("/")[1] for id in values if id.startswith("kernels/") and id.endswith(end)]
    if not names:
        raise BaselineError("baselines/h200.json: no kernel was timed; pytest -m h200 suites/kernels")
    made = ran.made_with
    triton = str(made.get("triton"))
    # Times of torch's own attention, and counters, of another build explain nothing about these rows.
    others = times_of_peers(wheels) if _build(wheels.provenance) == _build(made) else {}
    own_attention = NOT_COUNTED.format(build=_build(peers["made_with"]))
    if _build(peers["made_with"]) == _build(made):
        own_attention = COUNTED
        for name, times in peers["milliseconds"].items():
            others.setdefault(name, {}).update(times)
    builds = {name: _build(case["made_with"]) for name, case in counters.items()}
    elsewhere = {name: build for name, build in builds.items() if build != _build(made)}
    body = [cells for name in names for cells in lines(name, values, compiled.rows, triton, others)]
    machine = f"{made.get('device')}, driver {made.get('driver')}, {_build(made)}"
    page = ["# The kernels on an H200", "", f"{machine}.", "", *table(HEAD, body)]
    page += [NOTES.format(triton=triton, with_wheels=WITH_WHEELS.name, own_attention=own_attention)]
    every = marks(values, elsewhere)
    missed = [mark for mark in every if not mark[3].endswith("%") or mark[3].startswith("missed")]
    met = f"{len(every) - len(missed)} of {len(every)} marks of `suites/ops` are met. The others:"
    page += ["## Marks", "", met, "", *table(MARKS_HEAD, missed), ""]
    return "\n".join(page)


def _build(made_with: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {made_with.get(name)}" for name in ("torch", "triton"))


def measured() -> tuple[Record, Mapping[str, Any], Mapping[str, Any]]:
    """Return the run WITH_WHEELS, the kept result of tools.kernel_peers, and COUNTERS.

    Raises OSError, or RecordError if the run is not a record.
    """
    peers, counters = (json.loads(file.read_text()) for file in (kernel_peers.FILE, COUNTERS))
    return read_record(WITH_WHEELS), peers, counters


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
