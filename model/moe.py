"""E: mixture of experts over a padded power-of-two dispatch, plus one shared expert. No attention inside.

B batch, T tokens, D model dim, E experts, K choices per token, F expert hidden, C bucket (slots per expert and
sequence), S slots of a batch, M null slots.
Each sequence is its own dispatch group (GShard), so the bucket depends only on T: the batch remains the only
dynamic axis, and the routing of one row never drops a token of another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.moe_combine import moe_combine
from kernels.moe_dispatch import moe_dispatch
from model.config import HybridConfig
from model.layers import projection, rms_norm, wide_linear, widen

LOAD_MEMORY = 0.9  # decay of the running load per step
LARGEST_BIAS_STEP = 1.0  # in units of `bias_rate`


class Routing(NamedTuple):
    """Routing decision of each token."""

    expert: Tensor  # (B,T,K) int64, -1 for a null choice
    weights: Tensor  # (B,T,K) fp32, zero for a null choice
    share: Tensor  # (E,) fp32, of all real assignments
    aux: Tensor  # () fp32, balance and z-loss


class MoEBlock(nn.Module):
    """x + combine(relu^2 experts of the chosen) + shared SwiGLU expert; returns the block's auxiliary loss too.

    `overflow` counts dropped (token, expert) pairs. It is a tensor and not an int, because Dynamo would guard
    on the int's value and recompile at every step; it is not persistent, because it is bookkeeping and not
    model state. `expert_bias` and the running `load` are model state.
    """

    overflow: Tensor
    expert_bias: Tensor
    load: Tensor

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        D, E, hidden = config.d_model, config.experts, config.expert_hidden
        self.experts, self.choices, self.null_slots = E, config.choices, config.null_slots
        self.groups, self.chosen_groups = config.expert_groups, config.chosen_groups
        self.routed_scale, self.capacity, self.eps = config.routed_scale, config.bucket, config.norm_eps
        self.aux_weight, self.z_weight, self.bias_rate = config.aux_weight, config.z_weight, config.bias_rate
        self.router = projection(D, E)
        self.up = nn.Parameter(torch.randn(E, D, hidden) * D**-0.5)
        self.down = nn.Parameter(torch.randn(E, hidden, D) * (2 * config.depth * hidden) ** -0.5)
        self.shared_in = projection(D, 2 * config.shared_hidden)
        self.shared_out = projection(config.shared_hidden, D, config.depth)
        self.register_buffer("expert_bias", torch.zeros(E))
        self.register_buffer("overflow", torch.zeros((), dtype=torch.long), persistent=False)
        if self.null_slots:
            self.null_logit = nn.Parameter(torch.zeros(()))
        if self.bias_rate:
            self.register_buffer("load", torch.full((E,), 1 / E))
        # Increased by the launcher between steps after an overflow; 0 keeps the bucket of the capacity.
        self.min_bucket = 0

    def route(self, u: Tensor) -> Routing:
        """Choose the experts of each token of u (B,T,D). Router, weights and losses are fp32 throughout.

        The bias affects the selection but not the weights (auxiliary-loss-free balancing, Wang et al.
        2024). A null slot only takes part in the selection, so that a token may choose fewer experts.
        """
        logits = wide_linear(u, self.router.weight)  # (B,T,E)
        scores = logits.sigmoid()
        expert = torch.topk(self._selection(scores), self.choices, dim=-1).indices
        if self.null_slots:
            real = expert < self.experts
            chosen = scores.gather(-1, expert.clamp(max=self.experts - 1)).where(real, 0.0)
            expert = expert.where(real, -1)
            total = chosen.sum(-1, keepdim=True)
            weights = chosen / total.where(total > 0, 1.0) * self.routed_scale
        else:
            chosen = scores.gather(-1, expert)
            weights = chosen / chosen.sum(-1, keepdim=True) * self.routed_scale
        # A comparison, because F.one_hot reads its input's range on the host in eager mode.
        chosen_by = expert.unsqueeze(-1) == torch.arange(self.experts, device=u.device)
        share = chosen_by.to(scores.dtype).mean((0, 1, 2))  # f: share of assignments
        if self.null_slots:
            share = share / share.sum().clamp(min=1 / expert[0].numel())
        mass = (scores / scores.sum(-1, keepdim=True)).mean((0, 1))  # P: mean routing probability
        balance = self.experts * (share * mass).sum()
        z_loss = torch.logsumexp(self._with_null(logits), dim=-1).square().mean()
        return Routing(expert, weights, share, self.aux_weight * balance + self.z_weight * z_loss)

    def _selection(self, scores: Tensor) -> Tensor:
        """scores (B,T,E) -> the values compared by the top-k, (B,T,E+M)."""
        selection = scores + self.expert_bias
        if self.groups > 1:
            # The score of a group is the score of its two best experts (DeepSeek-V3).
            grouped = selection.unflatten(-1, (self.groups, -1))
            best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
            kept = torch.zeros_like(best).scatter(-1, best.topk(self.chosen_groups, dim=-1).indices, 1.0) > 0
            selection = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
        return self._with_null(selection, self.null_logit.sigmoid()) if self.null_slots else selection

    def _with_null(self, values: Tensor, null: Tensor | None = None) -> Tensor:
        """Append M copies of the null's value to values (...,E); return values if there is no null."""
        if not self.null_slots:
            return values
        copies = widen(self.null_logit if null is None else null)
        return torch.cat((values, copies.expand(*values.shape[:-1], self.null_slots)), -1)

    def _move_bias(self, share: Tensor) -> None:
        """Update the bias toward uniform load, with a running mean of the load and a clipped step."""
        with torch.no_grad():
            self.load.lerp_(share.to(self.load.dtype), 1 - LOAD_MEMORY)
            missing = (1 - self.experts * self.load).clamp(-LARGEST_BIAS_STEP, LARGEST_BIAS_STEP)
            self.expert_bias.add_(self.bias_rate * missing)

    def run_experts(self, padded: Tensor) -> Tensor:
        """padded (E,S,D), S slots of each expert -> (E,S,D). Expert parallelism replaces it on the instance."""
        hidden = F.relu(torch.bmm(padded, self.up)).square()
        return torch.bmm(hidden, self.down)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B,T,D) -> (B,T,D), auxiliary loss () fp32."""
        u = rms_norm(x, self.eps)
        routing = self.route(u)
        if self.bias_rate and self.training:
            self._move_bias(routing.share)
        bucket = max(self.min_bucket, self.capacity(x.shape[1]))
        padded, slot, dropped = moe_dispatch(u, routing.expert, self.experts, bucket)  # (E, B*C, D)
        with torch.no_grad():
            self.overflow.add_(dropped)
        routed = moe_combine(self.run_experts(padded), routing.expert, slot, routing.weights, bucket)
        gate, value = self.shared_in(u).chunk(2, dim=-1)
        return x + routed + self.shared_out(F.silu(gate) * value), routing.aux
