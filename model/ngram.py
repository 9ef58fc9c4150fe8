"""NgramHash: embeddings of hashed token n-grams, so that frequent phrases have their own vectors.

B batch, T tokens, D model dim, H hash heads over all orders, J taps (the largest order), W width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import HybridConfig


def primes_from(start: int, count: int) -> list[int]:
    """Return the first `count` primes that are at least `start`."""
    found: list[int] = []
    number = max(start, 2)
    while len(found) < count:
        if all(number % d for d in range(2, int(number**0.5) + 1)):
            found.append(number)
        number += 1
    return found


def document_taps(x: Tensor, doc_ids: Tensor, taps: int) -> Tensor:
    """x (B,T,...), doc_ids (B,T) -> (B,T,...,J): x at t, t-1, ..., zero where that is another document."""
    T = x.shape[1]
    trailing = (0, 0) * (x.dim() - 2)
    shifted = [x]
    for j in range(1, taps):
        past = F.pad(x, (*trailing, j, 0))[:, :T]
        same = F.pad(doc_ids, (j, 0), value=-2)[:, :T] == doc_ids
        shifted.append(past * same.reshape(*same.shape, *[1] * (x.dim() - 2)))
    return torch.stack(shifted, dim=-1)


class NgramHash(nn.Module):
    """W_out concat_h table[offset_h + (bias_h xor xor_j mult_hj id_{t-j}) mod prime_h], zero at the start.

    The hash is part of the trained weights: its multipliers have their own seed and are saved, since
    a table read with other multipliers than in training is noise.
    """

    multiplier: Tensor
    bias: Tensor
    prime: Tensor
    offset: Tensor

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        assert config.ngram is not None
        orders, heads, W = config.ngram.orders, config.ngram.heads, config.ngram.dim
        H, J = len(orders) * heads, max(orders)
        generator = torch.Generator().manual_seed(config.ngram.seed)
        odd = torch.randint(0, 2**30, (H, J), generator=generator) * 2 + 1  # odd, in [1, 2^31)
        order = torch.tensor(orders).repeat_interleave(heads).unsqueeze(1)
        primes = primes_from(config.ngram.table, H)
        # A tap beyond a head's order has multiplier 0, the neutral element of xor.
        self.register_buffer("multiplier", odd * (torch.arange(J) < order))
        self.register_buffer("bias", torch.randint(0, 2**31, (H,), generator=generator))
        self.register_buffer("prime", torch.tensor(primes))
        self.register_buffer("offset", torch.tensor([sum(primes[:h]) for h in range(H)]))
        self.table = nn.Parameter(torch.randn(sum(primes), W) * W**-0.5)
        self.output = nn.Linear(H * W, config.d_model, bias=False)
        nn.init.zeros_(self.output.weight)

    def rows(self, ids: Tensor, doc_ids: Tensor) -> Tensor:
        """ids (B,T) int64 below 2^32, doc_ids (B,T) -> rows of the table (B,T,H) int64.

        A tap from another document counts as id 0. Products stay below 2^63, so all values are exact and positive.
        """
        taps = document_taps(ids, doc_ids, self.multiplier.shape[1])  # (B,T,J)
        products = taps.unsqueeze(-2) * self.multiplier  # (B,T,H,J)
        mixed = self.bias
        for product in products.unbind(-1):
            mixed = mixed ^ product
        return mixed % self.prime + self.offset

    def forward(self, ids: Tensor, doc_ids: Tensor) -> Tensor:
        """ids (B,T) int64, doc_ids (B,T) int32 -> (B,T,D)."""
        return self.output(F.embedding(self.rows(ids, doc_ids), self.table).flatten(-2))
