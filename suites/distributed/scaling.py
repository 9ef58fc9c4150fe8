"""What ranks cost and bring: tokens/s, exchange of gradients, memory and compile time of a training over N ranks.

`python -m suites.distributed.scaling --ranks 1 2` trains on gloo, `--device cuda` on NCCL, and prints a Markdown table.
The ranks train under DDP; a rank's part of the batch is the same for any number of ranks.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from bumpgate.plugin.rows import RowRecorder
from bumpgate.process.gpu_shares import listed
from bumpgate.process.host import gpu_models
from launch.data import PackedBatches, TokenFile
from launch.dist.ranks import Ranks
from launch.train import DTYPES, Trainer, TrainingPlan
from model import preset
from suites.distributed.ranks import run_cases
from suites.distributed.training import CORPUS
from suites.support.instruments import compile_phases, peak_rss_bytes
from suites.support.reduce import largest, smallest

WORLDS = (2, 4, 8)
# The full size of the H200 lane's throughput rows, for each rank.
WORK = {"name": "nam52", "size": "full", "dtype": "bfloat16", "rows": 2, "tokens": 4096, "steps": 5}
POLICIES = (
    "regional",
    "per_block",
)  # without and with breaks: under per_block the M and R blocks are eager islands
ROUNDS = 5
WITHIN = 400.0  # seconds for one policy, most of them for compiling
METRICS = (
    "tokens_per_second_per_rank",
    "efficiency",
    "exposed_communication",
    "peak_memory",
    "compile_seconds",
    "compile_skew",
    "break_tax",
    "break_tax_alone",
)
# Judged by their reviewed value, too; the others are compared between the sides of a gate only.
REVIEWED = ("tokens_per_second_per_rank", "efficiency", "peak_memory")
UNITS = dict(zip(METRICS, ("tokens/s", "ratio", "ratio", "MiB", "s", "s", "ratio", "ratio"), strict=True))


def measure(
    ranks: Ranks,
    name: str,
    size: str,
    policy: str,
    rows: int,
    tokens: int,
    steps: int,
    dtype: str = "float32",
    pattern: str = "",
    delay: float = 0.0,
) -> dict[str, Any]:
    """Time `steps` steps with and without the exchange of gradients, in turn -> medians of seconds per step, MiB at the
    peak, and the CPU seconds of compiling.

    The difference is what the exchange adds to a step: the part of it that no computation hides.
    delay: seconds that each bucket's exchange waits first.
    """
    changed = {"layer_pattern": pattern, "depth": len(pattern)} if pattern else {}
    source = PackedBatches(TokenFile(CORPUS), rows * ranks.world, tokens, 0)
    plan = TrainingPlan(2 + 2 * ROUNDS * (steps + 1), policy=policy, dtype=dtype)
    with compile_phases() as phases:
        run = Trainer(preset(name, size, **changed), plan, source, device=str(ranks.device), ranks=ranks)
        if delay:
            # DDP inspects the hook: it has a name, and no annotations of ours.
            run.compiled.forward.register_comm_hook(None, lambda group, bucket: late(delay, group, bucket))  # type: ignore[attr-defined]
        run.run(until=2)
    exchanging = run.share
    local = replace(exchanging, held=lambda _: exchanging.held(True))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(ROUNDS):
        for exchange, share in ((True, exchanging), (False, local)):
            run.share = share
            ranks.meet()
            rate = run.run(until=run.step + steps + 1)["tokens_per_second"]
            seconds[exchange].append(rows * ranks.world * tokens / rate)
    if ranks.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak = peak_rss_bytes() / 2**20
    return {
        "step": _median(seconds[True]),
        "step_without_exchange": _median(seconds[False]),
        "tokens": rows * tokens,
        "peak": peak,
        "compile": sum(phase or 0.0 for phase in asdict(phases).values()),
        "timed": len(seconds[True]) * steps,
    }


def late(delay: float, group: Any, bucket: Any) -> Any:
    """Exchange one bucket as DDP does, after a delay in seconds."""
    time.sleep(delay)
    return allreduce_hook(group, bucket)


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
    """Report METRICS of `world` GPUs next to one, or that they are not run on a host with fewer GPUs.

    The driver counts them, too: a torch that sees fewer of them must fail, not excuse its rows.
    """
    ids = {name: f"throughput/nam52-full-ddp-{world}_gpus/{name}" for name in METRICS}
    present = len(gpu_models() if (named := listed()) is None else named)
    if reason := missing_gpus(world, present) and missing_gpus(world, torch.cuda.device_count()):
        row.not_run(ids.values(), reason, excused=True)
        pytest.skip(f"not run: {reason}")
    values, several = with_one_rank("cuda", world, WORK)
    for name, id in ids.items():
        row.cost(
            id,
            values[name],
            UNITS[name],
            seen=sum(one["timed"] for one in several["regional"]),
            rule="C18" if name.startswith("compile") else "C14",
            better="higher" if name in ("tokens_per_second_per_rank", "efficiency") else "lower",
            tolerance=0.1,
            paired=name not in REVIEWED,
            work=f"{WORK}",
            evidence=[f"rank {rank}: {one}" for rank, one in enumerate(several["regional"])],
        )


def _median(seconds: Sequence[float]) -> float:
    return float(torch.tensor(seconds, dtype=torch.float64).median())  # NaN if any value is


def _slowest(ranks: Iterable[Mapping[str, float]], name: str) -> float:
    return largest(one[name] for one in ranks)


def with_one_rank(
    device: str, world: int, work: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, list[dict]]]:
    """Measure `world` ranks from empty compile caches, and then one with what they compiled -> METRICS, their results.

    One rank has the kernels that the ranks chose by measuring, so that efficiency does not depend on the choice.
    """
    with tempfile.TemporaryDirectory(prefix="bumpgate-caches-") as caches:
        several = run(device, world, work, caches)
        return summary(several if world == 1 else run(device, 1, work, caches), several), several


def run(device: str, world: int, work: Mapping[str, Any], caches: str) -> dict[str, list[dict[str, Any]]]:
    """Measure under each of POLICIES over `world` ranks, with the compile caches in the folder `caches`.

    Raises RuntimeError, one line, if a rank fails.
    """
    cases = {p: {"program": "measure", "policy": p, "within": WITHIN, **work} for p in POLICIES}
    places = {name: f"{caches}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    found = run_cases(cases, device, world, places)
    if failed := [one["error"] for ranks in found.values() for one in ranks if "error" in one]:
        raise RuntimeError(f"{world} ranks: {failed[0]}")
    return found


def missing_gpus(world: int, present: int) -> str:
    """Return why this machine cannot run `world` ranks, or ""."""
    return "" if present >= world else f"needs {world} GPUs, this run has {present}"


def table(found: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Return a Markdown table with a line for each number of ranks."""
    lines = [f"| ranks | {' | '.join(METRICS).replace('_', ' ')} |", f"|{'---|' * (len(METRICS) + 1)}"]
    for world, values in found.items():
        lines.append(f"| {world} | {' | '.join(f'{values[name]:.3g}' for name in METRICS)} |")
    return lines


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m suites.distributed.scaling", description=__doc__)
    p.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--name", default="nam12")
    p.add_argument("--size", default="narrow")
    p.add_argument("--dtype", choices=DTYPES, default=TrainingPlan.dtype)
    for name, value in (("rows", 4), ("tokens", 128), ("steps", 10)):
        p.add_argument(f"--{name}", type=int, default=value)
    o = vars(p.parse_args(arguments))
    worlds, device = o.pop("ranks"), o.pop("device")
    try:
        found = {world: with_one_rank(device, world, o)[0] for world in worlds}
    except RuntimeError as error:
        p.exit(1, f"{p.prog}: {error}\n")
    print(*table(found), sep="\n")


if __name__ == "__main__":
    main()
