"""The peers of impl="upstream": an absent one names its install command, a present one computes the same as our op."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from bumpgate.plugin.instruments import forget_graphs
from kernels.attention import attention
from kernels.causal_conv1d import causal_conv1d
from kernels.mamba3_siso import mamba3_siso
from kernels.rms_norm_gated import rms_norm_gated
from kernels.ssd_chunk_scan import ssd_chunk_scan
from suites.kernels import test_attention, test_causal_conv1d, test_mamba3_siso, test_ssd_chunk_scan
from suites.kernels.peer_tuning import TUNED, keep_winners
from suites.support.absent import not_run
from suites.support.comparison import doubled, error_ratio, gradients
from suites.support.lanes import Lane, lanes
from suites.support.operands import OperandsIn
from suites.support.reduce import largest

BF16 = torch.bfloat16


def attention_inputs(**options: Any) -> tuple[Tensor, ...]:
    """Return the attention suite's inputs, with a head dim that every peer supports and without padding."""
    q, k, v, doc_ids = test_attention.problem(T=96, P=64, dtype=BF16, **options)
    return q, k, v, doc_ids.where(doc_ids >= 0, 9)


def norm_inputs(device: str) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    x, gate, weight = (
        torch.randn(*shape, generator=g).to(device, BF16) for shape in ((6, 256), (6, 256), (256,))
    )
    return x, gate, weight


def scan_inputs(device: str) -> tuple[Tensor, ...]:
    return tuple(test_ssd_chunk_scan.problem(T=130, P=64, N=64, dtype=BF16, device=device).values())


def mamba3_inputs(device: str) -> tuple[Tensor, ...]:
    """Return inputs without an initial state: the peer does not support one before packed documents."""
    inputs = test_mamba3_siso.problem(T=130, P=64, N=64, R=16, dtype=BF16, device=device)
    return tuple(inputs[n] for n in test_mamba3_siso.NAMES[:12])


def mamba3_output(*inputs: Tensor, impl: str) -> Tensor:
    return mamba3_siso(*inputs, impl=impl)[0]


def scan_output(*inputs: Tensor, impl: str) -> Tensor:
    return ssd_chunk_scan(*inputs, impl=impl)[0]


PEERS: dict[str, tuple[Callable[..., Tensor], Callable[[str], tuple[Tensor, ...]], str]] = {
    "attention": (attention, lambda device: attention_inputs(device=device), "flash_attn"),
    "attention-softcap": (
        partial(attention, softcap=2.0),
        lambda device: attention_inputs(device=device),
        "flash_attn",
    ),
    "attention-window": (
        partial(attention, window=9),
        lambda device: attention_inputs(device=device),
        "flash_attn",
    ),
    "causal_conv1d": (
        causal_conv1d,
        lambda device: test_causal_conv1d.problem(D=64, W=4, dtype=BF16, device=device),
        "causal_conv1d",
    ),
    "mamba3_siso": (mamba3_output, mamba3_inputs, "mamba_ssm"),
    "rms_norm_gated": (partial(rms_norm_gated, group_size=64), norm_inputs, "mamba_ssm"),
    "ssd_chunk_scan": (scan_output, scan_inputs, "mamba_ssm"),
}


@lanes("cpu")
@pytest.mark.parametrize("name", PEERS)
def test_an_absent_peer_says_how_to_install_it(lane: Lane, name: str, monkeypatch: pytest.MonkeyPatch):
    function, inputs, package = PEERS[name]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ImportError, match=f"^{name.split('-')[0]}: impl 'upstream' needs .*: pip install "
    ) as caught:
        function(*inputs(lane.device), impl="upstream")
    assert "\n" not in str(caught.value)


@lanes("h200")
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_computes_what_our_op_computes(lane: Lane, name: str, request, record_property):
    """Both are within the ratio rule of the same plain formula, in the output and every gradient.

    A peer's bound is loose, because it rounds more between its kernels than the formula does (mamba-ssm's own test
    allows 20 % for the gradient of its angles): it only detects a different function.
    """
    function, inputs, package = PEERS[name]
    if reason := not_run(record_property, [request.node.nodeid], [package]):
        pytest.skip(f"not run: {reason}")
    if name in TUNED:
        keep_winners()
    given = inputs(lane.device)
    exact = gradients(partial(function, impl="reference"), *doubled(given))
    with OperandsIn(BF16):
        plain = gradients(partial(function, impl="reference"), *given)
    for impl, factor in (("op", 3.0), ("upstream", 20.0)):
        found = gradients(partial(function, impl=impl), *given)
        ratios = [error_ratio(*three) for three in zip(found, plain, exact, strict=True)]
        assert largest(ratios) <= factor, (impl, ratios)


@lanes("cpu", "h200")
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 9}, {"scale": 0.3}])
def test_sdpa_is_the_same_function(lane: Lane, options: dict[str, Any]):
    inputs = test_attention.problem(device=lane.device)
    expected = gradients(partial(attention, impl="reference"), *inputs, **options)
    for found, exact in zip(gradients(partial(attention, impl="sdpa"), *inputs, **options), expected):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="'sdpa' has no softcap"):
        attention(*inputs, softcap=2.0, impl="sdpa")


FLEX = [
    {},
    {"softcap": 2.0},
    {"softcap": 2.0, "causal": False},
    {"window": 9},
    {"scale": 0.3, "softcap": 1.0},
]


@lanes("cpu", "h200")
@pytest.mark.parametrize("options", FLEX)
def test_flex_with_a_score_mod_is_the_same_function(lane: Lane, options: dict[str, Any]):
    """Without gradients: torch has none on CPU.

    One softcap a process, as in the model: torch 2.15 does not compile a second one (suites/features).
    """
    forget_graphs()
    inputs = test_attention.problem(device=lane.device)
    with torch.no_grad():
        expected, found = (attention(*inputs, **options, impl=impl) for impl in ("reference", "flex"))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        if softcap := options.get("softcap"):
            other = attention(*inputs, **options | {"softcap": softcap * 1.03}, impl="reference")
            assert not torch.allclose(found, other, rtol=1e-4)


@lanes("cpu")
def test_the_tuple_of_fa4_is_unwrapped_before_the_cast(lane: Lane, monkeypatch: pytest.MonkeyPatch):
    calls: list[dict[str, Any]] = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(options)
        return q.float() * 2, torch.zeros(())

    package = ModuleType("flash_attn.cute")
    package.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    q, k, v, doc_ids = attention_inputs()
    out = attention(q, k, v, torch.zeros_like(doc_ids), softcap=30.0, window=5, impl="fa4")
    assert out.dtype == BF16
    assert torch.equal(out, q * 2)
    assert calls == [{"softmax_scale": 0.125, "causal": True, "window_size": (4, 0), "softcap": 30.0}]


@lanes("cpu")
@pytest.mark.parametrize("impl", ["upstream", "fa4"])
def test_a_document_in_two_pieces_is_refused(lane: Lane, impl: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    q, k, v, doc_ids = attention_inputs()
    doc_ids[0, 50:] = doc_ids[0, 0]
    doc_ids[0, 20:50] = 9
    with pytest.raises(ValueError, match="documents of adjacent tokens only"):
        attention(q, k, v, doc_ids, impl=impl)
