"""Dynamo: configuration, graphs, calls, breaks, recompiles, guards, and eager fallbacks; torch's logs in process."""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import (
    clear_compilation_metrics,
    counters,
    get_compilation_metrics,
    set_compilation_metrics_limit,
)

# The metrics deque keeps 64 entries by default: a recompile storm of 80 would read as 64.
METRICS_KEPT = 8192
# The folders of this package and of the repository: left out of texts that are compared between machines.
HERE = (f"{Path(__file__).resolve().parents[3]}/", f"{Path.cwd()}/")


@contextmanager
def dynamo_config(values: Mapping[str, Any]) -> Iterator[None]:
    """Set Dynamo's configuration to `values` inside the block; restore every changed option at its end."""
    with torch._dynamo.config.patch(dict(values)):
        yield


def read_dynamo_config(names: Iterable[str]) -> dict[str, Any]:
    """Return the current values of the named Dynamo options."""
    return {name: getattr(torch._dynamo.config, name) for name in names}


def require_dynamic_batch(tensor: torch.Tensor) -> None:
    """Mark the first axis as dynamic: tracing a program that specializes on its present size raises."""
    torch._dynamo.mark_dynamic(tensor, 0)


def reset_dynamo() -> None:
    """Drop every compiled graph of this process and clear the counters."""
    torch._dynamo.reset()
    counters.clear()


@dataclass(frozen=True)
class Break:
    """One graph break: Dynamo's registry id, the user's call site, its source line and the first line of the reason."""

    code: str
    site: str
    line: str
    reason: str

    def __str__(self) -> str:
        return f"{self.code} at {self.site} `{self.line}`: {self.reason}"


@dataclass(frozen=True)
class Recompile:
    """One recompile: the recompiled function and the guard that failed."""

    function: str
    guard: str

    def __str__(self) -> str:
        return f"{self.function}: {self.guard}"


@dataclass(frozen=True)
class Graph:
    """One captured graph: the operator names in order, and the user call sites that read a value on the host."""

    operators: tuple[str, ...]
    host_reads: tuple[str, ...] = ()

    @property
    def ops(self) -> int:
        return len(self.operators)


@dataclass
class DynamoReport:
    """Dynamo events while a watch was open."""

    graphs: list[Graph] = field(default_factory=list)
    calls: int = 0
    breaks: list[Break] = field(default_factory=list)
    counted_breaks: int = 0
    recompiles: list[Recompile] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    guards: int = 0
    frames: int = 0
    frames_ok: int = 0

    @property
    def unique_graphs(self) -> int:
        return len(self.graphs)

    @property
    def witness(self) -> int:
        """The calls of compiled graphs."""
        return self.calls

    @property
    def instruments(self) -> tuple[str, ...]:
        return ("graphs", "graph_breaks", "recompiles")

    def evidence(self, most: int = 3) -> tuple[str, ...]:
        """Return the breaks, recompiles and failures as lines, at most `most` distinct ones of each kind."""
        lines: list[str] = []
        for kind, found in (
            ("break", self.breaks),
            ("recompile", self.recompiles),
            ("failure", self.failures),
        ):
            tally = Counter(str(f) for f in found)
            lines += [f"{kind} x{n}: {_as_anywhere(text)}" for text, n in tally.most_common(most)]
        return tuple(lines)


def _parse_break(text: str) -> Break:
    code = re.search(r"/gb/(gb\d+)", text, re.IGNORECASE)
    head = text.split("Traceback (most recent call last)")[0]
    frames = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s+(.*)', head)
    if not frames:
        frames = [(path, line, "") for path, line in re.findall(r'File "([^"]+)", line (\d+)', head)]
    ours = [f for f in frames if "/torch/" not in f[0]] or frames or [("?", "0", "")]
    path, line, source = ours[-1]
    reason = re.search(r"(?:Reason: .*\n\n|^)([A-Z][^\n]*)\n\s+Explanation: ([^\n]*)", text, re.MULTILINE)
    words = f"{reason[1]}: {reason[2]}" if reason else head.strip().splitlines()[0]
    return Break(
        code[1].upper() if code else "GB?", f"{_short(path)}:{line}", source.strip(), _as_anywhere(words)
    )


def _as_anywhere(text: str) -> str:
    """Remove what differs between processes or checkouts."""
    for folder in HERE:
        text = text.replace(folder, "")
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _short(path: str) -> str:
    """Shorten a path to its last two parts, which are the same on every machine."""
    return "/".join(path.split("/")[-2:])


def _parse_recompiles(text: str) -> str:
    """Parse the failed guards of one recompile. Dynamo writes a string or a JSON list, newest cache entry first."""
    try:
        reasons = json.loads(text)
    except json.JSONDecodeError:
        reasons = [text]
    if isinstance(reasons, str):
        reasons = [reasons]
    return re.sub(r"^\d+/\d+: ", "", str(reasons[0]))


