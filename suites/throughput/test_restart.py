"""Step 0 of the full-size models in fresh processes: cold against warm start, broken down by cache layer.

Rules C18 and C37. FX graphs and AOTAutograd by their counters, Triton by the code that is written, autotuning by its
benchmarks. Lost layers are covered in suites/cache/test_layers.py. Other tests run in parallel with these processes.
The compiled code is kept on disk for the timed steps of this run.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from bumpgate.process.gpu_shares import untimed
from suites.cache.layers import cold_layers, new_code
from suites.kernels.model_shapes import keep
from suites.support.child import ENVIRONMENT, run_json
from suites.support.lanes import Lane, lanes
from suites.support.shared import made_once
from suites.throughput.full_size import BATCH, POLICIES
from suites.throughput.full_size_restarts import (
    RATIO_TOLERANCE,
    Process,
    coldest,
    cpu_seconds,
    ratio,
    restarts,
)

pytestmark = pytest.mark.cold

# Seen on an H200 with 2.11.0, and with 2.13.0 (12 of 154 benchmarks, nothing compiled again); not with 2.15.0.
SEARCHED_AGAIN = "torch>=2.11,<2.14"
NAME, POLICY = "nam52", "regional"
CASE = f"cache/{NAME}-full-{POLICY}-restart"
COMPILED = [(name, policy) for name, chosen in POLICIES.items() for policy in chosen if policy != "eager"]
COLD = [case for case in COMPILED if case != (NAME, POLICY)]
# Two large models fit into the memory at a time, so the last of them does not start early.
START = {("nam52", "whole_disabled"): 170, ("nam56r", "regional"): 165, ("nam52", "per_block"): 95}
TOKENS = 4096
# Seconds of a process: waiting for memory, the import, four billion random weights, the first step.
LONGEST = 600
THREADS = "4"  # a model compiles for longer than the lane's other programs
TIMED = {"tolerance": 0.5, "bound": "compiler, host"}


def started(directory: Path, name: str, policy: str, *claim: str, **environment: str) -> Process:
    """Run the first step of a model in a new process, its graphs on a cache directory, the ops' own kernels on the
    run's cache unless `environment` overrides it. claim: see suites.throughput.restart.
    """
    environment |= {
        "TORCHINDUCTOR_CACHE_DIR": str(directory),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": THREADS,
    }
    return run_json(
        "suites.throughput.restart", name, policy, *claim, environment=environment, timeout=LONGEST
    )


def kept(directory: Path) -> None:
    """Merge the caches of a process into the run's."""
    keep(directory / "triton", Path(ENVIRONMENT["TRITON_CACHE_DIR"]))
    for layer in directory.iterdir():
        if layer.name != "triton":
            keep(layer, Path(ENVIRONMENT["TORCHINDUCTOR_CACHE_DIR"]) / layer.name)


@pytest.fixture
def restart(tmp_path_factory, canaries) -> tuple[Process, list[Process]]:
    """A cold process, and the warm ones on its caches, the fastest first; the instruments are checked meanwhile."""

    def make(directory: Path) -> Process:
        own = {"TRITON_CACHE_DIR": str(directory / "triton")}
        result = restarts(lambda: started(directory, NAME, POLICY, "first", **own))
        kept(directory)
        return result

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(made_once, tmp_path_factory, "full_size_restart", make)
        canaries("cache", "autotune", "graphs")
        _, result = made.result()
    return result["cold"], result["warm"]


@lanes("h200")
@pytest.mark.long(180)
def test_warm_restart_of_full_size_model(lane: Lane, restart, row) -> None:
    cold, warm = restart
    _report_seconds(row, cold, warm)
    _report_layers(row, cold, coldest(cold, warm))
    _report_cold(row, NAME, POLICY, cold)


@lanes("h200")
@pytest.mark.parametrize(
    ("name", "policy"), [pytest.param(*case, marks=pytest.mark.long(START.get(case, 160))) for case in COLD]
)
def test_cold_first_step(lane: Lane, name: str, policy: str, tmp_path: Path, row) -> None:
    if untimed():  # caches are filled: this one is its own
        return
    cold = started(tmp_path, name, policy)
    assert any(path.startswith("triton/") for path in cold["code"]), "its graphs' kernels are not its own"
    _report_cold(row, name, policy, cold)
    kept(tmp_path)


