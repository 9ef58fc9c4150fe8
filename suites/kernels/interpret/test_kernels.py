"""What is particular to one kernel under Triton's interpreter, and a defect of the interpreter.

B batch, T tokens, H heads, J index heads, K chosen keys per query or top-k, E experts, D_in and D_out model dims.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.errors import InterpreterError

from kernels._triton.block_spans import block_spans
from kernels.attention import attention_mask
from kernels.dsa_indexer import kernel as dsa_kernel
from kernels.dsa_indexer import kernel_choice, kernel_tiles
from kernels.dsa_indexer.eager import dsa_choice, dsa_distribution_eager, dsa_scores
from kernels.grouped_gemm import kernel as gemm_kernel
from kernels.moe_combine import kernel as combine_kernel
from kernels.moe_dispatch import kernel as dispatch_kernel
from kernels.moe_dispatch.eager import moe_dispatch_eager
from suites.ops import cross_entropy, interpreted, moe_combine, moe_dispatch
from suites.ops.dsa_indexer import make_index_inputs
from suites.ops.grouped_gemm import KERNEL_DIMS, RAGGED
from suites.ops.spec import INTERPRETED_DTYPES, KernelOp
from suites.support.comparison import AT_MOST, doubled, error_ratio
from suites.support.lanes import Lane, lanes
from suites.support.properties import quick

# Absent in 3.6.0, 3.7.1 and 3.8.0, present in 3.9.0.
MASK_REFUSED = "triton>=3.9,<3.10"
REFUSED = "mask has unsupported dtype"


def of(name: str, *dtypes: str) -> Any:
    """Run a test with the small blocks of one op, and for each of these dtypes, if any."""
    op = interpreted()[name]
    names, values = ("op", "dtype"), [pytest.param(op, dtype, id=f"{name}-{dtype}") for dtype in dtypes]
    return pytest.mark.parametrize(names if dtypes else "op", values or [pytest.param(op, id=name)])


@triton.jit
def _guarded_kernel(x_ptr, programs, N: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, 1.0, mask=(i < N) & (tl.program_id(0) < programs))


def stored() -> Tensor:
    x = torch.zeros(8)
    _guarded_kernel[(1,)](x, 1, N=4, BLOCK=8)
    return x


@lanes("cpu")
def test_mask_with_a_comparison_of_scalars(lane: Lane, row, masks_of_bool) -> None:
    """Defect present: the store fails. With a comparison that stays a bool, as on a GPU, it works in every version."""
    expected = torch.tensor([1.0] * 4 + [0.0] * 4)
    assert torch.equal(stored(), expected)
    signature = ""
    with masks_of_bool():
        try:
            assert torch.equal(stored(), expected)
        except InterpreterError as error:
            signature = str(error)
            if REFUSED not in signature:
                raise
    row.defect(
        "kernels/control/mask_of_scalars_refused", bool(signature), known_in=MASK_REFUSED,
        reason="a comparison of two scalars, broadcast to a tensor, gets the dtype of the scalars in "
        "triton/runtime/interpreter.py (create_splat), and a load or store with such a mask is refused; workaround: "
        "suites/kernels/interpret/conftest.py", witness=int(expected.sum()), rule="C36",
        evidence=[signature] if signature else [],
    )  # fmt: skip


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
) -> None:
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


# cross_entropy.


@lanes("cpu")
@pytest.mark.parametrize("softcap", cross_entropy.SOFTCAPS)
@of("cross_entropy", "fp32", "fp16")
def test_nan_affects_only_its_own_row(lane: Lane, op: KernelOp, dtype: str, softcap: float) -> None:
    """Neither the maximum nor the bound of the fast softcap may hide it, in a full tile or in the last one."""
    for at in (3, 130):
        inputs = op.example(dtype, 133)
        inputs["logits"][3, at] = torch.nan
        loss, _, dlogits = op.launched(**inputs | {"softcap": softcap})
        assert loss.isnan().tolist() == [False] * 3 + [True]
        assert dlogits.isnan().any(1).tolist() == [False] * 3 + [True]


@lanes("cpu")
@pytest.mark.parametrize("expected", [-1, 133, 2**40])
@pytest.mark.parametrize("softcap", cross_entropy.SOFTCAPS)
@of("cross_entropy")
def test_out_of_range_target_gives_nan_without_a_read(
    lane: Lane, op: KernelOp, softcap: float, expected: int
) -> None:
    inputs = op.example("fp16", 133)
    inputs["target"][1] = expected
    loss, _, dlogits = op.launched(**inputs | {"softcap": softcap})
    assert loss.isnan().tolist() == [False, True, False, False]
    assert dlogits.isnan().all(1).tolist() == dlogits.isnan().any(1).tolist() == loss.isnan().tolist()


# dsa_indexer: scores, choice, and which keys attention reads.


@lanes("cpu")
@pytest.mark.parametrize("sizes", [(2, 35, 3, 16), (1, 1, 2, 8)], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_scores_equal_reference_within_rounding(lane: Lane, dtype: str, sizes: tuple[int, ...]) -> None:
    """fp16 products are exact in fp32, so both dtypes meet fp32's bound: P + J roundings of the largest sum."""
    q, k, weights, doc_ids = inputs = make_index_inputs(*sizes, dtype=INTERPRETED_DTYPES[dtype])
    found, exact = kernel_choice.dsa_scores_kernel(*inputs), dsa_scores(*doubled(inputs))
    hidden = exact.isneginf()
    assert found.dtype == torch.float32
    assert torch.equal(found.isneginf(), hidden)
    sums = dsa_scores(q.double().abs(), k.double().abs(), weights.double().abs(), doc_ids)
    bound = (sizes[2] + sizes[3] + 2) * 2**-24 * sums.masked_fill(hidden, 0)
    assert (((found - exact).abs() <= bound) | hidden).all()
    if sizes[1] > 1:
        wrong = kernel_choice.dsa_scores_kernel(q.flip(2), k, weights, doc_ids)
        assert not (((wrong - exact).abs() <= bound) | hidden).all()


