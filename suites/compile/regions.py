"""A small region that a test gives its forward, and the watch that its calls are counted under."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bumpgate.plugin.instruments import DynamoReport, DynamoWatch, dynamo_config
from launch.contract import load

INSTRUMENTS = ("graphs", "graph_breaks", "recompiles", "recompile_limit")


class Region(nn.Module):
    """The region that a form is added to: a weight, and an int, a flag and a config that a forward may read."""

    def __init__(self, forward: Callable[..., Tensor], number: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("counter", torch.zeros((), dtype=torch.long), persistent=False)
        self.calls, self.flag, self.number = 0, False, number
        self.form = forward

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return self.form(self, x, *args, **kwargs)


@contextmanager
def watched(limit: int = 0, **config: object) -> Iterator[DynamoWatch]:
    contract = load().dynamo | ({"recompile_limit": limit} if limit else {}) | config
    with dynamo_config(contract), DynamoWatch() as watch:
        yield watch


def places(report: DynamoReport) -> set[str]:
    """Return where graphs broke. A break in an inlined function is reported again for the frame that called it."""
    return {found.site for found in report.breaks}
