"""Sharding of a model on a mesh of XLA devices: mesh shapes, an annotation for every parameter, and checks of both.

data    rows of the batch
expert  the experts of an E block
model   the output or input side of a linear map: heads, hidden channels, vocabulary

The compiler inserts collectives from the annotations, and the result is correct for any annotation: a parameter
without one is silently replicated. Each parameter therefore has a line in the tables below, also replicated ones, and
a new parameter without a line is refused.

D model dim, E experts, F hidden dim, H heads, M metrics, N devices, V vocabulary.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as runtime
from torch import Tensor, nn

from launch.optimizers import TensorOptimizer

DATA, EXPERT, MODEL = AXES = ("data", "expert", "model")
Spec = tuple[str | None, ...]

# By the parameter's own name and number of dims, which identify it.
_OUT, _IN = (MODEL, None), (None, MODEL)
SHARDED: dict[tuple[str, int], Spec] = {
    ("embedding", 2): _OUT,  # (V,D)
    ("query", 2): _OUT,
    ("key", 2): _OUT,
    ("value", 2): _OUT,
    ("gate", 2): _OUT,
    ("output", 2): _IN,
    ("input", 2): _OUT,
    ("shared_in", 2): _OUT,
    ("shared_out", 2): _IN,
    ("up", 3): (EXPERT, None, MODEL),  # (E,D,F)
    ("down", 3): (EXPERT, MODEL, None),  # (E,F,D)
    ("table", 2): _OUT,  # rows of hashed n-grams
}
# Small, or without a dim to shard: replicated, as all vectors are.
WHOLE = {
    2: "router conv_weight k_bias q_bias skip latent query_down query_up index_query index_key index_weight "
    "merge dynamic score up",
    3: "k_bias q_bias recurrent key_up value_up mimo_v mimo_z mimo_out mix relation",
}


class ShardingError(RuntimeError):
    """A mesh, an annotation or a reduction that this path refuses. The message is one line."""


def start_spmd() -> None:
    """Enable SPMD. Raises ShardingError after the first tensor, where torch_xla would only warn and replicate it."""
    if runtime.is_spmd():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            runtime.use_spmd()
        except UserWarning as warning:
            why = str(warning).split(". ")[0]
            raise ShardingError(f"SPMD must start before the first tensor: {why}") from None


def axes_of(expert: int = 1, model: int = 1) -> tuple[str, ...]:
    """Return the axes of a mesh: always data, the others if larger than 1."""
    return (DATA, *([EXPERT] if expert > 1 else []), *([MODEL] if model > 1 else []))


def make_mesh(expert: int = 1, model: int = 1) -> xs.Mesh:
    """Mesh of all devices as (data,), (data, model), (data, expert) or (data, expert, model); data takes the rest.

    Raises ShardingError if the number of devices is not divisible.
    """
    devices = runtime.global_runtime_device_count()
    if devices % (expert * model):
        raise ShardingError(f"{devices} devices are not a multiple of expert {expert} x model {model}")
    sizes = {DATA: devices // (expert * model), EXPERT: expert, MODEL: model}
    axes = axes_of(expert, model)
    return xs.Mesh(np.arange(devices), tuple(sizes[axis] for axis in axes), axes)


def check_axes(axes: Sequence[str] | None) -> None:
    """Raise ShardingError unless the axes are some of AXES in that order, data among them.

    The last axis maps to neighbouring chips, so `model`, with the most communication, comes last. Another order gives
    the same losses over slower links, so a test of the loss would not detect it.
    """
    named = tuple(axes or ())
    if named[:1] != (DATA,) or named != tuple(axis for axis in AXES if axis in named):
        raise ShardingError(f"mesh axes {named}: take some of {AXES}, in this order, data first")


def plan(model: nn.Module) -> dict[str, Spec]:
    """Map each parameter's path to the axis that shards each of its dims, None for a dim that is not sharded.

    Raises ShardingError on a parameter that is in no table.
    """
    return {path: _spec_of(path, p) for path, p in model.named_parameters()}


def _spec_of(path: str, p: Tensor) -> Spec:
    name = path.removesuffix(".weight").rpartition(".")[2]
    if found := SHARDED.get((name, p.ndim)):
        return found
    if p.ndim < 2 or name in WHOLE.get(p.ndim, "").split():
        return (None,) * p.ndim
    raise ShardingError(
        f"{path} {tuple(p.shape)}: launch/xla/sharding.py has no line for {name!r} of {p.ndim} dims"
    )


def annotate(model: nn.Module, mesh: xs.Mesh, optimizer: TensorOptimizer | None = None) -> None:
    """Annotate every parameter, and the optimizer's state of the same shape, which is then sharded alike.

    Missing state is created here: arguments with another sharding would be another program.
    """
    check_axes(mesh.axis_names)
    specs = {p: spec for (_, p), spec in zip(model.named_parameters(), plan(model).values())}
    for p, spec in specs.items():
        _mark(p, mesh, spec)
    for group in optimizer.param_groups if optimizer else ():
        for p in group["params"]:
            for state in optimizer._state(group["rule"], p).values():
                if state.shape == p.shape:
                    _mark(state, mesh, specs[p])


def shard_batch(ids: Tensor, mesh: xs.Mesh) -> Tensor:
    """Shard token ids (B,T) by row over the data axis."""
    _mark(ids, mesh, (DATA, None))
    return ids


def _mark(tensor: Tensor, mesh: xs.Mesh, spec: Spec) -> None:
    if tensor.ndim:
        here = tuple(axis if axis in mesh.axis_names else None for axis in spec)
        xs.mark_sharding(tensor.detach(), mesh, here)


def annotations(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return each tensor's annotation on the device, in XLA's notation; "" for none."""
    return {path: getattr(xs.wrap_if_sharded(t.detach()), "sharding_spec", "") for path, t in tensors.items()}


