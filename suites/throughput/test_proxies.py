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


@lanes("cpu")
@pytest.mark.parametrize("name", ["nam52", "nam56r"])
def test_size_of_generated_code(lane: Lane, name: str, row, canaries) -> None:
    canaries("graphs", "inductor")
    with watched_hybrid(name, "regional", device=lane.device) as hybrid, inductor_report() as generated:
        hybrid.compiled.warm_up(token_batch(hybrid.config, 2, device=lane.device))
        graphs = hybrid.report().unique_graphs
    case = f"throughput/{name}-regional"
    row.count(f"{case}/generated_kernels", generated.kernels, rule="C37", seen=graphs, per_build=True)
    row.count(f"{case}/generated_modules", generated.modules, rule="C37", seen=graphs)
    row.exact(f"{case}/code_hash", generated.code_hash, "sha256", rule="C37", seen=graphs, per_build=True)
    # A cache entry that was written without byte counting replays 0 bytes: the count is its own witness.
    read = generated.bytes_accessed
    row.cost(f"{case}/bytes_accessed", read, "bytes", tolerance=0.01, rule="C37", seen=read)


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
    with FlopCounterMode(display=False) as forward:
        loss = model(ids)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    flops = [counter.get_total_flops() for counter in (forward, backward)]
    assert flops[1] > flops[0] > 0, f"{flops} FLOPs forward and backward: a pass was not counted"
    about = {"tolerance": 0.01, "rule": "C37", "seen": calls}
    row.cost(f"throughput/{name}-regional/saved_tensor_bytes", saved, "bytes", **about)
    about = {"tolerance": 0.001, "rule": "C37", "seen": model.blocks}
    row.cost(f"throughput/{name}-eager/flops", sum(flops), "flop", **about)
