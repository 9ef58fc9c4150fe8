"""mamba3_mimo: the op against the token-by-token recurrence and against mamba3_siso; test_scans.py has its laws.

B batch, T tokens, H heads, R MIMO rank, P head dim, N state dim, G groups, A rotation angles.
The oracle is the recurrence in fp64. The op runs the chunked form, which is a different computation.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.mamba3_mimo import Mamba3MimoState, mamba3_mimo, upstream
from kernels.mamba3_mimo.upstream import halves_from_pairs
from kernels.mamba3_siso import Mamba3State, mamba3_siso
from suites.ops.mamba3_mimo import (
    FIXED,
    SPEC,
    STATE,
    make_inputs,
    one_rank_each,
    run,
)
from suites.ops.spec import flat, on_circle
from suites.support.comparison import Named, worst
from suites.support.lanes import Lane, lanes

results = SPEC.trained


def as_siso(inputs: Named) -> tuple[Tensor, ...]:
    """Run mamba3_siso on the inputs of rank 1, without projections; return the results of mamba3_mimo."""
    given = {n: t for n, t in inputs.items() if n not in STATE and not n.startswith("mimo_")}
    given |= {n: inputs[n].squeeze(2) for n in ("q", "k")}
    given |= {n: inputs[n].squeeze(1) for n in ("q_bias", "k_bias")}
    state = Mamba3State(*(inputs[n].squeeze(2) if n == "k_prev" else inputs[n] for n in STATE))
    y, (theta, h, k_prev, v_prev) = mamba3_siso(**given, state=state)
    return y, theta, h, k_prev.unsqueeze(2), v_prev


@lanes("cpu", "h200")
def test_rank_one_with_unit_projections_equals_siso(lane: Lane):
    inputs = make_inputs(R=1, device=lane.device)
    inputs |= {n: torch.ones_like(inputs[n]) for n in ("mimo_v", "mimo_z", "mimo_out")}
    projections = ("mimo_v", "mimo_z", "mimo_out")

    def siso(**i: Tensor) -> tuple[Tensor, ...]:
        y, *state = as_siso(i)
        return y + 0 * sum(i[n].sum() for n in projections), *state

    ours, theirs = results(run, inputs), results(siso, inputs)
    for name in projections:
        del ours[name], theirs[name]
    assert worst(ours, theirs) < 1e-12
    doubled_up = inputs | {"mimo_v": 2 * inputs["mimo_v"]}
    assert worst({"y": run(**doubled_up)[0]}, {"y": theirs["y"]}) > 0.1


@lanes("cpu", "h200")
def test_ranks_share_one_state(lane: Lane):
    """The state sums over ranks before any of them reads it; the order of the ranks does not matter."""
    inputs = make_inputs(device=lane.device)
    right = run(**inputs)[0]
    assert worst({"y": one_rank_each(**inputs)[0]}, {"y": right}) > 0.1
    backward = {n: inputs[n].flip(2) for n in ("q", "k", "k_prev")} | {
        n: inputs[n].flip(1) for n in FIXED if n != "D"
    }
    assert worst({"y": run(**inputs | backward)[0]}, {"y": right}) < 1e-13


@lanes("cpu")
@pytest.mark.parametrize("A", [2, 4])
def test_peer_order_of_state_dims_rotates_same_pairs(lane: Lane, A: int):
    """The peer's rotation, i with i + N/2, in its order of dims equals ours on adjacent dims; in our order it
    differs.
    """
    g = torch.Generator().manual_seed(0)
    x, angle, N = torch.randn(8, generator=g), torch.randn(A, generator=g), 8
    order = halves_from_pairs(N, A)

    def theirs(u: Tensor) -> Tensor:
        a, b, out = u[:A], u[N // 2 : N // 2 + A], u.clone()
        out[:A] = a * angle.cos() - b * angle.sin()
        out[N // 2 : N // 2 + A] = a * angle.sin() + b * angle.cos()
        return out

    ours = x.clone()
    ours[: 2 * A] = torch.view_as_real(
        torch.view_as_complex(x[: 2 * A].view(A, 2)) * on_circle(angle)
    ).flatten()
    assert sorted(order) == [*range(N)]
    torch.testing.assert_close(theirs(x[order]), ours[order])
    assert (theirs(x) - ours).abs().max() > 0.1


@lanes("cpu")
def test_documents_of_a_batch_are_one_sequence_upstream(lane: Lane, monkeypatch: pytest.MonkeyPatch):
    """Upstream gets all rows as one varlen sequence and returns one state per document; a row keeps its last one."""
    given: dict[str, Any] = {}

    def kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Any) -> tuple[Any, ...]:
        given.update(options, v=v)
        states = (torch.arange(5.0).reshape(5, 1, 1, 1).expand(5, *shape) for shape in ((4, 3, 8), (3, 4, 8)))
        return v, torch.arange(5.0), *states, None

    monkeypatch.setattr(upstream, "load", lambda: SimpleNamespace(mamba3_mimo=kernel))
    inputs = {
        k: v for k, v in make_inputs(T=6, A=4, starts=(2, 5)).items() if k not in Mamba3MimoState._fields
    }
    y, state = upstream.mamba3_mimo_upstream(**inputs)
    assert given["cu_seqlens"].tolist() == [0, 2, 5, 6, 11, 12]
    assert given["cu_seqlens"].dtype == torch.int32
    assert given["v"].shape == (1, 12, 4, 6)
    assert y.equal(inputs["v"])
    assert state.theta.tolist() == [2, 4]
    assert state.h.flatten(1).unique(dim=1).tolist() == [[2], [4]]
    assert state.v_prev.equal(inputs["v"][:, -1].float())


@lanes("cpu")
def test_absent_peer_error_names_its_install_command(lane: Lane):
    with pytest.raises(
        ImportError, match=r"mamba3_mimo: impl 'upstream' needs .*tilelang.*pip install .*tilelang"
    ):
        flat(mamba3_mimo, Mamba3MimoState, impl="upstream")(**make_inputs(T=6))
