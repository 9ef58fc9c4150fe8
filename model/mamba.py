"""M: Mamba-3 SISO (the default mixer) and Mamba-2, both over this project's scan ops.

B batch, T tokens, D model dim, H heads, P head dim, N state dim, G groups, R rotation angles.
Sources: Mamba-3 (arXiv 2603.15569), Mamba-2 / SSD (Dao & Gu 2024).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.causal_conv1d import causal_conv1d
from kernels.mamba3_siso import mamba3_siso
from kernels.rms_norm_gated import rms_norm_gated
from kernels.ssd_chunk_scan import ssd_chunk_scan
from model.config import HybridConfig
from model.layers import projection, rms_norm, widen


def inverse_softplus_of_log_uniform(config: HybridConfig, heads: int) -> Tensor:
    """dt_bias (H,) such that softplus(dt_bias) is log-uniform in [dt_min, dt_max], floored at dt_floor."""
    low, high = math.log(config.dt_min), math.log(config.dt_max)
    dt = torch.exp(torch.rand(heads) * (high - low) + low).clamp(min=config.dt_floor)
    return dt + torch.log(-torch.expm1(-dt))


class Mamba3Block(nn.Module):
    """x + W_o y, where y is the trapezoidal, rotary state-space scan gated by silu(z). No conv1d."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        H, P, N, G = config.m_heads, config.m_head_dim, config.m_state, config.m_groups
        self.heads, self.groups, self.state = H, G, N
        self.a_floor, self.eps, self.chunk = config.a_floor, config.norm_eps, config.m_chunk
        # z, x, B, C, dd_dt, dd_A, trap, angles: the order of the published in_proj.
        self.splits = [H * P, H * P, G * N, G * N, H, H, H, config.m_angles]
        self.input = projection(config.d_model, sum(self.splits))
        self.output = projection(H * P, config.d_model, config.depth)
        self.dt_bias = nn.Parameter(inverse_softplus_of_log_uniform(config, H))
        self.k_norm = nn.Parameter(torch.ones(N))
        self.q_norm = nn.Parameter(torch.ones(N))
        self.k_bias = nn.Parameter(torch.ones(H, N))
        self.q_bias = nn.Parameter(torch.ones(H, N))
        self.skip = nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor, doc_ids: Tensor, positions: Tensor) -> Tensor:
        """x (B,T,D), doc_ids (B,T) int32 -> (B,T,D). positions is unused: the scan keeps its own angle."""
        z, v, k, q, dd_dt, dd_a, trap, angles = self.input(rms_norm(x, self.eps)).split(self.splits, dim=-1)
        k = F.rms_norm(k.unflatten(-1, (self.groups, -1)), (self.state,), self.k_norm, self.eps)
        q = F.rms_norm(q.unflatten(-1, (self.groups, -1)), (self.state,), self.q_norm, self.eps)
        v = v.unflatten(-1, (self.heads, -1))  # (B,T,H,P)
        z = z.unflatten(-1, (self.heads, -1))
        dt = F.softplus(widen(dd_dt) + self.dt_bias)
        A = -F.softplus(widen(dd_a)).clamp(min=self.a_floor)
        per_head = angles.unsqueeze(2).expand(-1, -1, self.heads, -1)  # (B,T,H,R), one angle for all heads
        y, _ = mamba3_siso(
            q, k, v, A * dt, dt, trap, self.q_bias, self.k_bias, per_head, self.skip, z, doc_ids,
            state=None, chunk_size=self.chunk,
        )  # fmt: skip
        return x + self.output(y.flatten(-2))


class Mamba2Block(nn.Module):
    """x + W_o norm(SSD(conv(x), conv(B), conv(C)) * silu(z))."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        H, P, N, G = config.m_heads, config.m_head_dim, config.m_state, config.m_groups
        self.heads, self.groups, self.inner = H, G, H * P
        self.eps, self.chunk = config.norm_eps, config.m_chunk
        self.splits = [H * P, H * P + 2 * G * N, H]  # z, (x, B, C), dt
        self.conv_splits = [H * P, G * N, G * N]
        self.input = projection(config.d_model, sum(self.splits))
        self.output = projection(H * P, config.d_model, config.depth)
        width = config.m_conv_width
        self.conv_weight = nn.Parameter(torch.randn(self.splits[1], width) * width**-0.5)
        self.conv_bias = nn.Parameter(torch.zeros(self.splits[1]))
        self.dt_bias = nn.Parameter(inverse_softplus_of_log_uniform(config, H))
        self.a_log = nn.Parameter(torch.log(torch.empty(H).uniform_(1, 16)))
        self.skip = nn.Parameter(torch.ones(H))
        self.norm_weight = nn.Parameter(torch.ones(H * P))

    def forward(self, x: Tensor, doc_ids: Tensor, positions: Tensor) -> Tensor:
        """x (B,T,D), doc_ids (B,T) int32 -> (B,T,D). positions is unused."""
        z, xbc, dd_dt = self.input(rms_norm(x, self.eps)).split(self.splits, dim=-1)
        xbc = causal_conv1d(xbc, self.conv_weight, self.conv_bias, doc_ids)
        v, k, q = xbc.split(self.conv_splits, dim=-1)
        dt = F.softplus(widen(dd_dt) + self.dt_bias)
        y, _ = ssd_chunk_scan(
            v.unflatten(-1, (self.heads, -1)), dt, -torch.exp(widen(self.a_log)),
            k.unflatten(-1, (self.groups, -1)), q.unflatten(-1, (self.groups, -1)), self.skip, doc_ids,
            initial_state=None, chunk_size=self.chunk,
        )  # fmt: skip
        y = rms_norm_gated(y.flatten(-2), z, self.norm_weight, eps=self.eps)
        return x + self.output(y)
