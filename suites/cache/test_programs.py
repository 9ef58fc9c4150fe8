"""The budget of unique programs: derived from the layer pattern; a run that exceeds it stops with an alert.

Rule C27. The trainer counts what passes through its own backend, so that no torch counter can be renamed away.
"""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from bumpgate.plugin.instruments import reset_dynamo
from launch import train
from launch.contract import load
from launch.data import SyntheticBatches
from launch.policies import POLICIES
from launch.programs import ProgramBudgetError, Programs, load_spare, pattern_programs
from launch.train import Trainer
from model import preset
from model.config import NgramConfig
from model.presets import NAMES
from suites.compile.expectations import expected
from suites.launch.conftest import launched  # noqa: F401 (autouse: what a launcher exports, for main)
from suites.launch.trainers import smoke_trainer
from suites.support.hybrids import build
from suites.support.lanes import lanes
from suites.support.planted import planted

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane", "restored_dynamo")]

OVER_BUDGET = 6
LAYERS = {"layer_pattern": "AME", "depth": 3}


class LastBatchIsShort(SyntheticBatches):
    """Batches of which the third has half the tokens: an unplanned shape."""

    def __next__(self) -> torch.Tensor:
        ids = super().__next__()
        return ids[:, : ids.shape[1] // 2] if self.drawn == 3 else ids


def trainer(policy: str = "regional", ngram: NgramConfig | None = None, **options) -> Trainer:
    return smoke_trainer(4, preset("nam12", **LAYERS, ngram=ngram), policy=policy, backend="eager", **options)


def test_program_budget_follows_from_layer_pattern(row) -> None:
    """The trainer's derivation and the suite's, which the compile suite measures, agree on every preset and policy."""
    contract = load()
    apart = []
    for name in NAMES:
        model = build(preset(name))
        for policy in POLICIES:
            want = expected(model.config.kinds, policy).unique_graphs
            if (found := pattern_programs(model, policy, contract)) != want:
                apart.append(f"{name} {policy}: {found}, not {want}")
    cases = len(NAMES) * len(POLICIES)
    row.count("cache/programs/budgets_that_differ", apart, expected=0, rule="C27", seen=cases)
    with pytest.raises(ValueError, match="unknown compile policy 'magic'"):
        pattern_programs(model, "magic", contract)


def test_run_uses_exactly_its_program_budget(row) -> None:
    """Three steps under every policy use exactly as many programs as derived."""
    apart, steps = [], 0
    for policy in POLICIES:
        run = trainer(policy=policy)
        run.run(3, allow_synthetic="smoke")
        steps += len(run.losses)
        want = expected(run.config.kinds, policy).unique_graphs
        if len(run.programs.seen) != want or run.programs.allowed != want + load_spare():
            apart.append(f"{policy}: {len(run.programs.seen)} of {run.programs.allowed}, derived {want}")
        reset_dynamo()
    row.count("cache/programs/runs_off_their_budget", apart, expected=0, rule="C27", seen=steps)


def test_optimizer_and_token_features_add_one_program_each() -> None:
    plain = trainer().programs.allowed
    options = {"compile_optimizer": True, "optimizer": "adamw"}
    for run in (trainer(**options), trainer(ngram=NgramConfig(table=500))):
        run.run(3, allow_synthetic="smoke")
        assert len(run.programs.seen) == run.programs.allowed == plain + 1


@planted("C27", "one extra shape in the third step")
def test_extra_shape_stops_the_run(monkeypatch, capsys, row) -> None:
    config = preset("nam12", **LAYERS)
    run = trainer(source=LastBatchIsShort(config.vocab_size, 2, 16, 0, config.bos_id))
    with pytest.raises(ProgramBudgetError, match=r"^step 3: \d+ unique programs, the budget is 4; "):
        run.run(allow_synthetic="smoke")
    assert run.step == 3
    monkeypatch.setattr(train, "preset", partial(preset, **LAYERS))
    monkeypatch.setattr(train, "SyntheticBatches", LastBatchIsShort)
    monkeypatch.setattr(train, "Trainer", partial(Trainer, backend="eager"))
    code = train.main(["--smoke", "--steps", "4", "--batch", "2", "--tokens", "16"])
    out, err = (stream.splitlines() for stream in capsys.readouterr())
    alert = json.loads(out[-1])
    stated = {"alert": "program_budget", "rule": "C27", "step": 3, "allowed": 4}
    assert stated.items() <= alert.items()
    assert alert["inputs"]
    assert len(err) == 1
    assert err[0].startswith("stopped: step 3: ")
    about = {"expected": OVER_BUDGET, "rule": "C27", "seen": alert["programs"] - alert["allowed"]}
    row.bound("cache/programs/exit_code_over_budget", code, "exit code", **about)


def test_recompiled_program_is_counted_once() -> None:
    """A program compiled again after a reset is recognized; another shape or dtype makes another program."""
    programs = Programs(2, "eager")
    for x in (torch.ones(4), torch.ones(4), torch.ones(5), torch.ones(4, dtype=torch.float64)):
        reset_dynamo()
        torch.compile(torch.sin, backend=programs.backend)(x)
        if len(programs.seen) <= 2:
            programs.check(0)
    assert len(programs.seen) == 3
    with pytest.raises(ProgramBudgetError, match=r"the last one takes float64\[4\]$"):
        programs.check(0)
