"""The Triton kernels of m2rnn under the interpreter, against the reference in fp64.

B batch, T tokens, H heads, K key dim, V value dim.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.m2rnn import kernel
from kernels.m2rnn.eager import m2rnn_backward_reference, m2rnn_forward_with_states
from suites.kernels.interpret.ratio import DTYPES, outside
from suites.support.comparison import doubled
from suites.support.lanes import Lane, lanes

SIZES = [(1, 1, 1, 1, 1), (2, 7, 2, 6, 4), (1, 13, 2, 5, 3), (1, 9, 1, 4, 16), (2, 3, 1, 3, 20)]  # B T H K V
Inputs = tuple[Tensor, ...]


def make_inputs(sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Inputs:
    """Return q, k, v, W, f, doc_ids, h0, dy, dfinal. q and k are slices of one row; ids go 0, 1, 0, 1."""
    B, T, H, K, V = sizes
    wide = torch.promote_types(dtype, torch.float32)
    g = torch.Generator().manual_seed(T)

    def draw(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(to)

    q, k = draw(B, T, H, 2 * K).split(K, -1)
    W = draw(H, V, V, to=wide) / V**0.5
    doc_ids = (torch.rand(B, T, generator=g) < 0.3).int().cumsum(1).int() % 2
    f = draw(B, T, H, to=wide).sigmoid()
    v, dy = draw(B, T, H, V), draw(B, T, H, V)
    return q, k, v, W, f, doc_ids, draw(B, H, K, V, to=wide), dy, draw(B, H, K, V, to=wide)


def reference(*inputs: Tensor) -> tuple[Tensor, ...]:
    y, states = m2rnn_forward_with_states(*inputs[:7])
    return y, states[:, -1], states, *m2rnn_backward_reference(*inputs[:7], states, *inputs[7:])


def launched(*inputs: Tensor) -> tuple[Tensor, ...]:
    y, final, states = kernel.m2rnn_fwd_kernel(*inputs[:7])
    return y, final, states, *kernel.m2rnn_bwd_kernel(*inputs[:7], states, *inputs[7:])


@lanes("cpu")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_meet_error_ratio_rule(lane: Lane, dtype: str, sizes: tuple[int, ...]):
    inputs = make_inputs(sizes, DTYPES[dtype])
    assert not outside(launched(*inputs), reference(*inputs), reference(*doubled(inputs)))


@lanes("cpu")
def test_error_ratio_rule_rejects_document_leaks(lane: Lane):
    inputs = make_inputs(SIZES[2], torch.float16)
    leaking = launched(*inputs[:5], torch.zeros_like(inputs[5]), *inputs[6:])
    broken = outside(leaking, reference(*inputs), reference(*doubled(inputs)))
    assert len({line.split(":")[0] for line in broken}) == 9


@lanes("cpu")
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_small_and_saturated_candidates_are_accurate(lane: Lane, dtype: str):
    """tanh from 1e-6, where the exponential alone would cancel, to where it is 1 and its slope 0."""
    q, k, v, W, *rest = make_inputs((1, 24, 1, 4, 4), DTYPES[dtype])
    scale = torch.logspace(-6, 4, 24).view(1, 24, 1, 1).to(k)
    inputs = (q, scale * k, v.sign(), W, *rest[:2], torch.zeros_like(rest[2]), *rest[3:])
    found, oracle = launched(*inputs), reference(*doubled(inputs))
    assert not outside(found, reference(*inputs), oracle)
    first = (found[2].double() / oracle[2] - 1)[:, 0].abs().max()
    assert first < 16 * torch.finfo(found[2].dtype).eps
