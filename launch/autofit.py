"""A batch that does not fit is split, and the rest accumulated: a step sees the same rows (contract.toml's [autofit]).

B batch, T tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from launch.contract import PATH, ContractError, section
from launch.environment import RETRY
from launch.retry import REASON
from launch.step import train_step

MEMORY = ("cuda_out_of_memory", "hbm_out_of_memory")


def device_batch(batch: int, given: Mapping[str, str] = os.environ, path: Path = PATH) -> int:
    """Rows of `batch` that go through the model at once: all, or in a retry for memory the next of the contract's.

    Raises ContractError, one line, where there is no smaller one, or it does not divide the batch.
    """
    ladder = section("autofit", lambda table: list(table["device_batches"]["value"]), path)
    if not given.get(RETRY) or given.get(REASON) not in MEMORY:
        return batch
    smaller = max((size for size in ladder if size < batch), default=0)
    if not smaller or batch % smaller:
        raise ContractError(
            f"a batch of {batch} does not fit, and [autofit] has none of {ladder} to split it"
        )
    return smaller


def accumulated_step(
    loss_of: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, ids: Tensor, rows: int, bos_id: int
) -> Tensor:
    """train_step on ids (B,T) int64, `rows` of them at a time -> the loss before the update, () fp32, detached.

    The parts are weighted by their targets, which makes the cross entropy and its gradient those of the whole batch.
    The experts' auxiliary losses are means over a part: they balance what is on the device at once.
    """
    if rows >= ids.shape[0]:
        return train_step(loss_of, optimizer, ids)
    # A row's first token and the first of a document are no targets.
    targets = (ids[:, 1:] != bos_id).sum(1)
    losses = []
    for part, count in zip(ids.split(rows), targets.split(rows)):
        loss = loss_of(part)
        loss = loss * (count.sum().to(loss.dtype) / targets.sum())
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses).sum()
