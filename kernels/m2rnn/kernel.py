"""m2rnn in Triton, forward and backward.

The tanh leaves no parallel form over tokens. But each row h[k,:] of the state evolves independently,
tanh(h[k,:] W + k_t[k] v_t), so the K rows of a head are K independent recurrences: one program loops over
all tokens of a few rows, with them and W in registers. Its step is a chain of dependent instructions, and the time
is T times the latency of that chain. Programs therefore have few rows, so that all run at once and none waits for
another's instructions. The inputs of the next AHEAD tokens are prefetched while one is processed.

Forward: the loop writes the state after every token for the backward; y_t = h_t^T q_t, a sum over all rows, is a
second kernel over tokens.
Backward: the loop runs from the last token to the first. From the stored state before a token it recomputes the
candidate, and it carries the gradient of the state. Sums over one row are done in the loop (q, k), or over its
tokens (W); sums over the rows of several programs (v, f, W) are written as partial sums, which torch adds in a
fixed order. No atomics: both directions are bitwise deterministic.

Bytes at B2 T4096 H8 K64 V16: the states are B T H K V fp32, 268 MB: written and read once in the forward
(0.13 ms at 4.22 TB/s), read once in the backward, whose partial sums for v are 134 MB each way. Bandwidth is not the
limit: the time of a loop is T times the latency of a step.

B batch, T tokens, H heads, K key dim, V value dim (the state is K by V), R state rows per program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._triton.constants import LOG2E

AHEAD = 4
UNROLL = tl.constexpr(4)  # values rotate through tuples of AHEAD entries; free if unrolled as often


@triton.jit
def _append(items, item):
    return items + (item,)  # noqa: RUF005 (Triton has no starred items)


@triton.jit
def _tanh(x):
    """tanh(x) to a few ulp: Lambert's continued fraction near 0, where 1 - exp(-2|x|) cancels."""
    s, size = x * x, tl.abs(x)
    e = tl.exp2(size * (-2 * LOG2E))
    far = tl.where(x < 0, e - 1, 1 - e)
    near = x * (135135 + s * (17325 + s * (378 + s)))
    below = tl.where(size < 0.55, 135135 + s * (62370 + s * (3150 + s * 28)), 1 + e)
    return tl.where(size < 0.55, near, far) / below


@triton.jit
def _times(rows, matrix):
    """Multiply (R,V) by (V,V) -> (R,V) in fp32. Too small for tensor cores; most of the sum is within threads."""
    return tl.sum(rows[:, :, None] * matrix[None, :, :], 1)


@triton.jit
def _token(k_ptr, v_ptr, f_ptr, doc_ids_ptr, t, token, h, H, K, V, r, u, exists):
    """Load key rows, value and forget gate of a token, and whether it continues the previous token's document.

    `token` is its index in the whole batch. Both ids are loaded, not carried from step to step: Triton's compiler,
    unlike its interpreter, does not carry a variable that enters a loop as the same value that the body assigns to
    it (last = ids[0] before and in the loop), and no document would ever be reset.
    """
    n = token * H + h
    doc = tl.load(doc_ids_ptr + token, mask=exists, other=0)
    before = tl.load(doc_ids_ptr + token - 1, mask=exists & (t > 0), other=0)
    key = tl.load(k_ptr + n * K + r, mask=exists & (r < K), other=0)
    value = tl.load(v_ptr + n * V + u, mask=exists & (u < V), other=0)
    return key, value, tl.load(f_ptr + n, mask=exists, other=0), (doc == before) | (t <= 0)


@triton.jit
def _forward_walk(
    k_ptr, v_ptr, W_ptr, f_ptr, doc_ids_ptr, h0_ptr, states_ptr, final_ptr, T, K, V,
    ACC: tl.constexpr, R: tl.constexpr, VP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    h, H, b = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    r, u = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, VP)
    at = r[:, None] * V + u[None, :]
    inside = (r < K)[:, None] & (u < V)[None, :]
    square = (u < V)[:, None] & (u < V)[None, :]
    W = tl.load(W_ptr + h * V * V + u[:, None] * V + u[None, :], mask=square, other=0).to(ACC)
    state = tl.load(h0_ptr + (b * H + h) * K * V + at, mask=inside, other=0).to(ACC)

    keys, values, forgets, continues = (), (), (), ()
    for t in tl.static_range(AHEAD):
        key, value, forget, same = _token(
            k_ptr, v_ptr, f_ptr, doc_ids_ptr, t, b * T + t, h, H, K, V, r, u, t < T
        )
        keys, values = _append(keys, key), _append(values, value)
        forgets, continues = _append(forgets, forget), _append(continues, same)

    for t in tl.range(0, T, loop_unroll_factor=UNROLL):
        later = t + AHEAD
        key, value, forget, same = _token(
            k_ptr, v_ptr, f_ptr, doc_ids_ptr, later, b * T + later, h, H, K, V, r, u, later < T
        )
        before = tl.where(continues[0], state, 0.0)
        new = _tanh(_times(before, W) + keys[0].to(ACC)[:, None] * values[0].to(ACC)[None, :])
        share = forgets[0].to(ACC)
        state = share * before + (1 - share) * new
        tl.store(states_ptr + ((b * T + t) * H + h) * K * V + at, state, mask=inside)
        keys, values = _append(keys[1:], key), _append(values[1:], value)
        forgets, continues = _append(forgets[1:], forget), _append(continues[1:], same)
    tl.store(final_ptr + (b * H + h) * K * V + at, state, mask=inside)