@lanes("h200")
def test_restart_searches_and_compiles_nothing(lane: Lane, restart, row) -> None:
    """Defect present: a few of the searches of the cold start are repeated, with the code that they compile."""
    cold, warm = restart[0], coldest(*restart)
    found = f"{warm['autotunes']} of {cold['autotunes']} benchmarks, {new_code(cold, warm)}"
    lost = set(cold_layers(cold, warm))
    # Lost graphs, or repeating every search, are another fault; so is new code without a search.
    assert lost in (set(), {"autotune"}, {"autotune", "code"}), found
    assert 2 * warm["autotunes"] < cold["autotunes"], found
    row.defect(
        f"throughput/{NAME}-full-{POLICY}-{BATCH}x{TOKENS}/reductions_searched_again",
        bool(lost),
        known_in=SEARCHED_AGAIN,
        reason="the winner of a reduction's search is looked up in the list of configurations without those that "
        "_dynamic_scale_rblock adds (pytorch#181789)",
        rule="C18",
        seen=cold["autotunes"],
        evidence=[found],
    )


def _report_cold(row, name: str, policy: str, cold: Process) -> None:
    case = f"throughput/{name}-full-{policy}-{BATCH}x{TOKENS}"
    before = f"in parallel with other tests; the ops' own kernels, before it: {cold['kernels_seconds']:.1f} s"
    about = {**TIMED, "rule": "C37", "seen": cold["graphs"], "measured": cold["host"]}
    row.cost(f"{case}/cold_first_step_seconds", cold["seconds"], "s", evidence=[before], **about)


def _report_layers(row, cold: Process, warm: Process) -> None:
    before, after = cold["counts"], warm["counts"]
    evidence = [
        f"cold {before}, {cold['autotunes']} benchmarks",
        f"warm {after}, {warm['autotunes']} benchmarks",
    ]
    count = partial(row.count, rule="C18", evidence=evidence)
    for layer in ("aot", "fx"):
        missed = before[f"{layer}_miss"] or 0
        hit = after[f"{layer}_hit"]
        count(f"{CASE}/{layer}_hits", hit, expected=missed, seen=missed, instruments=("cache",))
    # At most the cost of the defect in test_restart_searches_and_compiles_nothing.
    written = new_code(cold, warm)
    cost = partial(row.cost, rule="C18")
    cost(f"{CASE}/new_code_files", len(written), "files", seen=cold["code"], evidence=written[:3])
    about = {"seen": cold["autotunes"], "evidence": evidence, "instruments": ("autotune",)}
    cost(f"{CASE}/autotune_benchmarks", warm["autotunes"], "count", **about)
    about = {"expected": cold["frames"], "seen": cold["frames"], "instruments": ("graphs",)}
    count(f"{CASE}/frames_traced_again", warm["frames"], **about)


def _report_seconds(row, cold: Process, warm: list[Process]) -> None:
    """Report CPU seconds: other tests run next to these processes."""
    cheapest, about = min(warm, key=cpu_seconds), {"rule": "C18", "seen": cold["graphs"]}
    for label, process in (("cold", cold), ("warm", cheapest)):
        spent = f"the ops' own kernels {process['kernels_seconds']:.1f} s, then {process['seconds']:.1f} s"
        timed = {**TIMED, "rule": "C18", "seen": process["graphs"], "measured": process["host"]}
        row.cost(
            f"{CASE}/{label}_first_step_cpu_seconds", cpu_seconds(process), "s", evidence=[spent], **timed
        )
    spent = f"CPU: cold {cpu_seconds(cold):.1f} s, warm " + ", ".join(f"{cpu_seconds(w):.1f}" for w in warm)
    row.cost(
        f"{CASE}/warm_over_cold_cpu", ratio(cold, warm), "ratio", tolerance=RATIO_TOLERANCE, rule="C18",
        seen=cold["counts"]["aot_miss"] or 0, evidence=[spent],
    )  # fmt: skip
    losses = f"cold {cold['loss']!r}, warm {cheapest['loss']!r}"
    apart = abs(cold["loss"] - cheapest["loss"])
    row.bound(f"{CASE}/loss_difference", apart, "nats", expected=0.0, evidence=[losses], **about)
