"""A warm training step never waits for the device: torch's own synchronization check reports nothing.

The CPU lane counts reads of a value (test_host_syncs.py); all other waits are visible only on the device.
"""

from __future__ import annotations

import pytest
import torch

from launch.step import make_optimizer, train_step
from suites.support.hybrids import token_batch, watched_hybrid
from suites.support.instruments import synchronisations
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted


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
        f"compile/{name}-{policy}/device_syncs",
        len(found),
        expected=0,
        rule="C2",
        seen=len(hybrid.model.blocks) if policy == "eager" else calls,
        evidence=sorted(set(found)),
    )


@lanes("h200")
@planted("C2", "a loss read in the step")
def test_device_sync_of_a_read_is_detected(lane: Lane) -> None:
    x = torch.ones(4, device=lane.device)
    with synchronisations() as found:
        x.sum().item()
        (x > 0).nonzero()
    assert len(found) >= 2
    assert all(place.startswith("test_device_syncs.py") for place in found), found
