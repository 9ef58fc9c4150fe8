"""M: Mamba-3 SISO (the default mixer) and Mamba-2, both over this project's scan ops.

B batch, T tokens, D model dim, H heads, P head dim, N state dim, G groups, R rotation angles.
Sources: Mamba-3 (arXiv 2603.15569), Mamba-2 / SSD (Dao & Gu 2024).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from kernels.mamba3_siso import Mamba3Inputs, Mamba3State, mamba3_siso, mamba3_siso_step
from kernels.rms_norm_gated import rms_norm_gated
from kernels.ssd_chunk_scan import SsdInputs, ssd_chunk_scan, ssd_chunk_scan_step
from model.config import HybridConfig
from model.layers import projection, rms_norm, widen


def inverse_softplus_of_log_uniform(config: HybridConfig, heads: int) -> Tensor:
    """Return dt_bias (H,) such that softplus(dt_bias) is log-uniform in [dt_min, dt_max], floored at dt_floor."""
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
        y, _ = mamba3_siso(self._project(x, doc_ids), chunk_size=self.chunk)
        return x + self.output(y.flatten(-2))

    def step(self, x: Tensor, state: Mamba3State) -> tuple[Tensor, Mamba3State]:
        """One token: x (B,D), the state of the previous token -> (B,D), the state after it."""
        y, state = mamba3_siso_step(self._project(x), state)
        return x + self.output(y.flatten(-2)), state

    def empty_state(self, x: Tensor) -> Mamba3State:
        """Return the state before any token, for x (B,D)."""
        H, P, N, R = self.heads, self.splits[0] // self.heads, self.state, self.splits[-1]
        return Mamba3State(*(widen(x.new_zeros(x.shape[0], H, *dims)) for dims in ((R,), (P, N), (N,), (P,))))

    def _project(self, x: Tensor, doc_ids: Tensor | None = None) -> Mamba3Inputs:
        """x (...,D) -> the inputs of the scan, or without documents of a step."""
        q, k, v, adt, dt, trap, angles, z = self._per_token(x)
        return Mamba3Inputs(
            q, k, v, adt, dt, trap, self.q_bias, self.k_bias, angles, self.skip, z, doc_ids
        )  # fmt: skip

    def _per_token(self, x: Tensor) -> tuple[Tensor, ...]:
        """x (...,D) -> q, k (...,G,N), v (...,H,P), A dt, dt, trap (...,H), angles (...,H,R), z (...,H,P)."""
        z, v, k, q, dd_dt, dd_a, trap, angles = self.input(rms_norm(x, self.eps)).split(self.splits, dim=-1)
        k = F.rms_norm(self._by_group(k), (self.state,), self.k_norm, self.eps)
        q = F.rms_norm(self._by_group(q), (self.state,), self.q_norm, self.eps)
        v = v.unflatten(-1, (self.heads, -1))  # (B,T,H,P)
        z = z.unflatten(-1, (self.heads, -1))
        dt = F.softplus(widen(dd_dt) + self.dt_bias)
        A = -F.softplus(widen(dd_a)).clamp(min=self.a_floor)
        per_head = angles.unsqueeze(-2).expand(*dt.shape, -1)  # one angle for all heads
        return q, k, v, A * dt, dt, trap, per_head, z

    def _by_group(self, x: Tensor) -> Tensor:
        """(...,G*N) -> (...,G,N)."""
        return x.unflatten(-1, (self.groups, -1))


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
        y, _ = ssd_chunk_scan(self._scan_inputs(xbc, dd_dt, doc_ids), chunk_size=self.chunk)
        return x + self._gated_output(y, z)

    def step(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One token: x (B,D), the conv's and the scan's state -> (B,D), both after it."""
        taps, scan = state
        z, xbc, dd_dt = self.input(rms_norm(x, self.eps)).split(self.splits, dim=-1)
        xbc, taps = causal_conv1d_step(xbc, taps, self.conv_weight, self.conv_bias)
        y, scan = ssd_chunk_scan_step(self._scan_inputs(xbc, dd_dt), scan)
        return x + self._gated_output(y, z), (taps, scan)

    def empty_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states before any token, for x (B,D): taps (B,W-1,channels), scan (B,H,P,N)."""
        B, N = x.shape[0], self.conv_splits[1] // self.groups
        taps = x.new_zeros(B, self.conv_weight.shape[1] - 1, self.splits[1])
        return taps, widen(x.new_zeros(B, self.heads, self.inner // self.heads, N))

    def _scan_inputs(self, xbc: Tensor, dd_dt: Tensor, doc_ids: Tensor | None = None) -> SsdInputs:
        """(...,channels), (...,H) -> the inputs of the scan, or without documents of a step."""
        v, k, q = xbc.split(self.conv_splits, dim=-1)
        dt = F.softplus(widen(dd_dt) + self.dt_bias)
        k, q = (t.unflatten(-1, (self.groups, -1)) for t in (k, q))
        v = v.unflatten(-1, (self.heads, -1))
        return SsdInputs(v, dt, -torch.exp(widen(self.a_log)), k, q, self.skip, doc_ids)

    def _gated_output(self, y: Tensor, z: Tensor) -> Tensor:
        return self.output(rms_norm_gated(y.flatten(-2), z, self.norm_weight, eps=self.eps))
