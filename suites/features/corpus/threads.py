"""Cases of public threads through Inductor, forward and gradient: regions, control flow, writes after views, casts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from suites.features.corpus.case import compiled_differs, differences, regression
from suites.support.instruments import scan

# B batch, T tokens, D model dim.
B, T, D = 2, 6, 4


@regression("lowering", 198094, bad="2.13.0 2.14.1 2.15.0", good="")
def scatter_before_zero() -> list[str]:
    """The result of slice_scatter is overwritten if its input is zeroed afterwards."""

    def updated(state: Tensor, new: Tensor) -> Tensor:
        result = torch.slice_scatter(state, new, dim=0, start=1, end=3)
        state.zero_()
        return result

    return compiled_differs(updated, torch.rand(4, D), torch.rand(2, D))


@regression("lowering", 198094, bad="2.13.0 2.14.1 2.15.0", good="")
def select_scatter_before_zero() -> list[str]:
    """The result of select_scatter is overwritten if its input is zeroed afterwards."""

    def updated(state: Tensor, new: Tensor) -> Tensor:
        result = torch.select_scatter(state, new, 0, 1)
        state.zero_()
        return result

    return compiled_differs(updated, torch.rand(4, D), torch.rand(D))


@regression("lowering", 197829, bad="2.13.0 2.14.1", good="2.15.0")
def shifted_rows() -> list[str]:
    """Rows that are moved in place by a clone of a slice are copied over each other."""

    def shifted(x: Tensor) -> Tensor:
        x[1:] = x[:-1].clone()
        return x

    return compiled_differs(shifted, torch.rand(3, 16, 16))


@regression("lowering", 198101, bad="2.13.0 2.14.1 2.15.0", good="")
def read_of_a_dtype_view() -> list[str]:
    """A product of a dtype view is computed after a later write to its input."""

    def product(x: Tensor) -> Tensor:
        y = x.view(torch.int32) * 2
        y.sub_(-4)
        x[:, 2:5] = 2
        return y.view(torch.int64)

    return compiled_differs(product, torch.arange(-12, 12).reshape(4, 6))


@regression("lowering", 195451, bad="2.13.0 2.14.1 2.15.0", good="")
def scattered_output_is_the_input() -> list[str]:
    """A scattered tensor that is copied back and returned shares the memory of the input."""

    def updated(x: Tensor) -> Tensor:
        y = torch.diagonal_scatter(x, torch.zeros(4))
        x.copy_(y)
        return y

    x = torch.rand(4, 4)
    y = torch.compile(updated)(x)
    before = x.clone()
    y.add_(1)
    return differences("input", before, x)


@regression("lowering", 185517, bad="2.13.0", good="2.14.1 2.15.0")
def margin_in_bf16() -> list[str]:
    """The gradient of margin_ranking_loss in bfloat16 is zero where its margin is rounded to a loss of zero."""
    x = torch.tensor([1.703125, 1.703125], dtype=torch.bfloat16, requires_grad=True)
    zeros, ones = (
        torch.zeros(2, dtype=torch.bfloat16, requires_grad=True),
        torch.ones(2, dtype=torch.bfloat16),
    )
    return compiled_differs(lambda x, y, sign: F.margin_ranking_loss(x, y, sign, margin=1.7), x, zeros, ones)


@regression("forward_mode", 194706, bad="2.13.0 2.14.1 2.15.0", good="", error="C++ compile error")
def reductions_in_float16() -> list[str]:
    """Float16 reductions under jacfwd do not compile."""

    def product(x: Tensor) -> Tensor:
        return (((x.prod() + x) @ (x.sum() + x)) @ (x.sum() + x)).sum()

    x = (torch.arange(1, 10, dtype=torch.float16) / 10).reshape(3, 3)
    jacobian = torch.func.jacfwd(product)
    return differences("jacobian", jacobian(x), torch.compile(jacobian)(x), 1e-2)


@regression("forward_mode", 187284, bad="2.13.0", good="2.14.1 2.15.0")
def dual_tensor() -> list[str]:
    """A compiled function of a dual tensor drops the tangent."""
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.tensor([0.1, 0.2]), torch.ones(2))
        tangent = forward_ad.unpack_dual(torch.compile(lambda x: (x**2).sum())(x)).tangent
    return differences("tangent", torch.tensor(0.6), tangent) if tangent is not None else ["no tangent"]


@regression("control_flow", 195977, bad="2.13.0 2.14.1 2.15.0", good="", error="scan might be aliasing")
def scan_of_tanh() -> list[str]:
    """A scan whose carry is a tanh cannot be trained."""
    w = torch.randn(D, D, requires_grad=True)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        return h, h.clone()

    def trained(h: Tensor, xs: Tensor) -> Tensor:
        return scan(step, h, xs)[1].sum()

    torch.compile(trained, fullgraph=True)(torch.zeros(B, D), torch.randn(T, B, D)).backward()
    return []


class Flagged(nn.Module):
    def __init__(self, flag: bool) -> None:
        super().__init__()
        self.flag = flag


@regression("control_flow", 192905, bad="2.13.0 2.14.1 2.15.0", good="")
def region_within_a_region() -> list[str]:
    """A region is reused although a guard of the region within it does not hold."""

    @torch.compiler.nested_compile_region
    def inner(layer: Flagged, x: Tensor) -> Tensor:
        return x.sin() if layer.flag else x.cos()

    @torch.compiler.nested_compile_region
    def outer(layer: Flagged, x: Tensor) -> Tensor:
        return inner(layer, x) + 1.0

    layers = [Flagged(True), Flagged(False)] * 2
    return compiled_differs(
        lambda x: sum(outer(layer, x) for layer in layers), torch.randn(8), fullgraph=True
    )


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(total)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.saved_tensors[0].add_(gradient)
        return gradient.clone(), None


@regression(
    "autograd", 172956, bad="2.13.0 2.14.1 2.15.0", good="", error="Node add was invalid, but is output"
)
def write_in_a_backward() -> list[str]:
    """A backward that writes to a saved tensor, which the forward returns, does not compile."""

    def counted(x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.detach().clone()
        return Counted.apply(x, total).clone(), total

    y, total = torch.compile(counted, fullgraph=True)(torch.randn(8, requires_grad=True))
    before = total.clone()
    y.sum().backward()
    return differences("saved", before + 1, total)
