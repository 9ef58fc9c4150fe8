"""The Triton training kernels of dsa_indexer under the interpreter: scores, their gradient, and the target.

B batch, T tokens, J index heads, K chosen keys per query, P head dim.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.dsa_indexer import kernel, kernel_loss
from kernels.dsa_indexer.eager import (
    dsa_chosen_scores_backward_reference,
    dsa_chosen_scores_reference,
    dsa_distribution_reference,
)
from suites.kernels.interpret.dsa_inputs import CASES, DTYPES, Inputs, make_index_inputs, make_inputs
from suites.kernels.interpret.ratio import outside
from suites.support.comparison import AT_MOST, doubled, error_ratio
from suites.support.lanes import Lane, lanes
from suites.support.operands import OperandsIn

SIZES = [(2, 22, 3, 16, 18), (1, 5, 2, 4, 9), (1, 1, 1, 8, 1), (1, 9, 17, 16, 4)]  # B T J P K


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks at a small T, and several parts of few heads."""
    tiles = {"gather": (32, 16, 4, 1), "dk": (16, 32, 4, 1)}
    monkeypatch.setattr(kernel_loss, "_tiles", lambda *dims: tiles)
    monkeypatch.setattr(kernel_loss, "HEADS", 2)


def make_score_inputs(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Inputs:
    """Return q, k, weights of either sign, a random choice with fewer keys for early queries, dscores."""
    B, T, J, P, K = sizes
    q, k, weights, _ = make_index_inputs(B, T, J, P, dtype)
    indices = make_inputs((B, T, 1, 1, 4, K))[3]
    dscores = torch.randn(B, T, K, generator=torch.Generator().manual_seed(K))
    return q, k, weights, indices, dscores


def reference(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, dscores: Tensor) -> tuple[Tensor, ...]:
    scores = dsa_chosen_scores_reference(q, k, weights, indices)
    return scores, *dsa_chosen_scores_backward_reference(q, k, weights, indices, dscores)


def launched(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, dscores: Tensor) -> tuple[Tensor, ...]:
    scores = kernel.dsa_chosen_scores_fwd_kernel(q, k, weights, indices)
    return scores, *kernel.dsa_chosen_scores_bwd_kernel(q, k, weights, indices, dscores)


def plain(inputs: Inputs) -> tuple[Tensor, ...]:
    """Compute the reference in the inputs' dtype with the operands of its products in it."""
    if inputs[0].dtype == torch.float32:
        return reference(*inputs)
    with OperandsIn(inputs[0].dtype):
        return reference(*inputs)


@lanes("cpu")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_and_gradients_meet_error_ratio_rule(
    lane: Lane, dtype: str, sizes: tuple[int, ...], small_tiles: None
):
    inputs = make_score_inputs(sizes, DTYPES[dtype])
    assert not outside(launched(*inputs), plain(inputs), reference(*doubled(inputs)))


@lanes("cpu")
def test_gpu_tiles_meet_error_ratio_rule(lane: Lane):
    inputs = make_score_inputs((1, 66, 9, 16, 65), torch.float16)
    assert not outside(launched(*inputs), plain(inputs), reference(*doubled(inputs)))


@lanes("cpu")
def test_error_ratio_rule_rejects_wrong_formulas(lane: Lane, small_tiles: None):
    q, k, weights, indices, dscores = inputs = make_score_inputs((1, 9, 4, 16, 6), torch.float16)
    oracle, usual = reference(*doubled(inputs)), plain(inputs)
    wrong = {
        "none for key 0": launched(q, k, weights, indices.clamp(min=0), dscores),
        "the choice of another": launched(q, k, weights, indices.roll(1, 1), dscores),
        "heads": launched(q, k, weights.flip(2), indices, dscores),
        "no relu": launched(q.abs(), k.abs(), weights, indices, dscores),
    }
    for name, found in wrong.items():
        assert len({line.split(":")[0] for line in outside(found, usual, oracle)}) >= 3, name


@lanes("cpu")
@pytest.mark.parametrize("size", [2.0**-32, 0.0])
def test_gradient_scale_does_not_matter(lane: Lane, size: float, small_tiles: None):
    """fp16 cannot represent values below 6e-8; the weights' gradient is requested in fp32."""
    q, k, weights, indices, dscores = make_score_inputs((1, 9, 4, 16, 6), torch.float16)
    inputs = q, k, weights.float(), indices
    large = kernel.dsa_chosen_scores_bwd_kernel(*inputs, dscores)[2]
    assert torch.equal(kernel.dsa_chosen_scores_bwd_kernel(*inputs, dscores * size)[2], large * size)


@lanes("cpu")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_target_meets_error_ratio_rule(lane: Lane, dtype: str, case: str, small_tiles: None):
    for sizes in [(2, 22, 3, 1, 16, 18), (1, 6, 4, 2, 16, 5)]:
        q, k, _, indices, _ = make_inputs(sizes, DTYPES[dtype])
        found = kernel.dsa_distribution_fwd_kernel(q, k, indices, *CASES[case])
        oracle = dsa_distribution_reference(*doubled((q, k, indices)), *CASES[case])
        assert found.dtype == torch.float32
        assert not outside(
            [found], [dsa_distribution_reference(q, k, indices, *CASES[case])], [oracle], terms=1.0
        )
        wrong = kernel.dsa_distribution_fwd_kernel(q, k.flip(1), indices, *CASES[case])
        assert outside(
            [wrong], [dsa_distribution_reference(q, k, indices, *CASES[case])], [oracle], terms=1.0
        )


@lanes("cpu")
@pytest.mark.parametrize("softcap", [30.0, 50.0])
def test_target_of_fp16_inputs_has_fp32_accuracy(lane: Lane, softcap: float, small_tiles: None):
    """Their products are exact and the target is fp32; the softcap that suffices for a bf16 P is 9 times as far off."""
    q, k, _, indices, _ = make_inputs((1, 40, 14, 2, 64, 24), torch.float16)
    found = kernel.dsa_distribution_fwd_kernel(q, k, indices, 0.125, softcap)
    plain = dsa_distribution_reference(q.float(), k.float(), indices, 0.125, softcap)
    oracle = dsa_distribution_reference(*doubled((q, k, indices)), 0.125, softcap)
    assert error_ratio(found, plain, oracle) < AT_MOST["forward"]


@lanes("cpu")
def test_query_without_keys_has_zero_gradient(lane: Lane, small_tiles: None):
    q, k, weights, indices, dscores = make_score_inputs((1, 9, 4, 16, 6))
    indices[:, 5] = -1
    scores, dq, _, dweights = launched(q, k, weights, indices, dscores)
    assert not any(t[:, 5].any() for t in (scores, dq, dweights))
    target = kernel.dsa_distribution_fwd_kernel(q, k.unsqueeze(2), indices, 0.25, 2.0)
    assert not target[:, 5].any()
    torch.testing.assert_close(target[:, 8].sum(-1), torch.ones(1))


@lanes("cpu")
def test_input_layouts_do_not_matter(lane: Lane, small_tiles: None):
    inputs = make_score_inputs((1, 6, 2, 16, 5), torch.float16)
    strided = tuple(t.repeat_interleave(2, -1)[..., ::2] for t in inputs)
    assert all(
        torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(launched(*inputs), launched(*strided))
    )


@lanes("cpu")
def test_unsupported_inputs_raise_one_line_error(lane: Lane):
    with pytest.raises(ValueError, match=r"index head dim must be a power of two up to 128, not 48$"):
        launched(*make_score_inputs((1, 2, 1, 48, 2)))
    q, k, _, indices, _ = make_inputs((1, 2, 1, 1, 48, 2), torch.float16)
    with pytest.raises(ValueError, match=r"power of two up to 128, not 48$"):
        kernel.dsa_distribution_fwd_kernel(q, k, indices, 0.25, 0.0)
