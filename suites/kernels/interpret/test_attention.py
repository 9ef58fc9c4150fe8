"""The Triton kernels of attention under the interpreter, against the reference in fp64.

B batch, T tokens, Hq query heads, Hkv key/value heads, P head dim.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.attention import kernel
from kernels.attention.eager import attention_backward_reference, attention_forward_with_lse
from suites.kernels.interpret.ratio import lse_outside, outside
from suites.support.comparison import doubled
from suites.support.lanes import Lane, lanes

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
# At a softcap of 100 the "fast" path is off; a scale of 3 drives tanh into saturation.
CASES = {
    "plain": (0.25, 0.0, 0, True),
    "softcap": (0.25, 2.0, 0, True),
    "saturated": (3.0, 5.0, 0, True),
    "wide softcap": (0.25, 100.0, 0, True),
    "window": (0.25, 0.0, 21, True),
    "both sides": (0.25, 2.0, 0, False),
    "window both sides": (0.25, 30.0, 9, False),
}
SIZES = [(2, 33, 4, 2, 16), (1, 48, 3, 1, 8), (2, 5, 2, 2, 4)]  # B T Hq Hkv P
Inputs = tuple[Tensor, ...]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks at a small T, wider than high and higher than wide."""
    tiles = {"forward": (32, 16, 4, 1), "dkdv": (16, 32, 4, 1), "dq": (16, 32, 4, 1)}
    monkeypatch.setattr(kernel, "_tiles", lambda P, dtype: tiles)