@lanes("cpu")
@quick
@given(
    seed=st.integers(0, 999),
    T=st.integers(1, 12),
    top_k=st.integers(1, 14),
    levels=st.sampled_from([2, 5, 10**9]),
)
def test_selected_keys_equal_reference(lane: Lane, seed: int, T: int, top_k: int, levels: int) -> None:
    """Ties, zeros of both signs, tiny and huge scores, and rows of few keys or none."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(-levels, levels, (1, T, T), generator=g).float()
    scores *= torch.tensor([1e-38, 1.0, 1e30])[torch.randint(0, 3, (1, T, T), generator=g)]
    scores = torch.where(torch.rand(1, T, T, generator=g) < 0.3, -0.0, scores)
    scores = scores.masked_fill(torch.rand(1, T, T, generator=g) < 0.3, float("-inf"))
    assert torch.equal(kernel_choice.dsa_choice_kernel(scores, top_k), dsa_choice(scores, top_k))


@lanes("cpu")
def test_selection_among_many_keys_equals_reference(lane: Lane) -> None:
    """The comparison itself is checked, too: it detects a later key among equals."""
    scores = torch.randint(0, 40, (1, 3, 700), generator=torch.Generator().manual_seed(0)).float()
    indices = torch.empty(1, 3, 256, dtype=torch.int32)
    kernel_choice._choice_kernel[(3,)](scores, indices, 700, 256, WIDTH=1024, PLACES=256, num_warps=1)
    order = scores.sort(descending=True, stable=True).indices[..., :256].sort().values
    assert torch.equal(indices.long(), order)
    later = scores.flip(-1).sort(descending=True, stable=True).indices[..., :256]
    assert not torch.equal(indices.long(), (699 - later).sort().values)


@lanes("cpu")
@of("dsa_indexer")
def test_unselected_keys_are_not_read(lane: Lane, op: KernelOp) -> None:
    """A weight of 0 times nan is nan: keys that were not chosen are not loaded, and their gradient is 0."""
    arguments = op.example("fp32", 1, 34, 2, 1, 16, 6)
    q, k, v, indices, dout = (arguments[n] for n in ("q", "k", "v", "indices", "dout"))
    indices = torch.where(indices % 3 == 0, -1, indices)
    indices[:, 7] = -1
    indices = torch.where(indices == 7, -1, indices)
    k[:, ::3] = v[:, ::3] = float("nan")
    out, lse = dsa_kernel.dsa_attention_fwd_kernel(q, k, v, indices, 0.25, 2.0)
    assert out.isfinite().all()
    assert not out[:, 7].any()
    k, v = k.nan_to_num(9.0), v.nan_to_num(9.0)
    dq, dk, dv = dsa_kernel.dsa_attention_bwd_kernel(q, k, v, indices, out, lse, dout, 0.25, 2.0)
    assert not any(t[:, ::3].any() or t[:, 7].any() for t in (dk, dv))
    assert not dq[:, 7].any()
    assert all(t.isfinite().all() for t in (dq, dk, dv))


@lanes("cpu")
@quick
@given(seed=st.integers(0, 99), T=st.integers(1, 70), K=st.integers(1, 4))
def test_block_walk_visits_exactly_the_blocks_with_pairs(lane: Lane, seed: int, T: int, K: int) -> None:
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
def test_unsupported_inputs_raise_one_line_error(lane: Lane) -> None:
    with pytest.raises(ValueError, match=r"power of two up to 128, not 48$"):
        kernel_choice.dsa_scores_kernel(*make_index_inputs(1, 2, 1, 48, torch.float32))
    with pytest.raises(ValueError, match=r"at most 16384 tokens, not 16385$"):
        kernel_choice.dsa_choice_kernel(torch.empty(1, 16385, 16385, device="meta"), 4)


@lanes("cpu")
@pytest.mark.parametrize("size", [2.0**-32, 0.0])
@of("dsa_indexer_scores")
def test_gradient_scale_does_not_matter(lane: Lane, op: KernelOp, size: float) -> None:
    """fp16 cannot represent values below 6e-8; the weights' gradient is requested in fp32."""
    q, k, weights, indices, dscores = op.example("fp16", 1, 9, 4, 16, 6).values()
    inputs = q, k, weights.float(), indices
    large = dsa_kernel.dsa_chosen_scores_bwd_kernel(*inputs, dscores)[2]
    assert torch.equal(dsa_kernel.dsa_chosen_scores_bwd_kernel(*inputs, dscores * size)[2], large * size)


