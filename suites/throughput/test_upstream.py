"""The full-size models with their peers' kernels: ours may not be slower on the device.

The ratio of whole steps is a reviewed time: where the host's launches take longest, it compares them.

Both run eagerly: under Dynamo the peers break graphs, so that a compiled step would compare policies and not kernels.
The rows of a batch are one document each, which the peers accept without packing. To detect that, they read the
document ids on the host, one wait per layer, which their time includes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

import model.attention
import model.m2rnn
import model.mamba
from bumpgate.plugin.instruments.work import device_work
from model import preset
from suites.kernels.peer_tuning import keep_winners
from suites.support.absent import not_run
from suites.support.anchor import anchor_milliseconds
from suites.support.gpu_timing import alternately, median
from suites.support.lanes import Lane, lanes
from suites.throughput.full_size import (
    BATCH,
    HOST_BOUND,
    HOST_TOLERANCE,
    TOLERANCE,
    WARMUP,
    full_size,
    memory,
    report_device_time,
    report_rate,
)

# Model -> the ops that have a peer where the model calls them, and the peer's package. nam56r's attention has none.
PEERS: dict[str, list[tuple[ModuleType, str, str]]] = {
    "nam52": [(model.attention, "attention", "flash_attn"), (model.mamba, "mamba3_siso", "mamba_ssm")],
    "nam56r": [
        (model.mamba, "mamba3_siso", "mamba_ssm"),
        (model.m2rnn, "causal_conv1d", "causal_conv1d"),
        (model.m2rnn, "rms_norm_gated", "mamba_ssm"),
    ],
}
# Steps of each. With 20 pairs of nam52 the interval of their ratio was 16 % wide on a busy host.
PAIRS = {"nam52": 60, "nam56r": 16}
METRICS = (
    "tokens_per_second",
    "device_milliseconds_per_step",
    "peak_memory_bytes",
    "speedup_over_upstream",
    "kernels_speedup_over_upstream",
)


@contextmanager
def upstream(name: str) -> Iterator[Counter[str]]:
    """Make the model call its ops' peers inside the block; yield calls by op."""
    calls = Counter({op: 0 for _, op, _ in PEERS[name]})

    def counted(op: str, peer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any, **options: Any) -> Any:
            calls[op] += 1
            return peer(*inputs, **options, impl="upstream")

        return call

    with ExitStack() as stack:
        for module, op, _ in PEERS[name]:
            stack.enter_context(mock.patch.object(module, op, counted(op, getattr(module, op))))
        yield calls


@lanes("h200")
@pytest.mark.parametrize("name", PEERS)
def test_own_ops_against_their_peers(lane: Lane, name: str, row, exclusive_machine) -> None:
    shape = f"{BATCH}x{preset(name, 'full').seq_len}"
    case, own = (f"throughput/{name}-full-{impl}-{shape}" for impl in ("upstream", "ours"))
    rows = [*(f"{case}/{metric}" for metric in METRICS), *(f"{own}/{metric}" for metric in METRICS[:2])]
    if reason := not_run(row, lane, rows, [package for *_, package in PEERS[name]]):
        pytest.skip(f"not run: {reason}")
    keep_winners()
    with memory(name), full_size(name, "eager") as hybrid:
        for ids in hybrid.batches:
            ids[:, 1:].masked_fill_(ids[:, 1:] == hybrid.config.bos_id, hybrid.config.bos_id + 1)
        with upstream(name) as calls:
            hybrid.first_step()
            loss = float(hybrid.step())
            called = min(calls.values())
            peak = hybrid.peak_memory()
            peers_work = device_work(hybrid.step)
        hybrid.step()
        work = device_work(hybrid.step)

        def peers_step() -> None:
            with upstream(name):
                hybrid.step()

        ours, peers = alternately((hybrid.step, peers_step), PAIRS[name], WARMUP[name])
        tokens = hybrid.tokens
    assert 0 < loss < 20
    for which, times, done in ((own, ours, work), (case, peers, peers_work)):
        evidence = [f"host: {anchor_milliseconds():.1f} ms for the anchor's work"]
        report_rate(row, which, name, median([tokens / ms * 1e3 for ms in times]), called, evidence)
        report_device_time(row, which, done, f"{done.kernels} kernels")
    shared = {"rule": "C37", "seen": called}
    row.cost(f"{case}/peak_memory_bytes", peak, "bytes", tolerance=TOLERANCE["peak"], **shared)
    row.timed(
        f"{case}/speedup_over_upstream", median([theirs / mine for mine, theirs in zip(ours, peers)]),
        "ratio", better="higher", tolerance=HOST_TOLERANCE[name], bound=HOST_BOUND[name],
        evidence=[f"ours {median(ours).median:.1f} ms, peers {median(peers).median:.1f} ms, in turn"],
        **shared,
    )  # fmt: skip
    speedup = peers_work.milliseconds / work.milliseconds
    evidence = [f"on the device: ours {work.milliseconds:.1f} ms, peers {peers_work.milliseconds:.1f} ms"]
    row.bound(
        f"{case}/kernels_speedup_over_upstream", speedup, "ratio", at_least=1.0, evidence=evidence, **shared
    )
