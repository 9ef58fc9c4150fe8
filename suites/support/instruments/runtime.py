"""Custom ops, host reads, device synchronizations, process groups, and other private names that the suites need."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import _foreach_add_ as foreach_add_
from torch import _grouped_mm as grouped_mm  # private in torch 2.9
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._library.custom_ops import OPDEFS
from torch.profiler import ProfilerActivity
from torch.testing._internal.optests import OpCheckError  # raised by torch.library.opcheck
from torch.utils._python_dispatch import TorchDispatchMode as EveryOperator

__all__ = [
    "EveryOperator",
    "OpCheckError",
    "OpDefinition",
    "disabled_functions",
    "flight_record",
    "foreach_add_",
    "functional_all_reduce",
    "functional_argument",
    "group_class",
    "group_timeout",
    "grouped_mm",
    "host_syncs",
    "op_calls",
    "op_definitions",
    "scan",
    "synchronisations",
]


@dataclass(frozen=True)
class OpDefinition:
    """What is registered for a custom op in addition to its body."""

    fake: bool
    backward: bool


def op_definitions(namespace: str, package: str = "") -> dict[str, OpDefinition]:
    """Return name -> definition of every torch.library.custom_op of the namespace imported in this process.

    package: only ops whose body is in a module that begins so.
    """
    known = ((name.partition("::"), op) for name, op in OPDEFS.items())
    return {
        name: OpDefinition(op._abstract_fn is not None, op._backward_fn is not None)
        for (space, _, name), op in known
        if space == namespace and op._init_fn.__module__.startswith(package)
    }


@contextmanager
def op_calls(namespace: str) -> Iterator[Counter[str]]:
    """Count by name how often the body of each torch.library.custom_op of the namespace runs inside the block.

    The profiler is not used: since torch 2.14 its trace lacks every op that only takes and returns tensors (pytorch
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


def present_activities() -> list[ProfilerActivity]:
    """Return CPU, and CUDA if there is such a device.

    The first profile of a process decides for all later ones whether a GPU's kernels are recorded: after one with CPU
    activities alone, a trace of CUDA activities is empty (pytorch#186036, pytorch#186970).
    """
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]


@contextmanager
def autograd_in_custom_op() -> Iterator[None]:
    """Let autograd record inside of a custom op, below which it is off."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradCPU, keys.AutogradCUDA):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


@contextmanager
def host_syncs() -> Iterator[Counter[str]]:
    """Count the host's reads of tensor values inside the block: `.item()`, `bool(t)`, `int(t)`."""
    tally: Counter[str] = Counter()
    with torch.profiler.profile(activities=present_activities()) as profile:
        yield tally
    for event in profile.events():
        tally[event.name] += event.device_type == torch.autograd.DeviceType.CPU
    tally["syncs"] = tally["aten::_local_scalar_dense"]
    tally["ops"] = sum(n for name, n in tally.items() if name.startswith("aten::"))


@contextmanager
def synchronisations() -> Iterator[list[str]]:
    """Yield where the host waited for the CUDA device inside the block, by torch's warnings: a file:line per wait."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Enabling the check itself warns that it is a prototype and misses some synchronizations.
    found += [
        f"{w.filename.split('/')[-1]}:{w.lineno}"
        for w in caught
        if "called a synchronizing" in str(w.message)
    ]


def group_timeout(group: Any, device: str = "cpu") -> float:
    """Return the timeout in seconds of this process group's collectives, read from its backend."""
    return _backend(group, device).options._timeout.total_seconds()


def group_class(group: Any, device: str = "cpu") -> str:
    """Return the class of a process group's backend, such as ProcessGroupNCCL."""
    return type(_backend(group, device)).__name__


def _backend(group: Any, device: str) -> Any:
    backend = group._get_backend(torch.device(device))
    return getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it


def functional_argument(group: Any) -> Any:
    """Return what c10d's functional operators take for a process group: the group, or in older torch its name."""
    schema = torch.ops._c10d_functional.all_reduce.default._schema
    return group.group_name if str(schema.arguments[-1].type) == "str" else group


def functional_all_reduce(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum over a process group by c10d's functional operator; group: as functional_argument returns it."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor, "sum", group))


def flight_record(device: str = "cpu") -> bytes:
    """Return torch's flight recorder of this process's collectives, pickled as its analyzer reads it.

    device: "cuda" for NCCL's, which has a separate recorder.
    """
    recorders = torch._C._distributed_c10d
    return recorders._dump_nccl_trace() if device == "cuda" else recorders._dump_fr_trace()


def disabled_functions(model: nn.Module) -> set[str]:
    """Return the qualified names of the methods in `model` that carry torch.compiler.disable, on class or instance."""
    found = set()
    for module in model.modules():
        kind = type(module)
        for name in {*vars(kind), *vars(module)} if kind.__module__.startswith("model.") else ():
            function = vars(module).get(name, vars(kind).get(name))
            if callable(function) and getattr(function, "_torchdynamo_disable", False):
                found.add(f"{kind.__module__}.{kind.__qualname__}.{name}")
    return found
