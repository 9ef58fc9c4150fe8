"""Gradient accumulation for a batch that does not fit: a step sees the same rows ([autofit] in contract.toml).

B batch, T tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from launch.contract import ContractError, section
from launch.environment import RETRY
from launch.retry import REASON
from launch.step import train_step

MEMORY = ("cuda_out_of_memory", "hbm_out_of_memory")


@dataclass(frozen=True)
class Share:
    """The part of a batch that one rank takes: `index` of `count` equal parts.

    held: context in which gradients are not exchanged if its argument is true. mean: the mean of a loss over the ranks.
    """

    index: int = 0
    count: int = 1
    held: Callable[[bool], AbstractContextManager[None]] = nullcontext
    mean: Callable[[Tensor], Tensor] = lambda loss: loss

    def of(self, batch: Tensor) -> Tensor:
        """Return this share's rows of `batch` (B,...)."""
        return batch.chunk(self.count)[self.index] if self.count > 1 else batch


ALONE = Share()


def device_batch(batch: int, given: Mapping[str, str] = os.environ) -> int:
    """Rows of `batch` per forward: all, or in a retry after OOM the contract's next smaller size.

    Raises ContractError, one line, if there is none, or it does not divide the batch.
    """
    ladder = section("autofit", lambda table: list(table["device_batches"]["value"]))
    if not given.get(RETRY) or given.get(REASON) not in MEMORY:
        return batch
    smaller = max((size for size in ladder if size < batch), default=0)
    if not smaller or batch % smaller:
        raise ContractError(
            f"a batch of {batch} does not fit, and no size of [autofit] device_batches {ladder} is smaller and "
            "divides it"
        )
    return smaller


def accumulated_step(
    loss_of: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    rows: int,
    bos_id: int,
    share: Share = ALONE,
    taking: Callable[[float], AbstractContextManager[None]] = lambda part: nullcontext(),
) -> Tensor:
    """train_step on ids (B,T) int64, `rows` of them at a time -> the loss before the update, () fp32, detached.

    The parts are weighted by their number of targets, so cross entropy and gradient equal the whole batch's. Losses
    of experts and of an MTP head for later tokens are means over a part.

    share: of several ranks, each takes its rows of the batch, and all return the loss of the whole batch.
    taking: context of a forward and backward of this share of this process's rows (model.dsa.scaled_losses).
    """
    mine = share.of(ids)
    if share.count == 1 and rows >= ids.shape[0]:
        return train_step(loss_of, optimizer, ids)
    # The first token of a row or document is not a target.
    targets = (ids[:, 1:] != bos_id).sum(1)
    losses = []
    parts, counts = mine.split(rows), share.of(targets).split(rows)
    for left, part, count in zip(reversed(range(len(parts))), parts, counts):
        with share.held(left > 0), taking(len(part) / len(mine)):
            loss = loss_of(part)
            # Times the number of ranks, since their gradients become means.
            loss = loss * (count.sum().to(loss.dtype) / targets.sum() * share.count)
            loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return share.mean(torch.stack(losses).sum())
