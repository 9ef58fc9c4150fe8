"""The peers of impl="upstream": an absent one names its install command, a present one computes the same as our op."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bumpgate.plugin.instruments import reset_dynamo
from kernels.attention import attention, upstream
from kernels.mamba3_mimo import Mamba3MimoInputs
from kernels.mamba3_mimo import upstream as mimo_upstream
from suites.kernels.peer_tuning import keep_winners
from suites.ops import mamba3_mimo as mimo
from suites.ops import specs
from suites.ops.attention import make_inputs, peer_inputs
from suites.ops.spec import BF16, on_circle
from suites.support.absent import not_run
from suites.support.child import ChildError, print_result, run_json
from suites.support.comparison import doubled, error_ratio, gradients
from suites.support.gpu_memory import claimed
from suites.support.lanes import Lane, lanes
from suites.support.operands import OperandsIn
from suites.support.reduce import largest

# The versions whose argument softcap is wrong.
OWN_SOFTCAP = "flash-attn-4<4"
# Comparison -> the op, its function and inputs.
PEERS = {name: (spec, *peer) for spec in specs().values() for name, peer in spec.peers.items()}


@lanes("cpu")
@pytest.mark.parametrize("name", PEERS)
def test_absent_peer_names_its_install_command(lane: Lane, name: str, monkeypatch: pytest.MonkeyPatch):
    op, function, inputs = PEERS[name]
    monkeypatch.setitem(sys.modules, op.packages[0], None)
    with pytest.raises(ImportError, match=f"^{op.name}: impl 'upstream' needs .*: pip install ") as caught:
        function(*inputs(lane.device), impl="upstream")
    assert "\n" not in str(caught.value)


@lanes("h200")
@pytest.mark.parametrize("name", PEERS)
def test_peer_computes_the_same_function(lane: Lane, name: str, request, row):
    """Both are within the ratio rule of the same plain formula, in the output and every gradient.

    A peer's bound is loose, because it rounds more between its kernels than the formula does (mamba-ssm's own test
    allows 20 % for the gradient of its angles): it only detects a different function.
    """
    op, function, inputs = PEERS[name]
    if reason := not_run(row, lane, [request.node.nodeid], op.packages):
        pytest.skip(f"not run: {reason}")
    if op.tuned_peer:
        keep_winners()
    assert_same_function(function, inputs(lane.device), "upstream")


@lanes("h200")
@pytest.mark.long(40)
@pytest.mark.parametrize("name", [name for name in PEERS if name.startswith("attention")])
def test_flash_attention_4_computes_the_same_function(lane: Lane, name: str, request, row):
    """Forward and gradients over packed documents, with the softcap as a score_mod, and in a window."""
    if reason := not_run(row, lane, [request.node.nodeid], ["cutlass"]):
        pytest.skip(f"not run: {reason}")
    _, function, inputs = PEERS[name]
    assert_same_function(function, inputs(lane.device), "fa4")


def assert_same_function(function: Callable[..., Tensor], given: tuple[Tensor, ...], peer: str) -> None:
    exact = gradients(partial(function, impl="eager"), *doubled(given))
    with OperandsIn(BF16):
        plain = gradients(partial(function, impl="eager"), *given)
    for impl, factor in (("op", 3.0), (peer, 20.0)):
        found = gradients(partial(function, impl=impl), *given)
        ratios = [error_ratio(*three) for three in zip(found, plain, exact, strict=True)]
        assert largest(ratios) <= factor, (impl, ratios)


@lanes("h200")
@pytest.mark.long(40)
def test_softcap_argument_of_flash_attention_4(lane: Lane, row):
    """Our adapter passes a score_mod instead. In a child: with a compiler that does not fit, it is said to crash."""
    id = "kernels/attention-fa4/own_softcap_is_wrong"
    if reason := not_run(row, lane, [id], ["cutlass"]):
        pytest.skip(f"not run: {reason}")
    with claimed(2):
        try:
            ratios = run_json("suites.kernels.test_peers", environment={}, timeout=200)
            evidence = f"error ratios {ratios}"
        except ChildError as error:
            if ": exit -" not in str(error):  # no crash: what ended it is not known
                raise
            ratios, evidence = None, str(error)
    row.defect(
        id,
        ratios is None or largest(ratios) > 20.0,
        known_in=OWN_SOFTCAP,
        reason="flash-attn 4's argument softcap crashes or is wrong",
        rule="C15",
        witness=1,
        evidence=[evidence],
    )


def own_softcap() -> list[float]:
    """Return the error ratios of flash-attn 4's output and gradients with its own softcap of 2."""
    from flash_attn.cute import flash_attn_func

    q, k, v, doc_ids = peer_inputs("cuda")
    given = (q, k, v, torch.zeros_like(doc_ids))
    exact = gradients(partial(attention, softcap=2.0, impl="eager"), *doubled(given))
    with OperandsIn(BF16):
        plain = gradients(partial(attention, softcap=2.0, impl="eager"), *given)

    def capped(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True, softcap=2.0)[0]

    return [error_ratio(*three) for three in zip(gradients(capped, *given), plain, exact, strict=True)]


