"""Step 0 of the full-size model in a fresh process, on empty caches and on full ones, told apart layer by layer.

Rule C18. FX graphs and AOTAutograd by their counters, Triton by the code that is written, autotuning by its
benchmarks; Dynamo traces anew in each process, which no cache saves. What a lost layer looks like stands in
suites/cache/test_layers.py, on a program that is cheap enough to break.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from suites.cache.test_layers import cold_layers, new_code
from suites.support.child import run_json
from suites.support.lanes import Lane, lanes

NAME, POLICY = "nam52", "regional"
CASE = f"cache/{NAME}-full-{POLICY}-restart"
# Seconds of a process: the import, four billion random weights, the first step.
LONGEST = 280
LARGEST_RATIO = 0.1
TOLERANCE = 0.5

Process = dict[str, Any]


def restarted(directory: Path) -> tuple[Process, Process]:
    """The same first step in two fresh processes, on one cache directory that starts empty."""
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(directory),
        "TRITON_CACHE_DIR": str(directory / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    cold, warm = (
        run_json("suites.throughput.restart", NAME, POLICY, environment=environment, timeout=LONGEST)
        for _ in range(2)
    )
    return cold, warm


@lanes("h200")
def test_a_warm_restart(lane: Lane, tmp_path: Path, row, canaries, exclusive_machine) -> None:
    canaries("cache", "autotune", "graphs")
    cold, warm = restarted(tmp_path)
    _report_seconds(row, cold, warm)
    _report_layers(row, cold, warm)


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
    for label, process in (("cold", cold), ("warm", warm)):
        row(
            f"{CASE}/{label}_first_step_seconds", process["seconds"], unit="s", rule="C18", better="lower",
            tolerance=TOLERANCE, witness=process["graphs"],
        )  # fmt: skip
    row(
        f"{CASE}/warm_over_cold", warm["seconds"] / cold["seconds"], unit="ratio", rule="C18",
        at_most=LARGEST_RATIO, witness=cold["counts"]["aot_miss"] or 0,
        evidence=[f"cold {cold['seconds']:.1f} s, warm {warm['seconds']:.1f} s"],
    )  # fmt: skip
    row(
        f"{CASE}/loss_difference", abs(cold["loss"] - warm["loss"]), unit="nats", rule="C18", expected=0.0,
        witness=cold["graphs"], evidence=[f"cold {cold['loss']!r}, warm {warm['loss']!r}"],
    )  # fmt: skip
