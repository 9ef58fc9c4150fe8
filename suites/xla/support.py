"""Instruments for torch_xla: every private name of it that this project reads, and programs to apply them to.

No function here judges a result. Each instrument is checked by a canary (suites/xla/canaries.py) before a row may
rely on it.

* compiles, executions and transfers by torch_xla's own metrics, as differences around a block
* operators that fall back to the CPU by its counters: `aten::` there, while `xla::` are those that run on the device
* the program itself by its HLO, its hash and its operators' count, none of which executes anything
* host reads inside a trace by forbidding execution: the first one raises, with its own Python frame

B batch, T tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
from torch import Tensor

from launch.optimizers import AdamW, TensorOptimizer
from model import Hybrid, HybridConfig, preset
from model.config import DSAConfig
from suites.support.hybrids import build, token_batch

METRICS = {
    "compiles": "CompileTime",
    "executions": "ExecuteTime",
    "downloads": "TransferFromDeviceTime",
    "uploads": "TransferToDeviceTime",
}
TOKENS = 32
# One tile of each preset, with each of its block kinds, for execution. Full depths are traced, not run.
TILES: dict[str, dict[str, Any]] = {
    "nam12": {"depth": 12},
    "nam52": {"depth": 4},
    "nam56r": {"depth": 12, "dsa": DSAConfig((1, 2), heads=4, width=16, top_k=16)},
}
# Each use gives a new program: XLA caches compiled programs, and no call clears them.
_fresh_size = count(33)


@dataclass
class Counts:
    """The events inside a block; `fallbacks` by operator."""

    compiles: int = 0
    executions: int = 0
    downloads: int = 0
    uploads: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {getattr(self, name)}" for name in METRICS)
        return f"{counts}, fallbacks {dict(self.fallbacks)}"


def _read() -> dict[str, int]:
    """Read every metric and counter of interest since process start; one that never changed is absent."""
    xm.wait_device_ops()
    found = {name: metrics.metric_data(metric) for name, metric in METRICS.items()}
    values = {name: data[0] for name, data in found.items() if data is not None}
    return values | {name: metrics.counter_value(name) for name in metrics.counter_names() if "::" in name}


@contextmanager
def counted() -> Iterator[Counts]:
    """Count events inside the block; filled in at its end, after the device has finished."""
    counts, before = Counts(), _read()
    yield counts
    moved = Counter(_read())
    moved.subtract(before)
    for name in METRICS:
        setattr(counts, name, moved[name])
    counts.fallbacks = Counter({n: k for n, k in moved.items() if n.startswith("aten::") and k})


def cache_counters() -> dict[str, int | None]:
    """Return the persistent cache's counters; None for one that torch_xla has never written."""
    names = ("PersistentCacheHit", "PersistentCacheMiss", "PersistentCacheDeserializeFailure")
    return {name: metrics.counter_value(name) for name in names}


def replicated_executions() -> int:
    """Return the executions under SPMD since process start, which torch_xla counts separately."""
    xm.wait_device_ops()
    data = metrics.metric_data("ExecuteReplicatedTime")
    return data[0] if data else 0


def hlo(tensors: Iterable[Tensor]) -> str:
    """Return the program that would compute the tensors, as text; executes nothing."""
    return torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))


def instructions(tensors: Iterable[Tensor]) -> int:
    """Count the instructions of that program, in all its computations."""
    return len(re.findall(r"^\s+(?:ROOT )?%\S+ = ", hlo(tensors), re.MULTILINE))


def opcodes(tensors: Iterable[Tensor]) -> Counter[str]:
    """Count each HLO operation of that program."""
    return Counter(re.findall(r"^\s+(?:ROOT )?%\S+ = \S+ ([\w-]+)\(", hlo(tensors), re.MULTILINE))


def graph_hash(tensors: Iterable[Tensor]) -> str:
    """Return the key of torch_xla's compiled programs; executes nothing."""
    return torch_xla._XLAC._get_graph_hash(list(tensors)).hex()


@contextmanager
def no_execution() -> Iterator[None]:
    """Inside the block, anything that would execute a program raises RuntimeError: a host read, or a sync."""
    allowed = torch_xla._XLAC._get_allow_execution()
    torch_xla._XLAC._set_allow_execution(False)
    try:
        yield
    finally:
        torch_xla._XLAC._set_allow_execution(allowed)


def refused_by_tracer(function: Callable[[], object]) -> str:
    """Return the line of our own code at which a trace of `function` would have executed; empty if there is none."""
    try:
        with no_execution():
            function()
    except RuntimeError as error:
        if "Unexpected execution" not in str(error):
            raise
        frames = [f for f in _frames(error) if "/model/" in f or "/suites/xla/test" in f or "/kernels/" in f]
        return frames[-1] if frames else str(error).splitlines()[0]
    return ""


def _frames(error: BaseException) -> list[str]:
    frames, at = [], error.__traceback__
    while at is not None:
        frames.append(f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}")
        at = at.tb_next
    return frames


def fresh_size() -> int:
    """Return a size that no other program of this process has."""
    return next(_fresh_size)


def tile(name: str, **changes: Any) -> HybridConfig:
    """Return one tile of the narrow preset, with every kind of block that the preset has."""
    return preset(name, "narrow", **(TILES[name] | changes))


@dataclass
class OnDevice:
    """A seeded hybrid on the XLA device, its optimizer and its batches of ids (B,T)."""

    config: HybridConfig
    model: Hybrid
    optimizer: TensorOptimizer

    def batch(self, batch: int = 2, tokens: int = TOKENS, seed: int = 1) -> Tensor:
        return token_batch(self.config, batch, tokens, seed).to(torch_xla.device())

    def state(self) -> list[Tensor]:
        """Return every tensor that a step writes."""
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        return [*self.model.parameters(), *self.model.buffers(), *states]


def on_device(config: HybridConfig, optimizer: type[TensorOptimizer] = AdamW) -> OnDevice:
    """Build the model with its seeded weights, with all transfers done."""
    model = build(config).to(torch_xla.device())
    made = OnDevice(config, model, optimizer(model.parameters(), lr=1e-3, capturable=True))
    torch_xla.sync()
    xm.wait_device_ops()
    return made


def each_step(
    step: Callable[[Sequence[Tensor]], Tensor], batches: Sequence[Sequence[Tensor]]
) -> list[Counts]:
    """Return the counts of each step, one per member of `batches`."""
    torch_xla.sync()
    found = []
    for micro in batches:
        with counted() as counts:
            step(micro)
        found.append(counts)
    return found


def eager_losses(config: HybridConfig, steps: int, batch: int = 2) -> list[float]:
    """Return the losses of the same AdamW steps on the CPU in eager torch."""
    model = build(config)
    update, losses = AdamW(model.parameters(), lr=1e-3), []
    for step in range(steps):
        loss = model(token_batch(config, batch, TOKENS, step))
        loss.backward()
        update.step()
        update.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses
