"""mHC: doubly stochastic mixing, the identity at the start, streams that can diverge, and invalid arguments.

B batch, T tokens, D model dim, N streams.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import preset
from model.config import HyperConfig
from model.hyper import HyperBlock, branch_weights, doubly_stochastic, sinkhorn
from suites.support.hybrids import build, token_batch
from suites.support.lanes import Lane, lanes
from suites.support.reduce import largest

CONFIG = preset("nam12", "narrow", hyper=HyperConfig(streams=4, layers=3))


def logits(n: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return spread * torch.randn(2, 3, n, n, generator=g, dtype=torch.float64)


class Residual(torch.nn.Module):
    """x + f(x)."""

    def __init__(self, f: torch.nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (...,D) -> (...,D)."""
        return x + self.f(x)


def off_balance(matrix: torch.Tensor) -> float:
    """Return the largest distance of a row or column sum from 1."""
    return largest(float((matrix.sum(dim) - 1).abs().max()) for dim in (-2, -1))


@lanes("cpu")
@settings(derandomize=True, max_examples=15, deadline=None)
@given(n=st.integers(2, 6), seed=st.integers(0, 99), spread=st.floats(0.1, 1.0))
def test_mixing_is_doubly_stochastic(lane: Lane, n: int, seed: int, spread: float) -> None:
    mixing = doubly_stochastic(logits(n, seed, spread), iterations=5)
    assert bool((mixing >= 0).all())
    torch.testing.assert_close(mixing.sum(-1), torch.ones_like(mixing[..., 0]), rtol=1e-12, atol=1e-12)
    assert off_balance(mixing) <= off_balance(doubly_stochastic(logits(n, seed, spread), iterations=1))
    assert off_balance(doubly_stochastic(logits(n, seed, spread), iterations=100)) < 1e-9
    assert off_balance(logits(n, seed, spread).softmax(-1)) > 1e-3, "rows alone are not enough"


@lanes("cpu")
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_sinkhorn_runs_its_iterations(lane: Lane, iterations: int) -> None:
    """Each divides by the column sums, then by the row sums."""
    scores = logits(4, seed=0)
    matrix = scores.exp()
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    torch.testing.assert_close(sinkhorn(scores, iterations), matrix, rtol=1e-12, atol=0)


@lanes("cpu")
def test_two_by_two_mixing_needs_a_softmax(lane: Lane) -> None:
    """A balanced 2x2 matrix has equal diagonals for any scores, so weights read from it would be equal."""
    scores = torch.tensor([3.0, -1.0], dtype=torch.float64)
    matrix = torch.exp(torch.diag(scores))
    for _ in range(100):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    torch.testing.assert_close(matrix[0, 0], matrix[1, 1], rtol=1e-9, atol=1e-9)
    weights = branch_weights(scores)
    torch.testing.assert_close(weights, 2 * scores.softmax(-1))
    with pytest.raises(ValueError, match="use a softmax over two"):
        sinkhorn(torch.diag(scores), 5)


@lanes("cpu")
@pytest.mark.parametrize("branches", [1, 3])
def test_branch_mixer_refuses_other_than_two_branches(lane: Lane, branches: int) -> None:
    with pytest.raises(ValueError, match=f"two branches, not {branches}"):
        branch_weights(torch.zeros(branches))


@lanes("cpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinkhorn_refuses_16_bit_logits(lane: Lane, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="needs fp32 logits"):
        sinkhorn(torch.zeros(3, 3, dtype=dtype), 5)


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coefficients_are_fp32_under_autocast(lane: Lane, dtype: torch.dtype) -> None:
    block = HyperBlock(torch.nn.Identity(), CONFIG, layer=0, with_aux=False).to(lane.device)
    torch.nn.init.normal_(block.dynamic)
    H = torch.randn(2, 3, 4, CONFIG.d_model, device=lane.device).to(dtype)
    with torch.autocast(lane.device, dtype=torch.bfloat16):
        inside = block.coefficients(H)
    for found, outside in zip(inside, block.coefficients(H)):
        assert found.dtype == torch.float32
        assert torch.equal(found, outside)


@lanes("cpu", "h200")
@pytest.mark.parametrize("hyper", [HyperConfig(4, 7), HyperConfig(2, 7), HyperConfig(4, 12, uniform=0.3)])
def test_streams_start_as_the_model_without_them(lane: Lane, hyper: HyperConfig) -> None:
    config = preset("nam12", "narrow")
    ids = token_batch(config, 2, device=lane.device)
    with torch.no_grad():
        plain = build(config, lane.device, torch.float64).logits(ids)
        model = build(config.replace(hyper=hyper), lane.device, torch.float64)
        torch.testing.assert_close(model.logits(ids), plain, rtol=1e-9, atol=1e-9)
        model.blocks[1].bias[hyper.streams] += 1.0  # one stream's weight of the second block's output
        assert float((model.logits(ids) - plain).abs().max()) > 1e-4


@lanes("cpu")
@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize("layer", [1, 2])
def test_streams_equal_the_formula(lane: Lane, layer: int, streams: int) -> None:
    """One token at a time, with unequal streams: H'_n = sum_m Hres[n,m] H_m + Hpost_n f(sum_m Hpre_m H_m)."""
    N, D = streams, CONFIG.d_model
    config = CONFIG.replace(hyper=HyperConfig(streams=N, layers=3, uniform=0.3))
    torch.manual_seed(layer)
    inner = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh()).double()
    block = HyperBlock(Residual(inner), config, layer, with_aux=False).double()
    torch.nn.init.normal_(block.bias)
    torch.nn.init.normal_(block.dynamic, std=D**-0.5)
    x = torch.randn(2, 3, N, D, dtype=torch.float64)
    with torch.no_grad():
        found = block(x.flatten(-2))
        for b, t in itertools.product(range(2), range(3)):
            H = x[b, t]
            seen = sum(H) / N
            scores = block.dynamic @ (seen / (seen.square().mean() + config.norm_eps).sqrt()) + block.bias
            pre, post = scores[:N].softmax(0), 2 * scores[N : 2 * N].sigmoid()
            res = doubly_stochastic(scores[2 * N :].view(N, N), config.hyper.iterations)
            res = 0.7 * res + 0.3 / N
            out = inner(sum(pre[m] * H[m] for m in range(N)))
            mixed = [sum(res[n, m] * H[m] for m in range(N)) + post[n] * out for n in range(N)]
            expected = sum(mixed) / N if layer == 2 else torch.cat(mixed)
            torch.testing.assert_close(found[b, t], expected, rtol=1e-11, atol=1e-11)


@lanes("cpu", "h200")
@pytest.mark.parametrize("apart", [True, False])
def test_streams_can_diverge(lane: Lane, apart: bool) -> None:
    """If layers read all streams alike, all of them would have the same gradient and remain one stream."""
    model = build(CONFIG, lane.device, torch.float64)
    N = CONFIG.hyper.streams
    if not apart:
        for block in model.blocks[: CONFIG.hyper.layers]:
            block.bias.data[:N] = 0.0
    model(token_batch(CONFIG, 2, device=lane.device)).backward()
    post = model.blocks[0].bias.grad[N : 2 * N]
    assert (float((post - post.mean()).abs().max()) > 1e-3 * float(post.abs().max())) is apart
