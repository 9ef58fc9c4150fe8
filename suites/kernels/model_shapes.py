"""The ops at the model's shapes: their errors, their speed, and the cost of their first call. B batch.

`python -m suites.kernels.model_shapes CASE` is one process of the first-call check, on the caches of its environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bumpgate.core.rows import write_atomic
from suites.kernels.peer_tuning import op_of, tuned_case
from suites.ops import specs
from suites.ops.spec import BF16, Workload
from suites.support.calibrations import OF_HOST
from suites.support.child import print_result
from suites.support.comparison import doubled, error_ratio, gradients
from suites.support.gpu_timing import (
    CALLS,
    copy_rate,
    floor_milliseconds,
    forward_and_backward,
    matmul_rate,
    milliseconds,
)
from suites.support.instruments import cpu_seconds
from suites.support.operands import OperandsIn

WAYS = ("forward", "both")
# In one run the 99 % intervals of the medians were at most 1.8 % wide. Two runs hours apart, on different machines,
# differ by at most 0.6 % in eight times and their fractions of the ceiling; one of eight ratios to a peer changed by
# 4.3 %, with the peer's time.
TOLERANCE = {"milliseconds": 0.06, "ratio": 0.08, "fraction": 0.06}
# Most kernels are bound by one of both in part, and the peer of a ratio by the other.
BOUND = "memory, matmul"
COMPILER = "calibration/compiler/python_cpu_milliseconds"
LIST = "__grp__"  # prefix of Triton's file that lists an entry's files


def ratios_of(
    case: Workload, *functions: Callable[..., Any] | None
) -> tuple[list[Tensor], list[list[float]]]:
    """Return the outputs and gradients of the fp64 oracle, and the error ratios of each function (None: empty)."""
    exact = gradients(case.reference, *doubled(case.inputs))
    with OperandsIn(BF16):
        plain = gradients(case.reference, *case.inputs)

    def ratios(function: Callable[..., Any] | None) -> list[float]:
        found = gradients(function, *case.inputs) if function else ()
        return [error_ratio(*three) for three in zip(found, plain, exact, strict=bool(function))]

    return exact, [*map(ratios, functions)]


def compared(name: str) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, int]]:
    """Return error ratios of the op and of its peer, by "forward" and "gradient", and the number of values compared."""
    case = tuned_case(name, B=1)
    exact, ratios = ratios_of(case, case.op, case.peer)
    outputs = len(exact) - sum(t.is_floating_point() for t in case.inputs)
    parts = {"forward": slice(0, outputs), "gradient": slice(outputs, None)}
    ours, peer = ({way: found[part] for way, part in parts.items()} for found in ratios)
    return ours, peer, {way: sum(t.numel() for t in exact[part]) for way, part in parts.items()}


def report_speed(row: Any, name: str, case: Workload) -> None:
    """Report rows kernels/<name>/{forward,both}_{milliseconds,roofline_fraction,over_peer}.

    both is forward and backward. The peer of a ratio is the fastest of those that are installed.
    """
    peers = {peer: _ways(function, case) for peer, function in all_peers(name, case).items()}
    for way, call in _ways(case.op, case).items():
        timing = milliseconds(call)
        moved, multiplied = getattr(case.work, f"{way}_bytes"), getattr(case.work, f"{way}_flops")
        about = {"rule": "C37", "bound": BOUND, "seen": CALLS}
        id, limits = f"kernels/{name}/{way}", TOLERANCE
        row.timed(f"{id}_milliseconds", timing, "ms", tolerance=limits["milliseconds"], **about)
        row.cost(
            f"{id}_roofline_fraction", floor_milliseconds(moved, multiplied) / timing.median, "fraction",
            better="higher", tolerance=limits["fraction"], **about,
            evidence=[f"{moved / 1e6:.0f} MB at {copy_rate() / 1e12:.2f} TB/s, "
                      f"{multiplied / 1e12:.2f} TFLOP at {matmul_rate() / 1e12:.0f} TFLOP/s"],
        )  # fmt: skip
        if peers:
            times = sorted((milliseconds(ways[way]).median, peer) for peer, ways in peers.items())
            row.cost(
                f"{id}_over_peer", timing.median / times[0][0], "ratio", tolerance=limits["ratio"], **about,
                own=f"{id}_milliseconds", evidence=[f"{peer}: {ms:.4f} ms" for ms, peer in times],
            )  # fmt: skip


def all_peers(name: str, case: Workload) -> dict[str, Callable[..., Any]]:
    """Return the installed peers of a case by name."""
    first = {specs()[op_of(name)].peer: case.peer} if case.peer else {}
    return first | {each.name: each.function for each in case.others}


def _ways(function: Callable[..., Any], case: Workload) -> dict[str, Callable[[], object]]:
    return dict(zip(WAYS, forward_and_backward(function, case.inputs)))


def first_call(name: str) -> dict[str, Any]:
    """Run a case once at the timed batch size, forward and backward. Raises KeyError on an unknown case.

    Returns the CPU seconds with compilation and autotuning, the number of kernels they compiled, and what this process
    read of its host before. The peers are called after them, so that their code is cached, too.
    """
    case = tuned_case(name, B=4)
    torch.cuda.synchronize()
    host = {COMPILER: OF_HOST[COMPILER].function()}
    started = cpu_seconds()
    forward_and_backward(case.op, case.inputs)[1]()
    torch.cuda.synchronize()
    seconds = cpu_seconds() - started
    kernels = len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))
    for peer in all_peers(name, case).values():
        forward_and_backward(peer, case.inputs)[1]()
    return {"cpu_seconds": seconds, "kernels": kernels, "host": host}


def keep(made: Path, cache: Path) -> None:
    """Copy the entries of one cache, of Triton or Inductor, into another that other processes use meanwhile.

    An existing file is left alone, because it may be mapped. Triton's list of an entry's files has their absolute
    paths, and is written after them.
    """
    files = [path for path in made.rglob("*") if path.is_file()]
    for file in sorted(files, key=lambda path: path.name.startswith(LIST)):
        place = cache / file.relative_to(made)
        if place.exists():
            continue
        data = file.read_bytes()
        if file.name.startswith(LIST):
            data = data.replace(os.fsencode(made), os.fsencode(cache))
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, data)


if __name__ == "__main__":
    print_result(first_call(sys.argv[1]))
