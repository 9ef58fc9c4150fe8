"""Gradients under compile: custom autograd functions, torch.func, gradients inside the graph."""

from __future__ import annotations

import torch
from torch import Tensor

from suites.features.corpus.case import differences, regression


class ZeroGradient(torch.autograd.Function):
    """sin with a backward of zeros, so that a dropped backward shows."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None: ...

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


@regression(
    "autograd-backward_under_func_grad",
    "torch.func.grad inside a compiled function ignores the backward of a custom autograd function",
    issue=193279,
    bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0 2.14.1",
    good="2.15.0",
)
def backward_under_func_grad() -> list[str]:
    gradient = torch.func.grad(lambda x: ZeroGradient.apply(x).sum())
    x = torch.randn(4)
    return differences("gradient", gradient(x), torch.compile(gradient, backend="aot_eager")(x))


@regression(
    "autograd-create_graph",
    "The result of autograd.grad(create_graph=True) inside a compiled function requires no gradient",
    issue=181581,
    bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0",
    good="2.13.0 2.14.1 2.15.0",
)
def create_graph() -> list[str]:
    def penalty(x: Tensor, w: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad((x @ w).sum(), x, create_graph=True)
        return gradient.square().sum()

    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    found = torch.compile(penalty, backend="aot_eager")(x, w)
    return [] if found.requires_grad else ["the penalty requires no gradient"]


@regression(
    "autograd-detach_in_place",
    "detach_() inside a compiled function leaves requires_grad set for the code after it",
    issue=176854,
    bad="2.8.0 2.9.0 2.10.0 2.11.0",
    good="2.12.0 2.13.0 2.14.1 2.15.0",
)
def detach_in_place() -> list[str]:
    def cut(x: Tensor) -> tuple[Tensor, bool]:
        y = x * 2
        y.detach_()
        return y + 1, y.requires_grad

    y, requires_grad = torch.compile(cut, backend="eager")(torch.randn(4, requires_grad=True))
    return ["the detached tensor requires a gradient"] if requires_grad or y.requires_grad else []
