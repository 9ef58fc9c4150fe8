"""Sparse attention over keys selected by an indexer: the selection, the attention, and the indexer's loss."""

from kernels.dsa_indexer.eager import (
    dsa_attention_backward_eager,
    dsa_attention_eager,
    dsa_choice,
    dsa_indexer_eager,
    dsa_scores,
)
from kernels.dsa_indexer.op import (
    dsa_attention,
    dsa_chosen_scores,
    dsa_distribution,
    dsa_indexer,
    dsa_indexer_loss,
)

__all__ = [
    "dsa_attention",
    "dsa_attention_backward_eager",
    "dsa_attention_eager",
    "dsa_choice",
    "dsa_chosen_scores",
    "dsa_distribution",
    "dsa_indexer",
    "dsa_indexer_eager",
    "dsa_indexer_loss",
    "dsa_scores",
]
