"""A batch that does not fit is split in the retry, and a step still uses all of it. Rules C25, C21, C12.

B batch, T tokens.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bumpgate.plugin.instruments import reset_dynamo
from launch import train
from launch.autofit import MEMORY, Share, accumulated_step, device_batch
from launch.contract import ContractError
from launch.environment import RETRY
from launch.retry import REASON, load_retry, supervise
from launch.step import train_step
from model import Hybrid, HybridConfig, preset
from model.dsa import scaled_losses
from suites.launch.trainers import first_launch, smoke_trainer
from suites.support.lanes import lanes
from suites.support.planted import planted
from suites.support.reduce import largest

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane")]

# Without experts the loss of a batch is a mean over its targets alone, so that the parts add up to the whole.
DENSE = preset("nam12", "narrow", layer_pattern="AM", depth=2)
SPLIT = {"batch": 4, "tokens": 32, "rows": 2}


def test_retry_uses_next_batch_size_of_contract() -> None:
    assert set(MEMORY) < set(load_retry().errors)
    for reason in MEMORY:
        again = {RETRY: "1", REASON: reason}
        assert device_batch(8, again) == 4
        assert device_batch(16, again) == 8
        for batch in (4, 2, 9):
            words = rf"^a batch of {batch} does not fit, and no size of \[autofit\] device_batches \[8, 4\]"
            with pytest.raises(ContractError, match=words):
                device_batch(batch, again)
    for given in ({}, {RETRY: "1"}, {RETRY: "1", REASON: "bootstrap"}, {REASON: MEMORY[0]}):
        assert device_batch(8, given) == 8


def batch_of(model: Hybrid) -> Tensor:
    """Return ids (8,32) with 1 to 25 documents per row: the parts differ in their number of targets."""
    ids = torch.randint(3, model.config.vocab_size, (8, 32), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = model.config.bos_id
    ids[:3, 1:25] = model.config.bos_id
    return ids


def after(step) -> tuple[Tensor, Tensor]:
    """Return the loss () and the flattened gradient of every weight, of one step."""
    model = double()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    loss = step(model, torch.optim.SGD(model.parameters(), lr=1.0), batch_of(model))
    return loss, before - torch.cat([p.detach().flatten() for p in model.parameters()])


@planted("C25", "parts weighted alike, and a batch that shrinks with the device's")
def test_split_batch_step_equals_full_step(row) -> None:
    whole = after(train_step)
    bos = DENSE.bos_id
    split = {
        rows: after(lambda m, o, ids, r=rows: accumulated_step(m, o, ids, r, bos)) for rows in (8, 4, 2, 3)
    }
    error = largest(float((a - b).abs().max()) for found in split.values() for a, b in zip(found, whole))
    about = {"seen": sum(len(found[1]) for found in split.values()), "rule": "C25"}
    about["evidence"] = [f"8 rows, {rows} at a time: loss {found[0]:.12f}" for rows, found in split.items()]
    row.bound("launch/autofit/difference_of_a_split_step", error, "gradient", at_most=1e-9, **about)
    assert torch.equal(split[8][1], whole[1]), "unsplit, it is train_step itself"

    def alike(model, optimizer, ids):
        for part in ids.split(4):
            (model(part) / 2).backward()
        optimizer.step()

    def shrunk(model, optimizer, ids):
        train_step(model, optimizer, ids[:4])

    for fault in (alike, shrunk):
        assert float((after(fault)[1] - whole[1]).abs().max()) > 1e-3, fault.__name__


def test_shares_of_ranks_average_to_the_whole_batch() -> None:
    """Ranks exchange the means of their gradients and losses."""
    whole, bos = after(train_step), DENSE.bos_id
    shares = [
        after(lambda m, o, ids, i=i: accumulated_step(m, o, ids, 2, bos, Share(i, 2))) for i in range(2)
    ]
    for both, expected in zip(zip(*shares), whole, strict=True):
        torch.testing.assert_close(sum(both) / 2, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rows", [8, 4])
def test_step_clears_its_gradients(rows: int) -> None:
    """Gradients that are left would be added to the gradients of the next step."""
    model = double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accumulated_step(model, optimizer, batch_of(model), rows, model.config.bos_id)
    assert all(p.grad is None for p in model.parameters())


def sparse_config() -> HybridConfig:
    """Return a model with sparse attention, whose indexer has a separate loss."""
    config = preset("nam56r", "narrow")
    return config.replace(layer_pattern="AM", depth=2, dsa=replace(config.dsa, ranks=(1,)))


def double(config: HybridConfig = DENSE) -> Hybrid:
    torch.manual_seed(0)
    return Hybrid(config).double()


def test_split_step_takes_the_indexers_loss_once() -> None:
    """Each part adds the gradient of a mean over its own tokens, which does not follow the loss of the model."""

    def gradients(scaled: bool, rows: int) -> dict[str, Tensor]:
        model = double(sparse_config())
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        taking = {"taking": partial(scaled_losses, model)} if scaled else {}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        accumulated_step(model, optimizer, batch_of(model), rows, model.config.bos_id, **taking)
        assert model.blocks[0].loss_weight == model.config.dsa.loss_weight
        return {name: before[name] - p.detach() for name, p in model.named_parameters()}

    whole = gradients(True, 8)
    assert sum("index" in name for name in whole) == 3
    for rows in (4, 3):
        for name, gradient in gradients(True, rows).items():
            assert float((gradient - whole[name]).norm()) <= 1e-5 * float(whole[name].norm()), (name, rows)
    for name, gradient in gradients(False, 4).items():
        factor = 2.0 if "index" in name else 1.0
        assert torch.allclose(gradient, factor * whole[name], rtol=1e-3, atol=1e-9), name


def test_split_batch_of_sparse_attention_compiles_once(restored_dynamo) -> None:
    """The weight of the indexer's loss is a constant of the graph: the warm-up has the weight of a part, too."""
    compiled = []
    for rows in (None, 2):
        reset_dynamo()
        run = smoke_trainer(3, sparse_config(), **SPLIT | {"rows": rows}, policy="regional", backend="eager")
        run.run(allow_synthetic="smoke")
        compiled.append(len(run.programs.seen))
    assert compiled[0] == compiled[1] > 1


