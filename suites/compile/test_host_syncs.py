"""A training forward reads no tensor value on the host: each read blocks on the device.

Rule C2: with capture_scalar_outputs a `.item()` becomes part of the graph, so no break shows it.
"""

from __future__ import annotations

import pytest

from suites.support.hybrids import token_batch, watched_hybrid
from suites.support.instruments import host_syncs
from suites.support.lanes import Lane, lanes


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
        f"compile/nam12-{policy}/host_syncs",
        tally["syncs"] + len(sites),
        expected=0,
        rule="C2",
        seen=tally["ops"],
        evidence=[f"read at {site}" for site in sites],
    )