@lanes("cpu")
@pytest.mark.parametrize("softcap", [30.0, 50.0])
@of("dsa_indexer_target")
def test_target_of_fp16_inputs_has_fp32_accuracy(lane: Lane, op: KernelOp, softcap: float) -> None:
    """Their products are exact and the target is fp32; the softcap that suffices for a bf16 P is 9 times as far off."""
    q, k, _, indices, *_ = op.example("fp16", 1, 40, 14, 2, 64, 24).values()
    found = dsa_kernel.dsa_distribution_fwd_kernel(q, k, indices, 0.125, softcap)
    plain = dsa_distribution_eager(q.float(), k.float(), indices, 0.125, softcap)
    oracle = dsa_distribution_eager(*doubled((q, k, indices)), 0.125, softcap)
    assert found.dtype == torch.float32
    assert error_ratio(found, plain, oracle) < AT_MOST["forward"]


@lanes("cpu")
@of("dsa_indexer_scores")
def test_query_without_keys_has_zero_gradient(lane: Lane, op: KernelOp) -> None:
    inputs = op.example("fp32", 1, 9, 4, 16, 6)
    inputs["indices"][:, 5] = -1
    scores, dq, _, dweights = op.launched(**inputs)
    assert not any(t[:, 5].any() for t in (scores, dq, dweights))
    inputs["k"] = inputs["k"].unsqueeze(2)
    (target,) = interpreted()["dsa_indexer_target"].launched(**inputs, scale=0.25, softcap=2.0)
    assert not target[:, 5].any()
    torch.testing.assert_close(target[:, 8].sum(-1), torch.ones(1))


# grouped_gemm: which tiles are used, and transposed inputs.


@lanes("cpu")
@of("grouped_gemm", "fp32", "fp16")
def test_tma_is_used_only_for_16_bit_whole_chunks(lane: Lane, op: KernelOp, dtype: str) -> None:
    """Checks which tiles the cases of the op ran with."""
    tiles = {}
    for D_in, D_out in KERNEL_DIMS:
        inputs = op.example(dtype, (4,), D_in, D_out)
        tiles[D_in, D_out] = gemm_kernel._tile(D_out, inputs["x"], inputs["weight"])
    plain = gemm_kernel.PLAIN, False
    assert tiles[32, 128] == ((gemm_kernel.WIDE, True) if dtype == "fp16" else plain)
    assert tiles[20, 35] == tiles[1, 3] == plain
    assert gemm_kernel._tile(96, *(torch.ones(4, 64, dtype=torch.float16),) * 2) == (gemm_kernel.TALL, True)


