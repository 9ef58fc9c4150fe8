"""The peers of impl="upstream": an absent one names its install command, a present one computes the same as our op."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
from torch import Tensor

from kernels.attention import attention
from suites.kernels.peer_tuning import keep_winners
from suites.ops import specs
from suites.ops.attention import peer_inputs
from suites.ops.spec import BF16
from suites.support.absent import not_run
from suites.support.comparison import doubled, error_ratio, gradients
from suites.support.lanes import Lane, lanes
from suites.support.operands import OperandsIn
from suites.support.reduce import largest

# Comparison -> function, inputs, package, and whether the peer is tuned.
PEERS: dict[str, tuple[Callable[..., Tensor], Callable[[str], tuple[Tensor, ...]], str, bool]] = {
    name: (*peer, spec.packages[0], spec.tuned_peer)
    for spec in specs().values()
    for name, peer in spec.peers.items()
}


@lanes("cpu")
@pytest.mark.parametrize("name", PEERS)
def test_absent_peer_names_its_install_command(lane: Lane, name: str, monkeypatch: pytest.MonkeyPatch):
    function, inputs, package, _ = PEERS[name]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ImportError, match=f"^{name.split('-')[0]}: impl 'upstream' needs .*: pip install "
    ) as caught:
        function(*inputs(lane.device), impl="upstream")
    assert "\n" not in str(caught.value)


@lanes("h200")
@pytest.mark.parametrize("name", PEERS)
def test_peer_computes_the_same_function(lane: Lane, name: str, request, row):
    """Both are within the ratio rule of the same plain formula, in the output and every gradient.

    A peer's bound is loose, because it rounds more between its kernels than the formula does (mamba-ssm's own test
    allows 20 % for the gradient of its angles): it only detects a different function.
    """
    function, inputs, package, tuned = PEERS[name]
    if reason := not_run(row, lane, [request.node.nodeid], [package]):
        pytest.skip(f"not run: {reason}")
    if tuned:
        keep_winners()
    given = inputs(lane.device)
    exact = gradients(partial(function, impl="eager"), *doubled(given))
    with OperandsIn(BF16):
        plain = gradients(partial(function, impl="eager"), *given)
    for impl, factor in (("op", 3.0), ("upstream", 20.0)):
        found = gradients(partial(function, impl=impl), *given)
        ratios = [error_ratio(*three) for three in zip(found, plain, exact, strict=True)]
        assert largest(ratios) <= factor, (impl, ratios)


@lanes("cpu")
def test_document_in_two_pieces_is_refused(lane: Lane, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    q, k, v, doc_ids = peer_inputs()
    doc_ids[0, 50:] = doc_ids[0, 0]
    doc_ids[0, 20:50] = 9
    with pytest.raises(ValueError, match="documents of adjacent tokens only"):
        attention(q, k, v, doc_ids, impl="upstream")
