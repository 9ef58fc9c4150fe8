"""Our optimizers: the published updates, one graph for any schedule, and a state that resumes bitwise.

Rules X2 and C8: an optimizer adds no program per step. Dims: A, B the two sides of a matrix, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bumpgate.plugin.instruments import DynamoReport, DynamoWatch, dynamo_config, read_dynamo_config
from launch import optimizers
from launch.contract import apply_dynamo, load
from launch.optimizers import (
    OPTIMIZERS,
    POLAR_BOUNDS,
    AdamW,
    Muon,
    build_optimizer,
    group_of,
    parameter_groups,
    polar,
)
from model import preset
from suites.support.comparison import AT_MOST, error_ratio, ratio_row
from suites.support.hybrids import build, token_batch
from suites.support.lanes import Lane, lanes

MATRICES = ((6, 4), (6, 4), (3, 5, 4))
VECTORS = ((7,), (1,))
# Values that fp32 represents exactly: an fp64 oracle must not differ by its hyperparameters.
EXACT = {"adamw": {"lr": 2**-8, "betas": (0.875, 0.96875), "eps": 2**-20, "weight_decay": 2**-4}}
EXACT["muon"] = EXACT["adamw"] | {"momentum": 0.9375}
EXACT["adagrad"] = {"lr": 2**-5, "lr_decay": 2**-4, "eps": 2**-20, "weight_decay": 2**-4}
INSTRUMENTS = ("graphs", "recompiles", "recompile_limit")


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Return two groups, matrices and vectors, with the same values in every dtype."""
    g = torch.Generator().manual_seed(3)

    def made(shape: tuple[int, ...]) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape, generator=g).to(device=device, dtype=dtype))

    return [
        {"params": [made(shape) for shape in MATRICES]},
        {"params": [made(shape) for shape in VECTORS], "weight_decay": 0.0},
    ]


def made(name: str, groups: list[dict[str, Any]], **options: Any) -> optimizers.TensorOptimizer:
    """Construct the optimizer `name` over both groups; Muon's vectors go to AdamW."""
    if name == "muon":
        groups[1]["rule"] = "adamw"
    return OPTIMIZERS[name](groups, **options)


def every(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def train(optimizer: torch.optim.Optimizer, steps: int, seed: int = 0, schedule: bool = True) -> Tensor:
    """Run `steps` updates on random gradients under torch's own scheduler; return all parameters concatenated."""
    lr = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 32)
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in every(optimizer):
            p.grad = torch.randn(p.shape, generator=g).to(p)
        optimizer.step()
        if schedule:
            lr.step()
    return torch.cat([p.detach().flatten() for p in every(optimizer)])


@contextmanager
def watched() -> Iterator[DynamoWatch]:
    """Watch Dynamo under the contract's configuration."""
    contract = load()
    with dynamo_config(read_dynamo_config(contract.dynamo)), DynamoWatch() as watch:
        apply_dynamo(contract)
        yield watch


@lanes("cpu", "h200")
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize(
    ("name", "theirs", "options"),
    [
        ("adamw", torch.optim.AdamW, {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
        ("adagrad", torch.optim.Adagrad, {"lr": 3e-2, "lr_decay": 0.1, "eps": 1e-6, "weight_decay": 0.1}),
    ],
)
def test_optimizer_equals_torch(lane: Lane, name: str, theirs: Any, options: dict, capturable: bool) -> None:
    ours = made(name, parameters(lane.device, torch.float64), **options, capturable=capturable)
    found = train(ours, 20)
    expected = train(theirs(parameters(lane.device, torch.float64), **options), 20)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    planted = train(theirs(parameters(lane.device, torch.float64), **options | {"eps": 2e-6}), 20)
    assert (planted - expected).abs().max() > 1e-9, "the comparison must detect another eps"


@lanes("cpu")
def test_defaults_are_those_of_torch_and_of_the_muon_recipe(lane: Lane) -> None:
    def first_step(kind: Any, **options: Any) -> Tensor:
        p = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))
        optimizer = kind([{"params": [p], **options}])
        for grad in (p.detach().cos(), p.detach().sin()):
            p.grad = grad
            optimizer.step()
        return p.detach()

    recipe = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    torchs = torch.optim.AdamW
    torch.testing.assert_close(first_step(AdamW), first_step(torchs))
    torch.testing.assert_close(first_step(optimizers.Adagrad), first_step(torch.optim.Adagrad))
    torch.testing.assert_close(first_step(Muon, rule="adamw"), first_step(torchs, **recipe))
    assert float(Muon([nn.Parameter(torch.zeros(2, 2))]).param_groups[0]["momentum"]) == pytest.approx(0.95)
    ours = made("adagrad", parameters("cpu", torch.float64), lr=3e-2, initial_total=0.5)
    theirs = torch.optim.Adagrad(parameters("cpu", torch.float64), lr=3e-2, initial_accumulator_value=0.5)
    torch.testing.assert_close(train(ours, 5), train(theirs, 5), rtol=1e-12, atol=1e-12)