@lanes("cpu")
@quick
@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=9),
    spare=st.integers(-5, 20),
    height=st.sampled_from([3, 8, 16]),
)
def test_tile_plan_covers_every_row_once(lane: Lane, counts: list[int], spare: int, height: int) -> None:
    """Counts that add up to more rows than there are do not access a row beyond the end."""
    M = max(0, sum(counts) + spare)
    plan, used = gemm_kernel._plan(torch.tensor(counts), M, height)
    tiles, rows = used.tolist()
    assert tiles <= len(plan)
    assert rows == min(M, sum(counts))
    covered = []
    for expert, first, end in plan[:tiles].tolist():
        mine = range(first, min(first + height, end))
        assert len(mine) > 0
        covered += [(row, expert) for row in mine]
    owners = [e for e, count in enumerate(counts) for _ in range(count)]
    assert covered == list(enumerate(owners[:M]))


@lanes("cpu")
@pytest.mark.parametrize("dims", KERNEL_DIMS[1:3], ids=str)
@of("grouped_gemm")
def test_transposed_inputs_give_the_same_bits(lane: Lane, op: KernelOp, dims: tuple[int, int]) -> None:
    inputs = op.example("fp16", RAGGED, *dims, spare=0)
    turned = {n: inputs[n].mT.contiguous().mT for n in ("x", "weight", "dy")}
    pairs = zip(op.launched(**turned, counts=inputs["counts"].int()), op.launched(**inputs))
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)


# m2rnn, moe_combine and moe_dispatch.


@lanes("cpu")
@of("m2rnn", "fp64", "fp32")
def test_small_and_saturated_candidates_are_accurate(lane: Lane, op: KernelOp, dtype: str) -> None:
    """tanh from 1e-6, where the exponential alone would cancel, to where it is 1 and its slope 0."""
    inputs = op.example(dtype, 1, 24, 1, 4, 4)
    inputs["k"] = torch.logspace(-6, 4, 24).view(1, 24, 1, 1).to(inputs["k"]) * inputs["k"]
    inputs |= {"v": inputs["v"].sign(), "h0": torch.zeros_like(inputs["h0"])}
    found, oracle = op.launched(**inputs), op.reference(**doubled(inputs))
    assert not op.rule([inputs])([found])
    first = (found[2].double() / oracle[2] - 1)[:, 0].abs().max()
    assert first < 16 * torch.finfo(found[2].dtype).eps


@lanes("cpu")
@of("moe_combine")
def test_dropped_and_unowned_rows_are_ignored(lane: Lane, op: KernelOp) -> None:
    inputs = op.example("fp32", *moe_combine.SIZES[1])
    expected = op.launched(**inputs)
    owned, dropped = expected[1].count_nonzero(-1) > 0, inputs["slot"] < 0
    assert dropped.any()
    assert not owned.all()
    inputs["y"].masked_fill_(~owned.unsqueeze(-1), torch.nan)
    inputs["weights"].masked_fill_(dropped, torch.inf)
    assert all(map(torch.equal, op.launched(**inputs), expected))


@lanes("cpu")
@of("moe_combine")
def test_output_is_cast_once_at_the_end(lane: Lane, op: KernelOp) -> None:
    *inputs, _ = op.example("fp16", *moe_combine.SIZES[1]).values()
    both = (torch.float32, torch.float16)
    wide, narrow = (combine_kernel.moe_combine_fwd_kernel(*inputs, dtype) for dtype in both)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.half(), narrow)
    assert not torch.equal(wide, narrow.float())


@lanes("cpu")
@pytest.mark.parametrize("sizes", moe_dispatch.SIZES, ids=str)
@of("moe_dispatch", *INTERPRETED_DTYPES)
def test_rows_slots_and_overflow_equal_reference(
    lane: Lane, op: KernelOp, dtype: str, sizes: tuple[int, ...]
) -> None:
    """The copy is bitwise equal."""
    B, T, K, E, D, C = sizes
    made = moe_dispatch.null_routing(B=B, T=T, K=K, E=E, D=D, C=C, dtype=INTERPRETED_DTYPES[dtype])
    x, expert, _ = made
    found = dispatch_kernel.moe_dispatch_fwd_kernel(x, expert, E, C)
    for ours, theirs in zip(found, moe_dispatch_eager(x, expert, E, C), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
        assert ours.is_contiguous()
    assert (found[2] > 0) == (sizes in (moe_dispatch.SIZES[1], moe_dispatch.SIZES[3]))
