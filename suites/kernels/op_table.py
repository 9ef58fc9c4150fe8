"""The kernels on an H200 in one table: error, speed beside the peer's, and what their code takes of the machine.

`python -m suites.kernels.op_table [--out docs/kernels.md]` prints GitHub Markdown, made of the reviewed rows:
baselines/h200.json for what ran, baselines/cpu.json for what the codegen tier read of the same triton's code. A cell
without a row reads "-". Exit codes: 0 the table is out, 2 usage, or a baseline or --out that is of no use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bumpgate.baseline import Baseline, BaselineError, load
from bumpgate.rows import Value
from suites.support.comparison import AT_MOST
from suites.support.tables import line, publish

ROOT = Path(__file__).resolve().parents[2]
WAYS = {"forward": "forward", "both": "forward + backward"}
HEAD = (
    "op, shape",
    f"error, forward (at most {AT_MOST['forward']:g})",
    f"error, gradients (at most {AT_MOST['gradient']:g})",
    "pass",
    "ours, ms",
    "peer, ms",
    "ours / peer",
    "share of the roofline",
    "registers",
    "spilled bytes",
)
NOTES = """
Error: the largest over all tensors of the error against fp64, relative to that of the plain formula in bf16. Median
times over cold caches, B 4, T 4096, in bf16; the peer's in the same run: flash-attn 2, mamba-ssm, causal-conv1d,
F.grouped_mm, and Inductor's code for the loss. Roofline: the larger of the bytes that must move at the copy rate, and
the products at the matmul rate, both measured in the run. Registers and spills: the most that any of the op's kernels
takes, and of all kernels together, a thread, in the code that triton {triton} makes of that shape.
"""


class Mark(NamedTuple):
    """What a row is to reach: at most so many milliseconds, at least such a share. bound: what keeps it from more."""

    name: str
    metric: str
    limit: float
    bound: str

    @property
    def least(self) -> bool:
        """A fraction is to be reached, and a time not to be exceeded."""
        return self.metric.endswith("_fraction")


STREAM = "the copy ceiling"
RECURRENCE = "registers: 255 a thread leave two warps to a scheduler, and forms that spilled less were slower"
MARKS = (
    Mark("causal_conv1d-D3584", "forward_milliseconds", 0.080, STREAM),
    Mark("causal_conv1d-D3584", "both_milliseconds", 0.36, STREAM),
    Mark("ssd_chunk_scan-N64-G8", "forward_milliseconds", 0.83, RECURRENCE),
    Mark("ssd_chunk_scan-N64-G8", "both_milliseconds", 4.1, RECURRENCE),
    Mark("mamba3_siso-N64-G8", "forward_milliseconds", 1.42, RECURRENCE),
    Mark("mamba3_siso-N64-G8", "both_milliseconds", 3.9, RECURRENCE),
    Mark(
        "attention-P128-softcap30", "forward_milliseconds", 1.9, "the softcap's tanh: see the time without it"
    ),
    Mark("attention-P128-softcap30", "both_milliseconds", 7.8, "the softcap's tanh: see the time without it"),
    Mark("rms_norm_gated-D7168-gate_first", "forward_roofline_fraction", 0.8, STREAM),
    Mark("rms_norm_gated-D7168-gate_first", "both_roofline_fraction", 0.8, STREAM),
    Mark("rms_norm_gated-D7168-norm_first", "forward_roofline_fraction", 0.8, STREAM),
    Mark("rms_norm_gated-D7168-norm_first", "both_roofline_fraction", 0.8, STREAM),
    Mark("moe_combine-E64-K6", "forward_roofline_fraction", 0.8, STREAM),
    Mark("moe_combine-E64-K6", "both_roofline_fraction", 0.8, STREAM),
    # 631 GFLOP at 600 TFLOP/s
    Mark("grouped_gemm-E64-K6-3584x896", "forward_milliseconds", 1.052, "the matmul ceiling"),
    Mark("grouped_gemm-E64-K6-896x3584", "forward_milliseconds", 1.052, "the matmul ceiling"),
)
MARKS_HEAD = ("op, shape", "row", "mark", "measured", "beyond the mark by", "what bounds it")


def marks(rows: Mapping[str, Value]) -> list[tuple[str, ...]]:
    """A line a mark: how far it is passed, or missed and then by what."""
    found = []
    for mark in MARKS:
        value = rows.get(f"kernels/{mark.name}/{mark.metric}")
        if value is None:
            found.append((f"`{mark.name}`", mark.metric, f"{mark.limit:g}", "-", "-", ""))
            continue
        gain = value / mark.limit - 1 if mark.least else 1 - value / mark.limit
        told = f"{gain:.1%}" if gain >= 0 else f"missed by {-gain:.1%}"
        bound = mark.bound if gain < 0 else ""
        found.append((f"`{mark.name}`", mark.metric, f"{mark.limit:g}", f"{value:.3f}", told, bound))
    return found


def number(rows: Mapping[str, Value], id: str, places: int) -> str:
    """A row's value as it is printed; "-" where there is no such row."""
    value = rows.get(id)
    return "-" if value is None else f"{value:.{places}f}"


