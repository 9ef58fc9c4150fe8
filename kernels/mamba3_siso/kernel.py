"""mamba3_siso in Triton (launch functions; placeholder docstring)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.mamba3_siso.kernel_forward import prepare_kernel, scan_kernel, state_kernel, turn_kernel


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
    seg = torch.empty(B, C, L, device=v.device, dtype=torch.int32)
    prepare_kernel[(triton.cdiv(H, 16), C, B)](adt, dt, trap, doc_ids, coef, seg, T, H, C, CHUNK, L=L, HEADS=16)
    turns = torch.empty(B, H, T, R, device=v.device, dtype=torch.float32)
    theta_f = torch.empty(B, H, R, device=v.device, dtype=torch.float32)
    turn_kernel[(H, B)](angles, angles.stride()[:3], dt, doc_ids, theta, turns, theta_f, T, H, R=R, BLOCK_R=triton.next_power_of_2(max(R, 1)), BLOCK_T=128)
    BP, BN = max(16, triton.next_power_of_2(P)), max(16, triton.next_power_of_2(N))
    ent = torch.empty(B, H, C, P, N, device=v.device, dtype=v.dtype)
    fin = [torch.empty(t.shape, device=v.device, dtype=torch.float32) for t in (h, k_prev, v_prev)]
    state_kernel[(H, triton.cdiv(N, BN), B)](
        k, k.stride()[:3], v, v.stride()[:3], k_bias, dt, trap, turns, coef, seg, h, k_prev, v_prev, ent, *fin,
        T, H, H // G, C, CHUNK, P=P, N=N, R=R, L=L, BLOCK_P=BP, BLOCK_N=BN)
    return coef, seg, turns, ent, (theta_f, *fin), (CHUNK, L, C, BP, BN)


def mamba3_siso_fwd_kernel(q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids, theta, h, k_prev, v_prev, chunk_size):
    inputs = (q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids)
    coef, seg, turns, ent, fin, (CHUNK, L, C, BP, BN) = _states(inputs, theta, h, k_prev, v_prev, chunk_size)
    B, T, H, P = v.shape
    G, N = q.shape[2:]
    y = torch.empty(v.shape, device=v.device, dtype=v.dtype)
    scan_kernel[(H, C, B)](q, q.stride()[:3], k, k.stride()[:3], v, v.stride()[:3], z, z.stride()[:3], q_bias, k_bias, D, turns, coef, seg, ent, y,
        T, H, H // G, C, CHUNK, P=P, N=N, R=angles.shape[3], L=L, BLOCK_P=BP, BLOCK_N=BN)
    return y, *fin


def mamba3_siso_bwd_kernel(q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids, theta, h, k_prev, v_prev, chunk_size, dy, dtheta, dh, dk_prev, dv_prev):
    from kernels.mamba3_siso.kernel_backward import state_gradient_kernel, chunk_gradient_kernel, token_gradient_kernel
    inputs = (q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, doc_ids)
    coef, seg, turns, ent, fin, (CHUNK, L, C, BP, BN) = _states(inputs, theta, h, k_prev, v_prev, chunk_size)
    B, T, H, P = v.shape
    G, N = q.shape[2:]
    R = angles.shape[3]
    f = lambda *s: torch.empty(*s, device=v.device, dtype=torch.float32)
    e = torch.empty_like
    leaving, carry = torch.empty_like(ent), f(B, H, C, R)
    parts = triton.cdiv(N, BN)
    lifted = f(B, H, parts, P)
    dh0, dkp, dvp, dth0 = f(h.shape), f(k_prev.shape), f(v_prev.shape), f(theta.shape)
    state_gradient_kernel[(H, parts, B)](q, q.stride()[:3], z, z.stride()[:3], dy, dy.stride()[:3], q_bias, dt, trap, turns, coef, seg,
        fin[1], fin[2], v_prev, dtheta, dh, dk_prev, leaving, carry, dh0, dkp, lifted, k_prev, T, H, H // G, C, CHUNK,
        P=P, N=N, R=R, L=L, BLOCK_P=BP, BLOCK_N=BN)
    S = next(s for s in range(1, H // G + 1) if (H // G) % s == 0 and H // G // s <= 16)
    dq, dk = f(B, T, G, S, N), f(B, T, G, S, N)
    dv, dz = torch.empty(v.shape, device=v.device, dtype=v.dtype), torch.empty(v.shape, device=v.device, dtype=v.dtype)
    dadt, ddt, dtrap = (torch.empty(t.shape, device=v.device, dtype=t.dtype) for t in (adt, dt, trap))
    dqb, dkb, dD = f(B * C, H, N), f(B * C, H, N), f(B * C, H)
    dturns, dgamma, dscale = f(B, H, T, R), f(B, H, C, L), f(B, H, C, L)
    chunk_gradient_kernel[(G * S, C, B)](q, q.stride()[:3], k, k.stride()[:3], v, v.stride()[:3], z, z.stride()[:3], dy, dy.stride()[:3], q_bias, k_bias, D,
        turns, coef, seg, ent, leaving, dtheta, dk_prev, dv_prev, dq, dk, dv, dadt, dz, dqb, dkb, dD, dturns, carry, dgamma, dscale,
        T, H, H // G, H // G // S, C, CHUNK, P=P, N=N, R=R, L=L, BLOCK_P=BP, BLOCK_N=BN, num_warps=8, num_stages=1)
    dangles = torch.empty(angles.shape, device=v.device, dtype=angles.dtype)
    token_gradient_kernel[(H, C, B)](angles, angles.stride()[:3], dt, trap, doc_ids, seg, v_prev, lifted, dturns, carry, dgamma, dscale,
        dangles, ddt, dtrap, dth0, dvp, T, H, C, CHUNK, parts, P=P, R=R, L=L, BLOCK_P=BP, BLOCK_R=triton.next_power_of_2(max(R, 1)))
    return [dq.sum(3).to(q.dtype), dk.sum(3).to(k.dtype), dv, dadt, ddt, dtrap, dqb.sum(0).to(q_bias.dtype), dkb.sum(0).to(k_bias.dtype), dangles,
            dD.sum(0).to(D.dtype), dz, dth0, dh0, dkp, dvp]
