"""The disable points that the sources name next to the recurrent block, each in a separate region. Rule C7.

With its point a region is two graphs around one break, whatever the hidden code does. Without it, the row says how
many graphs Dynamo makes of the same calls: more than one is what the point is for, one says that this release no
longer needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from bumpgate.plugin.instruments import DynamoReport
from suites.compile.regions import INSTRUMENTS, places, watched
from suites.support.instruments import grouped_mm
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

CALLS = 4
SOFTCAP = 15.0
X = torch.linspace(-1, 1, 64).reshape(4, 16)

Hidden = Callable[[Tensor], Tensor]


class Server:
    """What a program that serves the model reads between the steps."""

    def __init__(self) -> None:
        self.steps, self.latest = 0, torch.zeros(())

    def publish(self, y: Tensor) -> Tensor:
        """Return y, once it is the latest of one step more."""
        self.steps, self.latest = self.steps + 1, y.detach()
        return y + self.steps


@dataclass(frozen=True)
class Point:
    """make: the hidden code; graphs: those without the point, as derived; why: the derivation."""

    make: Callable[[], Hidden]
    graphs: int
    why: str

    @property
    def name(self) -> str:
        return self.make.__name__


POINTS: list[Point] = []


def point(graphs: int, why: str) -> Callable[[Callable[[], Hidden]], None]:
    """Add the decorated maker of hidden code to the points."""
    return lambda make: POINTS.append(Point(make, graphs, why))


@point(CALLS, "a graph for each value of a Python count")
def hand_off() -> Hidden:
    return Server().publish


@point(1, "DTensor is traced")
def dtensor_embedding() -> Hidden:
    """A lookup in a table that is sharded by rows, which ranks with a plain table make without DTensor."""
    mesh = init_device_mesh("cpu", (1,))
    table = distribute_tensor(torch.arange(32.0).reshape(2, 16), mesh, [Shard(0)])

    def dispatch(y: Tensor) -> Tensor:
        ids = (y[:, 0] > 0).long()
        if not isinstance(table, DTensor):
            return F.embedding(ids, table)
        return F.embedding(DTensor.from_local(ids, mesh, [Replicate()]), table).full_tensor()

    return dispatch


@point(1, "the grouped product is one operator")
def grouped_mm_entry() -> Hidden:
    """The fused entry of two experts: a grouped matrix product of two tokens each."""
    weights, ends = torch.ones(2, 16, 16, dtype=torch.bfloat16), torch.tensor([2, 4], dtype=torch.int32)
    return lambda y: grouped_mm(y.bfloat16(), weights, offs=ends).float()


@point(1, "flex_attention traces its score_mod, through the function that adapts it")
def score_mod() -> Hidden:
    """Attention whose cap has another signature than flex_attention calls it with."""

    def capped(score: Tensor, cap: float) -> Tensor:
        return cap * torch.tanh(score / cap)

    def attend(y: Tensor) -> Tensor:
        q = y[None, None]
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: capped(score, SOFTCAP))[0, 0]

    return attend


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def measure(point: Point, disabled: bool) -> DynamoReport:
    """Compile a region around the point's code, and compare each call with the eager one."""
    eager, hidden = point.make(), point.make()
    if disabled:
        hidden = torch.compiler.disable(hidden)
    with watched() as watch:
        compiled = torch.compile(lambda x: hidden(x * 2) + 1, backend=watch.backend("eager"))
        for _ in range(CALLS):
            torch.testing.assert_close(compiled(X), eager(X * 2) + 1)
    return watch.report


@lanes("cpu")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_disable_point_is_one_break(lane: Lane, point: Point, row, canaries) -> None:
    canaries(*INSTRUMENTS)
    report = measure(point, disabled=True)
    row.count(
        f"compile/disable-{point.name}/graph_breaks", len(places(report)), expected=1, rule="C7", seen=report
    )
    assert report.unique_graphs == 2
    without = measure(point, disabled=False)
    row.count(
        f"compile/disable-{point.name}/graphs_without", without.unique_graphs, expected=point.graphs,
        rule="C7", seen=without, evidence=[point.why],
    )  # fmt: skip


@lanes("cpu")
@planted("C7", "a disable point is removed")
def test_removed_disable_point_breaks_nothing(lane: Lane, canaries) -> None:
    canaries(*INSTRUMENTS)
    report = measure(POINTS[0], disabled=False)
    assert (len(places(report)), report.unique_graphs) == (0, CALLS)
    assert any("steps" in str(r) for r in report.recompiles), report.evidence()
