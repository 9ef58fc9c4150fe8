"""Exactly one dynamic axis: the batch size varies within one set of graphs; each new sequence length costs another set.

Rules C4 (static first), C12 (one axis, marked once at warm-up; a warm-up at batch 1 is widened to 2).
"""

from __future__ import annotations

import pytest

from suites.compile.expectations import expected
from suites.support.hybrids import token_batch, watched_hybrid
from suites.support.lanes import Lane, lanes

INSTRUMENTS = ("graphs", "graph_breaks", "recompiles")


@lanes("cpu", "h200")
@pytest.mark.long(70)
@pytest.mark.parametrize("warmup", [2, 1])
@pytest.mark.parametrize("policy", ["regional", "whole_opaque"])
def test_batch_is_dynamic_and_sequence_is_static(lane: Lane, policy: str, warmup: int, row, canaries) -> None:
    canaries(*INSTRUMENTS)
    with watched_hybrid("nam52", policy, device=lane.device, backend="eager") as hybrid:

        def graphs_after(batch: int, tokens: int = 0) -> int:
            hybrid.forward(token_batch(hybrid.config, batch, tokens, device=lane.device))
            return hybrid.report().unique_graphs

        hybrid.compiled.warm_up(token_batch(hybrid.config, warmup, device=lane.device))
        by_batch = {batch: graphs_after(batch) for batch in (2, 8, 32)}
        moved = by_batch[32]
        lengths = (hybrid.config.seq_len // 2, hybrid.config.seq_len * 3 // 4) if warmup == 2 else ()
        by_length = {tokens: graphs_after(2, tokens) for tokens in lengths}
        report = hybrid.report()
    want = expected(hybrid.config.kinds, policy).unique_graphs
    case = f"compile/nam52-{policy}-warmup_{warmup}"
    evidence = [f"graphs by batch {by_batch}, then by sequence length {by_length}"]
    shared = {"seen": report, "evidence": evidence}
    row.count(f"{case}/graphs_over_batches_2_8_32", moved, expected=want, rule="C12", **shared)
    if warmup == 2:
        # Automatic promotion would serve the second new length from the graph that the first one made dynamic.
        added = by_length[lengths[-1]] - moved
        row.count(
            f"{case}/graphs_added_by_two_sequence_lengths", added, expected=2 * want, rule="C4", **shared
        )