def peer_milliseconds(rows: Mapping[str, Value], case: str, way: str) -> str:
    """Ours over the ratio that the same run measured."""
    ours, ratio = rows.get(f"{case}/{way}_milliseconds"), rows.get(f"{case}/{way}_over_peer")
    return "-" if ours is None or ratio is None else f"{ours / ratio:.3f}"


def code(rows: Mapping[str, Value], name: str, triton: str, metric: str) -> list[int]:
    """The metric of each kernel that an op launches at a timed shape, forward and backward, in bf16."""
    op, _, shape = name.partition("-")
    end = f"-{shape}-bf16-triton{triton}/{metric}"
    return [value for id, value in rows.items() if id.startswith(f"kernels/{op}.") and id.endswith(end)]


def lines(name: str, ran: Mapping[str, Value], compiled: Mapping[str, Value], triton: str) -> list[tuple]:
    """Two lines of a case, one a way; what holds for both stands in the first."""
    case = f"kernels/{name}"
    registers, spills = (code(compiled, name, triton, metric) for metric in ("registers", "spills"))
    of_both = (str(max(registers)), str(sum(spills))) if registers else ("-", "-")
    errors = tuple(number(ran, f"{case}/{way}_error_ratio", 2) for way in AT_MOST)
    found = []
    for i, (way, title) in enumerate(WAYS.items()):
        speed = (
            title, number(ran, f"{case}/{way}_milliseconds", 3), peer_milliseconds(ran, case, way),
            number(ran, f"{case}/{way}_over_peer", 2), number(ran, f"{case}/{way}_roofline_fraction", 2),
        )  # fmt: skip
        found.append((f"`{name}`", *errors, *speed, *of_both) if i == 0 else ("", "", "", *speed, "", ""))
    return found


def markdown(ran: Baseline, compiled: Baseline) -> str:
    """The table of every case that has a timed row. Raises BaselineError where there is none."""
    end = "/forward_milliseconds"
    values, code_values = ({id: row.value for id, row in b.rows.items()} for b in (ran, compiled))
    names = [id.split("/")[1] for id in values if id.startswith("kernels/") and id.endswith(end)]
    if not names:
        raise BaselineError("baselines/h200.json: no kernel was timed; pytest -m h200 suites/kernels")
    made = ran.made_with
    triton = str(made.get("triton"))
    table = [cells for name in names for cells in lines(name, values, code_values, triton)]
    body = [line(cells) for cells in (HEAD, ("---",) * len(HEAD), *table)]
    machine = f"{made.get('device')}, driver {made.get('driver')}, torch {made.get('torch')}, triton {triton}"
    reached = [line(cells) for cells in (MARKS_HEAD, ("---",) * len(MARKS_HEAD), *marks(values))]
    head = ["# The kernels on an H200", "", f"{machine}.", ""]
    return "\n".join([*head, *body, NOTES.format(triton=triton), "## First marks", "", *reached, ""])


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code; argparse itself exits with 2."""
    parser = argparse.ArgumentParser(
        prog="python -m suites.kernels.op_table", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, help="writes the table there instead of printing it")
    given = parser.parse_args(arguments)
    try:
        ran, compiled = (load(ROOT / "baselines" / f"{lane}.json", lane) for lane in ("h200", "cpu"))
        text = markdown(ran, compiled)
    except BaselineError as error:
        print(error, file=sys.stderr)
        return 2
    return publish(text, given.out)


if __name__ == "__main__":
    sys.exit(main())
