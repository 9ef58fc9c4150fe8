"""Measuring devices for Dynamo, AOTAutograd and Inductor: every private torch name that this project reads.

Nothing here judges. A device that torch moved or renamed must not read 0: each is proved by a canary
(suites/support/canaries.py), a tiny program with a known count, before any row may rely on it.

What is counted, and why this way:
* graphs and compiled calls by our own backend wrapper, which is public and cannot be renamed away;
* graph breaks and recompiles from the structured trace log, because only it gives user call sites and guard
  reasons, and because `counters["graph_break"]` reads 0 when a break inside a loop makes Dynamo drop the frame;
* eager islands by the interpreter's profile hook, so that a block which silently fell back to eager is seen too.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.metrics
import torch._logging
from torch import _grouped_mm as grouped_mm  # noqa: F401 (for suites.xla.programs; private in torch 2.9)
from torch import nn
from torch._dynamo.utils import (
    clear_compilation_metrics,
    counters,
    get_compilation_metrics,
    set_compilation_metrics_limit,
)
from torch._inductor.decomposition import decompositions
from torch._inductor.lowering import lowerings
from torch._inductor.runtime.benchmarking import benchmarker
from torch._inductor.select_algorithm import (
    AlgorithmSelectorCache,
    add_feedback_saver,
    add_preprocessing_fn,
    clear_feedback_savers,
    clear_preprocessing_fns,
)
from torch._inductor.utils import fresh_cache
from torch._library.custom_ops import OPDEFS
from torch.testing._internal.optests import OpCheckError  # noqa: F401 (what torch.library.opcheck raises)
from torch.utils._python_dispatch import TorchDispatchMode as EveryOperator  # noqa: F401 (for suites.support.operands)

# The metrics deque keeps 64 entries by default: a recompile storm of 80 would read as 64.
METRICS_KEPT = 8192


@contextmanager
def dynamo_config(values: Mapping[str, Any]) -> Iterator[None]:
    """Dynamo's configuration with `values` inside the block; every line set in it is put back at its end."""
    with torch._dynamo.config.patch(dict(values)):
        yield


def read_dynamo_config(names: Iterable[str]) -> dict[str, Any]:
    """The present values of the named Dynamo configuration lines."""
    return {name: getattr(torch._dynamo.config, name) for name in names}


def require_dynamic_batch(tensor: torch.Tensor) -> None:
    """Declares the first axis dynamic: tracing a program that takes its present size for granted raises."""
    torch._dynamo.mark_dynamic(tensor, 0)


def forget_graphs() -> None:
    """Drops every compiled graph of this process and clears the counters."""
    torch._dynamo.reset()
    counters.clear()


@dataclass(frozen=True)
class Break:
    """One graph break: Dynamo's registry id, the user's call site, the source line there, the first reason line."""

    code: str
    site: str
    line: str
    reason: str

    def __str__(self) -> str:
        return f"{self.code} at {self.site} `{self.line}`: {self.reason}"


@dataclass(frozen=True)
class Recompile:
    """One recompile: the function that was compiled anew and the guard that failed."""

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
    """What Dynamo did while a watch was open."""

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

    def evidence(self, most: int = 3) -> tuple[str, ...]:
        """The breaks, recompiles and failures as lines, each kind cut to `most` distinct ones."""
        lines: list[str] = []
        for kind, found in (
            ("break", self.breaks),
            ("recompile", self.recompiles),
            ("failure", self.failures),
        ):
            tally = Counter(str(f) for f in found)
            lines += [f"{kind} x{n}: {text}" for text, n in tally.most_common(most)]
        return tuple(lines)


class _TraceHandler(logging.Handler):
    """Collects (artifact name, payload text) from torch's structured trace log, in process."""

    def __init__(self, wanted: set[str]) -> None:
        super().__init__(logging.DEBUG)
        self.wanted = wanted
        self.found: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", None) or {}
        name = metadata.get("artifact", {}).get("name") if "artifact" in metadata else None
        name = name or next((w for w in self.wanted if w in metadata), None)
        if name in self.wanted:
            payload = getattr(record, "payload", "")
            self.found.append((name, str(payload() if callable(payload) else payload)))


