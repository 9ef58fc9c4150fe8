"""m2rnn: the op against the token-by-token definition, in value, gradient and compilation.

B batch, T tokens, H heads, K key dim, V value dim.
The oracle is the recurrence in fp64, one step a token, differentiated by autograd. The op's forward is the
same loop with everything but the carry taken out of it; its backward is derived by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.profiler import ProfilerActivity, profile

from kernels.m2rnn import m2rnn, m2rnn_recurrent, m2rnn_step
from suites.support.instruments import DynamoWatch
from suites.support.lanes import Lane, lanes

NAMES = ("q", "k", "v", "W", "f", "doc_ids", "h0")
PER_TOKEN = ("q", "k", "v", "f", "doc_ids")
FLOATS = tuple(n for n in NAMES if n != "doc_ids")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FWD, BWD = torch.ops.bumpgate.m2rnn_fwd, torch.ops.bumpgate.m2rnn_bwd
Inputs = dict[str, Tensor]
Scan = Callable[..., tuple[Tensor, Tensor]]
quick = settings(derandomize=True, max_examples=15, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These sizes gain nothing from threads, and lose tenfold on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def problem(
    B=2, T=30, H=3, K=6, V=4, dtype=torch.float64, device="cpu", seed=0, starts=(9, 10, 22)
) -> Inputs:
    """Random inputs, W of spectral norm 1; a document begins at each of `starts`, three tokens later a row.

    The ids go 5, 1, 5, 1: a change from one token to the next is what counts, not the value.
    """
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    begins = torch.zeros(B, T, dtype=torch.int32)
    for row in range(B):
        begins[row, [start + 3 * row for start in starts if start + 3 * row < T]] = 1
    W = draw(H, V, V)
    inputs = {
        "q": draw(B, T, H, K),
        "k": draw(B, T, H, K),
        "v": draw(B, T, H, V),
        "W": W / torch.linalg.matrix_norm(W, 2)[:, None, None],
        "f": draw(B, T, H).sigmoid(),
        "doc_ids": 5 - 4 * (begins.cumsum(1) % 2).int(),
        "h0": draw(B, H, K, V),
    }
    wide = torch.promote_types(dtype, torch.float32)
    dtypes = {n: dtype if n in ("q", "k", "v") else wide for n in FLOATS}
    return {n: t.to(device, dtypes.get(n, t.dtype)) for n, t in inputs.items()}


def doubled(inputs: Inputs) -> Inputs:
    """The same numbers in fp64."""
    return {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}


def cut(inputs: Inputs, tokens: slice, state: Tensor | None) -> dict[str, Tensor | None]:
    """Some of the tokens, from a given state."""
    return {n: t[:, tokens] if n in PER_TOKEN else t for n, t in inputs.items()} | {"h0": state}


def results(scan: Scan, inputs: Inputs) -> Inputs:
    """y, the final state, and the gradients by name of a fixed random weighting of both."""
    leaves = {n: t.detach().clone().requires_grad_(n in FLOATS) for n, t in inputs.items()}
    y, final = scan(**leaves)
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t) for t in (y, final)]
    wanted = [leaves[n] for n in FLOATS]
    found = torch.autograd.grad((y, final), wanted, weights, allow_unused=True, materialize_grads=True)
    return {"y": y.detach(), "final": final.detach(), **dict(zip(FLOATS, found))}


def worst(found: Inputs, oracle: Inputs) -> float:
    """Largest difference, relative to the largest entry of each tensor."""
    return max(((found[n] - oracle[n]).abs().max() / oracle[n].abs().max()).item() for n in oracle)


def rounding_bound(inputs: Inputs) -> Tensor:
    """What rounding alone can do to y (B,T,H,V) in fp32, where W has spectral norm 1.

    A step then stretches no row error of h, so T steps add up to T times one step's: (V + 8) u on a row of
    h W + k v^T and of h, whose norms V m + |k| |v| and m V bound (m the largest entry of h, at least 1).
    The read-out adds the rows with weights |q|, and K + 1 roundings of its own.
    """
    i = doubled(inputs)
    T, K, V = i["q"].shape[1], i["k"].shape[3], i["v"].shape[3]
    m = max(1.0, i["h0"].abs().max().item())
    one_step = (V + 8) * (2 * m * V + i["k"].abs().max() * i["v"].norm(dim=-1).max())
    return 2**-24 * (T * one_step + (K + 1) * m) * i["q"].abs().sum(-1, keepdim=True)


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_as_close_to_the_oracle_as_the_plain_recurrence(lane: Lane, dtype: str, row):
    errors: dict[str, list[list[Tensor]]] = {n: [[], []] for n in ("y", "final", *FLOATS)}
    for seed in range(8):
        inputs = problem(dtype=DTYPES[dtype], device=lane.device, seed=seed)
        oracle = results(m2rnn_recurrent, doubled(inputs))
        for side, scan in enumerate((m2rnn, m2rnn_recurrent)):
            for name, found in results(scan, inputs).items():
                assert found.dtype == inputs[{"y": "v", "final": "h0"}.get(name, name)].dtype
                errors[name][side].append((found.double() - oracle[name]).flatten())
    ratios = {}
    for name, sides in errors.items():
        ours, plain = (torch.cat(side) for side in sides)
        ratios[name] = max((ours.abs().max() / plain.abs().max()).item(), (ours.norm() / plain.norm()).item())
    # Twice forward, three times backward, as in flash-attn's tests: a maximum over few entries wanders.
    for metric, names, limit in (("forward", ("y", "final"), 2.0), ("gradient", FLOATS, 3.0)):
        row(
            f"kernels/m2rnn-{lane.name}-{dtype}/{metric}_error_ratio",
            max(ratios[n] for n in names),
            unit="ratio",
            witness=sum(e.numel() for n in names for e in errors[n][0]),
            at_most=limit,
            rule="C36",
            evidence=[f"{n}: {ratios[n]:.3f}" for n in names],
        )


@lanes("cpu", "h200")
def test_fp32_error_is_within_rounding(lane: Lane):
    inputs = problem(dtype=torch.float32, device=lane.device)
    oracle, _ = m2rnn_recurrent(**doubled(inputs))
    bound = rounding_bound(inputs)
    assert ((m2rnn(**inputs)[0] - oracle).abs() <= bound).all()
    # The bound must tell a wrong recurrence from a right one.
    wrong = {"W": inputs["W"].mT, "f": 1 - inputs["f"], "doc_ids": torch.zeros_like(inputs["doc_ids"])}
    for name, tensor in wrong.items():
        y, _ = m2rnn(**inputs | {name: tensor})
        assert ((y - oracle).abs() > bound).double().mean() > 0.2, name


@lanes("cpu")
def test_gradcheck(lane: Lane):
    inputs = problem(B=2, T=5, H=2, K=3, V=2, starts=(3,))
    tensors = [inputs[n].requires_grad_(n in FLOATS) for n in NAMES]
    assert torch.autograd.gradcheck(m2rnn, tensors)

    def truncated(*t: Tensor) -> tuple[Tensor, Tensor]:
        """Known wrong: the same values, without the gradient through the carried state."""
        y, final = m2rnn(*t)
        return y, final.detach() + 0 * t[0].sum()

    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(truncated, tensors)


@lanes("cpu", "h200")
@quick
@given(T=st.integers(1, 40), V=st.integers(1, 5), start=st.integers(1, 40))
def test_values_and_gradients_equal_autograd_of_both_forms(lane: Lane, T: int, V: int, start: int):
    inputs = problem(T=T, V=V, starts=(start,), device=lane.device, seed=T)
    found = results(m2rnn, inputs)
    assert worst(found, results(m2rnn_recurrent, inputs)) < 1e-12
    assert worst(found, results(partial(m2rnn, impl="reference"), inputs)) < 1e-12


@lanes("cpu", "h200")
def test_the_backward_finds_all_candidates_at_once(lane: Lane):
    inputs = problem(T=20, dtype=torch.float32, device=lane.device)
    leaves = {n: t.requires_grad_(n in FLOATS) for n, t in inputs.items()}
    counts = []
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        y, _ = m2rnn(**leaves)
    counts.append({e.key: e.count for e in trace.key_averages()}["aten::tanh"])
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        y.sum().backward()
    counts.append({e.key: e.count for e in trace.key_averages()}["aten::tanh"])
    assert counts == [20, 1]


@lanes("cpu", "h200")
@quick
@given(T=st.integers(2, 40), at=st.floats(0, 1))
def test_two_segments_with_carried_state_are_one_run(lane: Lane, T: int, at: float):
    split = min(max(1, round(at * T)), T - 1)

    def in_two(**inputs: Tensor) -> tuple[Tensor, Tensor]:
        y0, state = m2rnn(**cut(inputs, slice(0, split), inputs["h0"]))
        # A segment cannot see that its first token begins a document: whoever carries the state zeroes it.
        ids = inputs["doc_ids"]
        state = state * (ids[:, split] == ids[:, split - 1])[:, None, None, None]
        y1, state = m2rnn(**cut(inputs, slice(split, T), state))
        return torch.cat((y0, y1), 1), state

    inputs = problem(T=T, starts=(T // 3, T // 2), device=lane.device, seed=T)
    assert worst(results(in_two, inputs), results(m2rnn, inputs)) < 1e-13


@lanes("cpu", "h200")
def test_decode_continues_a_prefill(lane: Lane):
    inputs = problem(T=20, starts=(7,), device=lane.device)
    whole, last = m2rnn(**inputs)
    _, state = m2rnn(**cut(inputs, slice(0, 19), inputs["h0"]))
    token = {n: inputs[n][:, -1] for n in ("q", "k", "v", "f")}
    y, state = m2rnn_step(**token, W=inputs["W"], state=state)
    assert worst({"y": y, "state": state}, {"y": whole[:, -1], "state": last}) < 1e-13


@lanes("cpu", "h200")
@quick
@given(length=st.integers(1, 30), dtype=st.sampled_from([*DTYPES]))
def test_a_packed_document_is_alone(lane: Lane, length: int, dtype: str):
    """[A|B] gives B as B alone gives it, bit for bit: a step sums the same wherever it lies in the row.

    Only the read-out on a GPU is rounded in another order: cuBLAS picks its kernel by the number of tokens.
    """
    inputs, others = (
        problem(T=length + 20, dtype=DTYPES[dtype], starts=(), device=lane.device, seed=length + i)
        for i in (0, 1)
    )
    inputs["doc_ids"][:, length:] += 1
    alone, alone_final = m2rnn(**cut(inputs, slice(length, None), None))
    packed, packed_final = m2rnn(**inputs)
    assert torch.equal(packed_final, alone_final)
    sums = inputs["q"][:, length:].double().abs().sum(-1, keepdim=True)  # no entry of h is above 1
    order = 0.0 if lane.device == "cpu" else 14 * 2**-24 * sums + torch.finfo(alone.dtype).eps * alone.abs()
    assert ((packed[:, length:].double() - alone).abs() <= order).all()

    mixed = inputs | {n: torch.cat((others[n][:, :length], inputs[n][:, length:]), 1) for n in PER_TOKEN[:-1]}
    assert not torch.equal(m2rnn(**mixed)[0][:, :length], packed[:, :length])
    assert torch.equal(m2rnn(**mixed)[0][:, length:], packed[:, length:])

    leaves = {n: t.detach().requires_grad_(n in FLOATS) for n, t in inputs.items()}
    m2rnn(**leaves)[0][:, length:].sum().backward()
    assert all(leaves[n].grad[:, :length].count_nonzero() == 0 for n in PER_TOKEN[:-1])
    assert leaves["h0"].grad.count_nonzero() == 0
    assert leaves["v"].grad[:, length:].count_nonzero() > 0


@lanes("cpu", "h200")
@quick
@given(T=st.integers(2, 40), at=st.floats(0, 1))
def test_the_future_does_not_reach_the_past(lane: Lane, T: int, at: float):
    now = min(max(1, round(at * T)), T - 1)
    inputs = problem(T=T, starts=(T // 2,), dtype=torch.float32, device=lane.device, seed=T)
    later = {
        n: torch.cat((t[:, :now], t[:, now:] * 3 + 1), 1) if n in PER_TOKEN else t for n, t in inputs.items()
    }
    y, changed = m2rnn(**inputs)[0], m2rnn(**later)[0]
    assert torch.equal(changed[:, :now], y[:, :now])
    assert not torch.equal(changed[:, now], y[:, now])


@lanes("cpu", "h200")
def test_a_saturated_candidate_leaves_finite_and_right_gradients(lane: Lane):
    inputs = problem(dtype=torch.float32, device=lane.device)
    inputs["k"][:, 4::5] = 1e4
    inputs["f"][:, ::7] = 0.0
    inputs["f"][:, 1::7] = 1.0
    found = results(m2rnn, inputs)
    assert all(t.isfinite().all() for t in found.values())
    assert worst(found, results(m2rnn_recurrent, doubled(inputs))) < 1e-4


@lanes("cpu", "h200")
def test_autocast_does_not_reach_the_recurrence(lane: Lane):
    inputs = problem(dtype=torch.float32, device=lane.device)
    plain = results(m2rnn, inputs)
    with torch.autocast(lane.device, dtype=torch.bfloat16):
        assert (inputs["q"] @ inputs["k"].mT).dtype == torch.bfloat16
        cast = results(m2rnn, inputs)
        inlined, _ = m2rnn(**inputs, impl="reference")
    assert all(torch.equal(plain[n], cast[n]) for n in plain)
    assert torch.equal(plain["y"], inlined)


@lanes("cpu", "h200")
def test_op_contract(lane: Lane):
    inputs = problem(B=2, T=5, H=3, K=4, V=3, starts=(4,), dtype=torch.float32, device=lane.device)
    # No tensor contiguous: the op may rely on no layout, and its results have the canonical one.
    strided = [t.repeat_interleave(2, -1)[..., ::2] for t in inputs.values()]
    y, final, states = FWD(*strided)
    cotangents = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (states, y, final)]
    for op, arguments in ((FWD, strided), (BWD, (*strided, *cotangents))):
        real, fake = op(*arguments), op(*(t.to("meta") for t in arguments))
        assert [(t.shape, t.stride(), t.dtype) for t in fake] == [
            (t.shape, t.stride(), t.dtype) for t in real
        ]
        assert all(t.is_contiguous() for t in real)
        torch.library.opcheck(op, arguments)
    torch.library.opcheck(FWD, [t.requires_grad_(t.is_floating_point()) for t in strided])


@lanes("cpu", "h200")
def test_compiles_to_one_graph_for_every_batch_size(lane: Lane):
    with DynamoWatch() as watch:
        scan = torch.compile(m2rnn, fullgraph=True, backend=watch.backend("aot_eager"))
        for B in (2, 3, 5):
            inputs = problem(B=B, T=6, dtype=torch.float32, device=lane.device)
            leaves = {n: t.requires_grad_(n in FLOATS) for n, t in inputs.items()}
            for name in (*PER_TOKEN, "h0"):
                torch._dynamo.maybe_mark_dynamic(leaves[name], 0)
            sum(t.sum() for t in scan(**leaves)).backward()
            eager, compiled = results(m2rnn, inputs), results(scan, inputs)
            assert all(torch.equal(eager[n], compiled[n]) for n in eager)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            results(scan, inputs)
        ran = {event.key: event.count for event in trace.key_averages()}
        assert ran["bumpgate::m2rnn_fwd"] == ran["bumpgate::m2rnn_bwd"] == 1
    (graph,) = watch.report.graphs
    assert graph.operators.count(str(FWD.default)) == 1

    inlined = partial(m2rnn, impl="reference")
    with DynamoWatch() as watch:
        traced = results(torch.compile(inlined, fullgraph=True, backend=watch.backend("aot_eager")), inputs)
    (graph,) = watch.report.graphs
    assert graph.ops > 20
    assert not any("bumpgate" in operator for operator in graph.operators)
    assert worst(traced, compiled) < 1e-5


BAD = {
    "impl": (lambda i: {"impl": "fused"}, "choices are"),
    "rank": (lambda i: {"v": i["v"][0]}, "k must be"),
    "no tokens": (lambda i: {n: i[n][:, :0] for n in PER_TOKEN}, "T must be"),
    "W": (lambda i: {"W": i["W"][:, :1]}, "W has shape"),
    "state": (lambda i: {"h0": i["h0"].mT}, "h0 has shape"),
    "integer f": (lambda i: {"f": i["f"].int()}, "f must be floating"),
    "mixed dtypes": (lambda i: {"q": i["q"].float()}, "share one dtype"),
    "doc_ids": (lambda i: {"doc_ids": i["doc_ids"].long()}, "doc_ids must be int32"),
}


@lanes("cpu")
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(lane: Lane, case: str):
    inputs = problem(T=6)
    change, words = BAD[case]
    with pytest.raises(ValueError, match=f"^m2rnn: .*{words}") as caught:
        m2rnn(**{**inputs, **change(inputs)})
    assert "\n" not in str(caught.value)
