"""A, as multi-head latent attention: keys and values are computed from one small latent per token, the only cache.

B batch, T tokens, H heads, P head dim without position, R rotated head dim, V value dim, C latent dim, D model dim.
Source: DeepSeek-V2 (2024).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention import rope
from kernels.mla import mla, mla_absorbed
from model.attention import gated, output_gate
from model.config import HybridConfig
from model.layers import projection, rms_norm


class LatentState(NamedTuple):
    """The cache of S tokens so far: latent (B,S,C), rotated key (B,S,R), seen (B,S) bool, false before a document."""

    latent: Tensor
    key: Tensor
    seen: Tensor


class MLABlock(nn.Module):
    """x + W_o attention([q, rope(q')], [W_uk c, rope(k')], W_uv c) with c = norm(W_dkv x), k' shared by the heads."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        assert config.mla is not None
        sizes, H, D = config.mla, config.q_heads, config.d_model
        self.heads, self.splits = H, [sizes.nope_dim, sizes.rope_dim]
        self.latent_splits = [sizes.kv_rank, sizes.rope_dim]
        self.query_down = projection(D, sizes.q_rank)
        self.query_up = projection(sizes.q_rank, H * sum(self.splits))
        self.latent = projection(D, sum(self.latent_splits))
        self.key_up = nn.Parameter(torch.randn(H, sizes.nope_dim, sizes.kv_rank) * sizes.kv_rank**-0.5)
        self.value_up = nn.Parameter(torch.randn(H, sizes.value_dim, sizes.kv_rank) * sizes.kv_rank**-0.5)
        self.output = projection(H * sizes.value_dim, D, config.depth)
        self.rope_base, self.eps, self.softcap = config.rope_base, config.norm_eps, config.attention_softcap
        self.gate = output_gate(config, H, sizes.value_dim)

    def forward(self, x: Tensor, doc_ids: Tensor, positions: Tensor) -> Tensor:
        """x (B,T,D), doc_ids and positions (B,T) int32 -> (B,T,D)."""
        u = rms_norm(x, self.eps)
        y = mla(*self._project(u, positions), self.key_up, self.value_up, doc_ids, softcap=self.softcap)
        return x + self.output(gated(y, u, self.gate).flatten(-2))

    def step(self, x: Tensor, state: LatentState, positions: Tensor) -> tuple[Tensor, LatentState]:
        """One token, in the absorbed form: x (B,D), the cache, positions (B,) int32 -> (B,D), the cache after it."""
        u = rms_norm(x, self.eps).unsqueeze(1)
        q, q_rope, latent, key = self._project(u, positions.unsqueeze(1))
        latent, key = torch.cat((state.latent, latent), 1), torch.cat((state.key, key), 1)
        seen = F.pad(state.seen, (0, 1), value=True)
        # Tokens that are not visible get their own document id.
        y = mla_absorbed(
            q, q_rope, latent, key, self.key_up, self.value_up, seen.to(torch.int32), softcap=self.softcap
        )
        return x + self.output(gated(y, u, self.gate).flatten(-2)).squeeze(1), LatentState(latent, key, seen)

    def empty_state(self, x: Tensor) -> LatentState:
        """Return the cache before any token, for x (B,D)."""
        nothing = (x.new_zeros(x.shape[0], 0, width) for width in self.latent_splits)
        return LatentState(*nothing, torch.zeros(x.shape[0], 0, dtype=torch.bool, device=x.device))

    def _project(self, u: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u (B,T,D) -> q (B,T,H,P), rotated q (B,T,H,R), normed latent (B,T,C), rotated key (B,T,R)."""
        queries = self.query_up(rms_norm(self.query_down(u), self.eps)).unflatten(-1, (self.heads, -1))
        q, q_rope = queries.split(self.splits, dim=-1)
        latent, key = self.latent(u).split(self.latent_splits, dim=-1)
        key = rope(key.unsqueeze(2), positions, self.rope_base).squeeze(2)
        return q, rope(q_rope, positions, self.rope_base), rms_norm(latent, self.eps), key
