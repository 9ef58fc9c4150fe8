"""Inductor's autotuning and CUDA graphs, and faults planted in its tables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
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

PLANTED = 1  # templates kept per search if its benchmark is replaced


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
