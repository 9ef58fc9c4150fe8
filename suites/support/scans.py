"""Shared inputs of the scan suites: documents in a row, and rows assembled from parts.

B batch, T tokens. Inputs go by name; per_token lists those whose second axis is T.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from suites.support.comparison import Named


def documents(B: int, T: int, starts: Iterable[int]) -> Tensor:
    """Return doc_ids (B,T) int32: a document begins at each of `starts` in row 0, three tokens later in each further
    row.

    The ids alternate 5, 1, 5, 1: a change from one token to the next is what counts, not the value.
    """
    begins = torch.zeros(B, T, dtype=torch.int32)
    for row in range(B):
        begins[row, [start + 3 * row for start in starts if start + 3 * row < T]] = 1
    return 5 - 4 * (begins.cumsum(1) % 2).int()


def inner_token(T: int, at: float) -> int:
    """Return the token at a fraction of the row, never the first one or one past the end."""
    return min(max(1, round(at * T)), T - 1)


def cut(inputs: Named, tokens: slice, per_token: Iterable[str]) -> Named:
    """Slice the tokens of the per-token inputs."""
    return inputs | {n: inputs[n][:, tokens] for n in per_token}


def spliced(head: Named, tail: Named, at: int, per_token: Iterable[str]) -> Named:
    """Return `tail` with its tokens before `at` replaced by those of `head`."""
    return tail | {n: torch.cat((head[n][:, :at], tail[n][:, at:]), 1) for n in per_token}


def carried(state: Tensor, doc_ids: Tensor, at: int) -> Tensor:
    """Return the initial state (B,...) of a run that begins at token `at`.

    The run cannot detect that its first token begins a document, so the caller zeroes the state there.
    """
    same_document = doc_ids[:, at] == doc_ids[:, at - 1]
    return state * same_document.view(-1, *[1] * (state.dim() - 1))
