"""The Triton training kernels of dsa_indexer under the interpreter: small gradients, accuracy, queries without keys.

B batch, T tokens, J index heads, K chosen keys per query, P head dim.
"""

from __future__ import annotations

import pytest
import torch

from kernels.dsa_indexer import kernel
from kernels.dsa_indexer.eager import dsa_distribution_eager
from suites.ops import interpreted
from suites.support.comparison import AT_MOST, doubled, error_ratio
from suites.support.lanes import Lane, lanes

OP, TARGET = interpreted()["dsa_indexer_scores"], interpreted()["dsa_indexer_target"]


@lanes("cpu")
@pytest.mark.parametrize("size", [2.0**-32, 0.0])
def test_gradient_scale_does_not_matter(lane: Lane, size: float):
    """fp16 cannot represent values below 6e-8; the weights' gradient is requested in fp32."""
    q, k, weights, indices, dscores = OP.example("fp16", 1, 9, 4, 16, 6).values()
    inputs = q, k, weights.float(), indices
    large = kernel.dsa_chosen_scores_bwd_kernel(*inputs, dscores)[2]
    assert torch.equal(kernel.dsa_chosen_scores_bwd_kernel(*inputs, dscores * size)[2], large * size)


@lanes("cpu")
@pytest.mark.parametrize("softcap", [30.0, 50.0])
def test_target_of_fp16_inputs_has_fp32_accuracy(lane: Lane, softcap: float):
    """Their products are exact and the target is fp32; the softcap that suffices for a bf16 P is 9 times as far off."""
    q, k, _, indices, *_ = TARGET.example("fp16", 1, 40, 14, 2, 64, 24).values()
    found = kernel.dsa_distribution_fwd_kernel(q, k, indices, 0.125, softcap)
    plain = dsa_distribution_eager(q.float(), k.float(), indices, 0.125, softcap)
    oracle = dsa_distribution_eager(*doubled((q, k, indices)), 0.125, softcap)
    assert found.dtype == torch.float32
    assert error_ratio(found, plain, oracle) < AT_MOST["forward"]


@lanes("cpu")
def test_query_without_keys_has_zero_gradient(lane: Lane):
    inputs = OP.example("fp32", 1, 9, 4, 16, 6)
    inputs["indices"][:, 5] = -1
    scores, dq, _, dweights = OP.launched(**inputs)
    assert not any(t[:, 5].any() for t in (scores, dq, dweights))
    k = inputs["k"].unsqueeze(2)
    (target,) = TARGET.launched(**inputs | {"k": k}, scale=0.25, softcap=2.0)
    assert not target[:, 5].any()
    torch.testing.assert_close(target[:, 8].sum(-1), torch.ones(1))
