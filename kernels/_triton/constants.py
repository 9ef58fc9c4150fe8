"""Numbers that several kernels use: the conversion of exponents and logarithms to base 2, and a finite -infinity."""

import math

import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))  # exp(x) = exp2(x * LOG2E)
LN2 = tl.constexpr(math.log(2))  # log(x) = log2(x) * LN2
LOWEST = tl.constexpr(
    -1e30
)  # start of a running maximum; finite: a row with no visible key yet must not give nan
