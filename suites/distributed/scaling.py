"""What ranks cost and bring: tokens/s, exchange of gradients, memory and compile time of a training over N GPUs.

The ranks train under DDP; a rank's part of the batch is the same for any number of ranks. They also measure their host:
the reviewed times belong to its links.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

from bumpgate.plugin.rows import RowRecorder
from suites.distributed.ranks import run_cases
from suites.distributed.steps import UNITS as OF_A_RANK
from suites.support.reduce import largest, smallest

WORLDS = (2, 4, 8)  # a lane measures those that its GPUs suffice for
# The full size of the H200 lane's throughput rows, for each rank.
WORK = {"name": "nam52", "size": "full", "dtype": "bfloat16", "rows": 2, "tokens": 4096, "steps": 5}
# Without and with breaks: under per_block the M and R blocks are eager islands.
POLICIES = ("regional", "per_block")
WITHIN = 400.0  # seconds for one policy, most of them for compiling
# Metric -> unit.
METRICS = {
    "tokens_per_second_per_rank": "tokens/s",
    "efficiency": "ratio",
    "exposed_communication": "ratio",
    "peak_memory": "MiB",
    "compile_seconds": "s",
    "compile_skew": "s",
    "break_tax": "ratio",
    "break_tax_alone": "ratio",
}
# Judged by their reviewed value, too; the others are compared between the sides of a gate only.
REVIEWED = ("tokens_per_second_per_rank", "efficiency", "peak_memory")
# Breaks cost time. A step with them that is faster by more than the noise of a step waits for something else.
LEAST_TAX = -0.05


def summary(alone: Mapping[str, list[dict]], several: Mapping[str, list[dict]]) -> dict[str, float]:
    """Return METRICS of several ranks next to one; both map policy -> the results of each rank."""
    step, step_alone = (_slowest(of["regional"], "step") for of in (several, alone))
    ranks = several["regional"]
    compiled = [one["compile"] for one in ranks]
    return {
        "tokens_per_second_per_rank": ranks[0]["tokens"] / step,
        "efficiency": step_alone / step,
        "exposed_communication": 1 - _slowest(ranks, "step_without_exchange") / step,
        "peak_memory": largest(one["peak"] for one in ranks),
        "compile_seconds": largest(compiled),
        "compile_skew": largest(compiled) - smallest(compiled),
        "break_tax": _slowest(several["per_block"], "step") / step - 1,
        "break_tax_alone": _slowest(alone["per_block"], "step") / step_alone - 1,
    }


def report(world: int, row: RowRecorder) -> None:
    """Report METRICS of `world` GPUs next to one."""
    ids = {name: f"throughput/nam52-full-ddp-{world}_gpus/{name}" for name in METRICS}
    values, several = with_one_rank(world)
    kinds = _report_host(row, world, several["calibrate"])
    for name, reason in meaningless(values).items():
        row.not_run([ids.pop(name)], reason, excused=True)
    ranks = several["regional"]
    shared = {"seen": sum(one["timed"] for one in ranks), "tolerance": 0.1, "work": f"{WORK}"}
    shared["evidence"] = [f"rank {rank}: {one}" for rank, one in enumerate(ranks)]
    for name, id in ids.items():
        compiles = name.startswith("compile")
        own = {"rule": "C18" if compiles else "C14", "paired": name not in REVIEWED}
        own["better"] = "higher" if name in ("tokens_per_second_per_rank", "efficiency") else "lower"
        own["bound"] = "" if name == "peak_memory" else "compiler" if compiles else kinds
        row.cost(id, values[name], METRICS[name], **shared, **own)


def meaningless(values: Mapping[str, float]) -> dict[str, str]:
    """Return the metrics that have no meaning on this host -> the cause."""
    exposed = values["exposed_communication"]
    cause = f"exposed communication of {exposed:.2f}: without breaks a step waits longer for its exchange"
    return {
        name: f"{values[name]:.3f} is below {LEAST_TAX}, so breaks do not decide it; {cause}"
        for name in ("break_tax", "break_tax_alone")
        if values[name] < LEAST_TAX
    }


def _report_host(row: RowRecorder, world: int, ranks: list[dict[str, float]]) -> str:
    """Report the properties of the host that `world` ranks measured, of the slowest one -> what bounds their times."""
    kinds = []
    for id in ranks[0]:
        unit = OF_A_RANK.get(id, "bytes/s")
        slowest = largest if unit == "us" else smallest
        _, kind, metric = id.split("/")
        kinds.append(f"{kind}-{world}")
        evidence = [f"rank {rank}: {one[id]:.4g}" for rank, one in enumerate(ranks)]
        about = {"rule": "C14", "seen": world, "evidence": evidence}
        value = slowest(one[id] for one in ranks)
        row.calibration(f"calibration/{kind}-{world}/{metric}", value, unit, **about)
    return ", ".join(dict.fromkeys(kinds))


def _slowest(ranks: Iterable[Mapping[str, float]], name: str) -> float:
    return largest(one[name] for one in ranks)


def with_one_rank(world: int) -> tuple[dict[str, float], dict[str, list[dict]]]:
    """Measure `world` ranks from empty compile caches, and then one with what they compiled -> METRICS, their results.

    One rank has the kernels that the ranks chose by measuring, so that efficiency does not depend on the choice.
    """
    with tempfile.TemporaryDirectory(prefix="bumpgate-caches-") as caches:
        several = run(world, caches)
        return summary(run(1, caches), several), several


def run(world: int, caches: str) -> dict[str, list[dict[str, Any]]]:
    """Measure the host and each of POLICIES over `world` ranks, with the compile caches in the folder `caches`.

    Raises RuntimeError, one line, if a rank fails.
    """
    cases: dict[str, dict[str, Any]] = {
        p: {"program": "measure", "policy": p, "within": WITHIN, "work": WORK} for p in POLICIES
    }
    places = {name: f"{caches}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    found = run_cases({"calibrate": {"program": "calibrate"}, **cases}, "cuda", world, places)
    if failed := [one["error"] for ranks in found.values() for one in ranks if "error" in one]:
        raise RuntimeError(f"{world} ranks: {failed[0]}")
    return found
