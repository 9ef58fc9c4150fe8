"""Each kind of block as a CUDA graph: captured once, replayed on new inputs, bitwise equal to eager.

B batch, T tokens, D model dim.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from bumpgate.plugin.instruments import DynamoWatch
from launch.cuda_graphs import capture, chosen_blocks
from model import Hybrid, preset
from model.hybrid import documents
from suites.support.child import run_json
from suites.support.hybrids import build, token_batch
from suites.support.instruments import cuda_graph_skips
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

KINDS = sorted(set(preset("nam56r", "narrow").kinds))
BATCH = 2
STEPS = 4  # two to warm up, one to capture, one to replay


def inputs(model: Hybrid, kind: str, seed: int, device: str) -> tuple[Tensor, ...]:
    """Return the inputs of a block of this kind: the stream (B,T,D) and, except for E, document ids and positions."""
    config = model.config
    torch.manual_seed(seed)
    x = torch.randn(BATCH, config.seq_len, config.d_model, device=device)
    ids = token_batch(config, BATCH, seed=seed, device=device)
    return (x,) if kind == "E" else (x, *documents(ids, config.bos_id))


@lanes("h200")
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_graph_replay_equals_eager_forward(lane: Lane, kind: str, row) -> None:
    model = build(preset("nam56r", "narrow"), lane.device).eval()
    block = chosen_blocks(model, [kind])[kind]
    replay = capture(block, inputs(model, kind, 0, lane.device))
    differing = elements = 0
    for seed in (1, 2):
        given = inputs(model, kind, seed, lane.device)
        with torch.no_grad():
            expected = block(*given)
        for found, eager in zip(replay(*given), (expected,) if isinstance(expected, Tensor) else expected):
            differing += int((found != eager).sum())
            elements += eager.numel()
    row.count(
        f"compile/nam56r-cuda_graph-{kind.replace(':', '_')}/elements_that_differ", differing, expected=0,
        rule="C2", seen=elements,
    )  # fmt: skip


@lanes("h200")
@planted("C2", "a host read inside a CUDA graph")
def test_cuda_graph_capture_refuses_host_read(lane: Lane) -> None:
    """After a failed capture the process continues: it draws random numbers and captures the next block."""
    program = "suites.compile.programs", "failed_recording", lane.device
    result = run_json(*program, environment={}, timeout=120)
    assert re.fullmatch(r"ReadsOnTheHost: [^\n]+", result["refusal"])
    assert (result["drawn"], result["replayed"]) == (True, True)


@lanes("h200")
@pytest.mark.parametrize("kind", KINDS)
def test_inductor_cuda_graph_skips(lane: Lane, kind: str, row, canaries) -> None:
    """A training step of a compiled block with Inductor's CUDA graphs: each skipped graph has its reason."""
    canaries("graphs", "cuda_graph_skips")
    model = build(preset("nam56r", "narrow"), lane.device)
    block = chosen_blocks(model, [kind])[kind]
    with DynamoWatch() as watch, cuda_graph_skips() as skips:
        compiled = torch.compile(block, backend=watch.backend())
        for seed in range(STEPS):
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(*inputs(model, kind, seed, lane.device))
            sum(part.sum() for part in (found if isinstance(found, tuple) else (found,))).backward()
            block.zero_grad(set_to_none=True)
    row.cost(
        f"compile/nam56r-inductor_cuda_graphs-{kind.replace(':', '_')}/skips", skips.count, "graphs",
        rule="C2", seen=watch.report.calls, evidence=sorted(set(skips.reasons)),
    )  # fmt: skip


@lanes("cpu", "h200")
def test_missing_block_kind_is_reported(lane: Lane) -> None:
    model = build(preset("nam12", "narrow"), lane.device)
    with pytest.raises(
        ValueError, match=r"^nam12 has no block of kind M:mimo; it has A:gqa, E, M:mamba3, R$"
    ):
        chosen_blocks(model, ["E", "M:mimo"])
