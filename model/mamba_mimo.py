"""M, as Mamba-3 with several inputs and outputs per head: rank-R state updates, projected up and down per head.

B batch, T tokens, D model dim, H heads, P head dim, N state dim, G groups, R rank.
Source: Mamba-3 (arXiv 2603.15569).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.mamba3_mimo import Mamba3MimoInputs, Mamba3MimoState, mamba3_mimo, mamba3_mimo_step
from model.config import HybridConfig
from model.layers import projection
from model.mamba import Mamba3Block


class Mamba3MIMOBlock(Mamba3Block):
    """The Mamba-3 block with R keys and queries per token and group; v, z and the output use (H,R,P) weights."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        H, P, N, R = config.m_heads, config.m_head_dim, config.m_state, config.m_rank
        self.rank, self.chunk = R, max(1, config.m_chunk // R)
        self.splits[2] = self.splits[3] = config.m_groups * N * R
        self.input = projection(config.d_model, sum(self.splits))
        self.k_bias = nn.Parameter(torch.ones(H, R, N))
        self.q_bias = nn.Parameter(torch.ones(H, R, N))
        self.mimo_v = nn.Parameter(torch.full((H, R, P), 1 / R))
        self.mimo_z = nn.Parameter(torch.ones(H, R, P))
        self.mimo_out = nn.Parameter(torch.full((H, R, P), 1 / R))

    def forward(self, x: Tensor, doc_ids: Tensor, positions: Tensor) -> Tensor:
        """x (B,T,D), doc_ids (B,T) int32 -> (B,T,D). positions is unused."""
        y, _ = mamba3_mimo(self._project(x, doc_ids), chunk_size=self.chunk)
        return x + self.output(y.flatten(-2))

    def step(self, x: Tensor, state: Mamba3MimoState) -> tuple[Tensor, Mamba3MimoState]:
        """One token: x (B,D), the state of the previous token -> (B,D), the state after it."""
        y, state = mamba3_mimo_step(self._project(x), state)
        return x + self.output(y.flatten(-2)), state

    def empty_state(self, x: Tensor) -> Mamba3MimoState:
        """Return the state before any token, for x (B,D); it has R last keys."""
        theta, h, k_prev, v_prev = super().empty_state(x)
        return Mamba3MimoState(theta, h, k_prev.unsqueeze(2).repeat(1, 1, self.rank, 1), v_prev)

    def _project(self, x: Tensor, doc_ids: Tensor | None = None) -> Mamba3MimoInputs:
        q, k, v, adt, dt, trap, angles, z = self._per_token(x)
        return Mamba3MimoInputs(
            q, k, v, adt, dt, trap, self.q_bias, self.k_bias, self.mimo_v, self.mimo_z, self.mimo_out, angles,
            self.skip, z, doc_ids,
        )  # fmt: skip

    def _by_group(self, x: Tensor) -> Tensor:
        """(...,R*G*N) -> (...,R,G,N)."""
        return x.unflatten(-1, (self.rank, self.groups, -1))
