"""mamba3_siso: the chunked op against the token-by-token recurrence, in value, gradient and compilation.

B batch, T tokens, H heads, P head dim, N state dim, G groups, R rotation angles.
The oracle is the recurrence in fp64. The op runs the chunked form, which is another computation; a third one,
the published whole-sequence form, is written here, with two readings of it that are known to be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

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
    """y, the final state (its angle as a point on the circle), and the gradients by name of a weighting of all."""
    leaves = {n: t.detach().clone().requires_grad_(n in FLOATS) for n, t in inputs.items()}
    found = scan(**leaves)
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t) for t in found]
    wanted = [leaves[n] for n in FLOATS]
    grads = torch.autograd.grad(found, wanted, weights, allow_unused=True, materialize_grads=True)
    y, theta, *rest = (t.detach() for t in found)
    final = dict(zip(("final " + n for n in STATE), (torch.polar(torch.ones_like(theta), theta), *rest)))
    return {"y": y, **final, **dict(zip(FLOATS, grads))}


def worst(found: Inputs, oracle: Inputs) -> float:
    """Largest difference, relative to the largest entry of each tensor."""
    return max(((found[n] - oracle[n]).abs().max() / oracle[n].abs().max()).item() for n in oracle)


def rounding_bound(inputs: Inputs) -> Tensor:
    """What rounding alone can do to y (B,T,H,P) in fp32.

    y is a sum over tokens of products of norms |q_t| |k_s| |v_s|. Each passes at most T + N additions, T more in
    its exponent (T u |s| on a weight exp(s) is at most T u of the undecayed one), and two angles: a sum of T
    terms, each rounded near 4 pi and wrapped, 16 u at most. 16 u for the roundings of single factors.
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
    return (34 * T + N + 16) * 2**-24 * size


def published_form(inputs: Inputs, diagonal: bool = True) -> Tensor:
    """y of one document from zero state, all T tokens at once; `diagonal=False` leaves out the diagonal term."""
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
    """Known wrong: scale k, then let the Mamba-2 scan have -adt for its dt and -1 for its A. It weighs v by that dt."""
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
    """Where lam is small the weight of a token for itself is small too: it may not be a difference of large ones."""
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
    halved = results(lambda **i: op(**i | {"trap": i["trap"] * 0.999}), inputs)
    assert worst(halved, found) > 1e-4


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
    names = [n for n in STATE if inputs[n].numel()]
    found, oracle = flat(mamba3_siso, chunk_size=chunk_size)(**inputs), recurrence(**inputs)
    named = [
        {n: t for n, t in zip(("y", *STATE), side) if n in ("y", *names[-3:])} for side in (found, oracle)
    ]
    assert worst(*named) < 1e-12
    assert (torch.sin(found[1] - oracle[1])).abs().sum() < 1e-11
    assert ((found[1] >= 0) & (found[1] < 2 * math.pi)).all()


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
