"""Triton kernels of the mamba3_siso forward, and the tile functions that the backward shares with them.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles, C chunks, L places of a chunk.
A chunk holds CHUNK <= L tokens; the other places are padding, which neither decays nor adds.
"""

from __future__ import annotations

import triton
import triton.language as tl

TAU = tl.constexpr(6.283185307179586)
LOG2E = tl.constexpr(1.4426950408889634)
TWO_TO_32 = tl.constexpr(4294967296.0)
COEFFICIENTS = tl.constexpr(4)  # (B,H,C,4,L): running log2 decay, what its rounding to fp32 left, gamma, scale
# fp32 operands keep all their bits; 16-bit operands take the tensor cores and do not look at this.
PRECISION = tl.constexpr("ieee")


@triton.jit
def begins(doc_ids, b, t, T):
    """Whether the document changes at token t. Token 0 continues whatever the given state holds."""
    asked = (t > 0) & (t < T)
    at = doc_ids + b.to(tl.int64) * T + t
    return tl.load(at, mask=asked, other=0) != tl.load(at - 1, mask=asked, other=0)


@triton.jit
def places(c, CHUNK, T, L: tl.constexpr):
    """Which places of chunk c hold a token (L,)."""
    i = tl.arange(0, L)
    return (i < CHUNK) & (c * CHUNK + i < T)


@triton.jit
def offset(strides, b, t, h):
    """Where (b, t, h) lies in a (B,T,H,...) tensor."""
    return b.to(tl.int64) * strides[0] + t.to(tl.int64) * strides[1] + h * strides[2]


