"""E: mixture of experts over a padded power-of-two dispatch, plus one shared expert. No attention inside.

B batch, T tokens, D model dim, E experts, K top-k, F expert hidden, C bucket (slots an expert and a sequence).
Each sequence is its own dispatch group (GShard), so the bucket follows from T alone: the batch stays the one
dynamic axis, and the routing of one row never drops a token of another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.moe_combine import moe_combine
from kernels.moe_dispatch import moe_dispatch
from model.config import HybridConfig
from model.layers import projection, rms_norm, widen


class MoEBlock(nn.Module):
    """x + combine(relu^2 experts of the top-k) + shared SwiGLU expert; returns the block's auxiliary loss too.

    `overflow` counts dropped (token, expert) pairs. It is a tensor and not an int, because Dynamo would guard
    on the int's value and compile anew at every step; it is not persistent, because it is bookkeeping and not
    model state.
    """

    overflow: Tensor
    expert_bias: Tensor

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        D, E, hidden = config.d_model, config.experts, config.expert_hidden
        self.experts, self.top_k, self.eps = E, config.top_k, config.norm_eps
        self.routed_scale, self.capacity = config.routed_scale, config.bucket
        self.aux_weight, self.z_weight = config.aux_weight, config.z_weight
        self.router = projection(D, E)
        self.up = nn.Parameter(torch.randn(E, D, hidden) * D**-0.5)
        self.down = nn.Parameter(torch.randn(E, hidden, D) * (2 * config.depth * hidden) ** -0.5)
        self.shared_in = projection(D, 2 * config.shared_hidden)
        self.shared_out = projection(config.shared_hidden, D, config.depth)
        self.register_buffer("expert_bias", torch.zeros(E))
        self.register_buffer("overflow", torch.zeros((), dtype=torch.long), persistent=False)
        # Raised by the launcher between steps after an overflow; 0 leaves the capacity's own bucket.
        self.min_bucket = 0

    def route(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u (B,T,D) -> expert (B,T,K) int64, weights (B,T,K) fp32, auxiliary loss () fp32.

        The bias moves the selection and stays out of the weights (auxiliary-loss-free balancing, Wang et al.
        2024). Router and losses are fp32 throughout.
        """
        logits = F.linear(widen(u), widen(self.router.weight))  # (B,T,E)
        scores = logits.sigmoid()
        expert = torch.topk(scores + self.expert_bias, self.top_k, dim=-1).indices
        chosen = scores.gather(-1, expert)
        weights = chosen / chosen.sum(-1, keepdim=True) * self.routed_scale
        # Compared and not F.one_hot: that one reads its input's range on the host in eager mode.
        chosen_by = expert.unsqueeze(-1) == torch.arange(self.experts, device=u.device)
        share = chosen_by.to(scores.dtype).mean((0, 1, 2))  # f: share of assignments
        mass = (scores / scores.sum(-1, keepdim=True)).mean((0, 1))  # P: mean routing probability
        balance = self.experts * (share * mass).sum()
        z_loss = torch.logsumexp(logits, dim=-1).square().mean()
        return expert, weights, self.aux_weight * balance + self.z_weight * z_loss

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B,T,D) -> (B,T,D), auxiliary loss () fp32."""
        u = rms_norm(x, self.eps)
        expert, weights, aux = self.route(u)
        bucket = max(self.min_bucket, self.capacity(x.shape[1]))
        padded, slot, dropped = moe_dispatch(u, expert, self.experts, bucket)  # (E, B*C, D)
        with torch.no_grad():
            self.overflow.add_(dropped)
        hidden = F.relu(torch.bmm(padded, self.up)).square()
        routed = moe_combine(torch.bmm(hidden, self.down), expert, slot, weights, bucket)
        gate, value = self.shared_in(u).chunk(2, dim=-1)
        return x + routed + self.shared_out(F.silu(gate) * value), aux
