"""Exact proxies for speed: the generated code, and the model's computation and saved memory.

They are exactly reproducible, so they find a fusion or memory regression that no clock on this machine can.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bumpgate.plugin.instruments import inductor_report
from suites.support.hybrids import build, token_batch, watched_hybrid
from suites.support.lanes import Lane, lanes

INSTRUMENTS = ("graphs", "inductor")


@lanes("cpu")
@pytest.mark.parametrize("name", ["nam52", "nam56r"])
def test_size_of_generated_code(lane: Lane, name: str, row, canaries) -> None:
    canaries(*INSTRUMENTS)
    with watched_hybrid(name, "regional", device=lane.device) as hybrid, inductor_report() as generated:
        hybrid.compiled.warm_up(token_batch(hybrid.config, 2, device=lane.device))
        graphs = hybrid.report().unique_graphs
    case = f"throughput/{name}-regional"
    shared = {"witness": graphs, "rule": "C37", "instruments": INSTRUMENTS}
    row(f"{case}/generated_kernels", generated.kernels, unit="count", per_build=True, **shared)
    row(f"{case}/generated_modules", generated.modules, unit="count", **shared)
    row(f"{case}/code_hash", generated.code_hash, unit="sha256", per_build=True, **shared)
    # A cache entry that was written without byte counting replays 0 bytes: the count is its own witness.
    counted = shared | {"witness": generated.bytes_accessed}
    row(
        f"{case}/bytes_accessed",
        generated.bytes_accessed,
        unit="bytes",
        better="lower",
        tolerance=0.01,
        **counted,
    )


@lanes("cpu")
@pytest.mark.parametrize("name", ["nam52", "nam56r"])
def test_work_and_memory(lane: Lane, name: str, row, canaries) -> None:
    """Count FLOPs of the eager step (operator formulas), and bytes that a regional forward saves for backward."""
    canaries("graphs")
    with watched_hybrid(name, "regional", device=lane.device) as hybrid:
        ids = token_batch(hybrid.config, 2, device=lane.device)
        hybrid.compiled.warm_up(ids)
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        parameters = {p.untyped_storage().data_ptr() for p in hybrid.model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = hybrid.compiled(ids)
        saved = sum(size for pointer, size in kept.items() if pointer not in parameters)
        loss.backward()
        calls = hybrid.report().calls
    model = build(hybrid.config, lane.device)
    with FlopCounterMode(display=False) as flops:
        model(ids).backward()
    row(
        f"throughput/{name}-regional/saved_tensor_bytes",
        saved,
        unit="bytes",
        witness=calls,
        rule="C37",
        better="lower",
        tolerance=0.01,
        instruments=("graphs",),
    )
    row(
        f"throughput/{name}-eager/flops",
        flops.get_total_flops(),
        unit="flop",
        witness=len(model.blocks),
        rule="C37",
        better="lower",
        tolerance=0.001,
    )
