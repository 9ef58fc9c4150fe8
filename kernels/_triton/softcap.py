"""Logit softcap of the attention kernels, forward and backward.

A logit is kept as its base-2 form u * a + b, where u is x = qk_scale * q.k after the softcap c:

    SOFTCAP   u                                               ds/dx ~       a               b
    "none"    x                                               1             scale log2e     0
    "exact"   tanh(x), x = s/c                                1 - u^2       c log2e         0
    "fast"    1/(1 + 2^x) = (1 - tanh(s/c))/2                 u - u^2       -2 c log2e      c log2e

"fast" costs an exp2, a reciprocal root and 3 multiply-adds. It has an absolute error of 1e-7 c where "exact" has a
relative one: negligible for c <= 64 next to the rounding of P to bf16 or fp16, but too large for fp32.

Source: softcap (Gemma 2, 2024).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels._triton.constants import LOG2E

LARGEST_FAST_CAP = 64.0


@triton.jit
def apply_softcap(x, SOFTCAP: tl.constexpr):
    """Return u of the table in the module docstring."""
    if SOFTCAP == "none":
        return x
    if SOFTCAP == "fast":
        root = tl.rsqrt(1.0 + tl.exp2(x))
        return root * root  # a division takes 4 more instructions, to handle huge divisors
    # 1 - e cancels for small x: use an odd polynomial (least squares on [0, 0.625], relative error 4.5e-9).
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    y = x * x
    c = -0.33333281 + y * (0.13331432 + y * (-0.053739157 + y * (0.020637861 - y * 0.0057040425)))
    return tl.where(tl.abs(x) < 0.625, x + x * y * c, tl.where(x < 0, -large, large))


@triton.jit
def softcap_bwd(grad, u, SOFTCAP: tl.constexpr):
    """Return grad times the derivative of the softcap, without its constant factor: that is in `grad_scale`."""
    if SOFTCAP == "none":
        return grad
    return grad * ((u if SOFTCAP == "fast" else 1.0) - u * u)


def softcap_params(scale: float, cap: float, dtype: torch.dtype) -> tuple[str, float, float, float, float]:
    """Return SOFTCAP, qk_scale, a, b of the table, and grad_scale, the factor from the backward sums to gradients.

    scale: of the logits; cap: c, 0 for none.
    """
    if cap == 0:
        return "none", 1.0, scale * LOG2E.value, 0.0, scale
    a = cap * LOG2E.value
    if dtype == torch.float32 or cap > LARGEST_FAST_CAP:
        return "exact", scale / cap, a, 0.0, scale
    return "fast", 2 * LOG2E.value * scale / cap, -2 * a, a, 4 * scale
