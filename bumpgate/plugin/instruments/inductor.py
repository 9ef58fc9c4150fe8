"""Inductor's caches, and what it generates."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch._dynamo.utils import counters
from torch._inductor import config, metrics
from torch._inductor.utils import fresh_cache

from bumpgate.plugin.instruments.dynamo import count_bytes_accessed, reset_dynamo, trace_artifacts
from bumpgate.plugin.timing import cpu_seconds


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


@dataclass
class InductorReport:
    """Exact proxies of the generated code. A cache hit replays all of them, so cold and warm runs agree.

    bytes_accessed: read and written by the kernels. modules: generated files. cpu_seconds, caches: of an
    `inductor_watch`, what the process and its ended children used in the block, and cache events by layer.
    """

    kernels: int = 0
    bytes_accessed: int = 0
    nodes_before_fusion: int = 0
    code_hash: str = ""
    modules: int = 0
    cpu_seconds: float = 0.0
    caches: CacheCounts | None = None

    @property
    def witness(self) -> int:
        """The generated files."""
        return self.modules

    @property
    def instruments(self) -> tuple[str, ...]:
        return ("inductor",)

    def evidence(self) -> tuple[str, ...]:
        return (f"{self.kernels} kernels in {self.modules} generated files",)


@contextmanager
def inductor_report() -> Iterator[InductorReport]:
    """Yield the kernels, bytes and code hash of what Inductor generates inside the block."""
    report = InductorReport()
    metrics.reset()
    with trace_artifacts("inductor_output_code") as found:
        yield report
    report.kernels = metrics.generated_kernel_count
    report.bytes_accessed = metrics.num_bytes_accessed
    report.nodes_before_fusion = metrics.ir_nodes_pre_fusion
    codes = sorted(_normalised(text) for _, text in found)
    report.modules = len(codes)
    report.code_hash = hashlib.sha256("\n".join(codes).encode()).hexdigest()[:16]


@contextmanager
def inductor_watch(*, cold: bool = False) -> Iterator[InductorReport]:
    """As inductor_report, from an empty Dynamo on, so that everything inside the block is compiled, and with caches.

    cold: also from empty caches on disk, and in this process, so that its CPU seconds are those of a first compile.
    """
    reset_dynamo()
    count_bytes_accessed()
    with ExitStack() as stack:
        if cold:
            stack.enter_context(empty_cache())
            stack.enter_context(config.patch(compile_threads=1))
        began = cpu_seconds()
        with inductor_report() as report:
            yield report
        report.cpu_seconds = cpu_seconds() - began
    report.caches = cache_counts()


def _normalised(code: str) -> str:
    """Remove what differs between machines and runs from generated code: comments, paths, hashes of paths."""
    code = re.sub(r"#[^\n]*", "", code)
    code = re.sub(r"/[\w./-]+", "/PATH", code)
    return re.sub(r"\n\s*\n+", "\n", code)
