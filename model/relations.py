"""Relations between the chunks of a program (functions, types, preambles), and an attention bias from them.

B batch, T tokens, H heads, C chunks, R relations, K edges. All tables have a fixed number of slots: an unused
chunk starts at 2**30 and ends at 0, an unused edge is (-1, -1).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.layers import widen

RELATIONS = (
    "same_chunk", "calls", "called_by", "uses_type", "type_used_by",
    "same_level", "next_level", "preamble_to_code", "code_to_preamble",
)  # fmt: skip
NO_CHUNK = 2**30


def started(start: Tensor, token: Tensor) -> Tensor:
    """torch.searchsorted(start, token, right=True) by comparisons: start (B,C), token (B,T) -> (B,T) int64."""
    return (start.unsqueeze(1) <= token.unsqueeze(2)).sum(-1)


def chunk_of_token(start: Tensor, end: Tensor, doc_ids: Tensor) -> tuple[Tensor, Tensor]:
    """start (ascending) and end (exclusive) (B,C) int64, doc_ids (B,T) -> chunk (B,T) and document (B,C).

    A token's chunk is the last one that starts at or before it, if that has not ended and is in the token's
    document; C where there is none. A chunk's document is the document of its first token, -2 for an unused slot.
    """
    (B, T), C = doc_ids.shape, start.shape[1]
    token = torch.arange(T, device=start.device).expand(B, T).contiguous()
    # torch_xla 2.9 has no searchsorted: it would copy both tensors to the host and search there, at every step.
    on_xla = start.device.type == "xla"
    begun = started(start, token) if on_xla else torch.searchsorted(start.contiguous(), token, right=True)
    chunk = begun - 1
    used = end > start
    document = torch.where(used, doc_ids.gather(1, start.clamp(0, T - 1)), -2)
    slot = chunk.clamp(min=0)
    inside = (chunk >= 0) & (token < end.gather(1, slot)) & (document.gather(1, slot) == doc_ids)
    return torch.where(inside, chunk, C), document


def edge_mask(edges: Tensor, chunks: int) -> Tensor:
    """edges (B,K,2) int64 as (from, to), negative where unused -> (B,C,C) bool."""
    source, target = edges.unbind(-1)
    used = (source >= 0) & (target >= 0)
    # Unused edges all write to one cell past the end, which is cut off.
    cell = torch.where(used, source * chunks + target, chunks * chunks)
    flat = torch.zeros(edges.shape[0], chunks * chunks + 1, dtype=torch.bool, device=edges.device)
    return flat.scatter(1, cell, True)[:, :-1].unflatten(1, (chunks, chunks))


def chunk_relations(
    document: Tensor, level: Tensor, preamble: Tensor, calls: Tensor, types: Tensor
) -> Tensor:
    """Return (B,9,C,C) bool, in the order of RELATIONS: relation r holds from chunk i to chunk j.

    document (B,C), negative for an unused chunk: relations do not cross documents. level (B,C) int64 in the
    dependency order, negative if unknown: "same level" includes the chunk itself, "next" is symmetric.
    preamble (B,C): 1 preamble, 0 code, negative neither. calls, types (B,K,2) int64.
    Edges are scattered and levels compared by broadcast: the number of operations does not depend on C.
    """
    C = document.shape[1]
    call, type_ = edge_mask(calls, C), edge_mask(types, C)
    distance = (level.unsqueeze(2) - level.unsqueeze(1)).abs()
    leveled = (level.unsqueeze(2) >= 0) & (level.unsqueeze(1) >= 0)
    to_code = (preamble.unsqueeze(2) == 1) & (preamble.unsqueeze(1) == 0)
    eye = torch.eye(C, dtype=torch.bool, device=level.device).expand_as(call)
    masks = (
        eye, call, call.mT, type_, type_.mT,
        leveled & (distance == 0), leveled & (distance == 1), to_code, to_code.mT,
    )  # fmt: skip
    together = (document.unsqueeze(2) == document.unsqueeze(1)) & (document.unsqueeze(2) >= 0)
    return torch.stack(masks, dim=1) & together.unsqueeze(1)


class RelationBias(nn.Module):
    """Additive attention logits between tokens by the relations of their chunks; zero at the start.

    A (B,H,T,T) tensor, for attention in plain torch or as a score_mod's table. `kernels.attention` has no
    bias argument, so the hybrid does not use this one: it is available separately.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(len(RELATIONS), heads))

    def forward(self, relations: Tensor, chunk: Tensor) -> Tensor:
        """relations (B,9,C,C) bool, chunk (B,T) int64, C for a token outside all chunks -> (B,H,T,T) fp32."""
        table = widen(self.table)
        between = torch.einsum("brij,rh->bhij", relations.to(table.dtype), table)
        between = F.pad(between, (0, 1, 0, 1))  # no chunk: zero
        (B, T), H, slots = chunk.shape, table.shape[1], between.shape[-1]
        rows = between.gather(2, chunk.view(B, 1, T, 1).expand(B, H, T, slots))
        return rows.gather(3, chunk.view(B, 1, 1, T).expand(B, H, T, T))