@lanes("cpu", "h200")
@pytest.mark.long(60)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_lr_schedule_compiles_to_one_graph(lane: Lane, name: str, row, canaries) -> None:
    canaries(*INSTRUMENTS)

    def ours(dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
        return train(made(name, parameters(lane.device, dtype), **EXACT[name], **options), 10)

    with watched() as watch:
        found = ours(compile=True, backend=watch.backend())
        report = watch.refresh()
    plain, oracle = ours(), ours(torch.float64)
    case = f"launch/optimizer-{name}-{lane.name}"
    shared = {"seen": report.calls, "rule": "X2", "evidence": report.evidence(), "instruments": INSTRUMENTS}
    row.count(f"{case}/recompiles", len(report.recompiles), expected=0, **shared)
    row.count(f"{case}/unique_graphs", report.unique_graphs, expected=1, **shared)
    ratio = {"parameters": error_ratio(found, plain, oracle)}
    ratio_row(row, f"{case}/compiled_error_ratio", ratio, oracle.numel(), AT_MOST["forward"])


class FloatHyper(AdamW):
    """The mutant of rule X2: Python numbers in the compiled update."""

    def hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: value.item() for name, value in super().hyper(group).items()}


class IntStep(AdamW):
    """The mutant of rule C8: the step count is a Python int."""

    count = 0

    def hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        self.count += 1
        return super().hyper(group) | {"count": self.count}


def adamw_with_int_step(p: Tensor, g: Tensor, state: Any, hyper: Any) -> None:
    p.sub_(g * (1 - hyper["beta1"] ** hyper["count"]))


def recompiles_of(kind: Callable[..., AdamW], device: str) -> DynamoReport:
    with watched() as watch:
        train(kind([parameters(device)[0]], compile=True, backend=watch.backend("aot_eager")), 4)
        return watch.refresh()


@lanes("cpu")
def test_python_number_hyperparameters_recompile(lane: Lane, monkeypatch, canaries) -> None:
    """Another learning rate, and another step count, at each of 4 steps."""
    canaries("recompiles")
    assert len(recompiles_of(AdamW, lane.device).recompiles) == 0
    for mutant, guarded in ((FloatHyper, "lr"), (IntStep, "count")):
        if mutant is IntStep:
            monkeypatch.setattr(optimizers, "adamw_", adamw_with_int_step)
        found = recompiles_of(mutant, lane.device).recompiles
        assert len(found) == 3
        assert guarded in found[0].guard


