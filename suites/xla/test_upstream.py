"""Known defects of torch_xla, each in a new process, and behaviour that our workarounds rely on. 13 processes.

A defect row is 1 if the wrong result occurs exactly as known, 0 if the result is right; any other one fails the test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.children import last_line
from suites.support.child import ROOT, ChildError
from suites.support.lanes import PJRT_CPU, lanes, needs_tpu
from suites.support.planted import planted

SECONDS = 300
CACHE_ISSUE = "https://github.com/pytorch/xla/issues/9094"
# What a key of JAX's cache must contain: each differs in one run.
JAX_CHANGES = ("program", "jaxlib", "flags", "topology")
# The only version with these defects that was run: no later one is released.
KNOWN_IN = "torch_xla==2.9.0"
DESERIALIZE = (
    "Failed to deserialize executable: UNIMPLEMENTED: Deserializing serialized executable not supported."
)

pytestmark = [lanes("v6e"), pytest.mark.usefixtures("lane"), pytest.mark.fresh_process]


class Child:
    """One run of a program of suites/xla/programs.py: its exit code and its output."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        # Use the CPU even if a TPU is present: these defects are torch_xla's own, and the chip may be another
        # process's.
        env = {**os.environ, "PJRT_DEVICE": "CPU", **environment}
        command = [sys.executable, "-m", "suites.xla.programs", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS)
        self.code, self.log, self.name = done.returncode, done.stderr, arguments[0]
        self._out = done.stdout

    @property
    def result(self) -> dict[str, Any]:
        """Return the program's result. Raises ChildError if it failed."""
        if self.code != 0:
            raise ChildError(f"{self.name}: exit {self.code}: {last_line(self.log.splitlines())}")
        return json.loads(self._out.splitlines()[-1])


def is_wrong(found: Any, wrong: Any, right: Any) -> bool:
    """Return whether a result is the known wrong one. Raises AssertionError if it is neither that nor the right one."""
    assert found in (wrong, right), (
        f"got {found}: neither the known wrong result {wrong} nor the right one {right}"
    )
    return found == wrong


@pytest.fixture(scope="module")
def cold_and_warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Child, Child, Path]:
    """The same two steps in two processes on one persistent cache."""
    directory = tmp_path_factory.mktemp("xla-cache")
    cold, warm = (Child("cached_step", str(directory)) for _ in range(2))
    return cold, warm, directory


@pytest.mark.measured_on(PJRT_CPU)
def test_cache_keys_are_stable_over_a_restart(row, cold_and_warm) -> None:
    cold, warm, directory = cold_and_warm
    written = len(list(directory.iterdir()))
    row.count(
        "xla/persistent_cache/misses_after_restart",
        warm.result["PersistentCacheMiss"] or 0,
        # A cold run that never queried the cache would have no key to store.
        seen=min(written, cold.result["PersistentCacheMiss"] or 0),
        rule="X1",
        expected=0,
        evidence=[f"cold {cold.result}", f"warm {warm.result}", f"{written} files"],
    )


@pytest.mark.measured_on(PJRT_CPU)
def test_cache_is_hit_after_a_restart(row, cold_and_warm) -> None:
    cold, warm, _ = cold_and_warm
    keys = cold.result["PersistentCacheMiss"]
    failures = warm.result["PersistentCacheDeserializeFailure"] or 0
    assert warm.log.count(DESERIALIZE) == failures, "a failure with another message"
    found = (warm.result["PersistentCacheHit"] or 0, failures, warm.result["compiles"] == 0)
    row.defect(
        "xla/persistent_cache/defect", is_wrong(found, wrong=(0, keys, False), right=(keys, 0, True)),
        known_in=KNOWN_IN,
        reason=f"{CACHE_ISSUE}: the cache is written, and loading calls a method that no client has",
        seen=keys, rule="X1", evidence=[line for line in warm.log.splitlines() if DESERIALIZE in line][:1],
    )  # fmt: skip


@planted("X1", "a process that makes other keys")
def test_another_cache_key_is_a_miss(cold_and_warm) -> None:
    _, warm, directory = cold_and_warm
    other = Child("cached_step", str(directory), XLA_NO_SPECIAL_SCALARS="0")
    assert not warm.result["PersistentCacheMiss"]
    assert other.result["PersistentCacheMiss"] > 0


