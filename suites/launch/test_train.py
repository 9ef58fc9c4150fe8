"""The trainer learns from the shipped corpus, resumes bitwise, and compiles to the same curve. Rules X13, C36."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bumpgate.plugin.instruments import DynamoWatch, reset_dynamo
from launch.data import PackedBatches, TokenFile
from launch.optimizers import build_optimizer
from launch.train import Trainer, TrainingPlan
from suites.launch.trainers import CORPUS, corpus_trainer
from suites.support.comparison import AT_MOST, error_ratio, over
from suites.support.lanes import Lane, lanes

pytestmark = pytest.mark.usefixtures("restored_dynamo")

BATCH, TOKENS, STEPS = 8, 100, 200
CURVES = 12  # with four, 20 losses, the ratio was 0.2, 2.9 and 3.1 on three H200s


def unigram_entropy(file: TokenFile) -> float:
    """Return the nats per token of the best predictor from the corpus's frequencies alone. BOS is not a target."""
    counts = np.bincount(file.ids, minlength=file.vocab_size).astype(np.float64)
    counts[file.bos_id] = 0
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


@lanes("cpu", "h200")
@pytest.mark.long(45)
def test_loss_after_two_hundred_steps_on_the_corpus(lane: Lane, row) -> None:
    """Below the unigram entropy a model must use context. The loss includes the experts' auxiliary terms, too."""
    run = corpus_trainer(
        TrainingPlan(STEPS, policy="eager", optimizer="adamw"), batch=BATCH, tokens=TOKENS, device=lane.device
    )
    summary = run.run()
    last = sum(run.losses[-10:]) / 10
    entropy = unigram_entropy(run.source.file)
    assert summary["kind"] == "training"
    assert run.losses[0] > math.log(256) > entropy, "an untrained model must not pass"
    mean = f"mean of the last 10 of {STEPS} steps; first {run.losses[0]:.3f}; unigram entropy {entropy:.3f}"
    about = {"seen": STEPS * BATCH * TOKENS, "rule": "X13", "evidence": [mean]}
    about["series"] = {"loss": run.losses, "unigram entropy": [entropy] * STEPS}
    row.bound("model/nam12-corpus/loss_after_200_steps", last, "nats", at_most=entropy, **about)


def curves(run: Trainer) -> Tensor:
    """Return the losses of 5 steps from the same start on each of CURVES streams; the run compiles once."""
    start = {name: value.clone() for name, value in run.model.state_dict().items()}
    found = []
    for seed in range(CURVES):
        run.model.load_state_dict(start)
        run.optimizer = build_optimizer(run.model, run.plan.optimizer, run.plan.lr)
        run.source = PackedBatches(TokenFile(CORPUS), 2, 32, seed)
        run.step, run.losses = 0, []
        run.run()
        found += run.losses
    return torch.tensor(found, dtype=torch.float64)


def stream_error_ratio(found: Tensor, plain: Tensor, oracle: Tensor) -> float:
    """Return the median RMS error of a stream over the error of eager. NaN if a loss is NaN.

    On an H200 a rounding moves one stream in some runs: over all streams at once the ratio of an unchanged build was
    0.6 to 9 in nine runs (torch 2.11.0, 2.14.1, 2.15.0). A wrong gradient or update changes every stream.
    """
    ours, theirs = (
        (losses - oracle).reshape(CURVES, -1).square().mean(dim=1).sqrt().median().item()
        for losses in (found, plain)
    )
    return over(ours, theirs)


@lanes("cpu", "h200")
@pytest.mark.long(45)
def test_compiled_training_matches_eager(lane: Lane, row, canaries) -> None:
    """Each loss follows the updates before it, so gradients and optimizer are in the curve, too.

    Every token goes to all 8 experts here. With a choice among 64, one rounding in 20 losses sent a token elsewhere and
    changed a loss by 5e-3, a thousand times the noise that this row measures.
    """
    canaries("graphs")
    eager = TrainingPlan(5, policy="eager", optimizer="adamw", warmup=1)
    every = {"experts": 8, "top_k": 8, "device": lane.device}
    plain = curves(corpus_trainer(eager, **every))
    exact = corpus_trainer(eager, **every)
    exact.model.double()
    oracle = curves(exact)
    with DynamoWatch() as watch:
        plan = replace(eager, policy="regional")
        found = curves(corpus_trainer(plan, **every, backend=watch.backend()))
        calls = watch.refresh().calls
    reset_dynamo()
    planted = curves(corpus_trainer(replace(eager, lr=eager.lr * 1.01), **every))
    assert stream_error_ratio(planted, plain, oracle) > 10, "a learning rate 1 % off must be seen"
    about = {"at_most": AT_MOST["gradient"], "seen": calls, "rule": "C36", "instruments": ("graphs",)}
    about["evidence"] = [
        f"{len(oracle)} losses: {CURVES} streams of 5 steps",
        f"all streams at once: {error_ratio(found, plain, oracle):.2f}",
    ]
    ratio = stream_error_ratio(found, plain, oracle)
    row.bound(f"launch/train-nam12-regional-{lane.name}/loss_error_ratio", ratio, "ratio", **about)


def logged(path: Path) -> list[dict[str, object]]:
    """Return the steps of a log without the memory that the process had."""
    lines = map(json.loads, path.read_text().splitlines())
    return [{name: value for name, value in line.items() if not name.startswith("bytes_")} for line in lines]


@lanes("cpu", "h200")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_run_equals_uninterrupted_run(lane: Lane, optimizer: str, tmp_path: Path) -> None:
    plan = TrainingPlan(8, policy="eager", optimizer=optimizer, warmup=3, checkpoint_every=3)
    (tmp_path / "whole.jsonl").write_text("of a former run\n")
    whole = corpus_trainer(plan, device=lane.device, log=tmp_path / "whole.jsonl")
    whole.run()
    part = {"device": lane.device, "checkpoint": tmp_path / "state.pt", "log": tmp_path / "part.jsonl"}
    first = corpus_trainer(plan, **part)
    first.run(until=3)
    saved = part["checkpoint"].read_bytes()
    first.run(until=5)  # continues past the checkpoint of step 3, and is then lost
    part["checkpoint"].write_bytes(saved)
    second = corpus_trainer(plan, **part)
    second.resume()
    assert second.step == 3
    second.run()
    assert second.losses == whole.losses[3:]
    for (name, a), b in zip(whole.model.state_dict().items(), second.model.state_dict().values()):
        assert torch.equal(a, b), name
    logs = [logged(path) for path in (part["log"], tmp_path / "whole.jsonl")]
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0]] == list(range(8))
    assert not list(tmp_path.glob("*.new")), "the temporary name is gone"
    # Resumed without its position in the data, the run differs.
    third = corpus_trainer(plan, device=lane.device, checkpoint=part["checkpoint"])
    part["checkpoint"].write_bytes(saved)
    third.resume()
    third.source = PackedBatches(TokenFile(CORPUS), 2, 32, 0)
    third.run()
    assert third.losses != whole.losses[3:]