@triton.jit
def _read_kernel(q_ptr, states_ptr, y_ptr, K, V, ACC: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    r, u = tl.arange(0, KP), tl.arange(0, VP)
    inside = (r < K)[:, None] & (u < V)[None, :]
    state = tl.load(states_ptr + n * K * V + r[:, None] * V + u[None, :], mask=inside, other=0)
    query = tl.load(q_ptr + n * K + r, mask=r < K, other=0).to(ACC)
    out = tl.sum(query[:, None] * state, 0)
    tl.store(y_ptr + n * V + u, out.to(y_ptr.dtype.element_ty), mask=u < V)


@triton.jit
def _backward_token(
    q_ptr, k_ptr, v_ptr, f_ptr, doc_ids_ptr, h0_ptr, states_ptr, dy_ptr, t, b, h, H, T, K, V, r, u, at, inside
):
    """Load the inputs of the backward step of token t: as _token, then query rows, gradient of y, and the state
    before the token (ignoring documents)."""
    exists = t >= 0
    token = b * T + t
    key, value, forget, same = _token(k_ptr, v_ptr, f_ptr, doc_ids_ptr, t, token, h, H, K, V, r, u, exists)
    n = token * H + h
    query = tl.load(q_ptr + n * K + r, mask=exists & (r < K), other=0)
    dout = tl.load(dy_ptr + n * V + u, mask=exists & (u < V), other=0)
    stored = tl.load(states_ptr + (n - H) * K * V + at, mask=inside & (t > 0), other=0)
    first = tl.load(h0_ptr + (b * H + h) * K * V + at, mask=inside & (t == 0), other=0).to(stored.dtype)
    return key, value, forget, same, query, dout, stored + first


@triton.jit
def _backward_walk(
    q_ptr, k_ptr, v_ptr, W_ptr, f_ptr, doc_ids_ptr, h0_ptr, states_ptr, dy_ptr, dfinal_ptr, dq_ptr, dk_ptr,
    dv_ptr, dW_ptr, df_ptr, dh0_ptr, T, K, V,
    ACC: tl.constexpr, R: tl.constexpr, VP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    block, blocks = tl.program_id(0), tl.num_programs(0)
    h, H, b = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    r, u = block * R + tl.arange(0, R), tl.arange(0, VP)
    at = r[:, None] * V + u[None, :]
    inside = (r < K)[:, None] & (u < V)[None, :]
    square = (u < V)[:, None] & (u < V)[None, :]
    transposed = tl.load(W_ptr + h * V * V + u[:, None] + u[None, :] * V, mask=square, other=0).to(ACC)
    W = tl.load(W_ptr + h * V * V + u[:, None] * V + u[None, :], mask=square, other=0).to(ACC)
    carry = tl.load(dfinal_ptr + (b * H + h) * K * V + at, mask=inside, other=0).to(ACC)
    dW_sum = tl.zeros((VP, VP), ACC)

    queue = ()
    for i in tl.static_range(AHEAD):
        queue = queue + _backward_token(
            q_ptr, k_ptr, v_ptr, f_ptr, doc_ids_ptr, h0_ptr, states_ptr, dy_ptr, T - 1 - i, b, h, H, T, K,
            V, r, u, at, inside,
        )  # fmt: skip

    for i in tl.range(0, T, loop_unroll_factor=UNROLL):
        key, value, forget, same, query, dout, before = queue[:7]
        queue = queue[7:] + _backward_token(
            q_ptr, k_ptr, v_ptr, f_ptr, doc_ids_ptr, h0_ptr, states_ptr, dy_ptr, T - 1 - i - AHEAD, b, h, H,
            T, K, V, r, u, at, inside,
        )  # fmt: skip
        n = (b * T + T - 1 - i) * H + h
        key, value, query, dout, share = (
            key.to(ACC), value.to(ACC), query.to(ACC), dout.to(ACC), forget.to(ACC),
        )  # fmt: skip
        before = tl.where(same, before, 0.0)
        new = _tanh(_times(before, W) + key[:, None] * value[None, :])
        state = share * before + (1 - share) * new

        dstate = carry + query[:, None] * dout[None, :]
        dpre = (1 - share) * (1 - new * new) * dstate
        carry = share * dstate + _times(dpre, transposed)
        carry = tl.where(same, carry, 0.0)

        row_dq, row_dk = tl.sum(state * dout[None, :], 1), tl.sum(dpre * value[None, :], 1)
        tl.store(dq_ptr + n * K + r, row_dq.to(dq_ptr.dtype.element_ty), mask=r < K)
        tl.store(dk_ptr + n * K + r, row_dk.to(dk_ptr.dtype.element_ty), mask=r < K)
        tl.store(dv_ptr + (n * blocks + block) * V + u, tl.sum(key[:, None] * dpre, 0), mask=u < V)
        tl.store(df_ptr + n * blocks + block, tl.sum(tl.sum(dstate * (before - new), 0), 0))
        dW_sum += tl.sum(before[:, :, None] * dpre[:, None, :], 0)

    tl.store(dh0_ptr + (b * H + h) * K * V + at, carry.to(dh0_ptr.dtype.element_ty), mask=inside)
    sum_at = dW_ptr + ((b * blocks + block) * H + h) * V * V + u[:, None] * V + u[None, :]
    tl.store(sum_at, dW_sum, mask=square)


def _tile(v: Tensor, K: int) -> dict[str, object]:
    """Launch options of a loop kernel: R V^2 is 512, so a step has 16 products per thread."""
    VP = triton.next_power_of_2(v.shape[3])
    R = min(max(1, 512 // VP**2), triton.next_power_of_2(K))
    acc = tl.float64 if v.dtype == torch.float64 else tl.float32
    return {"ACC": acc, "R": R, "VP": VP, "AHEAD": AHEAD, "num_warps": min(16, max(1, R * VP**2 // 512))}


def m2rnn_fwd_kernel(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, doc_ids: Tensor, h0: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement bumpgate::m2rnn_fwd: q, k (B,T,H,K), v (B,T,H,V), W (H,V,V), f (B,T,H),
    doc_ids (B,T) int32, h0 (B,H,K,V) -> y (B,T,H,V) in v.dtype, final state (B,H,K,V) and the state after
    every token (B,T,H,K,V) in fp32 (fp64 for fp64 v)."""
    (B, T, H, K), V = k.shape, v.shape[3]
    wide = torch.promote_types(v.dtype, torch.float32)
    y, final = v.new_empty(v.shape), v.new_empty((B, H, K, V), dtype=wide)
    states = v.new_empty((B, T, H, K, V), dtype=wide)
    tile = _tile(v, K)
    _forward_walk[triton.cdiv(K, tile["R"]), H, B](
        k.contiguous(), v.contiguous(), W.contiguous(), f.contiguous(), doc_ids.contiguous(), h0.contiguous(),
        states, final, T, K, V, **tile,
    )  # fmt: skip
    KP, VP = triton.next_power_of_2(K), tile["VP"]
    _read_kernel[(B * T * H,)](
        q.contiguous(), states, y, K, V,
        ACC=tile["ACC"], KP=KP, VP=VP, num_warps=min(8, max(1, KP * VP // 1024)),
    )  # fmt: skip
    return y, final, states


def m2rnn_bwd_kernel(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, doc_ids: Tensor, h0: Tensor,
    states: Tensor, dy: Tensor, dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Implement bumpgate::m2rnn_bwd: gradients of q, k, v, W, f, h0 from the gradients of y and the
    final state; `states` are the forward's."""
    (B, T, H, K), V = k.shape, v.shape[3]
    tile = _tile(v, K)
    blocks = triton.cdiv(K, tile["R"])
    dq, dk, dh0 = (t.new_empty(t.shape) for t in (q, k, h0))
    dv, df = states.new_empty((B, T, H, blocks, V)), states.new_empty((B, T, H, blocks))
    dW = states.new_empty((B, blocks, H, V, V))
    inputs = (t.contiguous() for t in (q, k, v, W, f, doc_ids, h0, states, dy, dfinal))
    _backward_walk[blocks, H, B](*inputs, dq, dk, dv, dW, df, dh0, T, K, V, **tile)
    sums = ((v, dv.sum(3)), (W, dW.sum((0, 1))), (f, df.sum(3)))
    return dq, dk, *(t.new_empty(t.shape).copy_(total) for t, total in sums), dh0
