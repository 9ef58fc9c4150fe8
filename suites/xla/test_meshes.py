"""The four shapes of a mesh: a small hybrid with experts trains alike on each of them and in eager mode (rule X9).

One process trains on all four, 45 s of CPU. The loss does not depend on the order of the axes, because the compiler
keeps every result right. The order is read from the annotations, whose text is derived here.
"""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.runtime as runtime

from launch.xla import sharding
from suites.support.hybrids import build
from suites.support.lanes import lanes
from suites.support.planted import planted
from suites.support.reduce import largest_difference
from suites.xla.mesh_programs import STEPS, on_meshes, small_moe

pytestmark = [lanes("v6e"), pytest.mark.usefixtures("lane")]


SHAPES = ("data", "data-model", "data-expert", "data-expert-model")
LOSS_DIFFERENCE = 2e-5  # of fp32 AdamW over devices, the project's threshold; measured: 1e-6
PROGRAMS = 2  # with experts: forward and backward, and the update


def spec_text(shape: list[int], axes: tuple[str, ...], spec: sharding.Spec) -> str:
    """Return XLA's text, device ids by tile, for a mesh of this shape and axes and the axes that shard each dim."""
    cuts = [axis for axis in spec if axis in axes]
    rest = [axis for axis in axes if axis not in cuts]
    sizes = dict(zip(axes, shape))
    tiles = [sizes[axis] if axis in axes else 1 for axis in spec]
    if int(np.prod(tiles)) == 1:
        return "{replicated}"
    ids = np.arange(np.prod(shape)).reshape(shape).transpose([axes.index(axis) for axis in (*cuts, *rest)])
    copies = ids.size // int(np.prod(tiles))
    dims = tiles + ([copies] if copies > 1 else [])
    assignment = f"devices=[{','.join(map(str, dims))}]{','.join(map(str, ids.flatten()))}"
    return "{" + assignment + (" last_tile_dim_replicate" if copies > 1 else "") + "}"


@pytest.mark.fresh_process
@pytest.mark.parametrize("name", SHAPES)
def test_mesh_agrees_with_eager(name: str, row) -> None:
    children = on_meshes(os.environ["PJRT_DEVICE"])
    found, eager = children["meshes"][name], children["eager"]
    compiles, executions, downloads = (sum(column) for column in zip(*found["counts"]))
    assert eager[0] - eager[-1] > 0.1, "three steps that learn: the optimizer took part"
    assert children["downloads_of_item"] == 1, "the counter of downloads counts under SPMD"
    assert downloads == 0, "nothing is read on the host within a step"
    counts = [f"shape {found['shape']}", f"compiles, executions, downloads by step {found['counts']}"]
    for value in (math.nan, math.inf):
        assert not largest_difference([*found["losses"][:-1], value], eager) <= LOSS_DIFFERENCE
    row.bound(
        f"meshes/{name}/loss_difference", largest_difference(found["losses"], eager), "nats",
        at_most=LOSS_DIFFERENCE, seen=executions, rule="X9",
        evidence=[*counts, f"losses {found['losses']}, eager {eager}"],
    )  # fmt: skip
    row.count(
        f"meshes/{name}/compiles", compiles, expected=PROGRAMS, seen=executions // STEPS, rule="X9",
        evidence=counts,
    )  # fmt: skip
    axes, plan = tuple(name.split("-")), sharding.plan(build(small_moe()))
    wrong = [
        f"{path}: {found['specs'][path]}, derived {expected}"
        for path, spec in plan.items()
        if found["specs"][path] != (expected := spec_text(found["shape"], axes, spec))
    ]
    row.count(
        f"meshes/{name}/annotations_wrong", len(wrong), expected=0, seen=found["specs"], rule="X9",
        evidence=wrong or [f"receipt {found['receipt']}"],
    )  # fmt: skip


@pytest.mark.fresh_process
@planted("X9", "the axes expert and model have changed places")
def test_swapped_axes_are_refused_and_detected() -> None:
    children = on_meshes(os.environ["PJRT_DEVICE"])
    right, swapped = children["meshes"]["data-expert-model"], children["swapped"]
    assert "take some of ('data', 'expert', 'model'), in this order" in swapped["refusal"]
    assert right["shape"][1:] == [2, 2], "only the order differs"
    spec = sharding.SHARDED["up", 3]
    assert swapped["up"] == spec_text(right["shape"], ("data", "model", "expert"), spec)
    assert swapped["up"] != spec_text(right["shape"], ("data", "expert", "model"), spec)


@planted("X9", "use_spmd after the first tensor")
def test_spmd_after_the_first_tensor_is_refused() -> None:
    torch.ones(3).to(torch_xla.device())
    with pytest.raises(sharding.ShardingError, match="before the first tensor"):
        sharding.start_spmd()
    assert not runtime.is_spmd()


@pytest.mark.parametrize(
    ("expert", "model", "axes"),
    [(1, 1, "data"), (1, 2, "data-model"), (2, 1, "data-expert"), (4, 2, SHAPES[-1])],
)
def test_mesh_axes_follow_from_the_degrees(expert: int, model: int, axes: str) -> None:
    assert "-".join(sharding.axes_of(expert, model)) == axes
    sharding.check_axes(sharding.axes_of(expert, model))
