"""What a step of the trainer applies and records, what a run leaves, and what it refuses. Rules X13, C29, C30.

B batch, T tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch import contract, train
from launch.contract import ContractError
from launch.data import DataError, PackedBatches, SyntheticBatches, TokenFile, receipt
from launch.dist.ranks import Layout
from launch.memory import memory_of
from launch.train import NonFiniteError, Trainer, TrainingPlan, facts, main, parser
from launch.warmup import Start
from suites.launch.trainers import CONFIG, CORPUS, corpus_trainer, smoke_trainer
from suites.support.lanes import lanes
from suites.support.planted import planted
from suites.support.reduce import largest

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane", "restored_dynamo")]

B, T = 2, 16
SMALL = ["--policy", "eager", "--steps", "1", "--batch", "2", "--tokens", "32"]


def eager(steps: int, **plan: Any) -> TrainingPlan:
    return TrainingPlan(steps, policy="eager", **plan)


def steps_of(log: Path) -> list[int]:
    return [json.loads(line)["step"] for line in log.read_text().splitlines()]


def test_each_step_applies_its_rate_to_all_groups(tmp_path: Path, monkeypatch) -> None:
    """The log states the same rate, and the memory that is in use."""
    run = smoke_trainer(4, warmup=2, log=tmp_path / "log.jsonl")
    applied, step = [], run.optimizer.step

    def recorded() -> None:
        applied.append([float(group["lr"]) for group in run.optimizer.param_groups])
        step()

    monkeypatch.setattr(run.optimizer, "step", recorded)
    run.run(allow_synthetic="smoke")
    lines = [json.loads(line) for line in run.log.open()]
    assert all(1 << 20 < line["bytes_used"] < line["bytes_limit"] for line in lines)
    logged = [line["lr"] for line in lines]
    assert logged == [run.plan.lr_at(s) for s in range(4)]
    assert len(set(logged)) == 4
    assert len(run.optimizer.param_groups) > 1
    assert applied == [[pytest.approx(rate)] * len(run.optimizer.param_groups) for rate in logged]


def test_lr_schedule_rises_and_falls() -> None:
    plan = TrainingPlan(101, lr=1.0, warmup=10)
    rates = [plan.lr_at(step) for step in range(101)]
    assert [rates[at] for at in (0, 25, 50, -1)] == pytest.approx([0.1, 0.775, 0.55, 0.1])
    assert rates.index(largest(rates)) == 9


def test_checkpoints_are_saved_every_n_steps(monkeypatch) -> None:
    """And at the end, which is the plan's."""
    saved: list[int] = []
    monkeypatch.setattr(Trainer, "save", lambda run: saved.append(run.step))
    summary = smoke_trainer(8, checkpoint_every=3).run(until=9, allow_synthetic="smoke")
    assert (saved, summary["step"]) == ([3, 6, 8], 8)


def test_summary_has_first_and_last_loss_and_the_rate(monkeypatch) -> None:
    """The rate counts the tokens of all steps but the first, which still compiles."""
    run = smoke_trainer(3)
    # Both ends of the warm-up and of a step, the begin of the first.
    clock = iter([0, 50, 50, 150, 152, 152, 158])
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    summary = run.run(allow_synthetic="smoke")
    assert len(set(run.losses)) == 3
    assert (summary["loss_first"], summary["loss_last"]) == (run.losses[0], run.losses[2])
    assert summary["tokens_per_second"] == 2 * B * T / (2 + 6)


def test_summary_counts_the_dropped_pairs() -> None:
    """Those of the steps, with experts too small for their tokens."""
    run = smoke_trainer(2, CONFIG.replace(capacity_factor=1.0))
    summary = run.run(allow_synthetic="smoke")
    assert summary["dropped_pairs"] == sum(int(block.overflow) for block in run.model.blocks[1::2]) > 0


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
    ranks = SimpleNamespace(layout=Layout(style)) if style else None
    smoke_trainer(1, CONFIG.replace(layer_pattern=pattern), policy=policy, device="cpu:0", ranks=ranks)
    assert stated == [STARTS[pattern, policy, style]]


