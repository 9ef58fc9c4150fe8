"""exp2 on two units of an SM at once, for the attention kernels in hopper.py.

The special-function unit computes 16 results per cycle, and a softcap takes three per logit. Here it computes every
second element; the others are polynomials on the FMA units, which are half idle: 2^x = 2^n p(x - n), with n = round(x)
and p of degree 4 (minimax of the relative error on [-0.5, 0.5]: 2.7e-6 in fp32, far below the rounding to 16 bits).
Source: FlashAttention-4 (2025).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def exp2(x):
    """Return exp2(x) for -126 < x < 127, and NaN for NaN. Other values are not computed."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 r, n, f, p, s;
        .reg .b32 i;
        ex2.approx.ftz.f32 $0, $2;
        add.rn.ftz.f32 r, $3, 0f4B400000;
        sub.rn.ftz.f32 n, r, 0f4B400000;
        sub.rn.ftz.f32 f, $3, n;
        mov.f32 p, 0f3C1CCBEB;
        fma.rn.ftz.f32 p, p, f, 0f3D650A21;
        fma.rn.ftz.f32 p, p, f, 0f3E76036D;
        fma.rn.ftz.f32 p, p, f, 0f3F31706E;
        fma.rn.ftz.f32 p, p, f, 0f3F7FFFF4;
        mov.b32 i, r;
        shl.b32 i, i, 23;
        add.s32 i, i, 0x3F800000;
        mov.b32 s, i;
        mul.rn.ftz.f32 $1, p, s;
        }""",
        "=&f,=&f,f,f", [x], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip
