"""The cost of training steps of the full-size models on one GPU, in bf16, under each compile policy.

One step is forward, backward and a fused AdamW update of B 2 sequences of T 4096 tokens; the code that the first one
compiles is on disk (test_restart.py). Documents are some 24 tokens long, so that attention's share of a step is small
here.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch

from bumpgate.plugin.instruments import eager_islands
from bumpgate.plugin.instruments.work import device_work
from bumpgate.process.gpu_shares import untimed, unused
from suites.compile.expectations import expected
from suites.support.anchor import anchor_milliseconds
from suites.support.gpu_timing import Timing, copy_rate, matmul_rate, milliseconds, rate_of
from suites.support.hybrids import work_of
from suites.support.instruments import synchronisations
from suites.support.lanes import Lane, lanes
from suites.support.reduce import growth
from suites.throughput.full_size import (
    BATCH,
    CALLS,
    POLICIES,
    TOLERANCE,
    WARMUP,
    FullSize,
    full_size,
    memory,
    report_device_time,
    report_rate,
    step_flops,
)

# The default timeout of a process group: a rank that compiles for longer is killed by its peers' watchdog.
LONGEST_FIRST_STEP = 600
FURTHER_STEPS = 30
# Separates a model that has not learned yet from one that explodes: 15 -> 5014 in four steps is a growth of 334.
FIRST_STEPS, LARGEST_GROWTH = 4, 1.5
# The compiled step against the same model's eager step: what the lane guarantees for nam52, and no loss elsewhere.
LEAST_SPEEDUP = {"nam52": 1.15, "nam12": 1.0, "nam56r": 1.0}
INSTRUMENTS = ("graphs", "graph_breaks", "recompiles", "islands")


@lanes("h200")
@pytest.mark.parametrize(("name", "policy"), [(n, p) for n, chosen in POLICIES.items() for p in chosen])
def test_full_size_training_step(
    lane: Lane, name: str, policy: str, row, canaries, exclusive_machine
) -> None:
    canaries(*INSTRUMENTS)
    with memory(name), full_size(name, policy) as hybrid:
        case = f"throughput/{name}-full-{policy}-{BATCH}x{hybrid.config.seq_len}"
        first = hybrid.first_step()
        if untimed():  # the caches are filled; an optimizer's state would take 16 GiB more
            return
        losses = [float(hybrid.step()) for _ in range(FIRST_STEPS)]
        peak = hybrid.peak_memory()
        found = {"rule": "C23", "seen": 1, "evidence": ["on the caches that this run found"]}
        row.bound(f"{case}/first_step_seconds", first, "s", at_most=LONGEST_FIRST_STEP, **found)
        found = {"rule": "C33", "seen": losses, "evidence": [" -> ".join(f"{loss:.3f}" for loss in losses)]}
        row.bound(f"{case}/loss_growth", growth(losses), "ratio", at_most=LARGEST_GROWTH, **found)
        found = {"rule": "C37", "seen": sum(p.numel() for p in hybrid.model.parameters())}
        row.cost(f"{case}/peak_memory_bytes", peak, "bytes", tolerance=TOLERANCE["peak"], **found)
        before = _compiled(hybrid)
        timing = milliseconds(hybrid.step, CALLS[name], WARMUP[name])
        _report_rate(row, case, hybrid, timing)
        if not unused(f"{case}/device_milliseconds_per_step"):
            _report_further_steps(row, case, policy, hybrid, before, timing)
        if policy == "regional" and not unused(f"{case}/speedup_over_eager"):
            _report_speedup(row, case, name, hybrid, timing)


class Compiled(NamedTuple):
    """Counts at one moment: graphs and recompiles so far, and steps."""

    graphs: int
    recompiles: int
    steps: int


def _compiled(hybrid: FullSize) -> Compiled:
    report = hybrid.watch.refresh()
    return Compiled(report.unique_graphs, len(report.recompiles), hybrid.steps)


def _report_further_steps(
    row, case: str, policy: str, hybrid: FullSize, before: Compiled, timing: Timing
) -> None:
    """Report rows on compiles, waits and launches of FURTHER_STEPS steps after `before`, the timed ones included."""
    work = device_work(hybrid.step)
    with synchronisations() as waits:
        hybrid.step()
    calls = hybrid.watch.report.calls
    with eager_islands(hybrid.model.blocks) as islands:
        hybrid.step()
    calls = hybrid.watch.report.calls - calls
    while policy != "eager" and hybrid.steps - before.steps < FURTHER_STEPS:
        hybrid.step()
    report = hybrid.watch.refresh()
    seen = calls + islands.total()
    row.cost(f"{case}/kernels_per_step", work.kernels, "count", rule="C37", seen=work.kernels)
    report_device_time(row, case, work, f"of {timing.median:.1f} ms a step")
    waited = sorted(set(waits))
    row.count(f"{case}/host_syncs_per_step", len(waits), expected=0, rule="C2", seen=seen, evidence=waited)
    want = expected(hybrid.config.kinds, policy)
    count = partial(row.count, seen=seen, evidence=report.evidence(), instruments=INSTRUMENTS)
    count(f"{case}/eager_islands", islands.total(), expected=want.eager_islands, rule="C6")
    if policy == "eager":
        return
    after = _compiled(hybrid)
    again = after.recompiles - before.recompiles + after.graphs - before.graphs
    further = after.steps - before.steps
    count(f"{case}/graph_breaks", len(report.breaks), expected=want.graph_breaks, rule="C6")
    count(f"{case}/unique_graphs", before.graphs, expected=want.unique_graphs, rule="C13", seen=calls)
    count(f"{case}/recompiles_over_30_steps", again, expected=0, rule="C8", seen=further)


def _report_rate(row, case: str, hybrid: FullSize, timing: Timing) -> None:
    flops, matmul = step_flops(hybrid.model, hybrid.tokens), matmul_rate()
    evidence = [
        f"{timing.median:.1f} ms a step",
        f"MFU {flops / timing.median * 1e3 / matmul:.3f}: 6 x active parameters x tokens, "
        f"{flops / 1e12:.1f} TFLOP, at this run's {matmul / 1e12:.0f} TFLOP/s",
        f"copy {copy_rate() / 1e12:.2f} TB/s; host: {anchor_milliseconds():.1f} ms for the anchor's work",
    ]
    work = work_of(hybrid.model, hybrid.batches[0])
    seen = CALLS[hybrid.config.name]
    report_rate(row, case, hybrid.config.name, rate_of(hybrid.tokens, timing), seen, evidence, work=work)


def _report_speedup(row, case: str, name: str, hybrid: FullSize, timing: Timing) -> None:
    """Compare with the same weights and ops in the same process with every compiled block called eagerly."""
    with torch.compiler.set_stance("force_eager"):
        calls = hybrid.watch.report.calls
        eager = milliseconds(hybrid.step, CALLS[name], WARMUP[name])
        calls = hybrid.watch.report.calls - calls
    assert calls == 0, f"{calls} compiled calls in the eager steps"
    both = (("eager", eager), ("compiled", timing))
    evidence = [", ".join(f"{word} {t.median:.1f} ms ({t.low:.1f} to {t.high:.1f})" for word, t in both)]
    found = {"rule": "C37", "seen": CALLS[name], "evidence": evidence}
    speedup = eager.median / timing.median
    row.bound(f"{case}/speedup_over_eager", speedup, "ratio", at_least=LEAST_SPEEDUP[name], **found)