@contextmanager
def trace_artifacts(*names: str) -> Iterator[list[tuple[str, str]]]:
    """The named artifacts of torch's structured trace log that appear inside the block, in order."""
    handler = _TraceHandler(set(names))
    log = logging.getLogger("torch.__trace")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield handler.found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


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
    words = re.sub(r" at 0x[0-9a-f]+", "", words)
    return Break(code[1].upper() if code else "GB?", f"{_short(path)}:{line}", source.strip(), words)


def _short(path: str) -> str:
    """A path from its last two parts, the same on every machine."""
    return "/".join(path.split("/")[-2:])


def _parse_recompiles(text: str) -> str:
    """The failed guards of one recompile; Dynamo gives a string or a JSON list, newest cache entry first."""
    try:
        reasons = json.loads(text)
    except json.JSONDecodeError:
        reasons = [text]
    if isinstance(reasons, str):
        reasons = [reasons]
    return re.sub(r"^\d+/\d+: ", "", str(reasons[0]))


class DynamoWatch:
    """Context manager that reports what Dynamo compiled, broke and recompiled between enter and exit.

    `backend(inner)` is the backend to hand to torch.compile: it counts each graph and each call of one, and
    hands the graph on to the named torch backend.
    """

    def __init__(self) -> None:
        self.report = DynamoReport()

    def backend(self, inner: str = "inductor") -> Callable[..., Any]:
        """A torch.compile backend that counts, then compiles with the registered backend `inner`."""
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
        forget_graphs()
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
        """Brings the report up to date; may be called while the watch is open, for before/after differences."""
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
    """The names of the operators that a graph calls, in order."""
    return tuple(
        str(n.target) for n in graph.graph.nodes if n.op in ("call_function", "call_method", "call_module")
    )


def host_reads(graph: torch.fx.GraphModule) -> tuple[str, ...]:
    """User call sites of the captured `.item()` calls: in the graph they are no break, yet they stop the host."""
    reads = [n for n in graph.graph.nodes if str(n.target) in ("item", "aten._local_scalar_dense.default")]
    return tuple(_call_site(n.stack_trace or "") for n in reads)


def _call_site(stack: str) -> str:
    frames = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s+(.*)', stack)
    path, line, source = frames[-1] if frames else ("?", "0", "")
    return f"{_short(path)}:{line} `{source.strip()}`"


