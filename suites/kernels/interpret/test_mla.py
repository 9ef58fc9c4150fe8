"""The Triton kernels of mla under the interpreter, against the reference in fp64.

B batch, T tokens, H heads, C latent dim, P, R and V head dims of q.k without and with position and of the values.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.mla import kernel
from kernels.mla.eager import mla_backward_reference, mla_forward_with_lse
from suites.kernels.interpret.ratio import lse_outside, outside
from suites.support.comparison import doubled
from suites.support.lanes import Lane, lanes
from suites.support.operands import OperandsIn
from suites.support.reduce import largest

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
# At a softcap of 100 the "fast" path is off; a scale of 3 drives tanh into saturation.
CASES = {
    "plain": (0.25, 0.0, True),
    "softcap": (0.25, 2.0, True),
    "saturated": (3.0, 5.0, True),
    "wide softcap": (0.25, 100.0, True),
    "both sides": (0.25, 2.0, False),
}
SIZES = [(2, 33, 2, 16, 16, 8, 32), (1, 48, 1, 5, 8, 16, 4), (2, 1, 1, 3, 4, 2, 16)]  # B T H C P R V
Inputs = tuple[Tensor, ...]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks at a small T, wider than high and higher than wide."""
    tiles = {"forward": (32, 16, 4, 1), "dkdv": (16, 32, 4, 1), "dq": (16, 32, 4, 1)}
    monkeypatch.setattr(kernel, "_tiles", lambda *dims: tiles)


