"""What is particular to causal_conv1d, cross_entropy and rms_norm_gated.

B batch, T tokens, D channels, W conv width, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from kernels.cross_entropy import cross_entropy, cross_entropy_eager
from kernels.rms_norm_gated import rms_norm_gated
from suites.ops import causal_conv1d as conv
from suites.ops import rms_norm_gated as norm
from suites.ops.cross_entropy import make_inputs
from suites.support.comparison import DTYPES, error, gradients
from suites.support.lanes import Lane, lanes
from suites.support.properties import quick


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), W=st.integers(1, 4), at=st.integers(0, 29))
def test_taps_reach_only_later_tokens_of_their_document(lane: Lane, seed: int, W: int, at: int) -> None:
    """A nan at one token reaches the W tokens from it on in its document; no bit of the others changes."""
    x, weight, bias, doc_ids = conv.make_inputs(W=W, seed=seed, device=lane.device)
    before = causal_conv1d(x, weight, bias, doc_ids)
    x[:, at] = torch.nan
    after = causal_conv1d(x, weight, bias, doc_ids)
    seen = after.isnan().any(2)
    lag = torch.arange(30, device=lane.device) - at
    assert torch.equal(seen, (lag >= 0) & (lag < W) & (doc_ids == doc_ids[:, at : at + 1]))
    assert torch.equal(after[~seen], before[~seen])
    assert seen.any()


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), W=st.integers(1, 4), activation=st.sampled_from(["silu", "none"]))
def test_decode_steps_equal_full_sequence(lane: Lane, seed: int, W: int, activation: str) -> None:
    x, weight, bias, doc_ids = conv.make_inputs(W=W, seed=seed, device=lane.device)
    state, outputs = x.new_zeros(2, W - 1, 8), []
    for t in range(30):
        starts = doc_ids[:, t] != doc_ids[:, max(t - 1, 0)]
        state = state.masked_fill(starts[:, None, None], 0)
        y, state = causal_conv1d_step(x[:, t], state, weight, bias, activation)
        outputs.append(y)
    assert state.shape == (2, W - 1, 8)
    whole = causal_conv1d(x, weight, bias, doc_ids, activation)
    torch.testing.assert_close(torch.stack(outputs, 1), whole, rtol=1e-13, atol=1e-13)


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_slice_of_a_wider_tensor_gives_same_bits(lane: Lane, dtype: str) -> None:
    inputs = conv.make_inputs(dtype=DTYPES[dtype], device=lane.device)

    def of_a_slice(x: Tensor, *rest: Tensor) -> Tensor:
        """Give x as the middle of a tensor three times as wide, as in a split of one projection."""
        middle = torch.cat((x - 1, x, x + 1), -1).split(x.shape[-1], -1)[1]
        assert not middle.is_contiguous()
        return causal_conv1d(middle, *rest)

    assert all(map(torch.equal, gradients(of_a_slice, *inputs), gradients(causal_conv1d, *inputs)))


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), shift=st.integers(-512, 512))
def test_row_shift_changes_no_bit_without_softcap(lane: Lane, seed: int, shift: int) -> None:
    """Logits that are multiples of 1/64 shift exactly, and the computation uses only differences."""
    logits, target = make_inputs(seed=seed, dtype=torch.float32, device=lane.device)
    logits = (logits * 64).round() / 64
    before, after = (gradients(cross_entropy, x, target) for x in (logits, logits + shift))
    assert all(map(torch.equal, after, before))
    if shift:
        capped = cross_entropy(logits + shift, target, softcap=3.0)
        assert not torch.equal(capped, cross_entropy(logits, target, softcap=3.0))


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), V=st.integers(1, 40), softcap=st.sampled_from([0.0, 3.0]))
def test_tokens_are_independent(lane: Lane, seed: int, V: int, softcap: float) -> None:
    """A permutation of the tokens permutes loss and gradient bitwise; a single token gives the same as among others."""
    logits, target = make_inputs(V=V, seed=seed, dtype=torch.float32, device=lane.device)
    x, t = logits.flatten(0, 1), target.flatten()
    order = torch.randperm(len(t), generator=torch.Generator().manual_seed(seed)).to(lane.device)

    def train(tokens: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x[tokens].requires_grad_()
        loss = cross_entropy(leaf, t[tokens], softcap)
        return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]

    whole, permuted, alone = (train(tokens) for tokens in (torch.arange(len(t)).to(order), order, order[:1]))
    for all_tokens, some, one in zip(whole, permuted, alone):
        assert torch.equal(some, all_tokens[order])
        assert torch.equal(one, some[:1])


@lanes("cpu", "h200")
@pytest.mark.parametrize("impl", ["op", "eager"])
@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize("V", [37, 5000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ignored_token_has_no_effect(lane: Lane, dtype: str, V: int, softcap: float, impl: str) -> None:
    logits, target = make_inputs(V=V, dtype=DTYPES[dtype], device=lane.device)
    function = partial(cross_entropy, softcap=softcap, impl=impl)
    clean = gradients(function, logits, target)
    for poison in (torch.nan, torch.inf, -torch.inf):
        poisoned = logits.clone()
        poisoned[target == -100] = poison
        found = gradients(function, poisoned, target)
        assert all(map(torch.equal, found, clean))
        assert all((t[target == -100] == 0).all() for t in found)
    logits[1, 1, V // 2] = torch.nan  # one that counts does, in its own row only
    for t, before in zip(gradients(function, logits, target), clean):
        seen = t.isnan().reshape(*target.shape, -1).any(-1)
        assert seen.nonzero().tolist() == [[1, 1]]
        assert torch.equal(t[~seen], before[~seen])


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_entries_have_zero_probability(lane: Lane, dtype: str) -> None:
    """-inf without a softcap: probability zero, gradient zero, and the loss of the remaining entries."""
    logits, target = make_inputs(V=40, dtype=DTYPES[dtype], device=lane.device)
    hidden = torch.arange(40, device=lane.device) >= 30
    target = target.where(target < 0, target % 30)
    loss, dlogits = gradients(cross_entropy, logits.masked_fill(hidden, -torch.inf), target)
    left, dleft = gradients(cross_entropy, logits[..., :30], target)
    torch.testing.assert_close(loss, left, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(dlogits[..., :30], dleft, rtol=2**-7, atol=2e-6)
    assert (dlogits[..., 30:] == 0).all()


@lanes("h200")
@pytest.mark.parametrize("expected", [37, -1])
def test_out_of_range_target_is_nan_in_triton(lane: Lane, expected: int) -> None:
    logits, target = make_inputs(dtype=torch.bfloat16, device=lane.device)
    target[1, 1] = expected
    for t in gradients(cross_entropy, logits, target, softcap=15.0):
        assert t.isnan().reshape(3, 5, -1).any(-1).nonzero().tolist() == [[1, 1]]


@lanes("cpu", "h200")
def test_one_row_of_logits_gives_a_scalar(lane: Lane) -> None:
    logits, target = make_inputs(dtype=torch.float32, device=lane.device)
    loss = cross_entropy(logits[1, 2], target[1, 2], softcap=3.0)
    assert loss.shape == ()
    assert torch.equal(loss, cross_entropy(logits, target, softcap=3.0)[1, 2])
    assert cross_entropy_eager(logits[:0], target[:0]).shape == (0, 5)


@lanes("cpu", "h200")
def test_mean_square_above_fp16_stays_finite(lane: Lane) -> None:
    x, gate, weight = norm.make_inputs(dtype=torch.float32, device=lane.device)
    large = rms_norm_gated(x.half() * 5000, gate.half(), weight.half())
    assert large.isfinite().all()
    assert error(large, rms_norm_gated(x * 5000, gate, weight))[0] < 1e-2
