"""causal_conv1d against torch's own conv1d, document by document: value, gradient, compilation, and the step.

B batch, T tokens, D channels, W conv width.
The op shifts and adds; the plain formula splits each row into its documents and runs F.conv1d on each.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from suites.ops.causal_conv1d import make_inputs
from suites.support.comparison import DTYPES, gradients
from suites.support.lanes import Lane, lanes

quick = settings(derandomize=True, max_examples=15, deadline=None)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), W=st.integers(2, 4), T=st.integers(1, 20))
def test_one_document_equals_conv1d(lane: Lane, seed: int, W: int, T: int):
    x, weight, bias, doc_ids = make_inputs(W=W, lengths=(T,), seed=seed, device=lane.device)
    full = F.conv1d(x.mT, weight.unsqueeze(1), bias, padding=W - 1, groups=8)[..., :T].mT
    found = causal_conv1d(x, weight, bias, doc_ids, activation="none")
    torch.testing.assert_close(found, full, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(causal_conv1d(x, weight, bias, doc_ids), F.silu(full), rtol=1e-13, atol=1e-13)


@lanes("cpu", "h200")
@quick
@given(seed=st.integers(0, 99), W=st.integers(1, 4), at=st.integers(0, 29))
def test_taps_reach_only_later_tokens_of_their_document(lane: Lane, seed: int, W: int, at: int):
    """A nan at one token reaches the W tokens from it on in its document; no bit of the others changes."""
    x, weight, bias, doc_ids = make_inputs(W=W, seed=seed, device=lane.device)
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
@given(seed=st.integers(0, 99), W=st.integers(1, 4))
def test_decode_steps_equal_full_sequence(lane: Lane, seed: int, W: int):
    x, weight, bias, doc_ids = make_inputs(W=W, seed=seed, device=lane.device)
    state, outputs = x.new_zeros(2, W - 1, 8), []
    for t in range(30):
        starts = doc_ids[:, t] != doc_ids[:, max(t - 1, 0)]
        y, state = causal_conv1d_step(
            x[:, t], state.masked_fill(starts[:, None, None], 0), weight, bias, "silu"
        )
        outputs.append(y)
    assert state.shape == (2, W - 1, 8)
    whole = causal_conv1d(x, weight, bias, doc_ids)
    torch.testing.assert_close(torch.stack(outputs, 1), whole, rtol=1e-13, atol=1e-13)


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_slice_of_a_wider_tensor_gives_same_bits(lane: Lane, dtype: str):
    x, weight, bias, doc_ids = make_inputs(dtype=DTYPES[dtype], device=lane.device)
    assert not _embedded(x).is_contiguous()
    found = gradients(lambda x, *rest: causal_conv1d(_embedded(x), *rest), x, weight, bias, doc_ids)
    for ours, theirs in zip(found, gradients(causal_conv1d, x, weight, bias, doc_ids)):
        assert torch.equal(ours, theirs)


def _embedded(x: Tensor) -> Tensor:
    """Return x as the middle of a tensor three times as wide, as in a split of one projection."""
    return torch.cat((x - 1, x, x + 1), -1).split(x.shape[-1], -1)[1]
