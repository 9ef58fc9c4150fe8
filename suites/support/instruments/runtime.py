"""Custom ops, host reads, waits for the device and process groups, and the other private names that a suite needs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import _grouped_mm as grouped_mm  # private in torch 2.9
from torch._library.custom_ops import OPDEFS
from torch.testing._internal.optests import OpCheckError  # what torch.library.opcheck raises
from torch.utils._python_dispatch import TorchDispatchMode as EveryOperator

__all__ = [
    "EveryOperator",
    "OpCheckError",
    "OpDefinition",
    "flight_record",
    "functional_all_reduce",
    "group_timeout",
    "grouped_mm",
    "host_syncs",
    "op_calls",
    "op_definitions",
    "synchronisations",
]


@dataclass(frozen=True)
class OpDefinition:
    """What a custom op has registered beside its body."""

    fake: bool
    backward: bool


def op_definitions(namespace: str) -> dict[str, OpDefinition]:
    """Name -> definition of every torch.library.custom_op of the namespace that this process has imported."""
    known = ((name.partition("::"), op) for name, op in OPDEFS.items())
    return {
        name: OpDefinition(op._abstract_fn is not None, op._backward_fn is not None)
        for (space, _, name), op in known
        if space == namespace
    }


@contextmanager
def op_calls(namespace: str) -> Iterator[Counter[str]]:
    """Counts how often the body of each torch.library.custom_op of the namespace runs inside the block, by name.

    Not through the profiler: since torch 2.14 its trace lacks every op that only takes and returns tensors (pytorch
    dispatches those from Python, without a RecordFunction). Tracing runs an op's fake and not its body.
    """
    tally: Counter[str] = Counter()
    bodies = {op: dict(op._backend_fns) for op in OPDEFS.values() if op._namespace == namespace}
    for op in bodies:
        for device, body in bodies[op].items():
            op._backend_fns[device] = _counted(body, tally, op._name)
    try:
        yield tally
    finally:
        for op, known in bodies.items():
            op._backend_fns.update(known)


def _counted(body: Callable[..., Any], tally: Counter[str], name: str) -> Callable[..., Any]:
    def run(*inputs: Any, **named: Any) -> Any:
        tally[name] += 1
        return body(*inputs, **named)

    return run


@contextmanager
def host_syncs() -> Iterator[Counter[str]]:
    """Counts reads of a tensor's value by the host inside the block: `.item()`, `bool(t)`, `int(t)`."""
    tally: Counter[str] = Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield tally
    for event in profile.events():
        tally[event.name] += 1
    tally["syncs"] = tally["aten::_local_scalar_dense"]
    tally["ops"] = sum(n for name, n in tally.items() if name.startswith("aten::"))


@contextmanager
def synchronisations() -> Iterator[list[str]]:
    """Where the host waited for the CUDA device inside the block, as torch warns of it: file:line, one entry a wait."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Turning the watch on is itself warned of: that it is a prototype, and misses some.
    found += [
        f"{w.filename.split('/')[-1]}:{w.lineno}"
        for w in caught
        if "called a synchronizing" in str(w.message)
    ]


def group_timeout(group: Any, device: str = "cpu") -> float:
    """Seconds after which a collective of this process group gives up, read from its backend."""
    backend = group._get_backend(torch.device(device))
    # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around it.
    return getattr(backend, "wrapped_pg", backend).options._timeout.total_seconds()


def functional_all_reduce(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over a process group by c10d's functional operator, which is given the group and not its name."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor, "sum", group))


def flight_record() -> bytes:
    """What the collectives of this process left in torch's flight recorder, pickled as its analyzer reads it."""
    return torch._C._distributed_c10d._dump_fr_trace()
