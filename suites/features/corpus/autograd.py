"""Gradients under compile: custom autograd functions, torch.func, gradients inside the graph."""

from __future__ import annotations

import torch
from torch import Tensor

from suites.features.corpus.case import compiled_differs, differences, regression


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


@regression("autograd", 193279, bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0 2.14.1", good="2.15.0")
def backward_under_func_grad() -> list[str]:
    """torch.func.grad inside a compiled function ignores the backward of a custom autograd function."""
    gradient = torch.func.grad(lambda x: ZeroGradient.apply(x).sum())
    x = torch.randn(4)
    return differences("gradient", gradient(x), torch.compile(gradient, backend="aot_eager")(x))


@regression("autograd", 181581, bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0", good="2.13.0 2.14.1 2.15.0")
def create_graph() -> list[str]:
    """The result of autograd.grad(create_graph=True) inside a compiled function requires no gradient."""

    def penalty(x: Tensor, w: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad((x @ w).sum(), x, create_graph=True)
        return gradient.square().sum()

    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    found = torch.compile(penalty, backend="aot_eager")(x, w)
    return [] if found.requires_grad else ["the penalty requires no gradient"]


@regression("autograd", 176854, bad="2.8.0 2.9.0 2.10.0 2.11.0", good="2.12.0 2.13.0 2.14.1 2.15.0")
def detach_in_place() -> list[str]:
    """detach_() inside a compiled function leaves requires_grad set for the code after it."""

    def cut(x: Tensor) -> tuple[Tensor, bool]:
        y = x * 2
        y.detach_()
        return y + 1, y.requires_grad

    y, requires_grad = torch.compile(cut, backend="eager")(torch.randn(4, requires_grad=True))
    return ["the detached tensor requires a gradient"] if requires_grad or y.requires_grad else []


class AddedInPlace(torch.autograd.Function):
    """x + w by an in-place sum; the gradient of w is doubled, so that the two cannot be exchanged unseen."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        y = x.clone()
        y += w
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient * 2


@regression("autograd", 180642, bad="2.11.0", good="2.12.0 2.13.0 2.14.1 2.15.0")
def in_place_in_forward() -> list[str]:
    """An in-place sum in the forward of a custom autograd function gives wrong gradients."""
    x, w = (torch.randn(4, requires_grad=True) for _ in range(2))
    return compiled_differs(lambda x, w: AddedInPlace.apply(x, w), x, w, backend="aot_eager")


class Product(torch.autograd.Function):
    """a * b."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradient * b, gradient * a


@regression("autograd", 183604, bad="2.11.0 2.12.0", good="2.13.0 2.14.1 2.15.0")
def same_tensor_twice() -> list[str]:
    """A tensor that is passed twice to a custom autograd function gets half of its gradient."""
    x = torch.randn(5, requires_grad=True)
    return compiled_differs(lambda x: Product.apply(x, x), x, backend="aot_eager")


@regression("autograd", 195664, bad="2.14.1 2.15.0", good="2.11.0 2.12.0 2.13.0")
def detached_copy() -> list[str]:
    """A result that is equal to a detached result of the same compiled function loses its gradient."""

    def loss_and_log(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y * 1.0, y.detach()

    loss, _ = torch.compile(loss_and_log)(torch.randn(4, requires_grad=True))
    return [] if loss.requires_grad else ["the result requires no gradient"]
