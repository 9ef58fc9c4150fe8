"""The block loops of the attention kernels, against the mask itself. T tokens."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels._triton.block_spans import block_spans
from kernels.attention import attention_mask
from suites.support.lanes import Lane, lanes


@lanes("cpu")
@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    ids=st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 40)), min_size=1, max_size=6),
    window=st.sampled_from([-1, 0, 1, 20]),
    causal=st.booleans(),
    own_keys=st.booleans(),
    own=st.sampled_from([16, 32]),
)
@example(ids=[(0, 32), (1, 16), (0, 32)], window=0, causal=True, own_keys=False, own=16)
@example(ids=[(0, 32), (1, 16), (0, 32)], window=-1, causal=True, own_keys=False, own=16)
def test_block_spans_miss_no_block_and_mask_correctly(
    lane: Lane, ids: list[tuple[int, int]], window: int, causal: bool, own_keys: bool, own: int
):
    """For documents in any order. The examples have a gap among the full blocks. Window -1: as in mla."""
    doc_ids = torch.cat([torch.full((1, n), i, dtype=torch.int32) for i, n in ids], 1)
    T, other = doc_ids.shape[1], 16
    visible = attention_mask(doc_ids, window, causal)[0]
    visible = visible.T if own_keys else visible
    spans = block_spans(doc_ids, own, other, own_keys, causal, window)[0].tolist()
    assert len(spans) == -(-T // own)
    for block, (begin, before, full, masked) in zip(visible.split(own), spans):
        tiles = block.split(other, 1)
        run = set(range(begin + before, begin + before + full))
        edges = set(range(begin, begin + full + masked)) - run
        assert len(edges) == masked
        assert all(tiles[i].all() and tiles[i].shape[1] == other for i in run)
        assert {i for i, tile in enumerate(tiles) if tile.any()} <= run | edges <= set(range(len(tiles)))
