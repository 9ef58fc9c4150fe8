"""A: grouped-query attention with QK norm, rotary positions, softcap and document mask. No FFN inside.

B batch, T tokens, H heads, P head dim, D model dim.
"""

from __future__ import annotations

from torch import Tensor, nn

from kernels.attention import attention, qk_norm, rope
from model.config import HybridConfig
from model.layers import projection, rms_norm


class AttentionBlock(nn.Module):
    """x + W_o attention(rope(norm(W_q x)), rope(norm(W_k x)), W_v x)."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        heads, kv_heads, P = config.q_heads, config.kv_heads, config.head_dim
        self.query = projection(config.d_model, heads * P)
        self.key = projection(config.d_model, kv_heads * P)
        self.value = projection(config.d_model, kv_heads * P)
        self.output = projection(heads * P, config.d_model, config.depth)
        self.head_dim, self.rope_base, self.eps = P, config.rope_base, config.norm_eps
        self.softcap, self.window = config.attention_softcap, config.window

    def forward(self, x: Tensor, doc_ids: Tensor, positions: Tensor) -> Tensor:
        """x (B,T,D), doc_ids and positions (B,T) int32 -> (B,T,D)."""
        u = rms_norm(x, self.eps)
        q = self.query(u).unflatten(-1, (-1, self.head_dim))  # (B,T,Hq,P)
        k = self.key(u).unflatten(-1, (-1, self.head_dim))
        v = self.value(u).unflatten(-1, (-1, self.head_dim))
        q = rope(qk_norm(q, self.eps), positions, self.rope_base)
        k = rope(qk_norm(k, self.eps), positions, self.rope_base)
        y = attention(q, k, v, doc_ids, softcap=self.softcap, window=self.window)
        return x + self.output(y.flatten(-2))
