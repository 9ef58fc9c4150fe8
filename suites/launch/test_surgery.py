"""FIRE, DASH and ReDo follow their formulas, change nothing else, and reject compiled regions and XLA (rule C31).

A, B the two sides of a matrix, F hidden units, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bumpgate.plugin.instruments import DynamoWatch
from launch.optimizers import build_optimizer
from launch.surgery import ReDo, dash, fire, fire_model
from model import preset
from model.config import MTPConfig
from suites.support.hybrids import build, token_batch
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted


def normal(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def with_spectrum(shape: tuple[int, int], smallest: float) -> Tensor:
    """Return a matrix whose singular values go from 1 down to `smallest`."""
    left, _, right = torch.linalg.svd(normal(*shape).double(), full_matrices=False)
    return ((left * torch.linspace(1, smallest, min(shape), dtype=torch.float64)) @ right).float()


def apart(weight: Tensor) -> float:
    """Return the largest distance of a singular value from 1."""
    return float((torch.linalg.svdvals(weight.detach()) - 1).abs().max())


@lanes("cpu", "h200")
@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32)])
def test_fire_gives_nearest_orthogonal_matrix(lane: Lane, shape: tuple[int, int]) -> None:
    # A spectrum from 1 down to 0.05: the range that 15 iterations guarantee, and that no random square matrix has.
    x = with_spectrum(shape, 0.05).to(lane.device)
    weight = nn.Parameter(x.clone())
    fire(weight)
    left, _, right = torch.linalg.svd(x.double(), full_matrices=False)
    torch.testing.assert_close(weight.detach().double(), left @ right, rtol=0, atol=2e-5)
    assert apart(weight) < 1e-5
    planted = x / torch.linalg.matrix_norm(x, 2)
    for _ in range(15):
        planted = 1.5 * planted - 0.4 * planted @ planted.mT @ planted
    assert apart(planted) > 0.05, "a wrong coefficient must be seen"


@lanes("cpu")
def test_fire_reaches_its_smallest_singular_value(lane: Lane) -> None:
    weight = nn.Parameter(with_spectrum((32, 24), 0.007))
    fire(weight)
    assert apart(weight) < 1e-3


@lanes("cpu")
def test_fire_wipes_state_of_changed_weights_only(lane: Lane) -> None:
    model = build(preset("nam12", "narrow"))
    optimizer = build_optimizer(model, "adamw", 1e-3)
    model(token_batch(model.config, 2)).backward()
    optimizer.step()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    changed = set(fire_model(model, optimizer, context=True))
    named = dict(model.named_parameters())
    assert changed
    for name, p in named.items():
        assert torch.equal(p, before[name]) != (name in changed), name
        assert (p in optimizer.state) != (name in changed), name
    letters = model.config.letters
    assert not any(letters[int(name.split(".")[1])] == "M" for name in changed)
    assert any(letters[int(name.split(".")[1])] == "M" for name in fire_model(model, optimizer))
    assert "embedding.weight" not in changed


@lanes("cpu")
def test_fire_spares_the_head_and_a_zero_output(lane: Lane) -> None:
    """A feature that is initialized as the identity must stay the identity."""
    model = build(preset("nam12", "narrow", mtp=MTPConfig(steps=1)))
    nn.init.zeros_(model.blocks[0].output.weight)
    linear = [name for name, module in model.head.named_modules() if isinstance(module, nn.Linear)]
    assert linear, "the head must have a map that could change"
    changed = fire_model(model, build_optimizer(model, "adamw", 1e-3))
    assert not any(name.startswith("head.") for name in changed)
    assert "blocks.0.output.weight" not in changed
    assert not model.blocks[0].output.weight.any()


@lanes("cpu")
def test_dash_shrinks_rows_along_their_gradient(lane: Lane) -> None:
    weight, other = nn.Parameter(normal(6, 32)), normal(6, 32, seed=1)
    before = weight.detach().clone()
    along = (other * before).sum(1, True) / before.square().sum(1, True) * before
    unit, across = (nn.functional.normalize(t, dim=1) for t in (before, other - along))
    cosines = torch.tensor([1.0, 0.5, 0.05, 0.0, -0.5, -1.0])
    weight.grad = 7.0 * (cosines[:, None] * unit + (1 - cosines[:, None] ** 2).sqrt() * across)
    dash([weight])
    factors = (weight.detach() / before).mean(1)
    expected = torch.tensor([1 - 0.0095, 1 - 0.0045, 1.0, 1.0, 1.0, 1.0])
    torch.testing.assert_close(factors, expected, rtol=0, atol=1e-6)
    assert torch.equal(weight.detach()[3:], before[3:]), "rows that the gradient does not push keep every bit"


@lanes("cpu", "h200")
def test_redo_revives_dormant_units_only(lane: Lane) -> None:
    F, D, dead = 64, 48, [3, 40]
    incoming, outgoing = normal(F, D, device=lane.device), normal(D, F, seed=1, device=lane.device)
    bias = torch.ones(F, device=lane.device)
    incoming[dead] = 0
    bias[dead] = -1
    redo = ReDo(F, lane.device)
    x = normal(256, D, seed=2, device=lane.device)

    def activation() -> Tensor:
        return torch.relu(x @ incoming.mT + bias)

    for _ in range(20):
        redo.observe(activation())
    assert redo.dormant().nonzero().squeeze(1).tolist() == dead
    kept = [i for i in range(F) if i not in dead]
    before = incoming[kept].clone(), outgoing[:, kept].clone(), bias[kept].clone()
    assert redo.recycle(incoming, outgoing, torch.Generator().manual_seed(0), bias) == len(dead)
    after = incoming[kept], outgoing[:, kept], bias[kept]
    assert all(torch.equal(a, b) for a, b in zip(after, before))
    assert not redo.dormant().any()
    assert bias[dead].tolist() == [0, 0]
    assert 0.7 < incoming[dead].std() / incoming[kept].std() < 1.3
    assert 0.07 < outgoing[:, dead].std() / outgoing[:, kept].std() < 0.13
    for _ in range(200):
        redo.observe(activation())
    assert not redo.dormant().any(), "a revived unit must live on its own activity, not on the reset"


@lanes("cpu")
def test_redo_averages_activity_and_is_reproducible_by_seed(lane: Lane) -> None:
    redo, activation = ReDo(2), torch.tensor([[1.0, -3.0], [1.0, 1.0]])
    for expected in ([0.1, 0.2], [0.19, 0.38]):
        redo.observe(activation)
        torch.testing.assert_close(redo.activity, torch.tensor(expected))
    runs = []
    for seed in (0, 0, 1):
        redo, incoming, outgoing = ReDo(4), normal(4, 3), normal(3, 4)
        redo.activity = torch.tensor([1.0, 0.0, 1.0, 1.0])
        redo.recycle(incoming, outgoing, torch.Generator().manual_seed(seed))
        runs.append(torch.cat([incoming.flatten(), outgoing.flatten()]))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


class XlaTensor(Tensor):
    """A host tensor whose device reads as XLA."""

    device = property(lambda self: torch.device("xla", 0))


def operations() -> dict[str, Callable[[Tensor], object]]:
    redo, generator = ReDo(8), torch.Generator().manual_seed(0)
    return {
        "fire": fire,
        "dash": lambda weight: dash([weight]),
        "redo recycle": lambda weight: redo.recycle(weight, weight.mT, generator),
        "redo observe": redo.observe,
    }


@lanes("cpu")
@planted("C31", "surgery inside a compiled region")
@pytest.mark.parametrize("name", sorted(operations()))
def test_surgery_is_refused_in_a_compiled_region(lane: Lane, name: str, row) -> None:
    operation = operations()[name]
    weight = normal(8, 8)
    weight.grad = normal(8, 8, seed=1)
    before = weight.clone()

    def region(x: Tensor) -> Tensor:
        operation(x)
        return x + 1

    with pytest.raises(RuntimeError, match="weight surgery is eager only: call it between steps"):
        torch.compile(region, fullgraph=True, backend="eager")(weight)
    moved = int((weight != before).sum())
    case = f"launch/surgery-{name.replace(' ', '_')}"
    row.count(f"{case}/weights_moved_in_a_region", moved, expected=0, seen=weight.numel(), rule="C31")
    region(weight)


@lanes("cpu")
@planted("C31", "surgery on an XLA tensor")
@pytest.mark.parametrize("name", sorted(operations()))
def test_surgery_is_refused_on_xla(lane: Lane, name: str) -> None:
    weight = normal(8, 8).as_subclass(XlaTensor)
    with pytest.raises(RuntimeError, match=rf"^{name.split()[0]}: not on XLA: [^\n]*$"):
        operations()[name](weight)


@lanes("cpu")
def test_surgery_refuses_bad_operands(lane: Lane) -> None:
    with pytest.raises(ValueError, match=r"fire: needs a matrix, not shape \(4,\)"):
        fire(nn.Parameter(torch.ones(4)))
    with pytest.raises(ValueError, match="fire: a zero matrix"):
        fire(nn.Parameter(torch.zeros(4, 4)))
    with pytest.raises(ValueError, match="after backward, before zero_grad"):
        dash([nn.Parameter(torch.ones(4, 4))])


@lanes("cpu")
def test_surgery_without_fullgraph_falls_back_to_eager(lane: Lane) -> None:
    """Dynamo skips such a frame, so that the surgery runs in eager mode and nothing of the region is compiled."""
    weight, eager = normal(8, 8), normal(8, 8)
    fire(eager)

    def region(x: Tensor) -> Tensor:
        fire(x)
        return x + 1

    with DynamoWatch() as watch:
        torch.compile(region, backend=watch.backend("eager"))(weight)
    assert torch.equal(weight, eager)
    assert watch.report.calls == 0
