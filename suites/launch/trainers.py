"""Small trainers of a narrow nam12, for tests: on random ids, and on the shipped corpus."""

from __future__ import annotations

import os
from typing import Any

from launch.data import PackedBatches, Source, SyntheticBatches, TokenFile
from launch.outputs import Files
from launch.train import Trainer, TrainingPlan
from model import HybridConfig, preset
from suites.support.child import ROOT

CORPUS = ROOT / "fixtures" / "corpus"
OPTIONS = ["--data", str(CORPUS), "--policy", "eager", "--tokens", "16", "--batch", "2"]
CONFIG = preset("nam12", "narrow", layer_pattern="AE", depth=2)


def smoke_trainer(
    steps: int,
    config: HybridConfig = CONFIG,
    *,
    batch: int = 2,
    tokens: int = 16,
    source: Source | None = None,
    policy: str = "eager",
    **options: Any,
) -> Trainer:
    """Build a trainer on random ids, or on `source`. options: of the plan, of Files and of the trainer."""
    plan = {name: options.pop(name) for name in TrainingPlan.__dataclass_fields__ if name in options}
    source = source or SyntheticBatches(config.vocab_size, batch, tokens, 0, config.bos_id)
    return Trainer(config, TrainingPlan(steps, policy=policy, **plan), source, **_files(options))


def first_launch(**given: str) -> dict[str, str]:
    """Return the environment for a launcher of this checkout, without what an outer one has set."""
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("BUMPGATE_", "TORCH_DISTRIBUTED"))}
    return {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **given}


def corpus_trainer(
    plan: TrainingPlan, *, batch: int = 2, tokens: int = 32, seed: int = 0, **options: Any
) -> Trainer:
    """Build a trainer of twelve layers on the corpus. options: of the configuration, of Files and of the trainer."""
    changes = {name: options.pop(name) for name in HybridConfig.__dataclass_fields__ if name in options}
    source = PackedBatches(TokenFile(CORPUS), batch, tokens, seed)
    return Trainer(preset("nam12", "narrow", **changes), plan, source, **_files(options))


def _files(options: dict[str, Any]) -> dict[str, Any]:
    files = Files(options.pop("checkpoint", None), options.pop("log", None))
    return {**options, "files": files}
