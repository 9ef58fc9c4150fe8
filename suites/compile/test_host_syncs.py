"""A training step reads no tensor value on the host, and a warm one never waits for the device. Rule C2.

With capture_scalar_outputs a `.item()` becomes part of the graph, so no break shows it. The CPU lane counts reads of a
value; all other waits are visible only on the device, by torch's own synchronization check.
"""

from __future__ import annotations

import pytest
import torch

from launch.step import make_optimizer, train_step
from suites.support.hybrids import token_batch, watched_hybrid
from suites.support.instruments import host_syncs, synchronisations
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted


@lanes("cpu")
@pytest.mark.parametrize("policy", ["eager", "regional"])
@pytest.mark.long(30)
def test_forward_reads_nothing_on_the_host(lane: Lane, policy: str, row, canaries) -> None:
    canaries("graphs", "host_syncs")
    with watched_hybrid("nam12", policy, device=lane.device) as hybrid:
        ids = token_batch(hybrid.config, 2, device=lane.device)
        hybrid.compiled.warm_up(ids)
        with host_syncs() as tally:
            loss = hybrid.compiled(ids)
        loss.backward()
        # Inductor turns a captured read into C++ that the profiler does not see, so the graphs are checked too.
        sites = [site for graph in hybrid.report().graphs for site in graph.host_reads]
    row.count(
        f"compile/nam12-{policy}/host_syncs", tally["syncs"] + len(sites), expected=0, rule="C2",
        seen=tally["ops"], evidence=[f"read at {site}" for site in sites],
    )  # fmt: skip


@lanes("h200")
@pytest.mark.parametrize("name", ["nam52", "nam56r"])
@pytest.mark.parametrize("policy", ["eager", "regional"])
def test_training_step_has_no_device_sync(lane: Lane, name: str, policy: str, row, canaries) -> None:
    canaries("graphs")
    with watched_hybrid(name, policy, device=lane.device) as hybrid:
        ids = token_batch(hybrid.config, 2, device=lane.device)
        hybrid.compiled.warm_up(ids)
        optimizer = make_optimizer(hybrid.model)
        train_step(hybrid.compiled, optimizer, ids)
        with synchronisations() as found:
            train_step(hybrid.compiled, optimizer, ids)
        calls = hybrid.report().calls
    row.count(
        f"compile/{name}-{policy}/device_syncs", len(found), expected=0, rule="C2",
        seen=len(hybrid.model.blocks) if policy == "eager" else calls, evidence=sorted(set(found)),
    )  # fmt: skip


@lanes("h200")
@planted("C2", "a loss read in the step")
def test_device_sync_of_a_read_is_detected(lane: Lane) -> None:
    x = torch.ones(4, device=lane.device)
    with synchronisations() as found:
        x.sum().item()
        (x > 0).nonzero()
    assert len(found) >= 2
    assert all(place.startswith("test_host_syncs.py") for place in found), found
