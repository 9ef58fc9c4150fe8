"""The Triton kernels of cross_entropy under the interpreter, against the reference in fp64.

N rows, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cross_entropy import kernel
from kernels.cross_entropy.eager import cross_entropy_backward_reference, cross_entropy_with_sums
from suites.kernels.interpret.ratio import outside
from suites.support.comparison import doubled
from suites.support.lanes import Lane, lanes

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
SOFTCAPS = {"none": 0.0, "fast for fp16": 3.0, "fast at its limit": 32.0, "exact": 50.0}
IGNORE = -100
Inputs = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def short_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 128 entries, and the fast softcap for all but the smallest vocabulary."""
    monkeypatch.setattr(kernel, "LANES", 32)
    monkeypatch.setattr(kernel, "SMALLEST_FAST_V", 100)


def make_inputs(V: int, dtype: torch.dtype = torch.float64, N: int = 4, scale: float = 4.0) -> Inputs:
    """logits are a slice of wider rows; row 2 is ignored, and holds nan."""
    g = torch.Generator().manual_seed(V)
    logits = (torch.randn(N, V + 7, generator=g, dtype=torch.float64) * scale).to(dtype)[:, 3 : 3 + V]
    target = torch.randint(0, V, (N,), generator=g)
    logits[2], target[2] = torch.nan, IGNORE
    return logits, target, torch.randn(N, generator=g, dtype=torch.float64).to(torch.float32)


def reference(logits: Tensor, target: Tensor, dloss: Tensor, softcap: float) -> tuple[Tensor, ...]:
    """Return loss, logsumexp, gradient."""
    loss, shift, total = cross_entropy_with_sums(logits, target, softcap, IGNORE)
    rest = (shift, total, dloss, softcap, IGNORE)
    return loss, shift + total.log(), cross_entropy_backward_reference(logits, target, *rest)


def launched(logits: Tensor, target: Tensor, dloss: Tensor, softcap: float) -> tuple[Tensor, ...]:
    loss, shift, total = kernel.cross_entropy_fwd_kernel(logits, target, softcap, IGNORE)
    rest = (shift, total, dloss, softcap, IGNORE)
    return loss, shift + total.log(), kernel.cross_entropy_bwd_kernel(logits, target, *rest)


@lanes("cpu")
@pytest.mark.parametrize("V", [1, 101, 256, 300])
@pytest.mark.parametrize("case", SOFTCAPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_meet_error_ratio_rule(lane: Lane, dtype: str, case: str, V: int):
    inputs = make_inputs(V, DTYPES[dtype])
    oracle = reference(*doubled(inputs), SOFTCAPS[case])
    found = launched(*inputs, SOFTCAPS[case])
    assert not outside(found, reference(*inputs, SOFTCAPS[case]), oracle)
    assert found[0][2] == 0
    assert (found[2][2] == 0).all()


@lanes("cpu")
@pytest.mark.parametrize("softcap", [3.0, 32.0])
def test_saturated_logits_meet_error_ratio_rule(lane: Lane, softcap: float):
    """Where tanh is 1 to the last bit, and its exponential would overflow."""
    logits, target, dloss = make_inputs(300, torch.float16)
    logits[0, ::2], logits[0, 1::2] = 6e4, -6e4
    inputs = logits, target, dloss
    oracle = reference(*doubled(inputs), softcap)
    assert not outside(launched(*inputs, softcap), reference(*inputs, softcap), oracle)


@lanes("cpu")
@pytest.mark.parametrize("case", SOFTCAPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_affects_only_its_own_row(lane: Lane, dtype: str, case: str):
    """Neither the maximum nor the bound of the fast softcap may hide it, in a full tile or in the last one."""
    for at in (3, 130):
        logits, target, dloss = make_inputs(133, DTYPES[dtype])
        logits[3, at] = torch.nan
        loss, _, dlogits = launched(logits, target, dloss, SOFTCAPS[case])
        assert loss.isnan().tolist() == [False] * 3 + [True]
        assert dlogits.isnan().any(1).tolist() == [False] * 3 + [True]


@lanes("cpu")
@pytest.mark.parametrize("expected", [-1, 133, 2**40])
@pytest.mark.parametrize("case", SOFTCAPS)
def test_out_of_range_target_gives_nan_without_a_read(lane: Lane, case: str, expected: int):
    logits, target, dloss = make_inputs(133, torch.float16)
    target[1] = expected
    loss, _, dlogits = launched(logits, target, dloss, SOFTCAPS[case])
    assert loss.isnan().tolist() == [False, True, False, False]
    assert dlogits.isnan().all(1).tolist() == dlogits.isnan().any(1).tolist() == loss.isnan().tolist()


@lanes("cpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_without_softcap_do_not_overflow(lane: Lane, dtype: str):
    logits, target, dloss = make_inputs(133, DTYPES[dtype])
    logits[:2] += 3e4
    inputs = logits, target, dloss
    oracle = reference(*doubled(inputs), 0.0)
    assert not outside(launched(*inputs, 0.0), reference(*inputs, 0.0), oracle)


@lanes("cpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_ratio_rule_rejects_wrong_formulas(lane: Lane, dtype: str):
    logits, target, dloss = inputs = make_inputs(133, DTYPES[dtype])
    oracle, plain = reference(*doubled(inputs), 3.0), reference(*inputs, 3.0)
    others = target.where(target < 0, target % 132)
    capped = (3 * torch.tanh(logits / 3)).to(logits.dtype)
    wrong = {
        "softcap": (launched(*inputs, 3.1), {"0", "1", "2"}),
        "target": (launched(logits, target.where(target < 0, (target + 1) % 133), dloss, 3.0), {"0", "2"}),
        "slope of the cap": (launched(capped, target, dloss, 0.0), {"2"}),
        "last entry": (launched(logits[:, :132], others, dloss, 3.0)[:2], {"0", "1"}),
        "3 % of the gradient": (launched(logits, target, dloss * 1.03, 3.0), {"2"}),
    }
    for name, (found, outputs) in wrong.items():
        broken = outside(found, plain[: len(found)], oracle[: len(found)])
        assert outputs <= {line.split(":")[0].split()[1] for line in broken}, name


@lanes("cpu")
def test_input_layouts_do_not_matter(lane: Lane):
    inputs = make_inputs(133, torch.float16)
    spread = tuple(t.repeat_interleave(2, -1)[..., ::2] for t in inputs)
    pairs = zip(launched(*inputs, 3.0), launched(*spread, 3.0))
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)
    alike = inputs[0], inputs[1], torch.ones(()).expand(4)  # the gradient of a sum
    assert torch.equal(launched(*alike, 3.0)[2], launched(*inputs[:2], torch.ones(4), 3.0)[2])