def test_trainer_gives_each_part_its_share_of_the_loss() -> None:
    config = sparse_config()
    run = smoke_trainer(1, config, **SPLIT)
    weights: list[float] = []
    run.model.blocks[0].register_forward_pre_hook(lambda block, _: weights.append(block.loss_weight))
    run.run(allow_synthetic="smoke")
    assert config.dsa is not None
    assert weights == [config.dsa.loss_weight / 2] * 3, "the warm-up and two parts"


# The trainer on a device that fits at most four rows. It prints which batches ran, and the resets.
OUT_OF_MEMORY = """
import json, os, sys, torch
from launch import train
from model import Hybrid

rows, resets, forward = [], [], Hybrid.forward

def small_device(self, ids, inputs=None):
    if len(ids) > 4:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    rows.append(len(ids))
    return forward(self, ids, inputs)

Hybrid.forward, torch.compiler.reset = small_device, lambda: resets.append(1)
try:
    code = train.main(sys.argv[1:])
finally:
    variables = {name: os.environ.get(name) for name in train.load().variables}
    print(json.dumps({"rows": rows, "resets": len(resets), "variables": variables}), flush=True)
raise SystemExit(code)
"""
SMALL = ["--smoke", "--policy", "eager", "--tokens", "16", "--batch", "8", "--steps", "2"]


def test_out_of_memory_retry_uses_smaller_device_batch(tmp_path: Path, row) -> None:
    """A real second process: 8 rows per step as before, 4 at a time, under the same contract, with one reset."""
    log = tmp_path / "log"
    code = supervise(0, ["-c", OUT_OF_MEMORY, *SMALL], first_launch(), seconds=300, log=log)
    assert code == 0, log.read_text()
    lines = [line.removeprefix("[run]: ") for line in log.read_text().splitlines()]
    first, summary, second = [json.loads(line) for line in lines if line.startswith("{")]
    rows = second["rows"]
    about = {"seen": rows, "rule": "C25", "evidence": [f"through the model: {rows}, first the warm-up"]}
    taken = sum(rows[1:]) / summary["step"]
    row.bound("launch/autofit/rows_of_a_step", taken, "rows", expected=8.0, **about)
    about = {"seen": 1 + first["resets"] + len(rows), "rule": "C21"}
    row.count("launch/autofit/resets_of_a_retry", second["resets"], expected=1, **about)
    assert (first["rows"], first["resets"]) == ([], 0)
    assert rows == [4] * 5
    assert summary["rows_at_once"] == 4
    assert first["variables"] == second["variables"]
    assert None not in second["variables"].values()


@planted("C21", "auto-fit resets the compiler for each candidate")
def test_extra_compiler_resets_are_counted(restored_dynamo, monkeypatch, capsys) -> None:
    """By the counter of the row above: 0 without a retry, 1 in one, 3 if trying a batch resets, too."""
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    assert (train.main(SMALL), len(resets)) == (0, 0)
    monkeypatch.setenv(RETRY, "1")
    monkeypatch.setenv(REASON, MEMORY[0])
    assert (train.main(SMALL), len(resets)) == (0, 1)

    def eager_fit(batch: int) -> int:
        for _ in (8, 4):
            torch.compiler.reset()
        return device_batch(batch)

    monkeypatch.setattr(train, "device_batch", eager_fit)
    assert (train.main(SMALL), len(resets)) == (0, 1 + 3)
