"""mamba3_siso in Triton (launch functions; placeholder docstring)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.mamba3_siso.kernel_forward import prepare_kernel, scan_kernel, state_kernel, turn_kernel


def _strides(t):
    return t.stride(0), tl.constexpr(t.stride(1)), tl.constexpr(t.stride(2))


def _rows(t: Tensor) -> Tensor:
    """Any layout goes whose last dim is contiguous; other inputs are copied."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _states(inputs, theta, h, k_prev, v_prev, chunk_size):
    q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids = inputs
    B, T, H, P = v.shape
    G, N = q.shape[2:]
    R = angles.shape[3]
    CHUNK = min(chunk_size, 64 if v.element_size() == 2 else 32)
    L = max(16, triton.next_power_of_2(CHUNK))
    C = triton.cdiv(T, CHUNK)
    coef = torch.empty(B, H, C, 4, L, device=v.device, dtype=torch.float32)
    seg = torch.empty(B, C, 2, L, device=v.device, dtype=torch.int32)
    prepare_kernel[(triton.cdiv(H, 16), C, B)](adt, dt, trap, doc_ids, coef, seg, T, C, H=H, CHUNK=CHUNK, L=L, HEADS=16)
    turns = torch.empty(B, H, T, 2, R, device=v.device, dtype=torch.float16 if v.dtype == torch.bfloat16 else torch.float32)
    theta_f = torch.empty(B, H, R, device=v.device, dtype=torch.float32)
    turn_kernel[(H, B)](angles, _strides(angles), dt, doc_ids, theta, turns, theta_f, T, H=H, R=R, BLOCK_R=triton.next_power_of_2(max(R, 1)), BLOCK_T=128)
    BP, BN = max(16, triton.next_power_of_2(P)), max(16, triton.next_power_of_2(N))
    ent = torch.empty(B, H, C, P, N, device=v.device, dtype=v.dtype)
    fin = [torch.empty(t.shape, device=v.device, dtype=torch.float32) for t in (h, k_prev, v_prev)]
    state_kernel[(H, triton.cdiv(N, BN), B)](
        k, _strides(k), v, _strides(v), k_bias, dt, trap, turns, coef, seg, h, k_prev, v_prev, ent, *fin,
        T, C, H=H, HEADS_A_GROUP=H // G, CHUNK=CHUNK, P=P, N=N, R=R, L=L, BLOCK_P=BP, BLOCK_N=BN)
    return coef, seg, turns, ent, (theta_f, *fin), (CHUNK, L, C, BP, BN)


def mamba3_siso_fwd_kernel(q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids, theta, h, k_prev, v_prev, chunk_size):
    inputs = (q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids)
    coef, seg, turns, ent, fin, (CHUNK, L, C, BP, BN) = _states(inputs, theta, h, k_prev, v_prev, chunk_size)
    B, T, H, P = v.shape
    G, N = q.shape[2:]
    y = torch.empty(v.shape, device=v.device, dtype=v.dtype)
    scan_kernel[(H, C, B)](q, _strides(q), k, _strides(k), v, _strides(v), z, _strides(z), q_bias, k_bias, D, turns, coef, seg, ent, y,
        T, C, H=H, HEADS_A_GROUP=H // G, CHUNK=CHUNK, P=P, N=N, R=angles.shape[3], L=L, BLOCK_P=BP, BLOCK_N=BN)
    return y, *fin


def mamba3_siso_bwd_kernel(q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids, theta, h, k_prev, v_prev, chunk_size, dy, dtheta, dh, dk_prev, dv_prev):
    from kernels.mamba3_siso.kernel_backward import state_gradient_kernel, query_gradient_kernel, key_gradient_kernel, token_gradient_kernel, gate_gradient_kernel
    inputs = (q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids)
    coef, seg, turns, ent, fin, (CHUNK, L, C, BP, BN) = _states(inputs, theta, h, k_prev, v_prev, chunk_size)
    B, T, H, P = v.shape
    G, N = q.shape[2:]
    R = angles.shape[3]
    f = lambda *s: torch.empty(*s, device=v.device, dtype=torch.float32)
    parts = triton.cdiv(N, BN)
    S = next(s for s in range(1, H // G + 1) if (H // G) % s == 0 and H // G // s <= 16)
    dims = dict(H=H, CHUNK=CHUNK, P=P, N=N, R=R, L=L, BLOCK_P=BP, BLOCK_N=BN)
    dq, dk = f(B, T, G, S, N), f(B, T, G, S, N)
    dv, dz, dout = (torch.empty(v.shape, device=v.device, dtype=v.dtype) for _ in range(3))
    dadt, ddt, dtrap = (torch.empty(t.shape, device=v.device, dtype=t.dtype) for t in (adt, dt, trap))
    dqb, dkb, dD = f(B * C, H, N), f(B * C, H, N), f(B * C, H)
    dturns, sums, through = f(B, H, T, R), f(B, H, C, 5, L), f(B, H, C)
    gate_gradient_kernel[(H, triton.cdiv(T, 64), B)](z, _strides(z), dy, _strides(dy), dout, dz, T, H=H, P=P, EXACT=v.dtype == torch.float32, TOKENS=64, BLOCK_P=BP)
    query_gradient_kernel[(G * S, C, B)](q, _strides(q), k, _strides(k), v, _strides(v), dout, q_bias, k_bias, D,
        turns, coef, seg, ent, dz, dq, dqb, dD, dturns, sums, T, C, HEADS_A_GROUP=H // G, HEADS=H // G // S, **dims, num_warps=4, num_stages=1)
    leaving, carry = torch.empty_like(ent), f(B, H, C, R)
    lifted = f(B, H, parts, P)
    dh0, dkp, dvp, dth0 = f(h.shape), f(k_prev.shape), f(v_prev.shape), f(theta.shape)
    state_gradient_kernel[(H, parts, B)](q, _strides(q), dout, q_bias, dt, trap, turns, coef, seg,
        fin[1], fin[2], k_prev, v_prev, dtheta, dh, dk_prev, leaving, carry, dh0, dkp, lifted, T, C, HEADS_A_GROUP=H // G, **dims)
    key_gradient_kernel[(G * S, C, B)](q, _strides(q), k, _strides(k), v, _strides(v), dout, q_bias, k_bias, D, turns, coef, seg,
        ent, leaving, dtheta, dk_prev, dv_prev, dk, dkb, dv, dturns, carry, through, sums,
        T, C, HEADS_A_GROUP=H // G, HEADS=H // G // S, **dims, num_warps=4, num_stages=1)
    dangles = torch.empty(angles.shape, device=v.device, dtype=angles.dtype)
    token_gradient_kernel[(H, C, B)](angles, _strides(angles), dt, trap, doc_ids, seg, v_prev, lifted, dturns, carry, through, sums,
        dangles, dadt, ddt, dtrap, dth0, dvp, T, C, parts, H=H, CHUNK=CHUNK, P=P, R=R, L=L, BLOCK_P=BP, BLOCK_R=triton.next_power_of_2(max(R, 1)))
    return [dq.sum(3).to(q.dtype), dk.sum(3).to(k.dtype), dv, dadt, ddt, dtrap, dqb.sum(0).to(q_bias.dtype), dkb.sum(0).to(k_bias.dtype), dangles,
            dD.sum(0).to(D.dtype), dz, dth0, dh0, dkp, dvp]
