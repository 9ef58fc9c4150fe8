"""The first profile of a process decides whether later ones record a GPU's kernels, so none is of the CPU alone."""

from __future__ import annotations

import re

import pytest
import torch
from torch.profiler import ProfilerActivity

from suites.support.instruments import host_syncs, present_activities
from tests.support.tree import ROOT

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
