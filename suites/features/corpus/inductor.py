"""Inductor's C++ code: values, indices and views that come out wrong, or do not compile."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from suites.features.corpus.case import compiled_differs, differences, regression


@regression("inductor", 193661, bad="2.11.0 2.12.0 2.13.0 2.14.1", good="2.15.0")
def argmax_of_mean() -> list[str]:
    """argmax of a mean over the last axis of a strided view returns the index of another layout."""
    x = torch.rand(2, 4, 4, 8).transpose(0, 1).contiguous().transpose(0, 1)[..., ::2]
    return differences("output", x.mean(-1).argmax(), torch.compile(lambda x: x.mean(-1).argmax())(x))


@regression("inductor", 187027, bad="2.11.0 2.12.0 2.13.0", good="2.14.1 2.15.0")
def flip_of_repeated() -> list[str]:
    """flip after repeat_interleave reads out of bounds with dynamic shapes."""
    return compiled_differs(
        lambda x: torch.repeat_interleave((x + 1).flatten(), 2).flip(0), torch.randn(8, 8), dynamic=True
    )


@regression("inductor", 187018, bad="2.11.0 2.12.0 2.13.0", good="2.14.1 2.15.0")
def negated_bytes() -> list[str]:
    """The negated absolute value of uint8 does not wrap around."""

    def total(x: Tensor) -> Tensor:
        y = -x.abs()
        return torch.cat([y, y]).sum()

    return compiled_differs(total, torch.tensor([200, 200], dtype=torch.uint8))


@regression("inductor", 195422, bad="2.11.0 2.12.0 2.13.0", good="2.14.1 2.15.0")
def update_through_dropout() -> list[str]:
    """An in-place update through the identity of dropout in evaluation does not reach the input."""

    def doubled(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.5, training=False)
        y += y
        return y

    return compiled_differs(doubled, torch.ones(2, 2))


@regression("inductor", 193876, bad="2.11.0 2.12.0 2.13.0 2.14.1", good="2.15.0", error="'Node'")
def two_constant_cumsums() -> list[str]:
    """Of two functions with cumsum of a constant, the second one does not compile in the same process."""

    def offsets(size: int):
        return lambda: torch.full((2,), size, dtype=torch.int64).cumsum(0)

    return [line for n in (1, 2) for line in differences("output", offsets(n)(), torch.compile(offsets(n))())]


@regression("inductor", 188084, bad="2.11.0 2.12.0 2.13.0", good="2.14.1 2.15.0")
def gather_gradient_under_vmap() -> list[str]:
    """The vmapped gradient of an index_select is wrong: index_put writes into an expanded view."""

    def picked(x: Tensor) -> Tensor:
        stacked = torch.stack([x[..., n] for n in range(4)], dim=-1)
        return (torch.index_select(stacked, -1, torch.tensor([0, 2])) * torch.tensor([1.0, -1.0])).sum()

    gradients = torch.func.vmap(torch.func.grad_and_value(picked))
    x = torch.randn(4, 4)
    return differences("output", gradients(x), torch.compile(gradients)(x))


@regression("inductor", 198131, bad="2.11.0 2.12.0 2.13.0 2.14.1", good="2.15.0")
def copy_before_update() -> list[str]:
    """A copy into another input sees an update of its source that comes after it."""

    def copied(target: Tensor, source: Tensor) -> Tensor:
        target[0:, :] = source[0:, :]
        source.add_(1)
        return source

    return compiled_differs(copied, torch.zeros(3, 4), torch.arange(12.0).view(3, 4))


@regression("inductor", 198270, bad="2.11.0 2.12.0 2.13.0 2.14.1", good="2.15.0")
def flip_after_index_put() -> list[str]:
    """An in-place sum with the flipped tensor after an index_put reads rows that it has overwritten."""

    def folded(x: Tensor) -> Tensor:
        x.index_put_((torch.arange(x.size(0)),), x * 2.0)
        x.add_(x.flip(0))
        return x

    return compiled_differs(folded, torch.rand(4, 8))


@regression("inductor", 198033, bad="2.11.0 2.12.0 2.13.0 2.14.1", good="2.15.0")
def foreach_sum_with_flip() -> list[str]:
    """An in-place foreach sum with the flipped tensor reads rows that it has overwritten."""
    from suites.support.instruments import foreach_add_  # some of the instruments do not import on torch 2.8

    def folded(x: Tensor) -> Tensor:
        foreach_add_([x], [x.flip(0)])
        return x

    return compiled_differs(folded, torch.rand(8, 8))


@regression("inductor", 183082, bad="2.11.0 2.12.0", good="2.13.0 2.14.1 2.15.0")
def argmax_of_transposed() -> list[str]:
    """argmax of a transposed intermediate returns the index of the layout before."""

    def largest(x: Tensor) -> Tensor:
        y = x * 1.0
        y.sin_()
        return y.t().argmax()

    return compiled_differs(largest, torch.randn(8, 4))


@regression("inductor", 183370, bad="2.11.0 2.12.0", good="2.13.0 2.14.1 2.15.0", error="unexpected group")
def norm_after_flatten() -> list[str]:
    """A batch norm of a flattened instance norm does not compile."""
    first, last = nn.InstanceNorm2d(7), nn.BatchNorm1d(63).eval()

    def normed(x: Tensor) -> Tensor:
        return last(F.relu(first(x)).flatten(1).clamp(max=10).exp())

    return compiled_differs(normed, torch.randn(8, 7, 3, 3))


@regression("inductor", 178952, bad="2.11.0", good="2.12.0 2.13.0 2.14.1 2.15.0", error="n=copy_")
def index_fill_of_expanded() -> list[str]:
    """index_fill of an expanded tensor does not compile."""

    def filled(x: Tensor, index: Tensor) -> Tensor:
        return torch.index_fill(x.expand(4, 3), 0, index, 5.0)

    return compiled_differs(filled, torch.randn(1, 3), torch.tensor([0, 2]))


@regression(
    "inductor",
    188223,
    bad="2.11.0 2.12.0 2.13.0",
    good="2.14.1 2.15.0",
    error="Not all inputs to pattern found",
)
def take_at_random() -> list[str]:
    """take at the indices of a randperm does not compile."""
    x = torch.rand(4, 32)
    found = torch.compile(lambda x: torch.take(x.sigmoid(), torch.randperm(10)))(x)
    return differences("sorted output", *(t.sort().values for t in (x[0, :10].sigmoid(), found)))


@regression("inductor", 181136, bad="2.11.0 2.12.0", good="2.13.0 2.14.1 2.15.0")
def order_of_draws() -> list[str]:
    """Random tensors are drawn in another order than in eager, also with fallback_random."""

    def drawn(x: Tensor) -> Tensor:
        noise, images, weights = torch.randn(2, 4, 4, 4), torch.randn(2, 3, 4, 4), torch.randn(4, 3, 3, 3)
        return x + noise + F.conv2d(images, weights, padding=1)

    return compiled_differs(drawn, torch.zeros(()), tolerance=1e-4, options={"fallback_random": True})


@regression("inductor", 191449, bad="2.11.0 2.12.0 2.13.0 2.14.1", good="2.15.0")
def resize_of_whole_slice() -> list[str]:
    """resize_ of a slice of the whole tensor resizes the tensor itself."""

    def shortened(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        z = y[:]
        z.resize_(1)
        return y, z

    shapes = [tuple(t.shape) for t in torch.compile(shortened)(torch.ones(12))]
    return [] if shapes == [(12,), (1,)] else [f"shapes {shapes}, expected [(12,), (1,)]"]


@regression("inductor", None, bad="2.11.0 2.12.0 2.13.0", good="2.14.1 2.15.0", error="expected size 2==1")
def slice_of_constant() -> list[str]:
    """A slice of a constant tensor that is written after a graph break has the size of the whole constant."""

    def written() -> Tensor:
        x = torch.tensor([1, 5])[0:1]
        y = x.squeeze()
        x[0] = 0
        if x[0] < 9:
            x[0] = 2
        return y

    return differences("output", torch.tensor(2), torch.compile(written)())


@torch.library.custom_op("corpus::reverse_into", mutates_args=("target",))
def reverse_into(source: Tensor, target: Tensor) -> None:
    """Write the entries of source into target in reverse order, one by one."""
    for n in range(len(source)):
        target[len(source) - 1 - n] = source[n]


@regression("lowering", 198031, bad="2.11.0 2.12.0 2.13.0 2.14.1", good="2.15.0")
def op_on_a_clone() -> list[str]:
    """A custom op that reads a clone of the tensor that it writes gets that tensor twice."""

    def reversed_(x: Tensor) -> Tensor:
        reverse_into(x.clone(), x)
        return x * 2

    return compiled_differs(reversed_, torch.arange(8.0))
