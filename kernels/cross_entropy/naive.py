"""Cross entropy of softcapped logits, as a loss head computes it.

B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy_naive(logits: Tensor, target: Tensor, softcap=0.0, ignore_index=-100) -> Tensor:
    """Compute the loss as a loss head does: cast to fp32, capped, then F.cross_entropy."""
    s = logits.to(torch.promote_types(logits.dtype, torch.float32))
    s = softcap * torch.tanh(s / softcap) if softcap else s
    flat = F.cross_entropy(s.flatten(0, -2), target.flatten(), ignore_index=ignore_index, reduction="none")
    return flat.view(target.shape)
