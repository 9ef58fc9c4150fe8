"""The Triton kernels of dsa_indexer under the interpreter: scores, choice, attention over it and its gradient.

B batch, T tokens, J index heads, K chosen keys per query, Hq and Hkv heads, P head dim.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.dsa_indexer import kernel, kernel_choice, kernel_tiles
from kernels.dsa_indexer.eager import (
    dsa_attention_backward_reference,
    dsa_attention_forward_with_lse,
    dsa_choice,
    dsa_scores,
)
from suites.kernels.interpret.dsa_inputs import CASES, DTYPES, Inputs, make_index_inputs, make_inputs
from suites.kernels.interpret.ratio import lse_outside, outside
from suites.support.comparison import doubled
from suites.support.lanes import Lane, lanes
from suites.support.operands import OperandsIn

SIZES = [(2, 6, 4, 2, 16, 5), (1, 5, 2, 2, 4, 9)]  # B T Hq Hkv P K


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks at a small T."""
    monkeypatch.setattr(kernel, "_tiles", lambda *dims: {"gather": (16, 16, 4, 1), "dkdv": (16, 32, 4, 1)})


def reference(q, k, v, indices, dout, *options) -> tuple[Tensor, ...]:
    out, lse = dsa_attention_forward_with_lse(q, k, v, indices, *options)
    return lse, out, *dsa_attention_backward_reference(q, k, v, indices, out, lse, dout, *options)


def plain(inputs: Inputs, options: tuple) -> tuple[Tensor, ...]:
    """Compute the reference in the inputs' dtype with operands of its products in it, like the kernel's weights."""
    if inputs[0].dtype == torch.float32:
        return reference(*inputs, *options)
    with OperandsIn(inputs[0].dtype):
        return reference(*inputs, *options)


def launched(q, k, v, indices, dout, *options) -> tuple[Tensor, ...]:
    out, lse = kernel.dsa_attention_fwd_kernel(q, k, v, indices, *options)
    return lse, out, *kernel.dsa_attention_bwd_kernel(q, k, v, indices, out, lse, dout, *options)


def breaks_of_the_rule(inputs: Inputs, options: tuple) -> list[str]:
    """Check out and the gradients by the ratio rule; lse by that or by the documented error of the "fast" softcap."""
    oracle, usual = reference(*doubled(inputs), *options), plain(inputs, options)
    lse, *found = launched(*inputs, *options)
    assert lse.is_contiguous()
    broken = outside(found, usual[1:], oracle[1:])
    return broken + lse_outside(lse, usual[0], oracle[0], options[1])


@lanes("cpu")
@pytest.mark.parametrize("sizes", [(2, 35, 3, 16), (1, 1, 2, 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_equal_reference_within_rounding(lane: Lane, dtype: str, sizes: tuple[int, ...]):
    """fp16 products are exact in fp32, so both dtypes meet fp32's bound: P + J roundings of the largest sum."""
    q, k, weights, doc_ids = inputs = make_index_inputs(*sizes, dtype=DTYPES[dtype])
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
    """Also checks that the comparison detects a later key among equals."""
    scores = torch.randint(0, 40, (1, 3, 700), generator=torch.Generator().manual_seed(0)).float()
    indices = torch.empty(1, 3, 256, dtype=torch.int32)
    kernel_choice._choice_kernel[(3,)](scores, indices, 700, 256, WIDTH=1024, PLACES=256, num_warps=1)
    order = scores.sort(descending=True, stable=True).indices[..., :256].sort().values
    assert torch.equal(indices.long(), order)
    later = scores.flip(-1).sort(descending=True, stable=True).indices[..., :256]
    assert not torch.equal(indices.long(), (699 - later).sort().values)


@lanes("cpu")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_meets_error_ratio_rule(lane: Lane, dtype: str, case: str, small_tiles: None):
    assert not breaks_of_the_rule(make_inputs((1, 22, 3, 1, 16, 18), DTYPES[dtype]), CASES[case])


@lanes("cpu")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size_meets_error_ratio_rule(lane: Lane, dtype: str, sizes: tuple[int, ...], small_tiles: None):
    assert not breaks_of_the_rule(make_inputs(sizes, DTYPES[dtype]), CASES["softcap"])


@lanes("cpu")
def test_gpu_tiles_meet_error_ratio_rule(lane: Lane):
    assert not breaks_of_the_rule(make_inputs((1, 66, 3, 1, 16, 65), torch.float16), (0.125, 30.0))


@lanes("cpu")
def test_error_ratio_rule_rejects_wrong_formulas(lane: Lane, small_tiles: None):
    q, k, v, indices, dout = inputs = make_inputs((1, 9, 4, 2, 16, 6), torch.float16)
    options = (0.25, 2.0)
    oracle, usual = reference(*doubled(inputs), *options), plain(inputs, options)
    wrong = {
        "softcap": launched(*inputs, 0.25, 2.2),
        "none for key 0": launched(q, k, v, indices.clamp(min=0), dout, *options),
        "a key too few": launched(q, k, v, indices[..., 1:], dout, *options),
        "the choice of another": launched(q, k, v, indices.roll(1, 1), dout, *options),
        "heads": launched(q, k.flip(2), v.flip(2), indices, dout, *options),
    }
    for name, found in wrong.items():
        assert len({line.split(":")[0] for line in outside(found, usual, oracle)}) == 5, name


@lanes("cpu")
def test_unselected_keys_are_not_read(lane: Lane, small_tiles: None):
    """A weight of 0 times nan is nan: keys that were not chosen are not loaded, and their gradient is 0."""
    q, k, v, indices, dout = make_inputs((1, 34, 2, 1, 16, 6), torch.float32)
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
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_key_returns_its_value(lane: Lane, dtype: str, small_tiles: None):
    q, k, v, indices, dout = make_inputs((2, 1, 2, 1, 16, 1), DTYPES[dtype])
    _, out, dq, dk, dv = launched(q, k, v, indices, dout, *CASES["softcap"])
    assert torch.equal(out, v.repeat_interleave(2, 2))
    assert torch.equal(dv, dout.sum(2, keepdim=True, dtype=torch.float32).to(v.dtype))
    assert dq.abs().max() <= 1e-6 >= dk.abs().max()  # exactly 0, apart from dout.v - delta


@lanes("cpu")
def test_input_layouts_do_not_matter(lane: Lane, small_tiles: None):
    inputs = make_inputs((1, 6, 2, 1, 16, 5), torch.float16)
    strided = tuple(t.repeat_interleave(2, -1)[..., ::2] for t in inputs)
    pairs = zip(launched(*inputs, *CASES["softcap"]), launched(*strided, *CASES["softcap"]))
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)


@lanes("cpu")
def test_unsupported_inputs_raise_one_line_error(lane: Lane):
    with pytest.raises(ValueError, match=r"power of two up to 128, not 48$"):
        launched(*make_inputs((1, 2, 1, 1, 48, 2), torch.float16), *CASES["plain"])
    with pytest.raises(ValueError, match=r"power of two up to 128, not 48$"):
        kernel_choice.dsa_scores_kernel(*make_index_inputs(1, 2, 1, 48))
    with pytest.raises(ValueError, match=r"at most 16384 tokens, not 16385$"):
        kernel_choice.dsa_choice_kernel(torch.empty(1, 16385, 16385, device="meta"), 4)
