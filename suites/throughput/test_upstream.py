"""The full-size models with the kernels of their peers: ours may not be slower, in tokens a second of the whole model.

Both run eagerly: under Dynamo the peers break graphs, so that a compiled step would compare policies and not kernels.
The rows of a batch are one document each, which the peers take without packing; to find that out they read the
document ids on the host, a wait a layer, which their time holds.
"""

from __future__ import annotations

import importlib.util
import json
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
from model import preset
from suites.kernels.peer_tuning import keep_winners
from suites.support.gpu_timing import milliseconds
from suites.support.lanes import Lane, lanes
from suites.support.rows import NOT_RUN_PROPERTY
from suites.throughput.full_size import BATCH, full_size

# Model -> the ops that have a peer where the model calls them, and the peer's package. nam56r's attention has none.
PEERS: dict[str, list[tuple[ModuleType, str, str]]] = {
    "nam52": [(model.attention, "attention", "flash_attn"), (model.mamba, "mamba3_siso", "mamba_ssm")],
    "nam56r": [
        (model.mamba, "mamba3_siso", "mamba_ssm"),
        (model.m2rnn, "causal_conv1d", "causal_conv1d"),
        (model.m2rnn, "rms_norm_gated", "mamba_ssm"),
    ],
}
TOLERANCE = {"rate": 0.06, "peak": 0.02}
METRICS = ("tokens_per_second", "peak_memory_bytes", "kernels_speedup_over_upstream")


@contextmanager
def upstream(name: str) -> Iterator[Counter[str]]:
    """The model calls its ops' peers inside the block -> calls by op."""
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
def test_ours_against_the_peers(lane: Lane, name: str, row, record_property, exclusive_machine) -> None:
    shape = f"{BATCH}x{preset(name, 'full').seq_len}"
    case, own = (f"throughput/{name}-full-{impl}-{shape}" for impl in ("upstream", "ours"))
    absent = sorted({package for *_, package in PEERS[name] if importlib.util.find_spec(package) is None})
    if absent:
        reason = f"{', '.join(absent)} not installed"
        missing = [*(f"{case}/{metric}" for metric in METRICS), f"{own}/{METRICS[0]}"]
        record_property(NOT_RUN_PROPERTY, json.dumps([f"{id}: {reason}" for id in missing]))
        pytest.skip(f"not run: {reason}")
    keep_winners()
    with full_size(name, "eager") as hybrid:
        for ids in hybrid.batches:
            ids[:, 1:].masked_fill_(ids[:, 1:] == hybrid.config.bos_id, hybrid.config.bos_id + 1)
        hybrid.first_step()
        hybrid.step()
        ours = milliseconds(hybrid.step)
        with upstream(name) as calls:
            loss = float(hybrid.step())
            called = min(calls.values())
            peak = hybrid.peak_memory()
            peers = milliseconds(hybrid.step)
        tokens = hybrid.tokens
    assert 0 < loss < 20
    times = (
        f"ours {ours.median:.1f} ms ({ours.low:.1f} to {ours.high:.1f}), "
        f"peers {peers.median:.1f} ms ({peers.low:.1f} to {peers.high:.1f})"
    )
    for which, timing in ((own, ours), (case, peers)):
        rate = [tokens / ms * 1e3 for ms in (timing.median, timing.high, timing.low)]
        row(
            f"{which}/tokens_per_second", rate[0], unit="tokens/s", interval=(rate[1], rate[2]), rule="C37",
            better="higher", tolerance=TOLERANCE["rate"], witness=called, evidence=[times],
        )  # fmt: skip
    row(
        f"{case}/peak_memory_bytes", peak, unit="bytes", rule="C37", better="lower", tolerance=TOLERANCE["peak"],
        witness=called,
    )  # fmt: skip
    row(
        f"{case}/kernels_speedup_over_upstream", peers.median / ours.median, unit="ratio", rule="C37",
        at_least=1.0, witness=called, evidence=[times],
    )  # fmt: skip
