"""Step 0 of the full-size models in fresh processes, on empty caches and on full ones, told apart layer by layer.

Rules C13 and C18. FX graphs and AOTAutograd by their counters, Triton by the code that is written, autotuning by its
benchmarks; Dynamo traces anew in each process, which no cache saves. What a lost layer looks like stands in
suites/cache/test_layers.py, on a program that is cheap enough to break. Others run beside these processes. What they
compile is kept for the timed steps of this run, which find it on disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from suites.cache.test_layers import cold_layers, new_code
from suites.kernels.first_call import keep
from suites.support.child import run_json
from suites.support.lanes import Lane, lanes
from suites.throughput.full_size import BATCH, POLICIES

NAME, POLICY = "nam52", "regional"
CASE = f"cache/{NAME}-full-{POLICY}-restart"
SMALL = "nam12"
LARGE = [
    (name, policy)
    for name, policies in POLICIES.items()
    for policy in policies
    if name != SMALL and policy != "eager" and (name, policy) != (NAME, POLICY)
]
TOKENS = 4096
# Seconds of a process: the import, four billion random weights, the first step.
LONGEST = 420
LARGEST_RATIO = 0.1
TOLERANCE = 0.5

Process = dict[str, Any]


def started(directory: Path, name: str, policy: str) -> Process:
    """The first step of a model in a process of its own, on a cache directory."""
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(directory),
        "TRITON_CACHE_DIR": str(directory / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    return run_json("suites.throughput.restart", name, policy, environment=environment, timeout=LONGEST)


def kept(directory: Path) -> None:
    """The caches of a process become part of the run's."""
    keep(directory / "triton", Path(os.environ["TRITON_CACHE_DIR"]))
    for layer in directory.iterdir():
        if layer.name != "triton":
            keep(layer, Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / layer.name)


@lanes("h200")
def test_a_warm_restart(lane: Lane, tmp_path: Path, row, canaries, most_gpu_memory) -> None:
    canaries("cache", "autotune", "graphs")
    cold, warm = (started(tmp_path, NAME, POLICY) for _ in range(2))
    _report_seconds(row, cold, warm)
    _report_layers(row, cold, warm)
    _report_cold(row, NAME, POLICY, cold)
    kept(tmp_path)


@lanes("h200")
@pytest.mark.parametrize(("name", "policy"), LARGE)
def test_a_cold_first_step(lane: Lane, name: str, policy: str, tmp_path: Path, row, most_gpu_memory) -> None:
    _report_cold(row, name, policy, started(tmp_path, name, policy))
    kept(tmp_path)


@lanes("h200")
@pytest.mark.parametrize("policy", POLICIES[SMALL])
def test_a_cold_first_step_of_twelve_layers(lane: Lane, policy: str, tmp_path: Path, row) -> None:
    _report_cold(row, SMALL, policy, started(tmp_path, SMALL, policy))
    kept(tmp_path)


def _report_cold(row, name: str, policy: str, cold: Process) -> None:
    row(
        f"throughput/{name}-full-{policy}-{BATCH}x{TOKENS}/cold_first_step_seconds", cold["seconds"], unit="s",
        rule="C13", better="lower", tolerance=TOLERANCE, witness=cold["graphs"],
        evidence=[f"beside other tests; the ops' own kernels, before it: {cold['kernels_seconds']:.1f} s"],
    )  # fmt: skip


def _report_layers(row, cold: Process, warm: Process) -> None:
    before, after = cold["counts"], warm["counts"]
    written = new_code(cold, warm)
    evidence = (
        f"cold {before}, {cold['autotunes']} benchmarks",
        f"warm {after}, {warm['autotunes']} benchmarks",
    )
    shared = {"unit": "count", "rule": "C18", "evidence": evidence}
    for layer in ("aot", "fx"):
        missed = before[f"{layer}_miss"] or 0
        row(
            f"{CASE}/{layer}_hits", after[f"{layer}_hit"], witness=missed, expected=missed, instruments=("cache",),
            **shared,
        )  # fmt: skip
    row(
        f"{CASE}/new_code_files", len(written), unit="files", rule="C18", witness=len(cold["code"]), expected=0,
        evidence=written[:3],
    )  # fmt: skip
    row(
        f"{CASE}/autotune_benchmarks", warm["autotunes"], witness=warm["graphs"], expected=0,
        instruments=("autotune",), **shared,
    )  # fmt: skip
    lost = cold_layers(cold, warm)
    row(
        f"{CASE}/cold_layers", len(lost), unit="layers", rule="C18", witness=after["aot_hit"] or 0, expected=0,
        evidence=[*lost, *evidence], instruments=("cache", "autotune"),
    )  # fmt: skip
    row(
        f"{CASE}/frames_traced_again", warm["frames"], witness=cold["frames"], expected=cold["frames"],
        instruments=("graphs",), **shared,
    )  # fmt: skip


def _report_seconds(row, cold: Process, warm: Process) -> None:
    seconds = {label: p["kernels_seconds"] + p["seconds"] for label, p in (("cold", cold), ("warm", warm))}
    for label, process in (("cold", cold), ("warm", warm)):
        row(
            f"{CASE}/{label}_first_step_seconds", seconds[label], unit="s", rule="C18", better="lower",
            tolerance=TOLERANCE, witness=process["graphs"],
            evidence=[f"the ops' own kernels {process['kernels_seconds']:.1f} s, then {process['seconds']:.1f} s"],
        )  # fmt: skip
    row(
        f"{CASE}/warm_over_cold", seconds["warm"] / seconds["cold"], unit="ratio", rule="C18",
        at_most=LARGEST_RATIO, witness=cold["counts"]["aot_miss"] or 0,
        evidence=[f"cold {seconds['cold']:.1f} s, warm {seconds['warm']:.1f} s"],
    )  # fmt: skip
    row(
        f"{CASE}/loss_difference", abs(cold["loss"] - warm["loss"]), unit="nats", rule="C18", expected=0.0,
        witness=cold["graphs"], evidence=[f"cold {cold['loss']!r}, warm {warm['loss']!r}"],
    )  # fmt: skip
