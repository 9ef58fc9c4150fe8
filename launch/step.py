"""One optimizer step of the hybrid, and the bucket required by its routing.

B batch, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from launch.policies import CompiledHybrid
from model import Hybrid
from model.moe import MoEBlock


def make_optimizer(model: Hybrid, lr: float = 3e-3) -> torch.optim.AdamW:
    """Create AdamW over all parameters, with one fused update kernel."""
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)


def train_step(compiled: CompiledHybrid, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    """Forward, backward and update on ids (B,T) int64; returns the loss before the update, () fp32, detached."""
    loss = compiled(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def needed_bucket(block: MoEBlock, u: Tensor) -> int:
    """Return the smallest power-of-two bucket that drops no token of the normed stream u (B,T,D) in this block.

    Reads the routing on the host: use it between steps (after an overflow), never in one.
    """
    with torch.no_grad():
        chosen = block.route(u).expert.unsqueeze(-1) == torch.arange(block.experts, device=u.device)
        counts = chosen.sum((1, 2))  # (B,E)
    return 1 << (int(counts.max()) - 1).bit_length()
