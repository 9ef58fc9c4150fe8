"""Held-out cases: what Inductor lowers, casts, fuses and lays out wrongly."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from suites.features.corpus.case import compiled_differs, differences, regression

# B batch, H heads, T tokens, P head dim, D model dim.
B, H, T, P = 1, 4, 64, 16
D = H * P


@regression(
    "attention",
    157612,
    bad="2.8.0 2.9.0 2.10.0 2.11.0 2.12.0",
    good="2.13.0 2.14.1 2.15.0",
    error="query, key, value are the same buffer",
)
def views_of_one_projection() -> list[str]:
    """flex_attention of a query and a key that are views of one projection does not compile."""
    qk, v = nn.Linear(D, 2 * D), nn.Linear(D, D)

    def attended(x: Tensor) -> Tensor:
        heads = (t.view(B, T, H, P).transpose(1, 2) for t in (*qk(x).chunk(2, dim=-1), v(x)))
        return flex_attention(*heads, score_mod=lambda score, b, h, i, j: score)

    with torch.no_grad():
        return compiled_differs(attended, torch.randn(B, T, D), tolerance=1e-4)


@regression("inductor", 185337, bad="2.8.0 2.11.0 2.12.0", good="2.13.0 2.14.1 2.15.0")
def half_round_trip() -> list[str]:
    """emulate_precision_casts drops an explicit cast to float16 and back."""

    def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.half().float()
        return y, y.sum(1)

    x = torch.arange(20.0).reshape(5, 4).t() / 7
    return compiled_differs(rounded, x, tolerance=1e-6, options={"emulate_precision_casts": True})


@regression("inductor", 182012, bad="2.8.0 2.11.0 2.12.0", good="2.13.0 2.14.1 2.15.0")
def diagonal_scatter_gradient() -> list[str]:
    """The gradient of the input of diagonal_scatter is zero everywhere."""
    operands = torch.randn(8, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    return compiled_differs(lambda x, diagonal: torch.diagonal_scatter(x, diagonal).sum(), *operands)


@regression("inductor", 189518, bad="2.8.0 2.11.0 2.12.0 2.13.0", good="2.14.1 2.15.0")
def cumsum_dtype() -> list[str]:
    """cumsum of a constant ignores its dtype argument."""

    def positions() -> Tensor:
        return torch.ones((2, 4), dtype=torch.bool).cumsum(1, dtype=torch.bfloat16)

    dtype = torch.compile(positions)().dtype
    return [] if dtype is torch.bfloat16 else [f"{dtype}, expected bfloat16"]


@regression("inductor", 184893, bad="2.8.0 2.11.0 2.12.0 2.13.0", good="2.14.1 2.15.0")
def min_of_booleans() -> list[str]:
    """The index of the minimum of booleans is that of a maximum."""
    mask = torch.arange(8).ge(4).repeat(4, 1)
    return differences("index", mask.min(1).indices, torch.compile(lambda x: x.min(1).indices)(mask))


@regression(
    "inductor",
    198343,
    bad="2.12.0 2.13.0 2.14.1 2.15.0",
    good="2.8.0 2.11.0",
    error="Cannot view a tensor with shape",
)
def view_after_lerp() -> list[str]:
    """A view of the result of lerp_ with a weight of 0.75 does not compile: it has the strides of the end."""

    def averaged(x: Tensor, end: Tensor) -> Tensor:
        x.lerp_(end, 0.75)
        return x.view(-1)

    return compiled_differs(averaged, torch.rand(2, 4, 4), torch.rand(2, 4, 4).transpose(-1, -2))


@regression(
    "inductor",
    159492,
    bad="2.8.0",
    good="2.9.0 2.10.0 2.11.0 2.12.0 2.13.0 2.14.1 2.15.0",
    error="self and mat2 must have the same dtype",
)
def float32_sum_after_linear() -> list[str]:
    """The sum of a bfloat16 linear layer and a float32 tensor is fused into a product of two dtypes."""
    layer, bias = nn.Linear(64, 64, bias=False).bfloat16(), torch.randn(32, 64)
    with torch.no_grad():
        return compiled_differs(lambda x: layer(x) + bias, torch.randn(32, 64).bfloat16(), tolerance=0.2)


@regression("inductor", 177630, bad="2.8.0 2.11.0", good="2.12.0 2.13.0 2.14.1 2.15.0")
def product_of_two_dtypes() -> list[str]:
    """A batched product of float16 and float32 compiles, where eager raises RuntimeError."""
    compiled = torch.compile(torch.matmul)
    try:
        compiled(torch.randn(2, 3, 4).half(), torch.randn(2, 4, 5))
    except RuntimeError as error:
        if "expected scalar type" not in str(error):
            raise
        return []
    return ["no error, expected RuntimeError"]


@regression(
    "inductor",
    179135,
    bad="2.10.0 2.11.0",
    good="2.8.0 2.9.0 2.12.0 2.13.0 2.14.1 2.15.0",
    error="C++ compile error",
)
def shifted_window_mask() -> list[str]:
    """The C++ code of an attention mask for shifted windows does not compile."""
    edges = [slice(0, -4), slice(-4, -2), slice(-2, None)]

    def masked(scores: Tensor) -> Tensor:
        regions = scores.new_zeros(12, 12)
        for n, (rows, columns) in enumerate((rows, columns) for rows in edges for columns in edges):
            regions[rows, columns] = n
        windows = regions.view(3, 4, 3, 4).permute(0, 2, 1, 3).reshape(9, 16)
        other = windows.unsqueeze(1) - windows.unsqueeze(2)
        return scores + other.masked_fill(other != 0, -100.0).masked_fill(other == 0, 0.0)

    return compiled_differs(masked, torch.randn(9, 16, 16))


@regression("inductor", None, bad="2.8.0 2.11.0 2.12.0", good="2.13.0 2.14.1 2.15.0")
def float8_overflow() -> list[str]:
    """Values above the range of float8 are cast to another value than in eager."""
    return compiled_differs(lambda x: x.to(torch.float8_e4m3fn).float(), torch.tensor([1.0, 500.0, -600.0]))


@regression("inductor", None, bad="2.14.1 2.15.0", good="2.8.0 2.11.0 2.12.0 2.13.0")
def set_after_sum() -> list[str]:
    """x + 0 returns the data that a later set_ gives to x."""

    def replaced(x: Tensor, other: Tensor) -> Tensor:
        y = x + 0
        with torch.no_grad():
            x.set_(other)
        return y

    return differences("output", torch.zeros(4), torch.compile(replaced)(torch.zeros(4), torch.ones(4)))
