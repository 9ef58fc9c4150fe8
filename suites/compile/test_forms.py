"""The forms of a forward that the sources warn of, each next to the form that the model uses, in one small region.

Each is called with the inputs that make it misbehave, under the contract's Dynamo options; its number of graphs is
derived from what changes between the calls. Two forms that once broke a graph are kept as expectations that they no
longer do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bumpgate.plugin.instruments import DynamoReport
from launch.contract import load
from suites.compile.regions import INSTRUMENTS, Region, places, watched
from suites.support.lanes import lanes
from suites.support.planted import planted

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane")]

VARIABLE = "BUMPGATE_FORM"
CALLS = 70
# Tokens that a block of a mixture of depths processes; the others pass it by.
CAPACITY = 2
LIMIT = load().dynamo["recompile_limit"]

X = torch.ones(4)


def plain(m: nn.Module) -> None:
    for _ in range(CALLS):
        m(X)


def flips_the_environment(m: nn.Module) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for value in ("0", "1", "0", "1"):
            patch.setenv(VARIABLE, value)
            m(X)


def flips_the_flag(m: nn.Module) -> None:
    for value in (False, True, False):
        m.flag = value
        m(X)


def with_and_without_mask(m: nn.Module) -> None:
    for mask in (None, X, None):
        m(X, mask)


def both_signs(m: nn.Module) -> None:
    for x in (X, -X, X):
        m(x)


def with_keywords(m: nn.Module) -> None:
    for _ in range(3):
        m(X, more=X)


def freezes_and_unfreezes(m: nn.Module) -> None:
    for step in range(CALLS):
        m.weight.requires_grad_(step % 2 == 1)
        assert m(X).requires_grad == (step % 2 == 1)


def opens_and_closes_the_gate(m: nn.Module) -> None:
    for step in range(CALLS):
        m.counter.fill_(step % 2)
        m.weight.grad = None
        m(X).sum().backward()
        assert torch.equal(m.weight.grad, X * (step % 2))


def with_other_tokens(m: nn.Module) -> None:
    """Tokens of which 1, 2, 3 and again 1 have a positive score."""
    for positive in (1, 2, 3, 1):
        x = torch.full((CAPACITY + 2, 4), -1.0)
        x[:positive] = 1.0
        torch.testing.assert_close(m(x), m.form(m, x))


@dataclass(frozen=True)
class Form:
    """graphs, and places of graph breaks, as derived; `why` is the derivation."""

    forward: Callable[..., Tensor]
    drive: Callable[[nn.Module], None]
    graphs: int
    breaks: int
    rule: str
    why: str

    @property
    def name(self) -> str:
        return self.forward.__name__.removeprefix("form_")


TRAPS: list[Form] = []
CLEAN: list[Form] = []


def form(forms: list[Form], drive: Callable[[nn.Module], None], *derived: Any) -> Callable[..., Any]:
    """Add the decorated forward to a list of forms. derived: graphs, breaks, rule and why."""

    def add(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        forms.append(Form(forward, drive, *derived))
        return forward

    return add


@form(TRAPS, plain, LIMIT, 0, "C8", "a graph a value, until the limit")
def form_python_counter(m: Region, x: Tensor) -> Tensor:
    m.calls += 1
    return x * m.weight + m.calls


@form(CLEAN, plain, 1, 0, "C8", "a buffer is an input")
def form_buffer_counter(m: Region, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.counter.add_(1)
    return x * m.weight + m.counter


@form(TRAPS, flips_the_environment, 2, 0, "C9", "a graph a value")
def form_environment(m: Region, x: Tensor) -> Tensor:
    return x * m.weight if os.environ.get(VARIABLE) == "1" else x + m.weight


@form(TRAPS, flips_the_flag, 2, 0, "C9", "a graph a value")
def form_flag(m: Region, x: Tensor) -> Tensor:
    return x * m.weight if m.flag else x + m.weight


@form(TRAPS, with_and_without_mask, 2, 0, "C9", "a graph each")
def form_none_or_tensor(m: Region, x: Tensor, mask: Tensor | None = None) -> Tensor:
    return x * m.weight if mask is None else x * m.weight * mask


@form(TRAPS, both_signs, 3, 1, "C9", "before the branch, and each side")
def form_host_branch(m: Region, x: Tensor) -> Tensor:
    y = x * m.weight
    return y.sin() if y.sum() > 0 else y.cos()


@form(CLEAN, both_signs, 1, 0, "C9", "both sides in one graph")
def form_where(m: Region, x: Tensor) -> Tensor:
    y = x * m.weight
    return torch.where(y.sum() > 0, y.sin(), y.cos())


@form(CLEAN, plain, 1, 0, "C9", "harmless now: a constant name is resolved")
def form_getattr(m: Region, x: Tensor) -> Tensor:
    return x * getattr(m, "wei" + "ght")


@form(TRAPS, freezes_and_unfreezes, 2, 0, "C8", "a graph with a gradient, and one without")
def form_requires_grad(m: Region, x: Tensor) -> Tensor:
    return x * m.weight


@form(CLEAN, opens_and_closes_the_gate, 1, 0, "C8", "the gate is an input")
def form_gradient_gate(m: Region, x: Tensor) -> Tensor:
    return x * torch.where(m.counter > 0, m.weight, m.weight.detach())


@form(TRAPS, with_other_tokens, 4, 1, "C11", "the scores, and each count")
def form_depths_by_threshold(m: Region, x: Tensor) -> Tensor:
    return x[x @ m.weight > 0] * m.weight


@form(CLEAN, with_other_tokens, 1, 0, "C11", "as many tokens at each call")
def form_depths_by_capacity(m: Region, x: Tensor) -> Tensor:
    scores, tokens = (x @ m.weight).topk(CAPACITY)
    return x.index_add(0, tokens, x[tokens] * scores.sigmoid()[:, None])


@form(CLEAN, with_keywords, 1, 0, "C9", "harmless now: a dict of tensors is unpacked")
def form_keywords(m: Region, x: Tensor, **kwargs: Tensor) -> Tensor:
    return x * m.weight + kwargs["more"]


@form(CLEAN, both_signs, 1, 0, "C2", "captured as a symbol")
def form_item(m: Region, x: Tensor) -> Tensor:
    return x * m.weight * x.sum().item()


def measure(form: Form, **options: object) -> DynamoReport:
    with watched(**options) as watch:
        region = Region(form.forward)
        region.compile(backend=watch.backend("eager"))
        form.drive(region)
    return watch.report


@pytest.mark.parametrize("form", CLEAN, ids=lambda form: form.name)
def test_clean_form_compiles_to_one_graph(form: Form, row, canaries) -> None:
    canaries(*INSTRUMENTS)
    report = measure(form)
    row.count(
        f"compile/form-{form.name}/unique_graphs", report.unique_graphs, expected=form.graphs, rule=form.rule,
        seen=report, evidence=[form.why],
    )  # fmt: skip
    assert not report.breaks


@pytest.mark.parametrize(
    "form", [pytest.param(f, id=f.name, marks=planted(f.rule, f.name.replace("_", " "))) for f in TRAPS]
)
def test_trap_form_compiles_to_known_number_of_graphs(form: Form, canaries) -> None:
    canaries(*INSTRUMENTS)
    report = measure(form)
    assert (report.unique_graphs, len(places(report))) == (form.graphs, form.breaks), report.evidence()
    limit_met = any("limit" in failure for failure in report.failures)
    assert limit_met == (form.graphs == LIMIT), report.failures


@planted("C2", "scalar outputs are not captured")
def test_uncaptured_item_breaks_the_graph(canaries) -> None:
    canaries(*INSTRUMENTS)
    item = next(f for f in CLEAN if f.name == "item")
    assert len(places(measure(item, capture_scalar_outputs=False))) == 1
    assert not places(measure(item))


def adds_its_number(m: Region, x: Tensor) -> Tensor:
    return x * m.weight + m.number


def layers(limit: int = 0, depth: int = 13) -> DynamoReport:
    """Compile `depth` blocks of one class, each of which reads its own int, such as a layer index."""
    with watched(limit) as watch:
        blocks = [Region(adds_its_number, number) for number in range(depth)]
        for block in blocks:
            block.compile(backend=watch.backend("eager"))
        for block in blocks:
            block(X)
    return watch.report


def test_numbered_layers_stay_below_recompile_limit(row, canaries) -> None:
    canaries(*INSTRUMENTS)
    report = layers()
    row.count(
        "compile/form-layer_number/unique_graphs", report.unique_graphs, expected=13, rule="C3",
        seen=report.calls,
    )  # fmt: skip
    row.count(
        "compile/form-layer_number/limit_hits", len(report.failures), expected=0, rule="C3", seen=report.calls
    )


@planted("C3", "a recompile limit of 8")
def test_low_recompile_limit_is_hit_and_reported(canaries) -> None:
    canaries(*INSTRUMENTS)
    report = layers(limit=8)
    assert report.unique_graphs == 8
    assert report.failures
    assert "limit" in report.failures[0]
