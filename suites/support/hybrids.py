"""Seeded models, batches and compiled hybrids shared by the suites.

B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bumpgate.plugin.instruments import (
    DynamoReport,
    DynamoWatch,
    dynamo_config,
    eager_islands,
    read_dynamo_config,
    reset_dynamo,
)
from launch.contract import Contract, apply_dynamo, load
from launch.policies import CompiledHybrid, apply
from model import Hybrid, HybridConfig, preset

SEED = 20260
DOCUMENT_TOKENS = 24


def token_batch(
    config: HybridConfig, batch: int, tokens: int = 0, seed: int = SEED, device: str = "cpu"
) -> Tensor:
    """Return token ids (B,T) int64 with a BOS at each row's start and about every 24 tokens: packed documents.

    Ids follow a short random walk, so that the next-token loss can decrease.
    """
    generator = torch.Generator().manual_seed(seed)
    T = tokens or config.seq_len
    steps = torch.randint(0, 3, (batch, T), generator=generator)
    start = torch.randint(0, 64, (batch, 1), generator=generator)
    ids = 8 + (start + steps.cumsum(1)) % 64
    ids[torch.rand(batch, T, generator=generator) < 1 / DOCUMENT_TOKENS] = config.bos_id
    ids[:, 0] = config.bos_id
    return ids.to(device)


def work_of(hybrid: Hybrid, ids: Tensor) -> str:
    """Describe the work of a step on `ids` (B,T) for rows: times of another pattern, dtype or size do not compare."""
    config, dtype = hybrid.config, next(hybrid.parameters()).dtype
    size = "batch {}, tokens {}".format(*ids.shape)
    return f"pattern {config.layer_pattern} of depth {config.depth}, dtype {str(dtype).removeprefix('torch.')}, {size}"


def build(config: HybridConfig, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Hybrid:
    """Build the model with seeded weights: the same values in every process and under every policy."""
    torch.manual_seed(SEED)
    return Hybrid(config).to(device=device, dtype=dtype)


@dataclass
class Watched:
    """A hybrid under a policy with every instrument enabled. `forward` counts the events of one call."""

    config: HybridConfig
    model: Hybrid
    compiled: CompiledHybrid
    watch: DynamoWatch

    def forward(self, ids: Tensor) -> tuple[int, int]:
        """Run one training forward and backward; return the numbers of compiled graph calls and eager islands."""
        calls = self.watch.report.calls
        with eager_islands(self.model.blocks) as islands:
            loss = self.compiled(ids)
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return self.watch.report.calls - calls, islands.total()

    def report(self) -> DynamoReport:
        """Return what Dynamo has done since the watch was opened."""
        return self.watch.refresh()


@contextmanager
def watched_hybrid(
    name: str | HybridConfig,
    policy: str,
    *,
    device: str = "cpu",
    backend: str = "inductor",
    contract: Contract | None = None,
    **changes: Any,
) -> Iterator[Watched]:
    """Yield the narrow preset `name`, or a configuration, under `policy`; undo all at exit.

    The contract and every instrument are active.
    """
    contract = contract or load()
    with dynamo_config(read_dynamo_config(contract.dynamo)), DynamoWatch() as watch:
        apply_dynamo(contract)
        config = preset(name, "narrow", **changes) if isinstance(name, str) else name
        model = build(config, device)
        yield Watched(config, model, apply(model, policy, contract, watch.backend(backend)), watch)
    reset_dynamo()
