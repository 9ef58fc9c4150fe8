"""What must hold for the tiny transformer when torch moves."""

import pytest
import torch
from tiny import LAYERS, D, V, loss_of, setup

pytestmark = pytest.mark.tiny
STEPS = 20


def test_parameters(row):
    model, _ = setup()
    block = 2 * 2 * D + (D * 3 * D + 3 * D) + (D * D + D) + (D * 4 * D + 4 * D) + (4 * D * D + D)
    sizes = [p.numel() for p in model.parameters()]
    derived = V * D + LAYERS * block + D * V + V
    row.count("model/tiny/parameters", sum(sizes), unit="parameters", expected=derived, seen=sizes)


def test_training_lowers_the_loss(row):
    model, ids = setup()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    first = f"first loss {losses[0]:.3f}"
    curve = {"loss": losses}
    row.cost(
        "train/tiny/loss", losses[-1], "nats", tolerance=0.02, seen=losses, evidence=[first], series=curve
    )


def test_the_model_is_one_graph(row, dynamo_watch):
    model, ids = setup()
    with dynamo_watch() as watch:
        compiled = torch.compile(model, backend=watch.backend("aot_eager"))
        for batch in (ids, ids[:4]):
            loss_of(compiled, batch).backward()
    report = watch.report
    row.count("compile/tiny/graph_breaks", len(report.breaks), unit="breaks", expected=0, seen=report)
    row.count("compile/tiny/graphs", report.unique_graphs, unit="graphs", expected=2, seen=report)
    row.count("compile/tiny/recompiles", len(report.recompiles), unit="recompiles", expected=1, seen=report)


def test_step_time(row, paired_timer):
    torch.set_num_threads(1)
    model, ids = setup()
    timed = paired_timer({"step": lambda: loss_of(model, ids).backward()}, rounds=30, budget=20)
    row.timed("train/tiny/step_seconds", timed.cost("step"), "s", paired=True)