def test_seed_decides_weights_and_data(capsys) -> None:
    weights = [smoke_trainer(1, seed=seed).model.embedding.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    for source, place in ((["--data", str(CORPUS)], ("data", "packing")), (["--smoke"], ("data",))):
        assert main([*SMALL, "--seed", "3", *source]) == 0
        found = json.loads(capsys.readouterr().out)
        for key in place:
            found = found[key]
        assert found["seed"] == 3


def test_checkpoint_is_on_disk_before_it_replaces_the_last(tmp_path: Path, monkeypatch) -> None:
    """Otherwise a machine that stops after the rename may be left with an empty file under the name."""
    run, done = smoke_trainer(1, checkpoint=tmp_path / "state.pt"), list[tuple[str, int]]()
    temporary, sync, rename = tmp_path / "state.pt.new", os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (sync(fd), done.append(("sync", os.fstat(fd).st_size))))
    monkeypatch.setattr(
        os, "replace", lambda a, b: (done.append(("replace", temporary.stat().st_size)), rename(a, b))
    )
    run.save()
    size = run.checkpoint.stat().st_size
    assert done == [("sync", size), ("replace", size)]


def test_memory_is_of_the_chip_or_says_why_not(monkeypatch) -> None:
    """A chip without a reading never reads 0."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 8 << 30))
    assert memory_of(torch.device("cuda", 1)) == {"bytes_used": 5 << 30, "bytes_limit": 8 << 30}
    failing = types.ModuleType("launch.xla.tpu_memory")
    failing.MemoryReadingError = LookupError  # type: ignore[attr-defined]
    failing.chip_memory = {}.__getitem__  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "launch.xla.tpu_memory", failing)
    assert memory_of(torch.device("xla", 3)) == {"memory_error": "'TPU:3'"}


def test_resume_restores_the_random_state(tmp_path: Path) -> None:
    """A block that draws in a step, such as dropout, must draw as in the original run; at present none does."""
    run = smoke_trainer(2, checkpoint=tmp_path / "state.pt")
    torch.rand(7)
    run.save()
    expected = torch.rand(3)
    again = smoke_trainer(2, checkpoint=tmp_path / "state.pt")
    assert not torch.equal(torch.rand(3), expected)
    again.resume()
    assert torch.equal(torch.rand(3), expected)


def test_foreign_or_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"

    def refused(message: str, steps: int = 2, seed: int = 0, **plan: Any) -> None:
        with pytest.raises(DataError, match=message):
            corpus_trainer(eager(steps, **plan), checkpoint=path, seed=seed).resume()

    corpus_trainer(eager(2), checkpoint=path).run(until=1)
    whole = path.read_bytes()
    refused(r"^[^\n]*of another run: plan differs in steps, lr$", 3, lr=1e-2)
    refused("plan differs in dtype", dtype="bfloat16")
    refused("cannot resume: seed was 0, now it is 5", seed=5)
    for foreign in ({"model": {}}, [1]):
        torch.save(foreign, path)
        refused(r"^[^\n]*: no checkpoint of a training$")
    for broken in (whole[:1000], b"no checkpoint", b""):
        path.write_bytes(broken)
        refused(r"^[^\n]*: no checkpoint \([^\n]*\)$")


def test_warm_up_changes_no_state() -> None:
    """With experts that are balanced by a bias, which every training forward moves."""
    run = corpus_trainer(eager(2), bias_rate=0.01)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.warm_up(next(run.source))
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    assert all(p.grad is None for p in run.model.parameters())
    assert run.model.overflow() == 0, "the warm-up's dropped pairs are not the training's"


@planted("X13", "random ids, and random ids in disguise")
def test_random_ids_are_refused_as_training_data() -> None:
    run = smoke_trainer(2)
    for word in ("", "yes"):
        with pytest.raises(DataError, match="random ids are not training data"):
            run.run(allow_synthetic=word)
    assert run.losses == []
    assert run.run(allow_synthetic="smoke")["kind"] == "smoke, not training"
    disguised = Trainer(CONFIG, eager(2), iter([torch.randint(512, (2, 32))]))
    with pytest.raises(DataError, match="is not a checked token file: it has no receipt"):
        disguised.run(allow_synthetic="smoke")


def test_data_of_another_vocabulary_is_refused() -> None:
    """A model may have more ids than the data, not fewer, and the same BOS."""
    for changes, message in (
        ({"vocab_size": 256}, "data of 512 ids with BOS 2, a model of 256 with BOS 2"),
        ({"bos_id": 5}, "data of 512 ids with BOS 2, a model of 512 with BOS 5"),
    ):
        with pytest.raises(DataError, match=message):
            corpus_trainer(eager(2), **changes).run()
    source = SyntheticBatches(CONFIG.vocab_size // 2, B, T, 0, CONFIG.bos_id)
    assert smoke_trainer(1, source=source).run(allow_synthetic="smoke")["step"] == 1


def test_non_finite_loss_stops_the_run(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "state.pt"
    good = "; the last checkpoint is good$"
    diverges = eager(9, optimizer="adamw", lr=math.inf)
    with pytest.raises(NonFiniteError, match="^step 1: the loss is nan" + good):
        corpus_trainer(diverges, checkpoint=path).run()
    # The weights break after a loss that is still finite: they must not become the last checkpoint.
    with pytest.raises(NonFiniteError, match="^step 1: a weight is not finite" + good):
        corpus_trainer(replace(diverges, checkpoint_every=1), checkpoint=path).run()
    assert not path.exists()
    run = smoke_trainer(2)
    forward = run._forward
    monkeypatch.setattr(run, "_forward", lambda ids: forward(ids) * math.inf)
    with pytest.raises(NonFiniteError, match="^step 0: the loss is inf" + good):
        run.run(allow_synthetic="smoke")
    assert run.losses == []


def test_non_finite_weight_is_not_saved(tmp_path: Path) -> None:
    run = smoke_trainer(2, checkpoint=tmp_path / "state.pt")
    parameters = [*run.model.parameters()]
    for at, value in itertools.product((0, len(parameters) // 2, -1), (math.nan, math.inf, -math.inf)):
        weights = parameters[at].detach().flatten()
        before = weights[-1].clone()
        weights[-1] = value
        with pytest.raises(NonFiniteError, match="a weight is not finite"):
            run.save()
        assert not run.checkpoint.exists(), (at, value)
        weights[-1] = before
    run.save()
    assert run.checkpoint.exists(), "each fault was taken back, so that each was alone"


def test_resumed_run_counts_its_own_steps(tmp_path: Path, monkeypatch) -> None:
    """The supervisor retries only before a process has passed its first steps, wherever the run was resumed."""
    steps: list[int] = []
    monkeypatch.setattr("launch.train.passed", lambda step, last_step: steps.append(step))
    plan = eager(4, checkpoint_every=2)
    corpus_trainer(plan, checkpoint=tmp_path / "state.pt").run(until=2)
    resumed = corpus_trainer(plan, checkpoint=tmp_path / "state.pt")
    resumed.resume()
    resumed.run()
    assert (resumed.step, steps) == (4, [0, 1, 0, 1])


def test_ranks_must_share_each_option_and_the_data() -> None:
    """A rank with another value of any of these is refused before the first step (rule C39)."""
    options = parser().parse_args(["--steps", "4", "--data", str(CORPUS)])
    data = receipt(PackedBatches(TokenFile(CORPUS), 2, 32, options.seed))
    found = facts(options, data)
    for name in vars(options):
        given = argparse.Namespace(**{**vars(options), name: "another"})
        assert facts(given, data) == {**found, f"--{name.replace('_', '-')}": "another"}
    assert {"--seed", "--lr", "--dtype", "--data", "--checkpoint-every"} < set(found)
    for name in ("sha256", "tokenizer"):
        assert found[name] == str(data[name])
        assert facts(options, {**data, name: "another"}) == {**found, name: "another"}
    assert (found["torch"], found["python"]) == (torch.__version__, platform.python_version())


@pytest.mark.parametrize(("rank", "local", "seeds"), [(0, 0, 1), (1, 1, 0), (2, 0, 1), (3, 1, 0)])
def test_one_process_of_each_host_seeds_the_caches(monkeypatch, rank: int, local: int, seeds: int) -> None:
    """Two hosts of two ranks: without a seed, the second host would compile everything."""

    def stop(*_: object) -> None:
        raise ContractError("the ranks agree here")

    ranks = SimpleNamespace(rank=rank, local=local, world=4, agree=stop)
    seeded: list[object] = []
    monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.setattr(train, "Ranks", lambda *_: ranks)
    monkeypatch.setattr(train.environment, "check", lambda _: None)
    monkeypatch.setattr(train.environment, "seed_caches", seeded.append)
    assert main(["--smoke", *SMALL]) == 3
    assert len(seeded) == seeds, f"rank {rank}, {local} on its host"


def test_trainer_exit_codes(tmp_path: Path, capsys, monkeypatch) -> None:
    """0 done, 2 usage, 3 refused, 4 not finite; each refusal is one line."""
    small, data = [*SMALL, "--steps", "2"], ["--data", str(CORPUS)]
    assert main([*small, *data, "--log", str(tmp_path / "log.jsonl")]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "training"
    assert steps_of(tmp_path / "log.jsonl") == [0, 1]
    assert main([*small, "--smoke"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "smoke, not training"
    smoke = [*small, "--smoke"]
    for arguments in (
        [],
        small,
        [*smoke, "--data", "x"],
        [*smoke, "--resume"],
        [*smoke, "--preset", "nam13"],
        [*smoke, "--tokens", "1"],
        [*smoke, "--rows", "3"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2, arguments
    capsys.readouterr()
    assert main([*small, "--data", str(tmp_path)]) == 3
    assert main([*smoke, "--lr", "inf"]) == 4
    # An output that cannot be written is refused at the start, not after the last step.
    log = tmp_path / "unwritten.jsonl"
    for option, path in itertools.product(("--checkpoint", "--log"), (tmp_path / "missing" / "a", tmp_path)):
        assert (
            main([*small, *data, *([] if option == "--log" else ["--log", str(log)]), option, str(path)]) == 3
        )
    assert not log.exists()
    monkeypatch.setattr(train, "load", lambda: contract.load(tmp_path / "contract.toml"))
    assert main(smoke) == 3
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["refused", "stopped", *["refused"] * 5]
    options = [re.search(r"--\w+=", line) for line in lines[2:6]]
    assert [found and found[0] for found in options] == ["--checkpoint="] * 2 + ["--log="] * 2


def test_bfloat16_weights_keep_float32_state(tmp_path: Path) -> None:
    plan, path = eager(3, dtype="bfloat16"), tmp_path / "state.pt"
    run = corpus_trainer(plan, checkpoint=path)
    run.run()
    state = [value for values in run.optimizer.state.values() for value in values.values()]
    assert {p.dtype for p in run.model.parameters()} == {torch.bfloat16}
    assert {value.dtype for value in state} == {torch.float32}
    plain = corpus_trainer(eager(3))
    plain.run()
    assert run.losses[0] == pytest.approx(plain.losses[0], rel=0.01)
    assert run.losses != plain.losses
    again = corpus_trainer(plan, checkpoint=path)
    again.resume()
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), run.model.parameters()))


def test_rows_of_a_forward_accumulate_to_the_batch(tmp_path: Path) -> None:
    """--rows is a memory knob: the model's experts balance the rows that run together, and nothing else differs."""
    losses = {}
    for rows in ("1", "2", "4"):
        options = ["--batch", "4", "--rows", rows, "--log", str(tmp_path / rows)]
        assert main([*SMALL, "--data", str(CORPUS), *options]) == 0
        losses[rows] = json.loads((tmp_path / rows).read_text())["loss"]
    assert losses["4"] == pytest.approx(losses["2"], rel=1e-2)
    assert len(set(losses.values())) == 3, "each has its own capacity of the experts"