@pytest.mark.measured_on(PJRT_CPU)
def test_key_of_another_topology_is_a_miss(row, cold_and_warm) -> None:
    cold, warm, directory = cold_and_warm
    other = Child("cached_step", str(directory), CPU_NUM_DEVICES="4")
    row.count(
        "xla/persistent_cache/misses_on_another_topology",
        other.result["PersistentCacheMiss"] or 0,
        # Each counts because the same program on the same topology finds its key.
        seen=warm.log.count(DESERIALIZE) + (warm.result["PersistentCacheHit"] or 0),
        rule="X1",
        expected=cold.result["PersistentCacheMiss"],
        evidence=[f"1 device {warm.result}", f"4 devices {other.result}"],
    )


@needs_tpu("needs the TPU client's own loader", "xla/persistent_cache_tpu/defect")
def test_cache_is_hit_after_a_restart_on_a_tpu(row, tmp_path: Path) -> None:
    cold, warm = (Child("cached_step", str(tmp_path), PJRT_DEVICE="TPU") for _ in range(2))
    keys = cold.result["PersistentCacheMiss"]
    row.defect(
        "xla/persistent_cache_tpu/defect",
        is_wrong(warm.result["PersistentCacheHit"] or 0, wrong=0, right=keys), known_in=KNOWN_IN,
        reason=CACHE_ISSUE, seen=keys, rule="X1",
    )  # fmt: skip


def jax_cached(directory: Path, change: str = "") -> Child:
    return Child("jax_cache", str(directory), change, JAX_COMPILATION_CACHE_DIR=str(directory))


@pytest.mark.measured_on(PJRT_CPU)
def test_jax_cache_is_hit_in_a_fresh_process(row, tmp_path: Path) -> None:
    cold, warm = (jax_cached(tmp_path) for _ in range(2))
    row.count(
        "xla/jax_cache/hits_after_restart", warm.result["hits"], expected=cold.result["misses"],
        seen=len(list(tmp_path.iterdir())), rule="X1",
        evidence=[f"cold {cold.result}", f"warm {warm.result}"],
    )  # fmt: skip

    changed = {change: jax_cached(tmp_path, change).result for change in JAX_CHANGES}
    assert changed["topology"]["devices"] > warm.result["devices"]
    row.count(
        "xla/jax_cache/changes_that_hit_the_old_entry",
        sum(result["last_hits"] for result in changed.values()),
        # Each counts because the same program without a change is a hit.
        seen=len(changed) * warm.result["last_hits"],
        rule="X1",
        expected=0,
        evidence=[f"{change}: {result}" for change, result in changed.items()],
    )


@pytest.mark.measured_on(PJRT_CPU)
def test_learning_rate_of_0_or_1_compiles_nothing(row) -> None:
    ours = Child("rate_schedule")
    without = Child("rate_schedule", XLA_NO_SPECIAL_SCALARS="0")
    row.count(
        "xla/special_scalars/compiles_after_first_step",
        sum(ours.result["compiles"][1:]),
        # The values are special: without the variable each of the two is a separate program.
        seen=sum(without.result["compiles"][1:]),
        rule="X10",
        expected=0,
        evidence=[f"XLA_NO_SPECIAL_SCALARS=1 {ours.result}", f"=0 {without.result}"],
    )


@pytest.fixture(scope="module")
def defects() -> dict[str, Any]:
    """Results of programs that torch_xla has computed wrongly: each found on the device, known as wrong, and right."""
    return Child("defects").result


# Defect of the program `defects` -> rule and reason.
DEFECTS = {
    "searchsorted_on_host": ("X3", "searchsorted, bucketize have no lowering"),
    "amax_without_dimension": ("R1", "amax() and amin() without a dimension return their input"),
    "view_write_in_custom_op": (
        "R1",
        "a custom op's body runs below functionalization, where a write into a view is lost",
    ),
}


@pytest.mark.measured_on(PJRT_CPU)
@pytest.mark.parametrize("name", DEFECTS)
def test_program_gives_the_result_of_the_cpu(row, defects, name: str) -> None:
    (rule, reason), (found, wrong, right) = DEFECTS[name], defects[name]
    row.defect(
        f"xla/{name}/defect", is_wrong(found, wrong, right), known_in=KNOWN_IN, reason=reason, seen=[right],
        rule=rule, evidence=[found],
    )  # fmt: skip


@pytest.mark.measured_on(PJRT_CPU)
def test_grouped_mm_does_not_crash(row) -> None:
    child = Child("grouped_mm")
    crashed = child.code == -signal.SIGSEGV
    row.defect(
        "xla/grouped_mm_crash/defect",
        crashed or is_wrong(child.result, wrong=None, right={"sum": 4 * 16 * 16.0}), known_in=KNOWN_IN,
        reason="_grouped_mm has no XLA kernel and no fallback: segmentation fault", seen=[child.code],
        rule="R1", evidence=[f"exit {child.code}"],
    )  # fmt: skip