@lanes("cpu", "h200")
@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (5, 32, 80)])
def test_polar_moves_singular_values_to_one(lane: Lane, monkeypatch, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(lane.device)
    for dtype, slack in ((torch.float32, 1e-3), (torch.bfloat16, 0.05)):
        values = torch.linalg.svdvals(polar(x.to(dtype)).float())
        assert POLAR_BOUNDS[0] - slack <= values.min() <= values.max() <= POLAR_BOUNDS[1] + slack
    left, _, right = torch.linalg.svd(x.double(), full_matrices=False)
    u, _, v = torch.linalg.svd(polar(x.double()), full_matrices=False)
    torch.testing.assert_close(u @ v, left @ right, rtol=0, atol=1e-9)
    # With one step fewer, as in an incorrect loop, the bounds are not met yet.
    monkeypatch.setattr(optimizers, "POLAR_STEPS", optimizers.POLAR_STEPS[:-1])
    assert torch.linalg.svdvals(polar(x)).max() > POLAR_BOUNDS[1] + 0.05


@lanes("cpu")
def test_polar_steps_hold_their_bounds(lane: Lane) -> None:
    """Every singular value in the stated interval, one by one; zero, stacked and transposed matrices."""
    s = torch.logspace(-3, 0, 20_001, dtype=torch.float64) / optimizers.POLAR_NORM_MARGIN
    for a, b, c in optimizers.POLAR_STEPS:
        s = a * s + b * s**3 + c * s**5
    assert POLAR_BOUNDS[0] <= s.min() <= s.max() <= POLAR_BOUNDS[1]
    x = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.equal(polar(torch.zeros(4, 6)), torch.zeros(4, 6))
    torch.testing.assert_close(polar(x), torch.stack([polar(m) for m in x]), rtol=0, atol=1e-12)
    torch.testing.assert_close(polar(x.mT), polar(x).mT, rtol=0, atol=1e-12)


def one_muon_step(w: Tensor, g: Tensor, **options: Any) -> Tensor:
    p = nn.Parameter(w.clone())
    p.grad = g.clone()
    Muon([p], lr=0.1, **options).step()
    return p.detach()


@lanes("cpu")
def test_muon_ignores_the_gradient_scale(lane: Lane) -> None:
    """A power of two scales exactly, so the steps are bitwise equal; the step has the stated RMS."""
    g = torch.Generator().manual_seed(5)
    w, grad = torch.randn(40, 64, generator=g), torch.randn(40, 64, generator=g)
    plain = one_muon_step(w, grad, weight_decay=0.0)
    assert torch.equal(plain, one_muon_step(w, 1024 * grad, weight_decay=0.0))
    rms = (plain - w).square().mean().sqrt() / 0.1
    # An orthogonal (A,B) has RMS 1/sqrt(max(A,B)), which the scale 0.2 sqrt(max(A,B)) turns into 0.2.
    assert 0.2 * POLAR_BOUNDS[0] <= rms <= 0.2 * POLAR_BOUNDS[1]


@lanes("cpu")
@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (3, 12, 20)])
def test_muon_equals_its_formula(lane: Lane, shape: tuple[int, ...]) -> None:
    """Nesterov momentum over three steps, at the scale of the longer side."""
    g = torch.Generator().manual_seed(7)
    w, *gradients = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(4))
    p = nn.Parameter(w.clone())
    optimizer = Muon([p], lr=0.1, momentum=0.75, weight_decay=0.0)
    momentum = torch.zeros_like(w)
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
        momentum = 0.75 * momentum + 0.25 * gradient
        w = w - 0.1 * 0.2 * 20**0.5 * polar(0.75 * momentum + 0.25 * gradient)
    torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-12)


@lanes("cpu")
def test_muon_decay_is_cautious(lane: Lane) -> None:
    """Decay applies only if the step shrinks the weight; there it is lr * weight_decay * w exactly."""
    g = torch.Generator().manual_seed(6)
    w, grad = (torch.randn(40, 64, generator=g, dtype=torch.float64) for _ in range(2))
    plain = one_muon_step(w, grad, weight_decay=0.0)
    decay = plain - one_muon_step(w, grad, weight_decay=0.5)
    shrinks = (w - plain) * w > 0
    assert 0.3 < shrinks.double().mean() < 0.7
    torch.testing.assert_close(decay, 0.1 * 0.5 * w * shrinks, rtol=0, atol=1e-12)


@lanes("cpu")
@pytest.mark.parametrize(
    ("name", "changes"), [("nam12", {}), ("nam12", {"m_mixer": "mamba2"}), ("nam52", {})]
)
def test_every_parameter_is_in_one_group(lane: Lane, name: str, changes: dict) -> None:
    model = build(preset(name, "narrow", **changes))
    groups = {group["name"]: dict(group["params"]) for group in parameter_groups(model)}
    named = dict(model.named_parameters())
    assert sorted(n for group in groups.values() for n in group) == sorted(named)
    assert set(groups["embedding"]) == {"embedding.weight"}
    assert all(p.ndim < 2 for p in groups["vector"].values())
    assert {n.split(".")[-1] for n in groups["matrix"]} == {"weight", "up", "down"}
    linear = {n.split(".")[-2] for n in groups["other"] if n.endswith(".weight")}
    assert linear == {"router"}


