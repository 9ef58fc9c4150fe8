"""The Triton kernels of dsa_indexer under the interpreter: scores, choice, and which keys attention reads.

B batch, T tokens, J index heads, K chosen keys per query, Hq and Hkv heads, P head dim.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dsa_indexer import kernel, kernel_choice, kernel_tiles
from kernels.dsa_indexer.eager import dsa_choice, dsa_scores
from suites.ops import interpreted
from suites.ops.dsa_indexer import make_index_inputs
from suites.ops.spec import INTERPRETED_DTYPES
from suites.support.comparison import doubled
from suites.support.lanes import Lane, lanes

OP = interpreted()["dsa_indexer"]


@lanes("cpu")
@pytest.mark.parametrize("sizes", [(2, 35, 3, 16), (1, 1, 2, 8)], ids=str)
@pytest.mark.parametrize("dtype", OP.dtypes)
def test_scores_equal_reference_within_rounding(lane: Lane, dtype: str, sizes: tuple[int, ...]):
    """fp16 products are exact in fp32, so both dtypes meet fp32's bound: P + J roundings of the largest sum."""
    q, k, weights, doc_ids = inputs = make_index_inputs(*sizes, dtype=INTERPRETED_DTYPES[dtype])
    found, exact = kernel_choice.dsa_scores_kernel(*inputs), dsa_scores(*doubled(inputs))
    assert found.dtype == torch.float32
    assert torch.equal(found.isneginf(), exact.isneginf())
    sizes_of_sums = dsa_scores(q.double().abs(), k.double().abs(), weights.double().abs(), doc_ids)
    bound = (sizes[2] + sizes[3] + 2) * 2**-24 * sizes_of_sums.masked_fill(exact.isneginf(), 0)
    close = ((found - exact).abs() <= bound) | exact.isneginf()
    assert close.all()
    if sizes[1] > 1:
        wrong = kernel_choice.dsa_scores_kernel(q.flip(2), k, weights, doc_ids)
        assert not (((wrong - exact).abs() <= bound) | exact.isneginf()).all()


@lanes("cpu")
@settings(derandomize=True, max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 999),
    T=st.integers(1, 12),
    top_k=st.integers(1, 14),
    levels=st.sampled_from([2, 5, 10**9]),
)
def test_selected_keys_equal_reference(lane: Lane, seed: int, T: int, top_k: int, levels: int):
    """Ties, zeros of both signs, tiny and huge scores, and rows of few keys or none."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(-levels, levels, (1, T, T), generator=g).float()
    scores *= torch.tensor([1e-38, 1.0, 1e30])[torch.randint(0, 3, (1, T, T), generator=g)]
    scores = torch.where(torch.rand(1, T, T, generator=g) < 0.3, -0.0, scores)
    scores = scores.masked_fill(torch.rand(1, T, T, generator=g) < 0.3, float("-inf"))
    assert torch.equal(kernel_choice.dsa_choice_kernel(scores, top_k), dsa_choice(scores, top_k))


@lanes("cpu")
def test_selection_among_many_keys_equals_reference(lane: Lane):
    """The comparison itself is checked, too: it detects a later key among equals."""
    scores = torch.randint(0, 40, (1, 3, 700), generator=torch.Generator().manual_seed(0)).float()
    indices = torch.empty(1, 3, 256, dtype=torch.int32)
    kernel_choice._choice_kernel[(3,)](scores, indices, 700, 256, WIDTH=1024, PLACES=256, num_warps=1)
    order = scores.sort(descending=True, stable=True).indices[..., :256].sort().values
    assert torch.equal(indices.long(), order)
    later = scores.flip(-1).sort(descending=True, stable=True).indices[..., :256]
    assert not torch.equal(indices.long(), (699 - later).sort().values)


@lanes("cpu")
def test_unselected_keys_are_not_read(lane: Lane):
    """A weight of 0 times nan is nan: keys that were not chosen are not loaded, and their gradient is 0."""
    arguments = OP.example("fp32", 1, 34, 2, 1, 16, 6)
    q, k, v, indices, dout = (arguments[n] for n in ("q", "k", "v", "indices", "dout"))
    indices = torch.where(indices % 3 == 0, -1, indices)
    indices[:, 7] = -1
    indices = torch.where(indices == 7, -1, indices)
    k[:, ::3] = v[:, ::3] = float("nan")
    out, lse = kernel.dsa_attention_fwd_kernel(q, k, v, indices, 0.25, 2.0)
    assert out.isfinite().all()
    assert not out[:, 7].any()
    k, v = k.nan_to_num(9.0), v.nan_to_num(9.0)
    dq, dk, dv = kernel.dsa_attention_bwd_kernel(q, k, v, indices, out, lse, dout, 0.25, 2.0)
    assert not any(t[:, ::3].any() or t[:, 7].any() for t in (dk, dv))
    assert not dq[:, 7].any()
    assert all(t.isfinite().all() for t in (dq, dk, dv))


@lanes("cpu")
@settings(derandomize=True, max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), T=st.integers(1, 70), K=st.integers(1, 4))
def test_block_walk_visits_exactly_the_blocks_with_pairs(lane: Lane, seed: int, T: int, K: int):
    M, N = 16, 32
    g = torch.Generator().manual_seed(seed)
    near = torch.arange(T).unsqueeze(1) - torch.arange(K)  # the last K tokens: most blocks hold no pair
    indices = torch.where(torch.rand(2, T, K, generator=g) < 0.2, -1, near.clamp(min=-1)).int()
    chosen = kernel_tiles.by_key(indices, torch.ones_like(indices))
    walk, blocks = kernel_tiles.query_blocks(indices, M, N)
    assert chosen.shape == (2, T + 1, T)
    for b in range(2):
        pairs = {(s, t) for t in range(T) for s in indices[b, t].tolist() if s >= 0}
        assert {(s, t) for s, t in chosen[b, :T].nonzero().tolist()} == pairs
        for block in range(-(-T // N)):
            expected = sorted({t // M for s, t in pairs if s // N == block})
            assert walk[b, block, : blocks[b, block]].tolist() == expected


@lanes("cpu")
def test_unsupported_inputs_raise_one_line_error(lane: Lane):
    with pytest.raises(ValueError, match=r"power of two up to 128, not 48$"):
        kernel_choice.dsa_scores_kernel(*make_index_inputs(1, 2, 1, 48, torch.float32))
    with pytest.raises(ValueError, match=r"at most 16384 tokens, not 16385$"):
        kernel_choice.dsa_choice_kernel(torch.empty(1, 16385, 16385, device="meta"), 4)