@pytest.mark.parametrize("name", ["state.new", "state.pt"])
def test_failed_save_keeps_other_checkpoints(tmp_path: Path, monkeypatch, name: str) -> None:
    """A checkpoint's temporary name is no other checkpoint's, and not its own."""
    others = [tmp_path / other for other in ("state.new", "state.pt", "state.b.new")]
    for other in others:
        other.write_text("good")
    run = smoke_trainer(1, checkpoint=tmp_path / name)
    seen: list[str] = []

    def full(state: object, file: Any) -> None:
        seen.append(Path(file.name).name)
        file.write(b"half of it")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        run.save()
    assert [other.read_text() for other in others] == ["good"] * 3
    assert sorted(tmp_path.iterdir()) == sorted(others), "the half-written file is gone"
    assert seen == [f"{name}.new"]


def test_log_that_began_late_has_each_step_once(tmp_path: Path) -> None:
    """The log is added at a resume, and the run is resumed again from a checkpoint before the log's end."""
    plan, path, log = eager(6), tmp_path / "state.pt", tmp_path / "log.jsonl"
    corpus_trainer(plan, checkpoint=path).run(until=2)
    for until, crash in ((4, False), (5, True), (6, False)):
        saved = path.read_bytes()
        run = corpus_trainer(plan, checkpoint=path, log=log)
        run.resume()
        run.run(until=until)
        if crash:
            path.write_bytes(saved)
            log.write_text(log.read_text() + '{"step": 5, "lo')
    assert steps_of(log) == [2, 3, 4, 5]
    for foreign in ("notes\n", '[1]\n{"step": 0}\n', '{"loss": 1}\n'):
        log.write_text(foreign)
        with pytest.raises(ContractError, match="line 1 is not a step of a training"):
            corpus_trainer(plan, checkpoint=path, log=log).resume()
        assert log.read_text() == foreign