@lanes("cpu")
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_only_matrices_decay_and_use_muon(lane: Lane, name: str) -> None:
    optimizer = build_optimizer(build(preset("nam12", "narrow")), name, 1e-3, weight_decay=0.5)
    found = {g["name"]: (float(g["weight_decay"]), g["rule"]) for g in optimizer.param_groups}
    other = "adamw" if name == "muon" else name
    expected = {"matrix": (0.5, name)} | dict.fromkeys(("embedding", "vector", "other"), (0.0, other))
    assert found == expected


@lanes("cpu")
def test_tied_weight_is_in_one_group_once(lane: Lane) -> None:
    """And the head's MTP block is no matrix for Muon."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    linear = model[1]
    assert group_of(linear, "blocks.0.query.weight", linear.weight) == "matrix"
    assert group_of(linear, "head.merge.weight", linear.weight) == "other"
    linear.weight = model[0].weight
    assert [(g["name"], len(g["params"])) for g in parameter_groups(model)] == [("embedding", 1)]


@lanes("cpu")
def test_bad_optimizers_are_refused(lane: Lane) -> None:
    with pytest.raises(ValueError, match="unknown optimizer 'lion': expected one of adamw, adagrad, muon"):
        build_optimizer(nn.Linear(2, 2), "lion", 1e-3)
    with pytest.raises(ValueError, match="muon takes matrices"):
        Muon([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="unknown rule 'sgd'"):
        Muon([{"params": [nn.Parameter(torch.zeros(3, 3))], "rule": "sgd"}])
    optimizer = made("adamw", parameters("cpu"))
    train(optimizer, 1)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(TypeError, match=r'lr must stay a tensor: group\["lr"\]\.fill_\(0\.5\)'):
        optimizer.step()


@lanes("cpu", "h200")
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_optimizer_state_resumes_bit_for_bit(
    lane: Lane, name: str, dtype: torch.dtype, capturable: bool
) -> None:
    def new(lr: float) -> optimizers.TensorOptimizer:
        return made(name, parameters(lane.device, dtype), lr=lr, capturable=capturable)

    def copy_weights(target: torch.optim.Optimizer) -> None:
        for ours, theirs in zip(every(target), every(first)):
            ours.data.copy_(theirs)

    first, second, fresh = new(0.1), new(0.7), new(0.1)
    train(first, 4, schedule=False)
    copy_weights(second), copy_weights(fresh)
    second.load_state_dict(first.state_dict())
    before = [value.clone() for state in second.state.values() for value in state.values()]
    expected = train(first, 3, seed=9, schedule=False)
    after = [value for state in second.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after)), "the first's steps moved the second's state"
    assert {value.dtype for value in after} <= {torch.float32, torch.float64}
    assert torch.equal(train(second, 3, seed=9, schedule=False), expected)
    # The state must affect the result, or the test shows nothing.
    assert not torch.equal(train(fresh, 3, seed=9, schedule=False), expected)


@lanes("cpu")
def test_wiped_parameter_restarts_its_state(lane: Lane) -> None:
    """Moments and step count together: a count that continued would mis-scale the first steps after surgery."""
    optimizer = made("adamw", parameters("cpu"), lr=0.1, weight_decay=0.0)
    train(optimizer, 5, schedule=False)
    p = every(optimizer)[0]
    optimizer.state.pop(p)
    before = p.detach().clone()
    train(optimizer, 1, schedule=False)
    torch.testing.assert_close((p - before).abs(), torch.full_like(p, 0.1), rtol=1e-5, atol=0)


@lanes("cpu", "h200")
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_reduces_the_hybrid_loss(lane: Lane, name: str) -> None:
    model = build(preset("nam12", "narrow"), lane.device)
    optimizer = build_optimizer(model, name, 3e-3)
    ids = token_batch(model.config, 2, device=lane.device)
    losses = []
    for _ in range(5):
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert all(after <= before for before, after in pairwise(losses)), losses
    assert losses[-1] < losses[0] - 0.5