@triton.jit
def load_rows(base, stride, live, n, N):
    """Rows base + i stride, columns n < N, in fp32; zero where there is no token."""
    i = tl.arange(0, live.shape[0])
    mask = live[:, None] & (n < N)[None, :]
    return tl.load(base + i[:, None] * stride + n[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def pairs_of(x):
    """(..., M) -> its even and its odd columns."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def rotate(x, cos, sin):
    """Turns the adjacent pairs of x (L,M) by angles (L,M/2)."""
    even, odd = pairs_of(x)
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (x.shape[0], x.shape[1]))


@triton.jit
def wedge(x, dx):
    """Gradient of the angles (...,M/2) that turn x, from x and its gradient, both (...,M)."""
    even, odd = pairs_of(x)
    deven, dodd = pairs_of(dx)
    return even * dodd - odd * deven


@triton.jit
def cos_sin(turns):
    """Cosine and sine of an angle in [-1/2, 1/2] turns, each off by less than 2.5e-7.

    Minimax polynomials of the half angle, doubled; no table, no slow path for large arguments.
    """
    s = turns * turns
    c = 2.550042152404785 + s * (-0.5980979800224304 + s * 0.07730873674154282)
    half_sin = turns * (3.141592502593994 + s * (-5.167707920074463 + s * c))
    c = -1.3352121114730835 + s * (0.23493756353855133 - s * 0.024396715685725212)
    half_cos = 1.0 + s * (-4.934802055358887 + s * (4.058709144592285 + s * c))
    # Either form of the cosine is exact where the other one's error is doubled most.
    cos = tl.where(s > 0.0625, 2 * half_cos * half_cos - 1, 1 - 2 * half_sin * half_sin)
    return cos, 2 * half_sin * half_cos


@triton.jit
def tanh(x):
    """The quotient cancels for small x: there a minimax polynomial, off by one unit in the last place."""
    e = tl.exp2(-2 * LOG2E * tl.abs(x))
    large = (1 - e) / (1 + e)
    s = x * x
    c = -0.05378813296556473 + s * (0.020809803158044815 - s * 0.005910614039748907)
    small = x + x * s * (-0.33333301544189453 + s * (0.13331978023052216 + s * c))
    return tl.where(tl.abs(x) < 0.6, small, tl.where(x < 0, -large, large))


@triton.jit
def restart(begun, total, begins_here, value):
    """Scan operator on (flag, sum): a running sum that starts anew wherever the flag is set."""
    return begun | begins_here, value + tl.where(begins_here != 0, total - total, total)


@triton.jit
def load_decay(coefficients, chunk, segment, L: tl.constexpr):
    """Of one chunk: log2 decay and its low part (L,), both at the last place, segments (L,), the last one."""
    i = tl.arange(0, L)
    at = coefficients + chunk * (COEFFICIENTS * L)
    high, low = tl.load(at + i), tl.load(at + L + i)
    high_end, low_end = tl.load(at + L - 1), tl.load(at + 2 * L - 1)
    return high, low, high_end, low_end, tl.load(segment + i), tl.load(segment + L - 1)


@triton.jit
def since_entry(high, low, segments):
    """Decay of the state that enters the chunk, up to and including a place; 0 once a document has begun."""
    return tl.where(segments == 0, tl.exp2(high + low), 0.0)


@triton.jit
def until_exit(high, low, high_end, low_end, segments, last_segment):
    """Decay from after a place to the end of the chunk; 0 if a document begins in between."""
    return tl.where(segments == last_segment, tl.exp2((high_end - high) + (low_end - low)), 0.0)


@triton.jit
def prepare_kernel(
    adt, dt, trap, doc_ids, coefficients, segments, T, H, C, CHUNK, L: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One program per (HEADS heads, chunk, row): the per-token scalars, transposed to (B,H,C,4,L).

    Decays are differences of running sums. In fp64, restarted with each document and kept as two fp32, such a
    difference is as exact as a sum of its own terms, and no bit of it hangs on another document.
    """
    heads, c, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, h = tl.arange(0, L), heads * HEADS + tl.arange(0, HEADS)
    t = c * CHUNK + i
    live = places(c, CHUNK, T, L)
    start = begins(doc_ids, b, t, T) & live
    wanted = live[:, None] & (h < H)[None, :]
    followed = wanted & ((t < T - 1) & ~begins(doc_ids, b, t + 1, T))[:, None]
    at = (b.to(tl.int64) * T + t[:, None]) * H + h[None, :]
    # A factor of 2^-256 is zero in fp32: past it nothing changes but the size of the sums.
    log_decay = tl.load(adt + at, mask=wanted, other=0.0).to(tl.float64) * LOG2E
    log_decay = tl.where(log_decay > -256.0, log_decay, -256.0)
    own, after = tl.load(dt + at, mask=wanted, other=0.0), tl.load(dt + at + H, mask=followed, other=0.0)
    trap_own = tl.load(trap + at, mask=wanted, other=0.0).to(tl.float64)
    trap_after = tl.load(trap + at + H, mask=followed, other=0.0).to(tl.float64)
    gamma = own.to(tl.float64) / (1 + tl.exp(-trap_own))
    scale = gamma + after.to(tl.float64) / (1 + tl.exp(trap_after))

    begun, total = tl.associative_scan(((start[:, None] & wanted).to(tl.int32), log_decay), 0, restart)
    high = total.to(tl.float32)
    at = coefficients + ((b.to(tl.int64) * H + h[None, :]) * C + c) * (COEFFICIENTS * L) + i[:, None]
    stored = (i >= 0)[:, None] & (h < H)[None, :]
    tl.store(at, high, mask=stored)
    tl.store(at + L, (total - high.to(tl.float64)).to(tl.float32), mask=stored)
    tl.store(at + 2 * L, gamma.to(tl.float32), mask=stored)
    tl.store(at + 3 * L, scale.to(tl.float32), mask=stored)
    if heads == 0:
        tl.store(segments + (b * C + c) * L + i, tl.cumsum(start.to(tl.int32), 0))


@triton.jit
def turn_kernel(
    angles, angle_strides, dt, doc_ids, theta, turns, theta_final, T, H,
    R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program per (head, row), along T: the running angle of each token in turns (B,H,T,R), in [-1/2, 1/2].

    Summed as 32-bit fixed point, where a whole turn wraps around of itself: the sum is exact, in any order.
    """
    h, b = tl.program_id(0), tl.program_id(1)
    i, r = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    row = b.to(tl.int64) * H + h
    given = tl.load(theta + row * R + r, mask=r < R, other=0.0).to(tl.float64) / TAU
    carry = tl.floor((given - tl.floor(given)) * TWO_TO_32 + 0.5).to(tl.int64).to(tl.int32)
    for t0 in range(0, T, BLOCK_T):
        t = t0 + i
        live = t < T
        rate = tl.load(dt + (b.to(tl.int64) * T + t) * H + h, mask=live, other=0.0).to(tl.float32)
        x = load_rows(angles + offset(angle_strides, b, t0 + i * 0, h)[:, None], 0, live, r, R)
        x = tanh(load_rows(angles + offset(angle_strides, b, tl.max(i) * 0 + t0, h), angle_strides[1], live, r, R))
        ticks = tl.floor((x * (rate * 0.5)[:, None]).to(tl.float64) * TWO_TO_32 + 0.5).to(tl.int64).to(tl.int32)
