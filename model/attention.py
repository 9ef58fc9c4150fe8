"""A: grouped-query attention with QK norm, rotary positions, softcap and document mask. No FFN inside.

B batch, T tokens, H heads, P head dim, D model dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention import attention, attention_step, qk_norm, rope
from model.config import HybridConfig
from model.layers import projection, rms_norm


class AttentionState(NamedTuple):
    """The cache of S tokens so far: key and value (B,S,Hkv,P), seen (B,S) bool, false before a row's document."""

    key: Tensor
    value: Tensor
    seen: Tensor


class AttentionBlock(nn.Module):
    """x + W_o attention(rope(norm(W_q x)), rope(norm(W_k x)), W_v x), the output optionally gated by sigmoid(W_g x).

    The gate is per head or per channel; its weight starts at zero, so the gate starts at one half everywhere.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        heads, kv_heads, P = config.q_heads, config.kv_heads, config.head_dim
        self.query = projection(config.d_model, heads * P)
        self.key = projection(config.d_model, kv_heads * P)
        self.value = projection(config.d_model, kv_heads * P)
        self.output = projection(heads * P, config.d_model, config.depth)
        self.head_dim, self.rope_base, self.eps = P, config.rope_base, config.norm_eps
        self.softcap, self.window = config.attention_softcap, config.window
        self.gate = output_gate(config, heads, P)

    def forward(self, x: Tensor, doc_ids: Tensor, positions: Tensor) -> Tensor:
        """x (B,T,D), doc_ids and positions (B,T) int32 -> (B,T,D)."""
        u = rms_norm(x, self.eps)
        q, k, v = self._project(u, positions)
        y = attention(q, k, v, doc_ids, softcap=self.softcap, window=self.window)
        return x + self._gated_output(y, u)

    def step(self, x: Tensor, state: AttentionState, positions: Tensor) -> tuple[Tensor, AttentionState]:
        """One token: x (B,D), the cache, positions (B,) int32 -> (B,D), the cache including this token."""
        u = rms_norm(x, self.eps).unsqueeze(1)
        q, k, v = self._project(u, positions.unsqueeze(1))
        key, value = torch.cat((state.key, k), 1), torch.cat((state.value, v), 1)
        seen = F.pad(state.seen, (0, 1), value=True)
        if self.window:
            seen = seen & (torch.arange(key.shape[1], 0, -1, device=x.device) <= self.window)
        y = attention_step(q[:, 0], key, value, seen, softcap=self.softcap)
        return x + self._gated_output(y, u[:, 0]), AttentionState(
            key, value, F.pad(state.seen, (0, 1), value=True)
        )

    def empty_state(self, x: Tensor) -> AttentionState:
        """Return the cache before any token, for x (B,D)."""
        heads = self.key.out_features // self.head_dim
        nothing = x.new_zeros(x.shape[0], 0, heads, self.head_dim)
        return AttentionState(nothing, nothing, torch.zeros(x.shape[0], 0, dtype=torch.bool, device=x.device))

    def _project(self, u: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u (B,T,D) -> q (B,T,Hq,P), k and v (B,T,Hkv,P), q and k normed and rotated."""
        q, k, v = (
            layer(u).unflatten(-1, (-1, self.head_dim)) for layer in (self.query, self.key, self.value)
        )
        q, k = (rope(qk_norm(t, self.eps), positions, self.rope_base) for t in (q, k))
        return q, k, v

    def _gated_output(self, y: Tensor, u: Tensor) -> Tensor:
        """y (...,Hq,P), u (...,D) -> (...,D)."""
        return self.output(gated(y, u, self.gate).flatten(-2))


def gated(y: Tensor, u: Tensor, gate: nn.Parameter | None) -> Tensor:
    """Multiply y (...,H,P) by sigmoid of the gate's rows applied to u (...,D); return y if there is no gate."""
    return y if gate is None else y * torch.sigmoid(F.linear(u, gate)).unflatten(-1, (y.shape[-2], -1))


def output_gate(config: HybridConfig, heads: int, P: int) -> nn.Parameter | None:
    """Return a zero weight (heads, D) or (heads * P, D); None if the configuration has no gate."""
    if config.attention_gate == "none":
        return None
    return nn.Parameter(torch.zeros(heads * (1 if config.attention_gate == "head" else P), config.d_model))
