"""cross_entropy against torch's own F.cross_entropy of capped logits: value, gradient, compilation, documented
guarantees.

B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cross_entropy import cross_entropy, cross_entropy_eager
from kernels.cross_entropy.naive import cross_entropy_naive
from suites.ops.cross_entropy import make_inputs
from suites.support.comparison import DTYPES, error, gradients
from suites.support.lanes import Lane, lanes

quick = settings(derandomize=True, max_examples=15, deadline=None)
sizes = {"seed": st.integers(0, 99), "V": st.integers(1, 40), "softcap": st.sampled_from([0.0, 3.0])}


@lanes("cpu", "h200")
@quick
@given(**sizes)
def test_equals_torch_for_every_vocabulary(lane: Lane, seed: int, V: int, softcap: float):
    inputs = make_inputs(V=V, seed=seed, device=lane.device)
    plain = gradients(cross_entropy_naive, *inputs, softcap=softcap)
    for ours, theirs in zip(gradients(cross_entropy, *inputs, softcap=softcap), plain):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99))
def test_large_softcap_equals_no_softcap(lane: Lane, seed: int):
    inputs = make_inputs(seed=seed, device=lane.device)
    # tanh(x) = x - x^3/3: at c = 1e6 the cubic term of a logit below 20 is under 3e-9
    torch.testing.assert_close(cross_entropy(*inputs, softcap=1e6), cross_entropy(*inputs), rtol=0, atol=1e-8)
    assert error(cross_entropy(*inputs, softcap=1.0), cross_entropy(*inputs))[0] > 1e-2


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), shift=st.integers(-512, 512))
def test_row_shift_changes_no_bit_without_softcap(lane: Lane, seed: int, shift: int):
    """Logits that are multiples of 1/64 shift exactly, and the computation uses only differences."""
    logits, target = make_inputs(seed=seed, dtype=torch.float32, device=lane.device)
    logits = (logits * 64).round() / 64
    before = gradients(cross_entropy, logits, target)
    for ours, theirs in zip(gradients(cross_entropy, logits + shift, target), before):
        assert torch.equal(ours, theirs)
    if shift:
        capped = cross_entropy(logits + shift, target, softcap=3.0)
        assert not torch.equal(capped, cross_entropy(logits, target, softcap=3.0))


@lanes("cpu", "h200")
@quick
@given(**sizes)
def test_tokens_are_independent(lane: Lane, seed: int, V: int, softcap: float):
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
def test_ignored_token_has_no_effect(lane: Lane, dtype: str, V: int, softcap: float, impl: str):
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
def test_masked_entries_have_zero_probability(lane: Lane, dtype: str):
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
def test_out_of_range_target_is_nan_in_triton(lane: Lane, expected: int):
    logits, target = make_inputs(dtype=torch.bfloat16, device=lane.device)
    target[1, 1] = expected
    for t in gradients(cross_entropy, logits, target, softcap=15.0):
        assert t.isnan().reshape(3, 5, -1).any(-1).nonzero().tolist() == [[1, 1]]


@lanes("cpu", "h200")
def test_one_row_of_logits_gives_a_scalar(lane: Lane):
    logits, target = make_inputs(dtype=torch.float32, device=lane.device)
    loss = cross_entropy(logits[1, 2], target[1, 2], softcap=3.0)
    assert loss.shape == ()
    assert torch.equal(loss, cross_entropy(logits, target, softcap=3.0)[1, 2])
    assert cross_entropy_eager(logits[:0], target[:0]).shape == (0, 5)
