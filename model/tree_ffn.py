"""TreeFFN: pool tokens to chunks, pass messages between chunks along their relations, and add them to the tokens.

B batch, T tokens, D model dim, C chunks, R message relations, W width of a chunk's state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import HybridConfig
from model.layers import projection, rms_norm, widen
from model.relations import chunk_of_token, chunk_relations

CARRIERS = slice(1, 7)  # calls, types, levels: the relations used for messages


def pool(x: Tensor, chunk: Tensor, chunks: int) -> Tensor:
    """Mean of each chunk's tokens: x (B,T,W), chunk (B,T) int64 in 0..C, C for none -> (B,C,W) fp32.

    One write per token, so the work is linear in T; a (C,T) membership mask would cost C times as much.
    """
    x = widen(x)
    B, _, W = x.shape
    total = x.new_zeros(B, chunks + 1, W).scatter_add(1, chunk.unsqueeze(-1).expand_as(x), x)
    count = x.new_zeros(B, chunks + 1).scatter_add(1, chunk, torch.ones_like(x[..., 0]))
    return (total / count.clamp(min=1).unsqueeze(-1))[:, :chunks]


def spread(state: Tensor, chunk: Tensor) -> Tensor:
    """Gather each token's chunk state, zero outside chunks: state (B,C,W), chunk (B,T) -> (B,T,W)."""
    padded = F.pad(state, (0, 0, 0, 1))
    return padded.gather(1, chunk.unsqueeze(-1).expand(-1, -1, state.shape[-1]))


class TreeFFN(nn.Module):
    """x + W_out spread(h), h after `steps` times h += silu(sum_r W_r mean_{j in r(i)} h_j), h_0 = pool(W_in x).

    As published, a token reads its own chunk's mean, which includes the tokens that it should predict. `causal`
    uses only the past: chunk i receives from chunks that end before it starts; its tokens get the messages, not h.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        assert config.tree is not None
        W, R = config.tree.width, CARRIERS.stop - CARRIERS.start
        self.steps, self.causal, self.eps = config.tree.steps, config.tree.causal, config.norm_eps
        self.input = projection(config.d_model, W)
        self.relation = nn.Parameter(torch.randn(R, W, W) * (R * W) ** -0.5)
        self.output = nn.Linear(W, config.d_model, bias=False)
        nn.init.zeros_(self.output.weight)

    def messages(self, state: Tensor, mean: Tensor) -> Tensor:
        """state (B,C,W), mean (B,R,C,C) with rows that sum to 1 or 0 -> messages to each chunk (B,C,W)."""
        heard = mean @ state.unsqueeze(1)  # (B,R,C,W)
        return F.silu((heard @ widen(self.relation)).sum(1))

    def forward(
        self, x: Tensor, doc_ids: Tensor, start: Tensor, end: Tensor,
        level: Tensor, preamble: Tensor, calls: Tensor, types: Tensor,
    ) -> Tensor:  # fmt: skip
        """x (B,T,D), doc_ids (B,T), the chunk tables (B,C) and edges (B,K,2) of model.relations -> (B,T,D)."""
        chunk, document = chunk_of_token(start, end, doc_ids)
        relations = chunk_relations(document, level, preamble, calls, types)[:, CARRIERS]
        if self.causal:
            relations = relations & (end.unsqueeze(1) <= start.unsqueeze(2)).unsqueeze(1)
        state = pool(self.input(rms_norm(x, self.eps)), chunk, start.shape[1])
        linked = relations.to(state.dtype)
        mean = linked / linked.sum(-1, keepdim=True).clamp(min=1)
        heard = torch.zeros_like(state)
        for _ in range(self.steps):
            heard = self.messages(state, mean)
            state = state + heard
        return x + self.output(spread(heard if self.causal else state, chunk).to(x.dtype))
