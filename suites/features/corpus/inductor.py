"""Inductor's C++ code: values, indices and views that come out wrong, or do not compile."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from suites.features.corpus.case import compiled_differs, differences, regression


@regression(
    "inductor-argmax_of_mean",
    "argmax of a mean over the last axis of a strided view returns the index of another layout",
    issue=193661,
    bad="2.13.0",
    good="2.15.0",
)
def argmax_of_mean() -> list[str]:
    x = torch.rand(2, 4, 4, 8).transpose(0, 1).contiguous().transpose(0, 1)[..., ::2]
    return differences("output", x.mean(-1).argmax(), torch.compile(lambda x: x.mean(-1).argmax())(x))


@regression(
    "inductor-flip_of_repeated",
    "flip after repeat_interleave reads out of bounds with dynamic shapes",
    issue=187027,
    bad="2.13.0",
    good="2.15.0",
)
def flip_of_repeated() -> list[str]:
    return compiled_differs(
        lambda x: torch.repeat_interleave((x + 1).flatten(), 2).flip(0), torch.randn(8, 8), dynamic=True
    )


@regression(
    "inductor-negated_bytes",
    "The negated absolute value of uint8 does not wrap around",
    issue=187018,
    bad="2.13.0",
    good="2.15.0",
)
def negated_bytes() -> list[str]:
    def total(x: Tensor) -> Tensor:
        y = -x.abs()
        return torch.cat([y, y]).sum()

    return compiled_differs(total, torch.tensor([200, 200], dtype=torch.uint8))


@regression(
    "inductor-update_through_dropout",
    "An in-place update through the identity of dropout in evaluation does not reach the input",
    issue=195422,
    bad="2.13.0",
    good="2.15.0",
)
def update_through_dropout() -> list[str]:
    def doubled(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.5, training=False)
        y += y
        return y

    return compiled_differs(doubled, torch.ones(2, 2))


@regression(
    "inductor-two_constant_cumsums",
    "Of two functions with cumsum of a constant, the second one does not compile in the same process",
    issue=193876,
    bad="2.13.0",
    good="2.15.0",
    error="FakeTensor",
)
def two_constant_cumsums() -> list[str]:
    def offsets(size: int):
        return lambda: torch.full((2,), size, dtype=torch.int64).cumsum(0)

    return [line for n in (1, 2) for line in differences("output", offsets(n)(), torch.compile(offsets(n))())]


@regression(
    "inductor-gather_gradient_under_vmap",
    "The vmapped gradient of an index_select is wrong: index_put writes into an expanded view",
    issue=188084,
    bad="2.13.0",
    good="2.15.0",
)
def gather_gradient_under_vmap() -> list[str]:
    def picked(x: Tensor) -> Tensor:
        stacked = torch.stack([x[..., n] for n in range(4)], dim=-1)
        return (torch.index_select(stacked, -1, torch.tensor([0, 2])) * torch.tensor([1.0, -1.0])).sum()

    gradients = torch.func.vmap(torch.func.grad_and_value(picked))
    x = torch.randn(4, 4)
    return differences("output", gradients(x), torch.compile(gradients)(x))


@regression(
    "inductor-copy_before_update",
    "A copy into another input sees an update of its source that comes after it",
    issue=198131,
    bad="2.13.0",
    good="2.15.0",
)
def copy_before_update() -> list[str]:
    def copied(target: Tensor, source: Tensor) -> Tensor:
        target[0:, :] = source[0:, :]
        source.add_(1)
        return source

    return compiled_differs(copied, torch.zeros(3, 4), torch.arange(12.0).view(3, 4))


@regression(
    "inductor-flip_after_index_put",
    "An in-place sum with the flipped tensor after an index_put reads rows that it has overwritten",
    issue=198270,
    bad="2.13.0",
    good="2.15.0",
)
def flip_after_index_put() -> list[str]:
    def folded(x: Tensor) -> Tensor:
        x.index_put_((torch.arange(x.size(0)),), x * 2.0)
        x.add_(x.flip(0))
        return x

    return compiled_differs(folded, torch.rand(4, 8))
