"""What a step of the trainer applies and records: learning rates, seeds, checkpoints, the summary.

B batch, T tokens.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from launch import train
from launch.data import SyntheticBatches
from launch.dist.ranks import Layout
from launch.outputs import Files
from launch.train import NonFiniteError, Trainer, TrainingPlan, main
from launch.warmup import Start
from model import HybridConfig, preset
from suites.support.child import ROOT
from suites.support.lanes import lanes

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane", "restored_dynamo")]

CONFIG = preset("nam12", "narrow", layer_pattern="AE", depth=2)
B, T = 2, 16


def smoke(steps: int, config: HybridConfig = CONFIG, vocab_size: int = 0, **options) -> Trainer:
    """Build an eager trainer of two layers on random ids; options of the plan and of the trainer by name."""
    source = SyntheticBatches(vocab_size or config.vocab_size, B, T, 0, config.bos_id)
    plan = {name: options.pop(name) for name in TrainingPlan.__dataclass_fields__ if name in options}
    files = Files(options.pop("checkpoint", None), options.pop("log", None))
    return Trainer(config, TrainingPlan(steps, policy="eager", **plan), source, files=files, **options)


def test_each_step_applies_its_rate_to_all_groups(tmp_path: Path, monkeypatch) -> None:
    """The log states the same rate."""
    run = smoke(4, warmup=2, log=tmp_path / "log.jsonl")
    applied, step = [], run.optimizer.step

    def recorded() -> None:
        applied.append([float(group["lr"]) for group in run.optimizer.param_groups])
        step()

    monkeypatch.setattr(run.optimizer, "step", recorded)
    run.run(allow_synthetic="smoke")
    logged = [json.loads(line)["lr"] for line in run.log.open()]
    assert logged == [run.plan.lr_at(s) for s in range(4)]
    assert len(set(logged)) == 4
    assert len(run.optimizer.param_groups) > 1
    assert applied == [[pytest.approx(rate)] * len(run.optimizer.param_groups) for rate in logged]


def test_checkpoints_are_saved_every_n_steps(monkeypatch) -> None:
    saved: list[int] = []
    monkeypatch.setattr(Trainer, "save", lambda run: saved.append(run.step))
    smoke(8, checkpoint_every=3).run(allow_synthetic="smoke")
    assert saved == [3, 6, 8], "and at the end"


def test_run_ends_with_its_plan() -> None:
    run = smoke(2)
    assert run.run(until=5, allow_synthetic="smoke")["step"] == 2


def test_summary_has_first_and_last_loss_and_the_rate(monkeypatch) -> None:
    """The rate counts the tokens of all steps but the first, which still compiles."""
    run = smoke(3)
    clock = iter(
        [0, 50, 50, 150, 152, 152, 158]
    )  # both ends of the warm-up and of a step, the begin of the first
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    summary = run.run(allow_synthetic="smoke")
    assert len(set(run.losses)) == 3
    assert (summary["loss_first"], summary["loss_last"]) == (run.losses[0], run.losses[2])
    assert summary["tokens_per_second"] == 2 * B * T / (2 + 6)


def test_summary_counts_the_dropped_pairs() -> None:
    """Those of the steps, with experts too small for their tokens."""
    run = smoke(2, preset("nam12", "narrow", layer_pattern="AE", depth=2, capacity_factor=1.0))
    summary = run.run(allow_synthetic="smoke")
    assert summary["dropped_pairs"] == sum(int(block.overflow) for block in run.model.blocks[1::2]) > 0


def test_infinite_loss_stops_the_run(monkeypatch) -> None:
    """A NaN is not the only loss that is not finite."""
    run = smoke(2)
    forward = run._forward
    monkeypatch.setattr(run, "_forward", lambda ids: forward(ids) * math.inf)
    with pytest.raises(NonFiniteError, match=r"^step 0: the loss is inf; the last checkpoint is good$"):
        run.run(allow_synthetic="smoke")
    assert run.losses == []


# Pattern, policy, style (of ranks; "" for one process) -> the start of the run.
STARTS = {
    ("AE", "regional", ""): Start("cpu", regional=True, moe=True),
    ("AM", "regional", ""): Start("cpu", regional=True, moe=False),
    ("AE", "per_block", ""): Start("cpu", regional=True, moe=True),
    ("AE", "whole_opaque", ""): Start("cpu", regional=False, moe=True),
    ("AM", "eager", ""): Start("cpu", regional=False, moe=False, compiled=False),
    ("AE", "regional", "ddp"): Start("cpu", regional=True, moe=True),
    ("AE", "eager", "fsdp2"): Start("cpu", regional=False, moe=True, fsdp=True, compiled=False),
}


@pytest.mark.parametrize(("pattern", "policy", "style"), STARTS)
def test_trainer_states_its_start(pattern: str, policy: str, style: str, monkeypatch) -> None:
    """The table of warm-ups (rule C30) decides by it; the device is given with its index, as for a rank."""
    stated: list[Start] = []
    monkeypatch.setattr(train, "load_warmup", lambda: SimpleNamespace(skipped=stated.append))
    monkeypatch.setattr(Trainer, "_parallelize", lambda *_: None)
    config = preset("nam12", "narrow", layer_pattern=pattern, depth=2)
    plan = TrainingPlan(1, policy=policy)
    ranks = SimpleNamespace(layout=Layout(style)) if style else None
    Trainer(config, plan, SyntheticBatches(config.vocab_size, B, T, 0), device="cpu:0", ranks=ranks)
    assert stated == [STARTS[pattern, policy, style]]


def test_seed_decides_weights_and_data(capsys) -> None:
    weights = [smoke(1, seed=seed).model.embedding.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    arguments = ["--policy", "eager", "--steps", "1", "--batch", "2", "--tokens", "16", "--seed", "3"]
    assert main([*arguments, "--data", str(ROOT / "fixtures" / "corpus")]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["packing"]["seed"] == 3
    assert main([*arguments, "--smoke"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["seed"] == 3


def test_model_may_have_more_ids_than_the_data() -> None:
    assert smoke(1, vocab_size=CONFIG.vocab_size // 2).run(allow_synthetic="smoke")["step"] == 1


def test_checkpoint_is_on_disk_before_it_replaces_the_last(tmp_path: Path, monkeypatch) -> None:
    """Otherwise a machine that stops after the rename may be left with an empty file under the name."""
    run, done = smoke(1, checkpoint=tmp_path / "state.pt"), list[tuple[str, int]]()
    temporary, sync, replace = tmp_path / "state.pt.new", os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (sync(fd), done.append(("sync", os.fstat(fd).st_size))))
    monkeypatch.setattr(
        os, "replace", lambda a, b: (done.append(("replace", temporary.stat().st_size)), replace(a, b))
    )
    run.save()
    size = run.checkpoint.stat().st_size
    assert done == [("sync", size), ("replace", size)]


def test_resume_restores_the_random_state(tmp_path: Path) -> None:
    """A block that draws in a step, such as dropout, must draw as in the original run; at present none does."""
    run = smoke(2, checkpoint=tmp_path / "state.pt")
    torch.rand(7)
    run.save()
    expected = torch.rand(3)
    again = smoke(2, checkpoint=tmp_path / "state.pt")
    assert not torch.equal(torch.rand(3), expected)
    again.resume()
    assert torch.equal(torch.rand(3), expected)
