"""R: M2RNN, a non-linear recurrence over a matrix state, h (K,V) per head.

B batch, T tokens, D model dim, H heads, K key dim, V value dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from kernels.m2rnn import m2rnn, m2rnn_step
from kernels.rms_norm_gated import rms_norm_gated
from model.config import HybridConfig
from model.layers import projection, rms_norm, widen
from model.mamba import inverse_softplus_of_log_uniform


class M2RNNBlock(nn.Module):
    """x + W_o norm((m2rnn(q, k, v) + D v) * silu(z)), with q, k, v after a causal conv of width 4."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        H, K, V = config.r_heads, config.r_key, config.r_value
        self.heads, self.eps = H, config.norm_eps
        self.splits = [H * V, 2 * H * K + H * V, H]  # z, (q, k, v), forget
        self.conv_splits = [H * K, H * K, H * V]
        self.input = projection(config.d_model, sum(self.splits))
        self.output = projection(H * V, config.d_model, config.depth)
        width = config.m_conv_width
        self.conv_weight = nn.Parameter(torch.randn(self.splits[1], width) * width**-0.5)
        self.conv_bias = nn.Parameter(torch.zeros(self.splits[1]))
        self.recurrent = nn.Parameter(torch.eye(V).repeat(H, 1, 1))
        self.a_log = nn.Parameter(torch.log(torch.empty(H).uniform_(1e-3, 16)))
        self.dt_bias = nn.Parameter(inverse_softplus_of_log_uniform(config, H))
        self.skip = nn.Parameter(torch.ones(H, 1))
        self.norm_weight = nn.Parameter(torch.ones(H * V))

    def forward(self, x: Tensor, doc_ids: Tensor, positions: Tensor) -> Tensor:
        """x (B,T,D), doc_ids (B,T) int32 -> (B,T,D). positions is unused."""
        z, qkv, dd_f = self.input(rms_norm(x, self.eps)).split(self.splits, dim=-1)
        qkv = causal_conv1d(qkv, self.conv_weight, self.conv_bias, doc_ids)
        q, k, v, forget = self._recurrence_inputs(qkv, dd_f)
        y, _ = m2rnn(q, k, v, self.recurrent, forget, doc_ids, h0=None)
        return x + self._gated_output(y, v, z)

    def step(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One token: x (B,D), the conv's and the recurrence's state -> (B,D), both after it."""
        taps, h = state
        z, qkv, dd_f = self.input(rms_norm(x, self.eps)).split(self.splits, dim=-1)
        qkv, taps = causal_conv1d_step(qkv, taps, self.conv_weight, self.conv_bias)
        q, k, v, forget = self._recurrence_inputs(qkv, dd_f)
        y, h = m2rnn_step(q, k, v, self.recurrent, forget, h)
        return x + self._gated_output(y, v, z), (taps, h)

    def empty_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states before any token, for x (B,D): taps (B,W-1,channels), h (B,H,K,V)."""
        B, H = x.shape[0], self.heads
        taps = x.new_zeros(B, self.conv_weight.shape[1] - 1, self.splits[1])
        return taps, widen(x.new_zeros(B, H, self.conv_splits[0] // H, self.conv_splits[2] // H))

    def _recurrence_inputs(self, qkv: Tensor, dd_f: Tensor) -> tuple[Tensor, ...]:
        """(...,channels), (...,H) -> q, k (...,H,K), v (...,H,V), forget (...,H)."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in qkv.split(self.conv_splits, dim=-1))
        return q, k, v, torch.exp(-torch.exp(widen(self.a_log)) * F.softplus(widen(dd_f) + self.dt_bias))

    def _gated_output(self, y: Tensor, v: Tensor, z: Tensor) -> Tensor:
        y = rms_norm_gated((y + self.skip * v).flatten(-2), z, self.norm_weight, eps=self.eps)
        return self.output(y)