class DynamoWatch:
    """Context manager that reports what Dynamo compiled, broke and recompiled between enter and exit.

    `backend(inner)` returns a backend for torch.compile that counts each graph and each call of one, and passes the
    graph on to the named torch backend.
    """

    def __init__(self) -> None:
        self.report = DynamoReport()

    def backend(self, inner: str = "inductor") -> Callable[..., Any]:
        """Return a torch.compile backend that counts, then compiles with the registered backend `inner`."""
        compile_graph = torch._dynamo.lookup_backend(inner)

        def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            self.report.graphs.append(Graph(operator_names(graph), host_reads(graph)))
            compiled = compile_graph(graph, inputs)

            def call(*args: Any) -> Any:
                self.report.calls += 1
                return compiled(*args)

            return call

        return counting

    def __enter__(self) -> DynamoWatch:
        reset_dynamo()
        count_bytes_accessed()
        set_compilation_metrics_limit(METRICS_KEPT)
        clear_compilation_metrics()
        self._trace = trace_artifacts("dynamo_graph_break_reason", "recompile_reasons")
        self._found = self._trace.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.refresh()
        self._trace.__exit__(None, None, None)

    def refresh(self) -> DynamoReport:
        """Update the report. May be called while the watch is open, for before/after differences."""
        metrics = get_compilation_metrics()
        functions = [
            f"{m.co_name} ({_short(m.co_filename or '?')}:{m.co_firstlineno})"
            for m in metrics
            if m.recompile_reason
        ]
        guards = [_parse_recompiles(text) for name, text in self._found if name == "recompile_reasons"]
        functions += ["?"] * (len(guards) - len(functions))
        r = self.report
        r.recompiles = [Recompile(f, g) for f, g in zip(functions, guards)]
        r.breaks = [_parse_break(text) for name, text in self._found if name == "dynamo_graph_break_reason"]
        r.counted_breaks = sum(counters["graph_break"].values())
        r.failures = [f"{m.fail_type}: {m.fail_reason}" for m in metrics if m.fail_type]
        r.guards = sum(m.guard_count or 0 for m in metrics)
        r.frames, r.frames_ok = counters["frames"]["total"], counters["frames"]["ok"]
        return r


def operator_names(graph: torch.fx.GraphModule) -> tuple[str, ...]:
    """Return the names of the operators that a graph calls, in order."""
    return tuple(
        str(n.target) for n in graph.graph.nodes if n.op in ("call_function", "call_method", "call_module")
    )


def host_reads(graph: torch.fx.GraphModule) -> tuple[str, ...]:
    """Return user call sites of the captured `.item()` calls: no break in the graph, but each one blocks the host."""
    reads = [n for n in graph.graph.nodes if str(n.target) in ("item", "aten._local_scalar_dense.default")]
    return tuple(_call_site(n.stack_trace or "") for n in reads)


def _call_site(stack: str) -> str:
    frames = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s+(.*)', stack)
    path, line, source = frames[-1] if frames else ("?", "0", "")
    return f"{_short(path)}:{line} `{source.strip()}`"


@contextmanager
def eager_islands(blocks: Collection[nn.Module]) -> Iterator[Counter[str]]:
    """Count, by class name, the block executions inside the context that run as plain Python.

    A compiled block runs code that Dynamo generated, so the interpreter never enters the code object of its `forward`.
    Entering it means a declared island, an undeclared one, or a silent fallback to eager. The interpreter's profile
    hook detects that without changing the model, its graphs or its guards.
    """
    tally: Counter[str] = Counter()
    counted = {id(block): type(block).__name__ for block in blocks}
    codes = {inspect.unwrap(type(block).forward).__code__ for block in blocks}

    def entered(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code not in codes:
            return
        called = id(frame.f_locals[frame.f_code.co_varnames[0]])
        if called in counted:  # not a block within one that wraps it
            tally[counted[called]] += 1

    previous = sys.getprofile()
    sys.setprofile(entered)
    try:
        yield tally
    finally:
        sys.setprofile(previous)


class _TraceHandler(logging.Handler):
    """Collects (artifact name, payload text) from torch's structured trace log, in process."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(logging.DEBUG)
        self.names = names
        self.found: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", None) or {}
        name = metadata.get("artifact", {}).get("name") if "artifact" in metadata else None
        name = name or next((w for w in self.names if w in metadata), None)
        if name in self.names:
            payload = getattr(record, "payload", "")
            self.found.append((name, str(payload() if callable(payload) else payload)))


@contextmanager
def trace_artifacts(*names: str) -> Iterator[list[tuple[str, str]]]:
    """Yield the named artifacts of torch's structured trace log that appear inside the block, in order."""
    handler = _TraceHandler(set(names))
    log = logging.getLogger("torch.__trace")
    level, propagate = log.level, log.propagate
    # pytest 9.2 listens to loggers that do not propagate: thousands of lines under every red row.
    shown = [other for other in log.handlers if type(other).__module__.startswith("_pytest.")]
    for other in shown:
        log.removeHandler(other)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield handler.found
    finally:
        log.removeHandler(handler)
        for other in shown:
            log.addHandler(other)
        log.setLevel(level)
        log.propagate = propagate


def count_bytes_accessed() -> None:
    """Make Inductor count bytes from here on; it does so only while this log is enabled.

    A cache entry holds the bytes only if they were counted when it was written, so the count stays enabled for every
    compile of a process, not just around a measurement. The log lines themselves are discarded.
    """
    log = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers[:] = [logging.NullHandler()]
