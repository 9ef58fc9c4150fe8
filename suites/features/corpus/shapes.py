"""Dynamic shapes: programs that compile for one size, but not for a symbolic one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from suites.features.corpus.case import compiled_differs, differences, regression


@regression(
    "shapes-weighted_soft_targets",
    "cross_entropy with class weights and soft targets cannot be traced with dynamic shapes",
    issue=181870,
    bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0",
    good="2.13.0 2.14.1 2.15.0",
    error="numel",
)
def weighted_soft_targets() -> list[str]:
    def loss(logits: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, weight=weight, reduction="none")

    operands = torch.randn(3, 5), torch.rand(3, 5).softmax(1), torch.rand(5)
    return compiled_differs(loss, *operands, backend="eager", dynamic=True)


@regression(
    "shapes-quantile",
    "quantile cannot be traced with dynamic shapes",
    issue=179383,
    bad="2.8.0 2.9.0 2.10.0 2.11.0",
    good="2.12.0 2.13.0 2.14.1 2.15.0",
    error="numel",
)
def quantile() -> list[str]:
    backend = "aot_eager_decomp_partition"
    return compiled_differs(
        lambda x: torch.quantile(x, 0.5), torch.arange(5.0), backend=backend, dynamic=True
    )


@regression(
    "shapes-power_of_symbol",
    "The gradient of a power with a symbolic integer exponent ends in an internal assertion",
    issue=185715,
    bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0",
    good="2.14.1 2.15.0",
    error="NYI SymInt equality",
)
def power_of_symbol() -> list[str]:
    def power(x: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
        y = torch.pow(x, exponent)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return y.detach(), gradient

    x = torch.ones(1, 3, requires_grad=True)
    return differences("output", power(x, 0), torch.compile(power, backend="aot_eager", dynamic=True)(x, 0))