def make_inputs(sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Inputs:
    """Return q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids, dout. Row 0 holds documents 5, 1, 3 and padding."""
    B, T, H, C, P, R, V = sizes
    g = torch.Generator().manual_seed(T)
    shapes = (B, T, H, P), (B, T, H, R), (B, T, C), (B, T, R), (H, P, C), (H, V, C), (B, T, H, V)
    *tensors, W_uk, W_uv, dout = (torch.randn(*s, generator=g, dtype=torch.float64) for s in shapes)
    doc_ids = torch.ones(B, T, dtype=torch.int32)
    doc_ids[0, : T // 3] = 5
    doc_ids[:, T // 2 :] = 3
    doc_ids[:, T - T // 8 :] = -1
    floats = (t.to(dtype) for t in (*tensors, W_uk * C**-0.5, W_uv * C**-0.5))
    return *floats, doc_ids, dout.to(dtype)


def reference(*inputs, options: tuple) -> tuple[Tensor, ...]:
    *inputs, dout = inputs
    out, lse = mla_forward_with_lse(*inputs, *options)
    return lse, out, *mla_backward_reference(*inputs, out, lse, dout, *options)


def launched(*inputs, options: tuple) -> tuple[Tensor, ...]:
    *inputs, dout = inputs
    out, lse = kernel.mla_fwd_kernel(*inputs, *options)
    return lse, out, *kernel.mla_bwd_kernel(*inputs, out, lse, dout, *options)


def plain(inputs: Inputs, options: tuple) -> tuple[Tensor, ...]:
    """Compute the reference in the inputs' dtype with the operands of its products in it, like the kernel's keys."""
    if inputs[0].dtype == torch.float32:
        return reference(*inputs, options=options)
    with OperandsIn(inputs[0].dtype):
        return reference(*inputs, options=options)


def breaks_of_the_rule(inputs: Inputs, options: tuple) -> list[str]:
    """Check out and the gradients by the ratio rule; lse by that or by the documented error of the "fast" softcap."""
    oracle, usual = reference(*doubled(inputs), options=options), plain(inputs, options)
    lse, *found = launched(*inputs, options=options)
    assert lse.is_contiguous()
    # With a single key its weight is 1 for any score: the gradients of q and k are differences of equals.
    alone = inputs[0].shape[1] == 1
    terms = largest(float(t.abs().max()) for t in oracle[1:]) if alone else 0.0
    broken = outside(found, usual[1:], oracle[1:], terms)
    return broken + lse_outside(lse, usual[0], oracle[0], options[1])


@lanes("cpu")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_meet_error_ratio_rule(lane: Lane, dtype: str, case: str, small_tiles: None):
    assert not breaks_of_the_rule(make_inputs((1, 41, 1, 16, 16, 16, 16), DTYPES[dtype]), CASES[case])


@lanes("cpu")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size_meets_error_ratio_rule(lane: Lane, dtype: str, sizes: tuple[int, ...], small_tiles: None):
    assert not breaks_of_the_rule(make_inputs(sizes, DTYPES[dtype]), CASES["softcap"])


@lanes("cpu")
@pytest.mark.parametrize(("T", "P", "dtype"), [(256, 64, "fp16"), (40, 128, "fp16"), (32, 32, "fp32")])
def test_gpu_tiles_meet_error_ratio_rule(lane: Lane, T: int, P: int, dtype: str):
    assert not breaks_of_the_rule(make_inputs((1, T, 1, 64, P, 64, P), DTYPES[dtype]), (0.1, 30.0, True))


@lanes("cpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_ratio_rule_rejects_wrong_formulas(lane: Lane, dtype: str, small_tiles: None):
    q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids, dout = inputs = make_inputs(
        (1, 20, 2, 16, 16, 16, 16), DTYPES[dtype]
    )
    options = (0.25, 2.0, True)
    oracle, usual = reference(*doubled(inputs), options=options), plain(inputs, options)
    everywhere = torch.zeros_like(doc_ids)
    wrong = {
        "softcap": launched(*inputs, options=(0.25, 2.2, True)),
        "causal": launched(*inputs, options=(0.25, 2.0, False)),
        "documents": launched(q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, everywhere, dout, options=options),
        "position": launched(
            q_nope, q_rope, c_kv, k_rope.roll(1, 1), W_uk, W_uv, doc_ids, dout, options=options
        ),
        "heads": launched(q_nope, q_rope, c_kv, k_rope, W_uk.flip(0), W_uv, doc_ids, dout, options=options),
    }
    for name, found in wrong.items():
        assert len({line.split(":")[0] for line in outside(found, usual, oracle)}) == 8, name


@lanes("cpu")
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_blocks_of_other_documents_are_not_read(lane: Lane, small_tiles: None):
    """A weight of 0 times nan is nan: finite results prove that a block was skipped. W's gradients use all tokens."""
    q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids, dout = make_inputs(
        (1, 96, 2, 16, 16, 16, 16), torch.float32
    )
    for document in range(3):
        doc_ids[:, 32 * document : 32 * document + 32] = document
    for t in (q_nope, q_rope, c_kv, k_rope, dout):
        t[:, 32:64] = float("nan")
    inputs = (q_nope, q_rope, c_kv, k_rope, W_uk, W_uv, doc_ids, dout)
    _, *found = launched(*inputs, options=CASES["both sides"])
    assert all(t[:, 32:64].isnan().all() for t in found[:5])
    assert all(t[:, part].isfinite().all() for t in found[:5] for part in (slice(32), slice(64, None)))


@lanes("cpu")
def test_input_layouts_do_not_matter(lane: Lane, small_tiles: None):
    inputs = make_inputs((1, 20, 1, 16, 16, 16, 16), torch.float32)
    strided = tuple(t.repeat_interleave(2, -1)[..., ::2] for t in inputs)
    both = (launched(*each, options=CASES["softcap"]) for each in (inputs, strided))
    for ours, expected in zip(*both):
        assert ours.stride() == expected.stride()
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@lanes("cpu")
@pytest.mark.parametrize("P", [48, 256])
def test_unsupported_head_dims_raise_one_line_error(lane: Lane, P: int):
    with pytest.raises(ValueError, match=f"powers of two up to 128, not {P}, 16 and 16$"):
        launched(*make_inputs((1, 2, 1, 4, P, 16, 16), torch.float16), options=CASES["plain"])
