"""Training steps of the full-size models on one GPU, in bf16: what compiling gains, and what a step costs.

B batch, T tokens. One step is forward, backward and a fused AdamW update; the first steps, which compile, are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from launch.contract import apply_dynamo, load
from launch.policies import apply
from launch.step import make_optimizer, train_step
from model import Hybrid, preset
from suites.support.gpu_timing import CALLS, matmul_rate, milliseconds
from suites.support.hybrids import SEED, token_batch
from suites.support.instruments import DynamoWatch, dynamo_config, forget_graphs, read_dynamo_config
from suites.support.lanes import Lane, lanes

BATCH = 1
# One run's 99 % intervals; two machines have not been compared.
TOLERANCE = 0.06


def kernels_launched(step: Callable[[], object]) -> int:
    """Kernels that the device ran in one call, by its own trace."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return sum(e.device_type == on_device and not e.name.startswith("Mem") for e in trace.events())


@lanes("h200")
@pytest.mark.parametrize("name", ["nam52", "nam56r"])
@pytest.mark.parametrize("policy", ["eager", "regional"])
def test_a_training_step(lane: Lane, name: str, policy: str, row, canaries, exclusive_machine) -> None:
    canaries("graphs", "recompiles")
    contract, config = load(), preset(name, "full")
    torch.manual_seed(SEED)
    with dynamo_config(read_dynamo_config(contract.dynamo)), DynamoWatch() as watch:
        apply_dynamo(contract)
        with torch.device("cuda"):
            model = Hybrid(config).to(torch.bfloat16)
        compiled = apply(model, policy, contract, watch.backend())
        ids = token_batch(config, BATCH, device=lane.device)
        step = partial(train_step, compiled, make_optimizer(model), ids)
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        compiled.warm_up(ids)
        torch.cuda.synchronize()
        first = time.perf_counter() - started
        for _ in range(2):
            step()
        known = watch.refresh().unique_graphs
        timing = milliseconds(step)
        launched = kernels_launched(step)
        loss, peak = float(step()), torch.cuda.max_memory_allocated()
        report = watch.refresh()
        weights = sum(p.numel() for p in model.parameters())
        del model, compiled, step
    forget_graphs()
    torch.cuda.empty_cache()
    assert 0 < loss < 20
    tokens = BATCH * config.seq_len
    case = f"throughput/{name}-full-{policy}-{BATCH}x{config.seq_len}"
    shared = {"rule": "C37", "instruments": ("graphs", "recompiles")}
    timed = {"better": "higher", "tolerance": TOLERANCE, "witness": CALLS}
    rate = [tokens / ms * 1e3 for ms in (timing.median, timing.high, timing.low)]
    row(
        f"{case}/tokens_per_second", rate[0], unit="tokens/s", interval=(rate[1], rate[2]),
        evidence=[f"{timing.median:.1f} ms a step, {weights / 1e9:.2f}e9 parameters, loss {loss:.3f}",
                  f"6 x parameters x tokens is {6 * weights * tokens / timing.median / matmul_rate() * 1e3:.2f} of "
                  "the matrix ceiling, as if all experts were active"],
        **shared, **timed,
    )  # fmt: skip
    row(
        f"{case}/peak_memory_bytes",
        peak,
        unit="bytes",
        better="lower",
        tolerance=0.02,
        witness=weights,
        **shared,
    )
    row(f"{case}/kernels_per_step", launched, unit="count", better="lower", witness=launched, **shared)
    row(
        f"{case}/first_step_seconds", first, unit="s", better="lower", tolerance=0.5, witness=1,
        evidence=[f"forward and backward, with compiling: {report.unique_graphs} graphs"], **shared,
    )  # fmt: skip
    added = report.unique_graphs - known
    row(
        f"{case}/graphs_after_warmup",
        added,
        unit="count",
        expected=0,
        witness=CALLS,
        **shared | {"rule": "C8"},
    )
