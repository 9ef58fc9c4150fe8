"""CPU seconds of compilation by phase, from the spans of torch's own `dynamo_timed`.

Spans are named and nested in private code, so an absent one reads None, and the canary checks all of them. Their clock
is replaced by the CPU time of the process and its ended children: wall time would include other processes' work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch._dynamo.utils as spans_module

from bumpgate.plugin.timing import cpu_seconds

# Our phase -> torch's span names. The span of a frame includes the call of its compiler; the one of Inductor's work on
# a graph includes creating its module, which includes code generation. The backward graph is compiled at its first
# call.
SPANS = {
    "frame": "_compile.compile_inner",
    "compiler": "OutputGraph.call_user_compiler",
    "backward": "backward._backward_impl",
    "inductor": "compile_fx_inner",
    "module": "GraphLowering.compile_to_module",
    "codegen": "GraphLowering.codegen",
}


@dataclass
class Phases:
    """CPU seconds by phase, each second in one phase only; None if torch reported no such span, or nothing in it.

    dynamo: tracing, guards, bytecode. aot: joint graph, decompositions, partition. inductor: passes, lowering,
    scheduling, code generation. backend: g++, Triton and ptxas, and loading their output.
    """

    dynamo: float | None = None
    aot: float | None = None
    inductor: float | None = None
    backend: float | None = None


class _CpuClock:
    """The time module, with CPU time for time_ns."""

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)

    def time_ns(self) -> int:
        return int(cpu_seconds() * 1e9)


@contextmanager
def compile_phases() -> Iterator[Phases]:
    """Yield the phases of everything compiled inside the block, filled in at its end.

    Compile in this process (TORCHINDUCTOR_COMPILE_THREADS=1): the CPU time of workers counts only when they have ended.
    """
    measured = spans_module.compilation_time_metrics
    before = {name: len(measured.get(name, ())) for name in SPANS.values()}
    phases = Phases()
    with mock.patch.object(spans_module, "time", _CpuClock()):
        yield phases
    spans = {ours: sum(measured.get(name, ())[before[name] :]) for ours, name in SPANS.items()}
    backend = spans["module"] - spans["codegen"]
    found = {
        "dynamo": ("frame", "compiler"),
        "aot": ("compiler", "backward", "inductor"),
        "inductor": ("inductor", "module", "codegen"),
        "backend": ("module", "codegen"),
    }
    seconds = {
        "dynamo": spans["frame"] - spans["compiler"],
        "aot": spans["compiler"] + spans["backward"] - spans["inductor"],
        "inductor": spans["inductor"] - backend,
        "backend": backend,
    }
    for phase, needed in found.items():
        read = all(spans[name] > 0 for name in needed) and seconds[phase] > 0
        setattr(phases, phase, seconds[phase] if read else None)