def make_inputs(sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Inputs:
    """Return q, k, v, doc_ids, dout. Row 0 holds documents 5, 1, 3 and padding, the others 1, 3 and padding."""
    B, T, Hq, Hkv, P = sizes
    g = torch.Generator().manual_seed(T)
    q, k, v, dout = (
        torch.randn(B, T, H, P, generator=g, dtype=torch.float64).to(dtype) for H in (Hq, Hkv, Hkv, Hq)
    )
    doc_ids = torch.ones(B, T, dtype=torch.int32)
    doc_ids[0, : T // 3] = 5
    doc_ids[:, T // 2 :] = 3
    doc_ids[:, T - T // 8 :] = -1
    return q, k, v, doc_ids, dout


def reference(q, k, v, doc_ids, dout, *options) -> tuple[Tensor, ...]:
    out, lse = attention_forward_with_lse(q, k, v, doc_ids, *options)
    return lse, out, *attention_backward_reference(q, k, v, doc_ids, out, lse, dout, *options)


def launched(q, k, v, doc_ids, dout, *options) -> tuple[Tensor, ...]:
    out, lse = kernel.attention_fwd_kernel(q, k, v, doc_ids, *options)
    return lse, out, *kernel.attention_bwd_kernel(q, k, v, doc_ids, out, lse, dout, *options)


def breaks_of_the_rule(inputs: Inputs, options: tuple) -> list[str]:
    """Check out and the gradients by the ratio rule; lse by that or by the documented error of the "fast" softcap.

    A difference of 1e-7 c is lost in fp16 weights, but lse is fp32 in both.
    """
    oracle, plain = reference(*doubled(inputs), *options), reference(*inputs, *options)
    lse, *found = launched(*inputs, *options)
    assert lse.is_contiguous()
    broken = outside(found, plain[1:], oracle[1:])
    return broken + lse_outside(lse, plain[0], oracle[0], options[1])


@lanes("cpu")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_meet_error_ratio_rule(lane: Lane, dtype: str, case: str, small_tiles: None):
    assert not breaks_of_the_rule(make_inputs((1, 61, 2, 1, 16), DTYPES[dtype]), CASES[case])


@lanes("cpu")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size_meets_error_ratio_rule(lane: Lane, dtype: str, sizes: tuple[int, ...], small_tiles: None):
    assert not breaks_of_the_rule(make_inputs(sizes, DTYPES[dtype]), CASES["softcap"])


@lanes("cpu")
@pytest.mark.parametrize(("T", "P", "dtype"), [(256, 64, "fp16"), (130, 128, "fp16"), (64, 32, "fp32")])
def test_gpu_tiles_meet_error_ratio_rule(lane: Lane, T: int, P: int, dtype: str):
    assert not breaks_of_the_rule(make_inputs((1, T, 2, 1, P), DTYPES[dtype]), (P**-0.5, 30.0, 0, True))


@lanes("cpu")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_capped_logits_meet_error_ratio_rule(lane: Lane, dtype: str, causal: bool, small_tiles: None):
    """One document in whole blocks: most need no mask, and on both sides none does. Weights span e^64."""
    q, k, v, _, dout = make_inputs((1, 64, 2, 1, 16), DTYPES[dtype])
    k[:, 16:32] = -4 * q[:, :1, :1]  # row 0 sees the least logits first
    k[:, 32:48] = 4 * q[:, :1, :1]
    inputs = (q, k, v, torch.zeros(1, 64, dtype=torch.int32), dout)
    assert not breaks_of_the_rule(inputs, (1.0, 32.0, 0, causal))


@lanes("cpu")
def test_error_ratio_rule_rejects_wrong_formulas(lane: Lane, small_tiles: None):
    q, k, v, doc_ids, dout = inputs = make_inputs((1, 30, 2, 2, 16), torch.float16)
    options = (0.25, 2.0, 7, True)
    oracle, plain = reference(*doubled(inputs), *options), reference(*inputs, *options)
    wrong = {
        "softcap": launched(*inputs, 0.25, 2.1, 7, True),
        "window": launched(*inputs, 0.25, 2.0, 8, True),
        "causal": launched(*inputs, 0.25, 2.0, 7, False),
        "documents": launched(q, k, v, torch.zeros_like(doc_ids), dout, *options),
        "heads": launched(q, k.flip(2), v.flip(2), doc_ids, dout, *options),
    }
    for name, found in wrong.items():
        assert len({line.split(":")[0] for line in outside(found, plain, oracle)}) == 5, name


@lanes("cpu")
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_blocks_of_other_documents_are_not_read(lane: Lane, small_tiles: None):
    """A weight of 0 times nan is nan: finite results prove that a block was skipped."""
    q, k, v, doc_ids, dout = make_inputs((1, 96, 2, 1, 16), torch.float32)
    for document in range(3):
        doc_ids[:, 32 * document : 32 * document + 32] = document
    for t in (q, k, v, dout):
        t[:, 32:64] = float("nan")
    _, *found = launched(q, k, v, doc_ids, dout, *CASES["both sides"])
    assert all(t[:, 32:64].isnan().all() for t in found)
    assert all(t[:, part].isfinite().all() for t in found for part in (slice(32), slice(64, None)))


@lanes("cpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_returns_its_value(lane: Lane, dtype: str, small_tiles: None):
    q, k, v, doc_ids, dout = make_inputs((2, 1, 2, 1, 16), DTYPES[dtype])
    _, out, dq, dk, dv = launched(q, k, v, doc_ids, dout, *CASES["softcap"])
    assert torch.equal(out, v.repeat_interleave(2, 2))
    assert torch.equal(dv, dout.sum(2, keepdim=True, dtype=torch.float32).to(v.dtype))
    assert dq.abs().max() <= 1e-6 >= dk.abs().max()  # exactly 0, apart from dout.v - delta


@lanes("cpu")
def test_input_layouts_do_not_matter(lane: Lane, small_tiles: None):
    inputs = make_inputs((1, 20, 2, 1, 16), torch.float16)
    strided = tuple(t.repeat_interleave(2, -1)[..., ::2] for t in inputs)
    pairs = zip(launched(*inputs, *CASES["softcap"]), launched(*strided, *CASES["softcap"]))
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)


@lanes("cpu")
@pytest.mark.parametrize("P", [48, 256])
def test_unsupported_head_dims_raise_one_line_error(lane: Lane, P: int):
    with pytest.raises(ValueError, match=f"power of two up to 128, not {P}$"):
        launched(*make_inputs((1, 2, 1, 1, P), torch.float16), *CASES["plain"])
