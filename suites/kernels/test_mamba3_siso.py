"""mamba3_siso: the chunked op against the token-by-token recurrence, in value, gradient and compilation.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles.
The oracle is the recurrence in fp64. The op runs the chunked form, which is another computation; a third one,
the published whole-sequence form, is written here, with two readings of it that are known to be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kernels.mamba3_siso import Mamba3State, mamba3_siso, mamba3_siso_recurrent, mamba3_siso_step
from kernels.ssd_chunk_scan import ssd_chunk_scan_reference
from suites.support.instruments import DynamoWatch
from suites.support.lanes import Lane, lanes

PER_TOKEN = ("q", "k", "v", "adt", "dt", "trap", "angles", "z", "doc_ids")
FIXED = ("q_bias", "k_bias", "D")
STATE = Mamba3State._fields
NAMES = ("q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias", "angles", "D", "z", "doc_ids", *STATE)
FLOATS = tuple(n for n in NAMES if n != "doc_ids")
NARROW = ("q", "k", "v", "z")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FWD, BWD = torch.ops.bumpgate.mamba3_siso_fwd, torch.ops.bumpgate.mamba3_siso_bwd
Inputs = dict[str, Tensor]
Scan = Callable[..., tuple[Tensor, ...]]
quick = settings(derandomize=True, max_examples=15, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These sizes gain nothing from threads, and lose tenfold on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def flat(scan: Callable[..., tuple[Tensor, Mamba3State]], **options: object) -> Scan:
    """The scan over flat keyword tensors, a given state among them -> (y, theta, h, k_prev, v_prev)."""

    def run(**inputs: Tensor) -> tuple[Tensor, ...]:
        state = Mamba3State(*(inputs.pop(n) for n in STATE))
        y, final = scan(**inputs, state=state, **options)
        return y, *final

    return run


op, recurrence = flat(mamba3_siso), flat(mamba3_siso_recurrent)


def problem(
    B=2, T=50, H=4, P=8, N=8, G=2, R=3, dtype=torch.float64, device="cpu", seed=0, starts=(13, 14, 40)
) -> Inputs:
    """Random inputs; a document begins at each of `starts` in row 0, three tokens later in each further row.

    The ids go 5, 1, 5, 1: a change from one token to the next is what counts, not the value.
    """
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    begins = torch.zeros(B, T, dtype=torch.int32)
    for row in range(B):
        begins[row, [start + 3 * row for start in starts if start + 3 * row < T]] = 1
    dt = F.softplus(draw(B, T, H))
    inputs = {
        "q": draw(B, T, G, N),
        "k": draw(B, T, G, N),
        "v": draw(B, T, H, P),
        "adt": -dt * (0.05 + torch.rand(B, T, H, generator=g, dtype=torch.float64)),
        "dt": dt,
        "trap": draw(B, T, H),
        "q_bias": draw(H, N),
        "k_bias": draw(H, N),
        "angles": draw(B, T, H, R),
        "D": draw(H),
        "z": draw(B, T, H, P),
        "doc_ids": 5 - 4 * (begins.cumsum(1) % 2).int(),
        "theta": 2 * math.pi * torch.rand(B, H, R, generator=g, dtype=torch.float64),
        "h": draw(B, H, P, N),
        "k_prev": draw(B, H, N),
        "v_prev": draw(B, H, P),
    }
    wide = torch.promote_types(dtype, torch.float32)
    dtypes = {n: dtype if n in NARROW else wide for n in FLOATS}
    return {n: t.to(device, dtypes.get(n, t.dtype)) for n, t in inputs.items()}


def doubled(inputs: Inputs) -> Inputs:
    """The same numbers in fp64."""
    return {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}


def cut(inputs: Inputs, tokens: slice, state: tuple[Tensor, ...]) -> Inputs:
    """Some of the tokens, from a given state."""
    part = {n: t[:, tokens] if n in PER_TOKEN else t for n, t in inputs.items()}
    return part | dict(zip(STATE, state))


def nothing(inputs: Inputs) -> tuple[Tensor, ...]:
    """The state before any token."""
    return tuple(torch.zeros_like(inputs[n]) for n in STATE)


def results(scan: Scan, inputs: Inputs) -> Inputs:
    """y, the final state (theta as a point on the circle), and the gradients of a weighting of both."""
    leaves = {n: t.detach().clone().requires_grad_(n in FLOATS) for n, t in inputs.items()}
    found = scan(**leaves)
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t) for t in found]
    wanted = [leaves[n] for n in FLOATS]
    grads = torch.autograd.grad(found, wanted, weights, allow_unused=True, materialize_grads=True)
    y, theta, *rest = (t.detach() for t in found)
    final = dict(zip(("final " + n for n in STATE), (torch.polar(torch.ones_like(theta), theta), *rest)))
    return {"y": y, **final, **dict(zip(FLOATS, grads))}


def worst(found: dict, oracle: dict) -> float:
    """Largest difference, relative to the largest entry of each tensor."""
    return max(((found[n] - oracle[n]).abs().max() / oracle[n].abs().max()).item() for n in oracle)


def rounding_bound(inputs: Inputs) -> Tensor:
    """What rounding alone can do to y (B,T,H,P) in fp32.

    y is a sum over tokens of products of norms |q_t| |k_s| |v_s|. Each passes at most T + N additions, T more
    in its exponent (T u |s| on a weight exp(s) is at most T u of the undecayed one), and two angles. An angle
    is a sum of T terms: pi u a term for the addition, and 4 pi u dt for the term, 28 u for dt below 2.
    16 u more for the roundings of single factors.
    """
    i = doubled(inputs)
    T, H, N = i["q"].shape[1], i["v"].shape[2], i["q"].shape[3]
    query, key = (
        (i[n].repeat_interleave(H // i[n].shape[2], 2) + i[n + "_bias"]).norm(dim=-1)[..., None] for n in "qk"
    )
    before = (
        i["h"].norm(dim=-1) + i["dt"][:, 0, :, None] * i["k_prev"].norm(dim=-1)[..., None] * i["v_prev"].abs()
    )
    twice = i["dt"] + F.pad(i["dt"][:, 1:], (0, 0, 0, 1))
    sums = before[:, None] + (twice[..., None] * key * i["v"].abs()).cumsum(1)
    size = (query * sums + i["D"].abs()[:, None] * i["v"].abs()) * F.silu(i["z"]).abs()
    return (58 * T + N + 16) * 2**-24 * size


def published_form(inputs: Inputs, diagonal: bool = True) -> Tensor:
    """y of one document from zero state, all T tokens at once; without `diagonal`, less the diagonal term."""
    i, H = inputs, inputs["v"].shape[2]
    theta = (math.pi * i["angles"].tanh() * i["dt"][..., None]).cumsum(1)
    plain, turned = [], []
    for n in "qk":
        x = i[n].repeat_interleave(H // i[n].shape[2], 2) + i[n + "_bias"]
        R = theta.shape[-1]
        pairs = torch.view_as_complex(x[..., : 2 * R].unflatten(-1, (R, 2))) * torch.polar(
            theta * 0 + 1, theta
        )
        plain.append(x)
        turned.append(torch.cat((torch.view_as_real(pairs).flatten(-2), x[..., 2 * R :]), -1))
    lam = i["trap"].sigmoid()
    shifted = F.pad((i["dt"] * (1 - lam))[:, 1:], (0, 0, 0, 1))
    scale = lam * i["dt"] + shifted
    if not diagonal:
        shifted = shifted * 0
    q, k, v, sums = (
        t.transpose(1, 2) for t in (turned[0], turned[1] * scale[..., None], i["v"], i["adt"].cumsum(1))
    )
    decay = torch.exp((sums[..., :, None] - sums[..., None, :]).tril()).tril()
    y = (((q @ k.mT) * decay) @ v).transpose(1, 2)
    y = y - i["v"] * (shifted * (plain[0] * plain[1]).sum(-1))[..., None] + i["D"][:, None] * i["v"]
    return y * F.silu(i["z"])


def scaled_k_in_mamba2(inputs: Inputs) -> Tensor:
    """Known wrong: scale k, and give the Mamba-2 scan -adt for its dt, which then weighs v as well."""
    i, H = inputs, inputs["v"].shape[2]
    lam = i["trap"].sigmoid()
    scale = lam * i["dt"] + F.pad((i["dt"] * (1 - lam))[:, 1:], (0, 0, 0, 1))
    q, k = (i[n].repeat_interleave(H // i[n].shape[2], 2) + i[n + "_bias"] for n in "qk")
    y, _ = ssd_chunk_scan_reference(
        i["v"], -i["adt"], -torch.ones_like(i["D"]), k * scale[..., None], q, i["D"], i["doc_ids"]
    )
    return y * F.silu(i["z"])


@lanes("cpu", "h200")
def test_the_published_form_holds_and_its_two_wrong_readings_do_not(lane: Lane):
    inputs = problem(starts=(), device=lane.device)
    inputs |= dict(zip(STATE, nothing(inputs)))
    y, *_ = op(**inputs)
    assert (y - published_form(inputs)).abs().max() < 1e-11
    assert (y - published_form(inputs, diagonal=False)).abs().max() > 1
    still = inputs | {"angles": torch.zeros_like(inputs["angles"])}
    assert (op(**still)[0] - published_form(still)).abs().max() < 1e-11
    assert (op(**still)[0] - scaled_k_in_mamba2(still)).abs().max() > 1


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_as_close_to_the_oracle_as_the_plain_recurrence(lane: Lane, dtype: str, row):
    errors: dict[str, list[list[Tensor]]] = {}
    for seed in range(8):
        inputs = problem(dtype=DTYPES[dtype], device=lane.device, seed=seed)
        oracle = results(recurrence, doubled(inputs))
        assert torch.equal(results(op, inputs)["final v_prev"], inputs["v"][:, -1].to(torch.float32))
        for side, scan in enumerate((flat(mamba3_siso, chunk_size=16), recurrence)):
            for name, found in results(scan, inputs).items():
                error = (found - oracle[name]).abs().flatten()
                errors.setdefault(name, [[], []])[side].append(error)
    del errors["final v_prev"]
    ratios = {}
    for name, sides in errors.items():
        ours, plain = (torch.cat(side) for side in sides)
        ratios[name] = max((ours.max() / plain.max()).item(), (ours.norm() / plain.norm()).item())
    # Twice forward, three times backward, as in flash-attn's tests: a maximum over few entries wanders.
    forward = tuple(n for n in ratios if n not in FLOATS)
    for metric, names, limit in (("forward", forward, 2.0), ("gradient", FLOATS, 3.0)):
        row(
            f"kernels/mamba3_siso-{lane.name}-{dtype}/{metric}_error_ratio",
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
    oracle, *_ = recurrence(**doubled(inputs))
    bound = rounding_bound(inputs)
    for chunk_size in (1, 16, 64):
        y, *_ = flat(mamba3_siso, chunk_size=chunk_size)(**inputs)
        assert ((y - oracle).abs() <= bound).all()
    # The bound must tell a wrong scan from a right one: no reset, and the angle not carried.
    unreset, *_ = op(**inputs | {"doc_ids": torch.zeros_like(inputs["doc_ids"])})
    assert ((unreset - oracle).abs() > bound).double().mean() > 0.1
    unturned, *_ = op(**inputs | {"theta": torch.zeros_like(inputs["theta"])})
    assert ((unturned - oracle).abs() > bound)[:, :10].double().mean() > 0.5


@lanes("cpu", "h200")
def test_a_small_lambda_keeps_its_digits(lane: Lane):
    """Where lam is small a token weighs little for itself: that weight may be no difference of large ones."""
    inputs = problem(starts=(), dtype=torch.float32, device=lane.device)
    inputs |= dict(zip(STATE, nothing(inputs))) | {"D": torch.zeros_like(inputs["D"])}
    inputs["trap"] = inputs["trap"] - 12
    oracle = recurrence(**doubled(inputs))[0][:, 0]
    assert ((op(**inputs)[0][:, 0] - oracle) / oracle).abs().median() < 1e-6
    assert ((published_form(inputs)[:, 0] - oracle) / oracle).abs().median() > 1e-4


@lanes("cpu")
def test_gradcheck(lane: Lane):
    inputs = problem(B=2, T=5, H=2, P=2, N=3, G=1, R=1, starts=(3,))
    tensors = [inputs[n].requires_grad_(n in FLOATS) for n in NAMES]
    scan = flat(mamba3_siso, chunk_size=2)
    assert torch.autograd.gradcheck(lambda *t: scan(**dict(zip(NAMES, t))), tensors)


@lanes("cpu", "h200")
@pytest.mark.parametrize("chunk_size", [1, 16, 64])
def test_gradients_equal_autograd_of_both_forms(lane: Lane, chunk_size: int):
    inputs = problem(device=lane.device)
    found = results(flat(mamba3_siso, chunk_size=chunk_size), inputs)
    assert worst(found, results(recurrence, inputs)) < 1e-12
    assert worst(found, results(flat(mamba3_siso, chunk_size=chunk_size, impl="reference"), inputs)) < 1e-12
    # Known wrong: the given state without its v_prev k_prev^T.
    assert worst(results(lambda **i: op(**i | {"v_prev": i["v_prev"] * 0}), inputs), found) > 0.1


@lanes("cpu", "h200")
@quick
@given(
    T=st.integers(1, 70),
    chunk_size=st.integers(1, 80),
    G=st.sampled_from([1, 2, 4]),
    R=st.integers(0, 2),
    start=st.integers(1, 70),
)
def test_any_chunk_size_is_the_recurrence(lane: Lane, T: int, chunk_size: int, G: int, R: int, start: int):
    inputs = problem(T=T, G=G, R=R, P=3, N=5, starts=(start,), device=lane.device, seed=T)
    y, theta, *rest = flat(mamba3_siso, chunk_size=chunk_size)(**inputs)
    y0, theta0, *rest0 = recurrence(**inputs)
    assert worst(dict(enumerate((y, *rest))), dict(enumerate((y0, *rest0)))) < 1e-12
    assert (torch.polar(theta * 0 + 1, theta) - torch.polar(theta * 0 + 1, theta0)).abs().sum() < 1e-11
    assert ((theta >= 0) & (theta < 2 * math.pi)).all()


@lanes("cpu", "h200")
@quick
@given(T=st.integers(2, 60), at=st.floats(0, 1), chunk_size=st.integers(1, 64))
def test_two_segments_with_carried_state_are_one_run(lane: Lane, T: int, at: float, chunk_size: int):
    split = min(max(1, round(at * T)), T - 1)
    scan = flat(mamba3_siso, chunk_size=chunk_size)

    def in_two(**inputs: Tensor) -> tuple[Tensor, ...]:
        y0, *state = scan(**cut(inputs, slice(0, split), tuple(inputs[n] for n in STATE)))
        # A segment cannot see that its first token begins a document: whoever carries the state zeroes it.
        keep = inputs["doc_ids"][:, split] == inputs["doc_ids"][:, split - 1]
        state = [s * keep.view(-1, *[1] * (s.dim() - 1)) for s in state]
        y1, *state = scan(**cut(inputs, slice(split, T), tuple(state)))
        return torch.cat((y0, y1), 1), *state

    inputs = problem(T=T, P=3, N=6, starts=(T // 3, T // 2), device=lane.device, seed=T)
    assert worst(results(in_two, inputs), results(scan, inputs)) < 1e-12


@lanes("cpu", "h200")
def test_decode_continues_a_prefill(lane: Lane):
    inputs = problem(T=20, starts=(7,), device=lane.device)
    whole, *last = op(**inputs)
    _, *state = op(**cut(inputs, slice(0, 19), tuple(inputs[n] for n in STATE)))
    token = {n: inputs[n][:, -1] for n in PER_TOKEN[:-1]} | {n: inputs[n] for n in FIXED}
    y, state = mamba3_siso_step(**token, state=Mamba3State(*state))
    named = [dict(zip(("y", *STATE), side)) for side in ((y, *state), (whole[:, -1], *last))]
    assert worst(*named) < 1e-12


@lanes("cpu", "h200")
@quick
@given(length=st.integers(1, 40), chunk_size=st.sampled_from([4, 16, 64]), dtype=st.sampled_from([*DTYPES]))
def test_a_packed_document_is_alone(lane: Lane, length: int, chunk_size: int, dtype: str):
    """[A|B] gives B as B alone gives it, and not a bit of B hangs on what A holds.

    Bit-equal where A fills whole chunks (the same sums in the same order), and in the recurrence always.
    Elsewhere the chunk borders cut B in other places, so its sums are rounded in another order.
    """
    scan = flat(mamba3_siso, chunk_size=chunk_size)
    inputs, others = (
        problem(T=length + 64, dtype=DTYPES[dtype], starts=(), device=lane.device, seed=length + i)
        for i in (0, 1)
    )
    inputs["doc_ids"][:, length:] += 1
    alone_inputs = cut(inputs, slice(length, None), nothing(inputs))
    alone, packed = scan(**alone_inputs), scan(**inputs)
    if length % chunk_size == 0:
        assert torch.equal(packed[0][:, length:], alone[0])
        assert all(torch.equal(a, b) for a, b in zip(packed[1:], alone[1:]))
    elif dtype == "fp32":
        assert ((packed[0][:, length:] - alone[0]).abs() <= 2 * rounding_bound(alone_inputs)).all()
    assert torch.equal(recurrence(**inputs)[0][:, length:], recurrence(**alone_inputs)[0])

    mixed = {
        n: torch.cat((others[n][:, :length], t[:, length:]), 1) if n in PER_TOKEN[:-1] else t
        for n, t in inputs.items()
    }
    changed = scan(**mixed)
    assert not torch.equal(changed[0][:, :length], packed[0][:, :length])
    assert torch.equal(changed[0][:, length:], packed[0][:, length:])
    assert all(torch.equal(a, b) for a, b in zip(changed[1:], packed[1:]))

    leaves = {n: t.detach().requires_grad_(n in FLOATS) for n, t in inputs.items()}
    scan(**leaves)[0][:, length:].sum().backward()
    assert all(leaves[n].grad[:, :length].count_nonzero() == 0 for n in PER_TOKEN[:-1])
    assert all(leaves[n].grad.count_nonzero() == 0 for n in STATE)
    assert leaves["v"].grad[:, length:].count_nonzero() > 0


@lanes("cpu", "h200")
@quick
@given(T=st.integers(2, 60), at=st.floats(0, 1), chunk_size=st.integers(1, 64))
def test_the_future_does_not_reach_the_past(lane: Lane, T: int, at: float, chunk_size: int):
    now = min(max(1, round(at * T)), T - 1)
    inputs = problem(T=T, P=3, N=6, starts=(T // 2,), dtype=torch.float32, device=lane.device, seed=T)
    scan = flat(mamba3_siso, chunk_size=chunk_size)
    later = {
        n: torch.cat((t[:, :now], t[:, now:] * 3 + 1), 1) if n in PER_TOKEN else t for n, t in inputs.items()
    }
    y, changed = scan(**inputs)[0], scan(**later)[0]
    assert torch.equal(changed[:, :now], y[:, :now])
    assert not torch.equal(changed[:, now], y[:, now])


@lanes("cpu", "h200")
@pytest.mark.parametrize("chunk_size", [4, 64])
def test_strong_decay_leaves_finite_and_right_gradients(lane: Lane, chunk_size: int):
    inputs = problem(T=24, dtype=torch.float32, device=lane.device)
    inputs["adt"][:, 5::7] = -3e4
    inputs["adt"][:, 8, 0] = -float("inf")
    found = results(flat(mamba3_siso, chunk_size=chunk_size), inputs)
    assert all(t.isfinite().all() for t in found.values())
    assert worst(found, results(recurrence, doubled(inputs))) < 2e-5
    # The usual way, exp of a difference of running sums and then a mask, does turn into NaN here.
    decay = inputs["adt"][0, :, 1].clone().requires_grad_()
    sums = decay.cumsum(0)
    torch.exp(sums[:, None] - sums[None, :]).tril().sum().backward()
    assert decay.grad.isnan().any()


@lanes("cpu", "h200")
def test_autocast_does_not_reach_the_scan(lane: Lane):
    inputs = problem(dtype=torch.float32, device=lane.device)
    plain = results(op, inputs)
    with torch.autocast(lane.device, dtype=torch.bfloat16):
        assert (inputs["q"] @ inputs["k"].mT).dtype == torch.bfloat16
        cast = results(op, inputs)
        inlined, *_ = flat(mamba3_siso, impl="reference")(**inputs)
    assert all(torch.equal(plain[n], cast[n]) for n in plain)
    assert torch.equal(plain["y"], inlined)


@lanes("cpu", "h200")
def test_op_contract(lane: Lane):
    inputs = problem(B=2, T=9, H=4, P=3, N=5, G=2, R=2, starts=(4,), dtype=torch.float32, device=lane.device)
    # No tensor contiguous: the op may rely on no layout, and its results have the canonical one.
    strided = [inputs[n].repeat_interleave(2, -1)[..., ::2] for n in NAMES]
    cotangents = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in FWD(*strided, 4)]
    for call, arguments in ((FWD, (*strided, 4)), (BWD, (*strided, 4, *cotangents))):
        real = call(*arguments)
        fake = call(*(t.to("meta") if isinstance(t, Tensor) else t for t in arguments))
        assert [(t.shape, t.stride(), t.dtype) for t in fake] == [
            (t.shape, t.stride(), t.dtype) for t in real
        ]
        assert all(t.is_contiguous() for t in real)
        torch.library.opcheck(call, arguments)
    torch.library.opcheck(FWD, (*(t.requires_grad_(t.is_floating_point()) for t in strided), 4))


@lanes("cpu", "h200")
def test_compiles_to_one_graph_for_every_batch_size(lane: Lane):
    with DynamoWatch() as watch:
        scan = torch.compile(op, fullgraph=True, backend=watch.backend("aot_eager"))
        for B in (2, 3, 5):
            inputs = problem(B=B, T=20, dtype=torch.float32, device=lane.device)
            leaves = {n: t.requires_grad_(n in FLOATS) for n, t in inputs.items()}
            for name in (*PER_TOKEN, *STATE):
                torch._dynamo.maybe_mark_dynamic(leaves[name], 0)
            sum(t.sum() for t in scan(**leaves)).backward()
            eager, compiled = results(op, inputs), results(scan, inputs)
            assert all(torch.equal(eager[n], compiled[n]) for n in eager)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            results(scan, inputs)
        ran = {event.key: event.count for event in trace.key_averages()}
        assert ran["bumpgate::mamba3_siso_fwd"] == ran["bumpgate::mamba3_siso_bwd"] == 1
    (graph,) = watch.report.graphs
    assert graph.operators.count(str(FWD.default)) == 1

    inlined = flat(mamba3_siso, impl="reference")
    with DynamoWatch() as watch:
        traced = results(torch.compile(inlined, fullgraph=True, backend=watch.backend("aot_eager")), inputs)
    (graph,) = watch.report.graphs
    assert graph.ops > 20
    assert not any("bumpgate" in operator for operator in graph.operators)
    assert worst(traced, compiled) < 1e-5


BAD = {
    "impl": (lambda i: {"impl": "fused"}, "choices are"),
    "rank": (lambda i: {"v": i["v"][0]}, "v must be"),
    "groups": (lambda i: {"q": i["q"][:, :, [0, 1, 0]]}, "H divisible by G"),
    "angles": (lambda i: {"angles": i["angles"].repeat(1, 1, 1, 2)}, "2R <= N"),
    "no tokens": (lambda i: {n: i[n][:, :0] for n in PER_TOKEN}, "T >= 1"),
    "k": (lambda i: {"k": i["k"][..., :-1]}, "k has shape"),
    "state": (lambda i: {"h": i["h"][:, :1]}, "state.h has shape"),
    "integer dt": (lambda i: {"dt": i["dt"].int()}, "dt must be floating"),
    "mixed dtypes": (lambda i: {"z": i["z"].float()}, "share one dtype"),
    "doc_ids": (lambda i: {"doc_ids": i["doc_ids"].long()}, "doc_ids must be int32"),
    "chunk_size": (lambda i: {"chunk_size": 0}, "chunk_size must be"),
}


@lanes("cpu")
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(lane: Lane, case: str):
    inputs = problem(T=6)
    change, words = BAD[case]
    with pytest.raises(ValueError, match=f"^mamba3_siso: .*{words}") as caught:
        op(**{**inputs, **change(inputs)})
    assert "\n" not in str(caught.value)
