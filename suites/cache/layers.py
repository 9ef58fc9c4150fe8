"""Runs of the cache programs in new processes, and which cache layers a second run found cold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suites.support.child import run_json
from suites.support.lanes import Lane

SECONDS = 300


def compiled(lane: Lane, directory: Path, *variants: str, **variables: str) -> dict[str, Any]:
    """Run suites.cache.programs in a new process, on a cache directory, with additional environment variables."""
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(directory),
        "TRITON_CACHE_DIR": str(directory / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        **variables,
    }
    return run_json("suites.cache.programs", lane.device, *variants, environment=environment, timeout=SECONDS)


def cold_layers(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the layers that `after` did not take from the cache that `before` has filled.

    A layer is warm only by a positive count of hits: with the caches off torch counts no misses either.
    """
    counts = after["counts"]
    cold = [
        layer
        for layer in ("aot", "fx")
        if not counts[f"{layer}_hit"] or counts[f"{layer}_miss"] or counts[f"{layer}_bypass"]
    ]
    if not before["code"] or new_code(before, after):
        cold.append("code")
    return [*cold, "autotune"] if after["autotunes"] else cold


def new_code(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return shared objects and cubins that were written since `before`, with a new name or not."""
    return [path for path, written in after["code"].items() if before["code"].get(path) != written]