@contextmanager
def eager_islands(blocks: Iterable[nn.Module]) -> Iterator[Counter[str]]:
    """Counts, by class name, the block executions inside the context that run as plain Python.

    A compiled block runs code that Dynamo generated, so the interpreter never enters the code object of its
    `forward`: entering it means a declared island, an undeclared one, or a silent fallback to eager. The
    interpreter's own profile hook sees that and leaves the model, its graphs and its guards as they are.
    """
    tally: Counter[str] = Counter()
    codes = {inspect.unwrap(type(block).forward).__code__: type(block).__name__ for block in blocks}

    def entered(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            tally[codes[frame.f_code]] += 1

    previous = sys.getprofile()
    sys.setprofile(entered)
    try:
        yield tally
    finally:
        sys.setprofile(previous)


def disabled_functions(model: nn.Module) -> set[str]:
    """Qualified names of the methods in `model` that carry torch.compiler.disable, on class or instance."""
    found = set()
    for module in model.modules():
        kind = type(module)
        for name in {*vars(kind), *vars(module)} if kind.__module__.startswith("model.") else ():
            function = vars(module).get(name, vars(kind).get(name))
            if callable(function) and getattr(function, "_torchdynamo_disable", False):
                found.add(f"{kind.__module__}.{kind.__qualname__}.{name}")
    return found


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


@dataclass(frozen=True)
class CacheCounts:
    """AOTAutograd and FX-graph cache events since the counters were cleared. None: torch never wrote the key."""

    aot_hit: int | None
    aot_miss: int | None
    aot_bypass: int | None
    fx_hit: int | None
    fx_miss: int | None
    fx_bypass: int | None


def cache_counts() -> CacheCounts:
    """Reads the cache counters. An absent key is None, never 0: a renamed counter may not pass as 'no misses'."""
    aot, fx = counters["aot_autograd"], counters["inductor"]
    return CacheCounts(
        aot.get("autograd_cache_hit"),
        aot.get("autograd_cache_miss"),
        aot.get("autograd_cache_bypass"),
        fx.get("fxgraph_cache_hit"),
        fx.get("fxgraph_cache_miss"),
        fx.get("fxgraph_cache_bypass"),
    )


@contextmanager
def empty_cache() -> Iterator[None]:
    """Inductor's caches on an empty directory of their own inside the block."""
    with tempfile.TemporaryDirectory() as directory, fresh_cache(dir=directory):
        yield


def benchmark_one_choice() -> None:
    """What autotuning does for each candidate, once, on a candidate that does nothing."""
    benchmarker.benchmark_cpu(lambda: None, warmup=1, rep=1)


def autotune_count() -> int:
    """Choices that Inductor benchmarked since the counters were cleared."""
    return sum(
        n for key, n in counters["inductor"].items() if key.startswith("benchmarking.") and "benchmark" in key
    )


@contextmanager
def autotuning(time: Callable[..., float] | None = None) -> Iterator[list[dict[str, float]]]:
    """Candidate -> milliseconds of each search that Inductor makes inside the block, measured or from its cache.

    time: what times a template's candidate in place of torch's benchmark; picklable, since it runs in the autotuning
    subprocess where there is one. ATen's own candidates are timed as ever, in this process.
    """
    found: list[dict[str, float]] = []

    def plant(choices: list[Any]) -> list[Any]:
        for choice in choices if time else ():
            if not AlgorithmSelectorCache._is_extern(choice):
                choice.bmreq.benchmark, choice.precompile = time, lambda: None
        return choices

    def save(timings: Mapping[Any, float], *_: object) -> None:
        found.append({choice.name: milliseconds for choice, milliseconds in timings.items()})

    add_preprocessing_fn(plant)
    add_feedback_saver(save)
    try:
        yield found
    finally:
        clear_feedback_savers()
        clear_preprocessing_fns()


def wrong_decomposition(op: Any, body: Callable[..., Any]) -> AbstractContextManager[Any]:
    """AOTAutograd traces `body` for the ATen overload `op` wherever Inductor's table is used inside the block."""
    return mock.patch.dict(decompositions, {op: body})


def wrong_lowering(op: Any, other: Any) -> AbstractContextManager[Any]:
    """Inductor generates code for `other` where a graph holds the ATen overload `op` inside the block."""
    return mock.patch.dict(lowerings, {op: lowerings[other]})


def count_bytes_accessed() -> None:
    """Makes Inductor count bytes from here on: it only does while this log is enabled.

    A cache entry holds the bytes only if they were counted when it was written, so the count stays on for
    every compile of a process, not just around a measurement. The log's own lines go nowhere.
    """
    log = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers[:] = [logging.NullHandler()]


@dataclass
class InductorReport:
    """Exact proxies of the generated code; all of them replayed by a cache hit, so cold and warm runs agree."""

    kernels: int = 0
    bytes_accessed: int = 0
    nodes_before_fusion: int = 0
    code_hash: str = ""
    modules: int = 0


@contextmanager
def inductor_report() -> Iterator[InductorReport]:
    """Kernels, bytes and code hash of what Inductor generates inside the block."""
    report = InductorReport()
    metrics = torch._inductor.metrics
    metrics.reset()
    with trace_artifacts("inductor_output_code") as found:
        yield report
    report.kernels = metrics.generated_kernel_count
    report.bytes_accessed = metrics.num_bytes_accessed
    report.nodes_before_fusion = metrics.ir_nodes_pre_fusion
    codes = sorted(_normalised(text) for _, text in found)
    report.modules = len(codes)
    report.code_hash = hashlib.sha256("\n".join(codes).encode()).hexdigest()[:16]


def _normalised(code: str) -> str:
    """Generated code without what differs between machines and runs: comments, paths, hashes of paths."""
    code = re.sub(r"#[^\n]*", "", code)
    code = re.sub(r"/[\w./-]+", "/PATH", code)
    return re.sub(r"\n\s*\n+", "\n", code)


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
