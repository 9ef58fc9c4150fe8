"""The tied loss head: final norm, logits from the embedding, softcap, cross entropy, all after fp32.

B batch, T tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.layers import rms_norm, widen

IGNORE = -1


class LossHead(nn.Module):
    """Mean cross entropy of softcap(norm(x) E^T); the embedding weight is an argument, so it has one owner."""

    def __init__(self, softcap: float, eps: float) -> None:
        super().__init__()
        self.softcap, self.eps = softcap, eps

    def logits(self, x: Tensor, embedding: Tensor) -> Tensor:
        """x (B,T,D), embedding (V,D) -> (B,T,V) fp32, bounded by the softcap."""
        raw = widen(F.linear(rms_norm(x, self.eps), embedding.to(x.dtype)))
        return self.softcap * torch.tanh(raw / self.softcap)

    def forward(self, x: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        """targets (B,T) int64, -1 where there is none -> () fp32."""
        return F.cross_entropy(
            self.logits(x, embedding).flatten(0, 1), targets.flatten(), ignore_index=IGNORE
        )
