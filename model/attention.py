"""A: grouped-query attention with QK norm, rotary positions, softcap and document mask. No FFN inside.

B batch, T tokens, H heads, P head dim, D model dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention import attention, qk_norm, rope
from model.config import HybridConfig
from model.layers import projection, rms_norm


class AttentionBlock(nn.Module):
    """x + W_o attention(rope(norm(W_q x)), rope(norm(W_k x)), W_v x), the output gated by sigmoid(W_g x) if asked.

    The gate is by head or by channel; its weight starts at zero, so that it starts at one half everywhere.
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
        q = self.query(u).unflatten(-1, (-1, self.head_dim))  # (B,T,Hq,P)
        k = self.key(u).unflatten(-1, (-1, self.head_dim))
        v = self.value(u).unflatten(-1, (-1, self.head_dim))
        q = rope(qk_norm(q, self.eps), positions, self.rope_base)
        k = rope(qk_norm(k, self.eps), positions, self.rope_base)
        y = attention(q, k, v, doc_ids, softcap=self.softcap, window=self.window)
        if self.gate is not None:
            y = y * torch.sigmoid(F.linear(u, self.gate)).unflatten(-1, (y.shape[2], -1))
        return x + self.output(y.flatten(-2))


def output_gate(config: HybridConfig, heads: int, P: int) -> nn.Parameter | None:
    """Zeros (heads, D) or (heads * P, D); None where the configuration has no gate."""
    if config.attention_gate == "none":
        return None
    return nn.Parameter(torch.zeros(heads * (1 if config.attention_gate == "head" else P), config.d_model))