def unannotated(model: nn.Module) -> list[str]:
    """Return paths of parameters without an annotation on the device. A scalar needs none."""
    found = annotations({path: p for path, p in model.named_parameters() if p.ndim})
    return [path for path, spec in found.items() if not spec]


def receipt(model: nn.Module, mesh: xs.Mesh) -> dict[str, Any]:
    """Sharding entry of a training receipt: mesh, parameters, number of sharded ones, fingerprint of the annotations.

    Read from the device, not from the plan. Raises ShardingError on a parameter without an annotation.
    """
    if missing := unannotated(model):
        raise ShardingError(f"{len(missing)} parameters without an annotation: {', '.join(missing[:5])}")
    specs = annotations(dict(model.named_parameters()))
    lines = [f"{path} {tuple(p.shape)} {specs[path]}" for path, p in model.named_parameters()]
    return {
        "mesh": dict(zip(mesh.axis_names, map(int, mesh.mesh_shape))),
        "parameters": len(lines),
        "cut": sum("devices=" in spec for spec in specs.values()),
        "fingerprint": hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16],
    }


def global_sums(local: Tensor, reduce: Callable[[Tensor], Tensor], parts: int) -> Tensor:
    """Sums of metrics over all `parts` of a run: local (M,) of this part, or (N,M) of all -> (M,).

    A 1 is added to each part and must sum to the number of parts: a reduction that was swallowed by an `except`, or
    skipped by torch_xla (xm.all_reduce of 2.9 returns its argument under SPMD), is local and looks like a result.
    Syncs the device: use between steps. Raises ShardingError, also if the reduction raises.
    """
    try:
        total = reduce(torch.cat((local, torch.ones_like(local[..., :1])), dim=-1))
    except RuntimeError as error:
        raise ShardingError(f"the metrics were not reduced: {str(error).strip().splitlines()[0]}") from error
    covered = total[..., -1].flatten()[0].item()
    if covered != parts:
        raise ShardingError(f"the metrics are not global: the reduction covered {covered:g} of {parts} parts")
    return total[..., :-1]
