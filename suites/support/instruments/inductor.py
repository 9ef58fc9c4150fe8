"""AOTAutograd and Inductor: caches, autotuning, and counts of code generation."""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch._inductor.metrics
from torch._dynamo.utils import (
    counters,
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

from suites.support.instruments.trace import trace_artifacts

PLANTED = 1  # templates kept per search if its benchmark is replaced


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
    """Read the cache counters. An absent key is None, never 0: a renamed counter must not pass as 'no misses'."""
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
    """Use an empty directory for Inductor's caches inside the block."""
    with tempfile.TemporaryDirectory() as directory, fresh_cache(dir=directory):
        yield


def benchmark_one_choice() -> None:
    """Run once what autotuning does for each candidate, on an empty candidate."""
    benchmarker.benchmark_cpu(lambda: None, warmup=1, rep=1)


def autotune_count() -> int:
    """Return the number of choices that Inductor benchmarked since the counters were cleared."""
    return sum(
        n for key, n in counters["inductor"].items() if key.startswith("benchmarking.") and "benchmark" in key
    )


@contextmanager
def autotuning(time: Callable[..., float] | None = None) -> Iterator[list[dict[str, float]]]:
    """Yield candidate -> milliseconds of each of Inductor's searches inside the block, measured or from its cache.

    A template candidate's name ends with the end of the key under which torch stores its time.

    time: replaces torch's benchmark of template candidates. It must be picklable, since it runs in the autotuning
    subprocess if there is one. ATen candidates are still timed by torch in this process. With `time`, only PLANTED of a
    search's tens of templates are kept: each crash costs a new subprocess, which on a GPU takes many seconds.
    """
    found: list[dict[str, float]] = []

    def plant(choices: list[Any]) -> list[Any]:
        if time is None:
            return choices
        extern, templates = [], []
        for choice in choices:
            (extern if AlgorithmSelectorCache._is_extern(choice) else templates).append(choice)
        templates.sort(key=lambda choice: choice.hash_key())  # the same ones in every process
        for choice in templates[:PLANTED]:
            choice.bmreq.benchmark, choice.precompile = time, lambda: None
        return [*extern, *templates[:PLANTED]]

    def name(choice: Any) -> str:
        if AlgorithmSelectorCache._is_extern(choice):
            return str(choice.name)
        return f"{choice.name} {choice.hash_key()[-8:]}"

    def save(timings: Mapping[Any, float], *_: object) -> None:
        found.append({name(choice): milliseconds for choice, milliseconds in timings.items()})

    add_preprocessing_fn(plant)
    add_feedback_saver(save)
    try:
        yield found
    finally:
        clear_feedback_savers()
        clear_preprocessing_fns()


@dataclass
class GraphSkips:
    """How often Inductor left a compiled graph out of its CUDA graphs, and the reasons it gave."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)


@contextmanager
def cuda_graph_skips() -> Iterator[GraphSkips]:
    """Enable Inductor's CUDA graphs for what it compiles inside the block, and count the graphs it skips.

    It gives no reason for a graph of a device other than CUDA.
    """
    skips, before = GraphSkips(), counters["inductor"]["cudagraph_skips"]
    log = logging.getLogger("torch._inductor.cudagraph_utils.__cudagraphs")
    handler = logging.Handler()
    handler.emit = lambda record: skips.reasons.append(record.getMessage())  # type: ignore[method-assign]
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    log.propagate = False
    try:
        with torch._inductor.config.patch({"triton.cudagraphs": True}):
            yield skips
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
        skips.count = counters["inductor"]["cudagraph_skips"] - before


def wrong_decomposition(op: Any, body: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Make AOTAutograd trace `body` for the ATen overload `op` wherever Inductor's table is used inside the block."""
    return mock.patch.dict(decompositions, {op: body})


def wrong_lowering(op: Any, other: Any) -> AbstractContextManager[Any]:
    """Make Inductor generate code for `other` instead of the ATen overload `op` inside the block."""
    return mock.patch.dict(lowerings, {op: lowerings[other]})


def count_bytes_accessed() -> None:
    """Make Inductor count bytes from here on; it does so only while this log is enabled.

    A cache entry holds the bytes only if they were counted when it was written, so the count stays enabled for every
    compile of a process, not just around a measurement. The log lines themselves are discarded.
    """
    log = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers[:] = [logging.NullHandler()]


@dataclass
class InductorReport:
    """Exact proxies of the generated code. A cache hit replays all of them, so cold and warm runs agree."""

    kernels: int = 0
    bytes_accessed: int = 0
    nodes_before_fusion: int = 0
    code_hash: str = ""
    modules: int = 0


@contextmanager
def inductor_report() -> Iterator[InductorReport]:
    """Yield the kernels, bytes and code hash of what Inductor generates inside the block."""
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
    """Remove what differs between machines and runs from generated code: comments, paths, hashes of paths."""
    code = re.sub(r"#[^\n]*", "", code)
    code = re.sub(r"/[\w./-]+", "/PATH", code)
    return re.sub(r"\n\s*\n+", "\n", code)
