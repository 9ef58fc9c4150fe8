"""Step-by-step decoding: the state of every stateful block, and the logits of the next token.

B batch, D model dim, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.attention import AttentionState
from model.dsa import SparseState
from model.hybrid import Hybrid
from model.mla import LatentState

FEATURES = ("ngram", "structure", "tree", "engram", "mtp", "hyper")


class DecodeState(NamedTuple):
    """State before a token: each block's state (None for E), and the token's position in its document."""

    blocks: tuple[Any, ...]
    positions: Tensor  # (B,) int32


def empty_state(model: Hybrid, batch: int) -> DecodeState:
    """Return the initial state. Raises ValueError on a model with features that read more than the last token."""
    on = [name for name in FEATURES if getattr(model.config, name) is not None]
    if on:
        raise ValueError(f"{model.config.name}: decoding does not support {', '.join(on)}")
    x = model.embedding.weight.new_zeros(batch, model.config.d_model)
    states = (block.empty_state(x) if hasattr(block, "step") else None for block in model.blocks)
    return DecodeState(tuple(states), torch.zeros(batch, dtype=torch.int32, device=x.device))


def decode_step(model: Hybrid, ids: Tensor, state: DecodeState) -> tuple[Tensor, DecodeState]:
    """ids (B,) int64, the current token -> logits of the next one (B,V) fp32, the state after it.

    A BOS begins a document and resets the state of its row.
    """
    begins = ids == model.config.bos_id
    positions = state.positions.masked_fill(begins, 0)
    x, after = model.embedding(ids), []
    for letter, block, before in zip(model.config.letters, model.blocks, state.blocks):
        if letter == "E":
            x = block(x.unsqueeze(1))[0].squeeze(1)
            after.append(None)
            continue
        before = forget(before, begins)
        x, left = block.step(x, before, positions) if letter == "A" else block.step(x, before)
        after.append(left)
    logits = model.head.logits(x.unsqueeze(1), model.embedding.weight).squeeze(1)
    return logits, DecodeState(tuple(after), positions + 1)


def forget(state: Any, begins: Tensor) -> Any:
    """Reset the state of rows where a document begins (`begins`, (B,) bool); return the same structure."""
    if isinstance(state, SparseState):
        return state._replace(attention=forget(state.attention, begins))
    if isinstance(state, (AttentionState, LatentState)):
        return state._replace(seen=state.seen & ~begins.unsqueeze(1))
    kept = (t.masked_fill(begins.view(-1, *[1] * (t.dim() - 1)), 0) for t in state)
    return type(state)(*kept) if hasattr(state, "_fields") else tuple(kept)
