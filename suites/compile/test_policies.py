"""Graph breaks, eager islands, compiled calls and unique graphs of the 52-layer models under every policy.

The expectation follows from the layer pattern. Rules C6, C7, C13, C27: breaks only at declared disable points, regional
by default, a bounded number of programs.
"""

from __future__ import annotations

import pytest
import torch

from launch.policies import POLICIES, disable
from suites.compile.expectations import RECURRENT, expected
from suites.support.hybrids import token_batch, watched_hybrid
from suites.support.lanes import Lane, lanes

# Dynamo's counts do not depend on the code generator, so the whole-model graphs stop before Inductor here; the default
# policy is compiled fully.
GENERATES = {"regional": "inductor"}
INSTRUMENTS = ("graphs", "graph_breaks", "islands", "guards")


CASES = {
    "nam52": ("nam52", {}),
    "nam56r": ("nam56r", {}),
    "nam12_mamba2": ("nam12", {"m_mixer": "mamba2"}),
    "nam12_mimo": ("nam12", {"m_mixer": "mimo"}),
}


@lanes("cpu", "h200")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_counts(lane: Lane, name: str, policy: str, row, canaries) -> None:
    canaries(*INSTRUMENTS)
    preset, changes = CASES[name]
    backend = GENERATES.get(policy, "eager")
    with watched_hybrid(preset, policy, device=lane.device, backend=backend, **changes) as hybrid:
        ids = token_batch(hybrid.config, batch=2, device=lane.device)
        hybrid.compiled.warm_up(ids)
        calls, islands = hybrid.forward(ids)
        report = hybrid.report()
    want = expected(hybrid.config.kinds, policy)
    case = f"compile/{name}-{policy}"
    witness = calls + islands
    for metric, value in (
        ("graph_breaks", len(report.breaks)),
        ("eager_islands", islands),
        ("compiled_calls", calls),
        ("unique_graphs", report.unique_graphs),
    ):
        row.count(
            f"{case}/{metric}", value, expected=getattr(want, metric),
            rule="C6" if metric in ("graph_breaks", "eager_islands") else "C13", seen=witness,
            evidence=report.evidence(),
        )  # fmt: skip
    if policy != "eager":
        row.cost(
            f"{case}/guard_count", report.guards, "count", tolerance=0.1, rule="C9", seen=report.unique_graphs
        )


@lanes("cpu", "h200")
def test_graph_break_in_layer_loop_drops_whole_frame(lane: Lane, row, canaries) -> None:
    """A compiled layer loop with a disabled block inside: Dynamo drops the frame and its counter reads 0.

    This is why `graph_breaks` must never be gated alone: it reads like a clean model while the loop runs as Python.
    Compiled calls and islands show the difference.
    """
    canaries(*INSTRUMENTS)
    with watched_hybrid("nam52", "eager", device=lane.device) as hybrid:
        letters = hybrid.config.letters
        for letter, block in zip(letters, hybrid.model.blocks):
            if letter in RECURRENT:
                disable(block)
        hybrid.compiled.forward = torch.compile(hybrid.model, backend=hybrid.watch.backend("eager"))
        ids = token_batch(hybrid.config, batch=2, device=lane.device)
        hybrid.compiled.warm_up(ids)
        calls, islands = hybrid.forward(ids)
        report = hybrid.report()
    recurrent = sum(letter in RECURRENT for letter in letters)
    case = "compile/nam52-whole_loop"
    shared = {"rule": "C6", "seen": calls, "evidence": report.evidence()}
    row.count(f"{case}/eager_islands", islands, expected=recurrent, **shared)
    row.count(f"{case}/compiled_calls", calls, at_least=len(letters) - recurrent, **shared)
    row.count(f"{case}/counted_graph_breaks", report.counted_breaks, per_build=True, **shared)