@lanes("cpu", "h200")
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 9}, {"scale": 0.3}])
def test_sdpa_computes_the_same_function(lane: Lane, options: dict[str, Any]):
    inputs = make_inputs(device=lane.device)
    expected = gradients(partial(attention, impl="eager"), *inputs, **options)
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
def test_flex_with_score_mod_computes_the_same_function(lane: Lane, options: dict[str, Any]):
    """Without gradients: torch has none on CPU.

    One softcap a process, as in the model: torch 2.15 does not compile a second one (suites/features).
    """
    reset_dynamo()
    inputs = make_inputs(device=lane.device)
    with torch.no_grad():
        expected, found = (attention(*inputs, **options, impl=impl) for impl in ("eager", "flex"))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        if softcap := options.get("softcap"):
            other = attention(*inputs, **options | {"softcap": softcap * 1.03}, impl="eager")
            assert not torch.allclose(found, other, rtol=1e-4)


class Capped(torch.autograd.Function):
    """A score_mod applied to whole logits, with the gradient of its score_mod_bwd."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, mod: Callable[..., Tensor], mod_bwd: Callable[..., Tensor]
    ) -> Tensor:
        ctx.save_for_backward(scores)
        ctx.mod_bwd = mod_bwd
        return mod(scores, *[None] * 6)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.mod_bwd(grad, *ctx.saved_tensors, *[None] * 6), None, None


class FakeFA4:
    """flash-attn-4 as far as the adapter uses it, in plain torch. calls: options of the calls of its function."""

    def __init__(self) -> None:
        self.version, self.requires = "4.0.0b36", ["nvidia-cutlass-dsl>=4.6.2", "pytest; extra == 'dev'"]
        self.versions = {"nvidia-cutlass-dsl": "4.8.1"}
        self.calls: list[dict[str, Any]] = []
        self.package, self.utils = ModuleType("flash_attn.cute"), ModuleType("flash_attn.cute.utils")
        self.package.flash_attn_func = self.package.flash_attn_varlen_func = self.attend
        self.utils.create_softcap_scoremod = lambda cap: self.mod
        self.utils.create_softcap_scoremod_bwd = lambda cap: self.mod_bwd

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, window_size: tuple[int, int],
        softcap: float = 0.0, score_mod: Any = None, score_mod_bwd: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        self.calls.append({"softmax_scale": softmax_scale, "window_size": window_size, "softcap": softcap})
        group = q.shape[2] // k.shape[2]
        k, v = (t.repeat_interleave(group, 2) for t in (k, v))
        scores = torch.einsum("bihp,bjhp->bhij", q, k) * softmax_scale
        scores = Capped.apply(scores, score_mod, score_mod_bwd) if score_mod else scores
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        out = torch.einsum("bhij,bjhp->bihp", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        return out.double(), torch.zeros(())

    def mod(self, acc_S_SSA, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        raise AssertionError("the package's own softcap was used")

    def mod_bwd(self, grad_out_SSA, score_SSA, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        raise AssertionError("the package's own softcap was used")

    def distribution(self, name: str) -> Any:
        if not self.version:
            raise metadata.PackageNotFoundError(name)
        return SimpleNamespace(version=self.version, requires=self.requires)

    def version_of(self, name: str) -> str:
        if name not in self.versions:
            raise metadata.PackageNotFoundError(name)
        return self.versions[name]


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFA4]:
    fake, cute = FakeFA4(), ModuleType("cutlass.cute")
    cute.jit = lambda function: function
    cute.math = SimpleNamespace(tanh=lambda x, fastmath: torch.tanh(x))
    modules = {"flash_attn.cute": fake.package, "flash_attn.cute.utils": fake.utils, "cutlass.cute": cute}
    for name, module in (modules | {name: ModuleType(name) for name in ("flash_attn", "cutlass")}).items():
        monkeypatch.setitem(sys.modules, name, module)
    absent = metadata.PackageNotFoundError
    found = SimpleNamespace(
        distribution=fake.distribution, version=fake.version_of, PackageNotFoundError=absent
    )
    monkeypatch.setattr(upstream, "metadata", found)
    caches = (upstream.check_fa4, upstream._fa4_softcap)
    for kept in caches:
        kept.cache_clear()
    yield fake
    for kept in caches:
        kept.cache_clear()


@lanes("cpu")
def test_fa4_tuple_is_unwrapped_before_the_cast(lane: Lane, fa4: FakeFA4):
    q, k, v, doc_ids = peer_inputs()
    out = attention(q, k, v, torch.zeros_like(doc_ids), window=5, impl="fa4")
    assert out.dtype == BF16
    assert fa4.calls == [{"softmax_scale": 0.125, "window_size": (4, 0), "softcap": 0.0}]


@lanes("cpu")
@pytest.mark.parametrize("softcap", [0.0, 0.5, 2.0])
def test_fa4_takes_the_softcap_as_a_score_mod(lane: Lane, fa4: FakeFA4, softcap: float):
    q, k, v, doc_ids = make_inputs(T=32, P=16, dtype=torch.float64)
    inputs = q, k, v, torch.zeros_like(doc_ids)
    expected = gradients(partial(attention, impl="eager"), *inputs, softcap=softcap)
    found = gradients(partial(attention, impl="fa4"), *inputs, softcap=softcap)
    for mine, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9)
    assert [call["softcap"] for call in fa4.calls] == [0.0]


def without_score_mod(q: Tensor, k: Tensor, v: Tensor, softcap: float = 0.0) -> None:
    raise AssertionError("a function of a stale FA4 was called")


def shorter_mod(acc_S_SSA, batch_idx, head_idx, q_idx, kv_idx, aux_tensors):
    raise AssertionError("not called")


MISFITS: dict[str, tuple[Callable[[FakeFA4], None], str]] = {
    "copy in flash-attn 2": (
        lambda fake: setattr(fake, "version", ""),
        "flash-attn-4 is not installed, so flash_attn.cute is the old copy in flash-attn 2",
    ),
    "old compiler": (
        lambda fake: fake.versions.update({"nvidia-cutlass-dsl": "4.4.2"}),
        "flash-attn-4 4.0.0b36 requires nvidia-cutlass-dsl>=4.6.2, installed is 4.4.2",
    ),
    "no compiler": (
        lambda fake: fake.versions.clear(),
        "flash-attn-4 4.0.0b36 requires nvidia-cutlass-dsl>=4.6.2, installed is (not installed)",
    ),
    "stale functions": (
        lambda fake: setattr(fake.package, "flash_attn_func", without_score_mod),
        "flash_attn_func of flash-attn-4 4.0.0b36 has no score_mod, score_mod_bwd",
    ),
    "other score_mod": (
        lambda fake: setattr(fake.utils, "create_softcap_scoremod", lambda cap: shorter_mod),
        "passes (acc_S_SSA, batch_idx, head_idx, q_idx, kv_idx, aux_tensors) to a score_mod, not (acc_S_SSA, ",
    ),
}


@lanes("cpu")
@pytest.mark.parametrize("misfit", MISFITS)
def test_incompatible_fa4_is_refused_before_a_kernel_runs(lane: Lane, fa4: FakeFA4, misfit: str):
    plant, reason = MISFITS[misfit]
    plant(fa4)
    q, k, v, doc_ids = peer_inputs()
    with pytest.raises(
        ImportError, match=f"^attention: impl 'fa4' does not fit: .*{re.escape(reason)}"
    ) as caught:
        attention(q, k, v, torch.zeros_like(doc_ids), softcap=30.0, impl="fa4")
    assert str(caught.value).endswith("; install it with: pip install --pre flash-attn-4")
    assert "\n" not in str(caught.value)
    assert fa4.calls == []


@lanes("cpu")
@pytest.mark.parametrize("impl", ["upstream", "fa4"])
def test_document_in_two_pieces_is_refused(lane: Lane, fa4: FakeFA4, impl: str):
    q, k, v, doc_ids = peer_inputs()
    doc_ids[0, 50:] = doc_ids[0, 0]
    doc_ids[0, 20:50] = 9
    with pytest.raises(ValueError, match="documents of adjacent tokens only"):
        attention(q, k, v, doc_ids, impl=impl)


# mamba3_mimo, whose peer has another order of state dims and one state per document.


@lanes("cpu")
@pytest.mark.parametrize("A", [2, 4])
def test_peer_order_of_state_dims_rotates_same_pairs(lane: Lane, A: int) -> None:
    """The peer's rotation, i with i + N/2, in its order of dims equals ours on adjacent dims; in our order it
    differs.
    """
    g = torch.Generator().manual_seed(0)
    x, angle, N = torch.randn(8, generator=g), torch.randn(A, generator=g), 8
    order = mimo_upstream.halves_from_pairs(N, A)

    def theirs(u: Tensor) -> Tensor:
        a, b, out = u[:A], u[N // 2 : N // 2 + A], u.clone()
        out[:A] = a * angle.cos() - b * angle.sin()
        out[N // 2 : N // 2 + A] = a * angle.sin() + b * angle.cos()
        return out

    ours, pairs = x.clone(), torch.view_as_complex(x[: 2 * A].view(A, 2))
    ours[: 2 * A] = torch.view_as_real(pairs * on_circle(angle)).flatten()
    assert sorted(order) == [*range(N)]
    torch.testing.assert_close(theirs(x[order]), ours[order])
    assert (theirs(x) - ours).abs().max() > 0.1


@lanes("cpu")
def test_documents_of_a_batch_are_one_sequence_upstream(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream gets all rows as one varlen sequence and returns one state per document; a row keeps its last one."""
    given: dict[str, Any] = {}

    def kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Any) -> tuple[Any, ...]:
        given.update(options, v=v)
        states = (torch.arange(5.0).reshape(5, 1, 1, 1).expand(5, *shape) for shape in ((4, 3, 8), (3, 4, 8)))
        return v, torch.arange(5.0), *states, None

    monkeypatch.setattr(mimo_upstream, "load", lambda: SimpleNamespace(mamba3_mimo=kernel))
    made = mimo.make_inputs(T=6, A=4, starts=(2, 5))
    inputs = {name: t for name, t in made.items() if name not in mimo.STATE}
    y, state = mimo_upstream.mamba3_mimo_upstream(Mamba3MimoInputs(**inputs))
    assert given["cu_seqlens"].tolist() == [0, 2, 5, 6, 11, 12]
    assert given["cu_seqlens"].dtype == torch.int32
    assert given["v"].shape == (1, 12, 4, 6)
    assert y.equal(inputs["v"])
    assert state.theta.tolist() == [2, 4]
    assert state.h.flatten(1).unique(dim=1).tolist() == [[2], [4]]
    assert state.v_prev.equal(inputs["v"][:, -1].float())


@lanes("cpu")
def test_absent_mimo_peer_names_its_install_command(lane: Lane) -> None:
    with pytest.raises(
        ImportError, match=r"mamba3_mimo: impl 'upstream' needs .*tilelang.*pip install .*tilelang"
    ):
        mimo.run(**mimo.make_inputs(T=6), impl="upstream")


if __name__ == "__main__":
    print_result(own_softcap())
