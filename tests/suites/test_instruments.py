"""Instruments of the suites: evidence, compile phases, profiled activities, and the peak memory of a process."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity

from bumpgate.core.baseline import Baseline, judge
from bumpgate.core.rows import Row, Verdict
from bumpgate.plugin.instruments.dynamo import DynamoReport
from bumpgate.plugin.rows import InfraError
from suites.support.gpu_memory import wait_for_free
from suites.support.instruments import Phases, compile_phases, host_syncs, present_activities
from suites.support.instruments import phases as phases_module
from suites.support.instruments.phases import SPANS, spans_module
from suites.support.planted import planted
from tests.support.tree import ROOT


def test_evidence_is_the_three_most_frequent_events_of_each_kind() -> None:
    events = ["a", "b", "b", "c", "c", "c", "d"]
    report = DynamoReport(failures=events)
    assert report.evidence() == ("failure x3: c", "failure x2: b", "failure x1: a")
    assert report.evidence(1) == ("failure x3: c",)
    assert len(report.evidence(9)) == 4


def test_evidence_names_no_address() -> None:
    report = DynamoReport(failures=["guard on <object at 0x7f12ab> failed"])
    assert report.evidence() == ("failure x1: guard on <object> failed",)


SECONDS = {"frame": 10.0, "compiler": 9.0, "backward": 4.0, "inductor": 11.0, "module": 8.0, "codegen": 2.0}


def measured(seconds: dict[str, float]) -> Phases:
    """Return the phases of spans reported by torch inside the block, after others with the same names."""
    names = {SPANS[ours]: spent for ours, spent in seconds.items()}
    spans = {name: [100.0] for name in SPANS.values()}
    with mock.patch.object(spans_module, "compilation_time_metrics", spans), compile_phases() as phases:
        for name, spent in names.items():
            spans[name].append(spent)
    return phases


def test_phases_do_not_overlap() -> None:
    phases = measured(SECONDS)
    assert phases == Phases(dynamo=1.0, aot=2.0, inductor=5.0, backend=6.0)
    assert sum(vars(phases).values()) == SECONDS["frame"] + SECONDS["backward"]


@pytest.mark.parametrize("lost", SECONDS)
@planted("C13", "torch renames a span of its compile times")
def test_renamed_span_is_none_and_never_zero(lost: str) -> None:
    phases = measured({name: spent for name, spent in SECONDS.items() if name != lost})
    absent = [name for name, spent in vars(phases).items() if spent is None]
    assert absent
    assert 0 not in vars(phases).values()
    row = Row(f"throughput/start/{absent[0]}", None, "s", 1, "C13", better="lower", paired=True)
    assert judge(row, Baseline("cpu"), failed_instruments={}).verdict is Verdict.INSTRUMENT


def test_spans_are_timed_in_cpu_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's own clock is restored at the end."""
    monkeypatch.setattr(phases_module, "cpu_seconds", lambda: 1.5)
    with mock.patch.object(spans_module, "compilation_time_metrics", {}), compile_phases():
        assert spans_module.time.time_ns() == 1_500_000_000
    assert spans_module.time is time


CPU_ALONE = re.compile(r"activities=\[\s*(?:torch\.profiler\.)?ProfilerActivity\.CPU,?\s*\]")


@pytest.mark.parametrize("there", [True, False])
def test_present_gpu_is_profiled(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert (ProfilerActivity.CUDA in present_activities()) == there
    assert ProfilerActivity.CPU in present_activities()


def test_host_syncs_profile_every_present_device(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []
    profile = torch.profiler.profile

    def recorded(activities: list[ProfilerActivity]) -> object:
        requested.append(activities)
        return profile(activities=[ProfilerActivity.CPU])

    monkeypatch.setattr(torch.profiler, "profile", recorded)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with host_syncs() as tally:
        torch.ones(2).sum().item()
    assert requested == [[ProfilerActivity.CPU, ProfilerActivity.CUDA]]
    assert tally["syncs"] == 1


def test_no_code_profiles_the_cpu_alone() -> None:
    files = [
        path
        for room in ("bumpgate", "suites", "launch", "model", "tools")
        for path in (ROOT / room).rglob("*.py")
    ]
    assert [str(path) for path in files if CPU_ALONE.search(path.read_text())] == []
    assert CPU_ALONE.search("profile(activities=[torch.profiler.ProfilerActivity.CPU])")


MIB = 2**20
INSTRUMENT = ROOT / "suites/support/instruments/memory.py"
PROGRAM = f"""
import runpy
read = runpy.run_path("{INSTRUMENT}")["peak_rss_bytes"]
started = read()
held = bytearray({200 * MIB})
del held
print(started, read())
"""

MAPPED = f"""
import mmap, runpy, sys
read = runpy.run_path("{INSTRUMENT}")
with open(sys.argv[1], "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    read_pages = sum(pages[i] for i in range(0, len(pages), mmap.PAGESIZE))
before = read["peak_memory_bytes"]()
held = bytearray({100 * MIB})
del held
print(before, read["peak_memory_bytes"](), read["peak_rss_bytes"]())
"""


@planted("C37", "a large parent process, whose peak getrusage passes on to its children")
def test_peak_memory_is_that_of_the_process_alone() -> None:
    parent = bytearray(b"1") * (400 * MIB)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    started, peak = map(int, done.stdout.split())
    assert len(parent) > started
    assert started < 100 * MIB
    assert 200 * MIB <= peak < 300 * MIB


@planted("C37", "a file in the page cache, all of whose pages a process has mapped")
def test_peak_memory_excludes_pages_of_files(tmp_path: Path) -> None:
    file = tmp_path / "library"
    file.write_bytes(b"1" * (200 * MIB))
    done = subprocess.run(
        [sys.executable, "-c", MAPPED, str(file)], capture_output=True, text=True, check=True
    )
    before, peak, resident = map(int, done.stdout.split())
    assert resident >= 300 * MIB
    assert before < 50 * MIB
    assert 100 * MIB <= peak < 150 * MIB


def test_claim_waits_until_the_memory_is_free() -> None:
    """A test whose neighbours hold the card is a fault of the machine, not of the build."""
    free = iter([3.7, 40.0, 52.5])
    wait_for_free(52, lambda: next(free), seconds=60)
    with pytest.raises(
        InfraError, match=r"^3\.7 GiB of the GPU's memory are free, and this test needs 52: end what"
    ):
        wait_for_free(52, lambda: 3.7, seconds=0.1)
