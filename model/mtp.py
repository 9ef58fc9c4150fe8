"""Multi-token prediction (FastMTP): one shared block predicts the tokens after the next one, step by step.

B batch, T tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import AttentionBlock
from model.config import HybridConfig
from model.head import IGNORE, LossHead
from model.layers import projection, rms_norm


def further(targets: Tensor) -> Tensor:
    """Shift the targets by one token: (B,T) int64, -1 where that token is in another document or past the end."""
    return torch.where(targets == IGNORE, IGNORE, F.pad(targets[:, 1:], (0, 1), value=IGNORE))


def documents_of_targets(targets: Tensor) -> Tensor:
    """Derive document ids (B,T) int32 from the targets: a token without a target is the last of its document."""
    ends = (targets == IGNORE).to(torch.int32)
    return ends.cumsum(1, dtype=torch.int32) - ends


class MTPHead(LossHead):
    """Cross entropy of the next token + weight * sum_k w_k CE_k, w_k = decay^k / sum, k = 1..steps.

    h_k = block(W [norm(h_{k-1}), norm(E[token t+k])]) predicts token t+k+1 through the tied embedding; h_0 is the
    trunk's stream, detached. The steps share one block and all shapes, so that all of them are one graph. Tokens and
    documents are derived from the targets, so its arguments are LossHead's.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config.logit_softcap, config.norm_eps)
        assert config.mtp is not None
        self.merge = projection(2 * config.d_model, config.d_model)
        self.block = AttentionBlock(config)
        decays = [config.mtp.decay**k for k in range(1, config.mtp.steps + 1)]
        self.weights = tuple(config.mtp.weight * decay / sum(decays) for decay in decays)

    def mean_loss(self, h: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy over the tokens that have a target, () fp32; 0 if none has (k may exceed all lengths)."""
        logits = self.logits(h, embedding).flatten(0, 1)
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
        return total / (targets != IGNORE).sum().clamp(min=1)

    def future(self, x: Tensor, embedding: Tensor, targets: Tensor) -> list[Tensor]:
        """Loss of each step, () fp32: x (B,T,D) the trunk's stream, targets (B,T) the next tokens."""
        doc_ids = documents_of_targets(targets)
        # Attention only depends on differences of positions, so they need not restart at each document.
        positions = torch.arange(x.shape[1], device=x.device, dtype=torch.int32).expand_as(doc_ids)
        h, losses = x.detach(), []
        for _ in self.weights:
            known, targets = targets, further(targets)
            token = F.embedding(known.clamp(min=0), embedding).to(x.dtype)
            merged = torch.cat((rms_norm(h, self.eps), rms_norm(token, self.eps)), dim=-1)
            h = self.block(self.merge(merged), doc_ids, positions)
            losses.append(self.mean_loss(h, embedding, targets))
        return losses

    def forward(self, x: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        """x (B,T,D), embedding (V,D), targets (B,T) int64, -1 where there is none -> () fp32."""
        loss = super().forward(x, embedding, targets)
        for weight, future in zip(self.weights, self.future(x, embedding, targets)):
            loss = loss + weight * future
        return loss
