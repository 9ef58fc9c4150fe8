"""The class of a host: numbers of different classes are not compared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bumpgate.process import host


def test_class_names_processor_cores_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bus, text in (
        ("0001", "Model: \t\t NVIDIA H200\nIRQ: 17\n"),
        ("0000", "Model: NVIDIA H100\n"),
        ("0002", "IRQ: 9\n"),
    ):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(text)
    monkeypatch.setattr(host, "GPUS", tmp_path)
    monkeypatch.setattr(host, "cpu_model", lambda: "EPYC 9654")
    monkeypatch.setattr(host, "cores", lambda: 16)
    assert host.host_class() == "EPYC 9654, 16 cores, NVIDIA H100, NVIDIA H200"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this platform")
def test_host_of_run_on_a_share_has_the_cores_of_its_parent() -> None:
    """A run that bumpgate starts on a share of the machine is not of another class of host."""
    own = sorted(os.sched_getaffinity(0))
    code = "import os; from bumpgate.process.host import cores, host_cores; "
    code += f"os.sched_setaffinity(0, {{{own[0]}}}); print(cores(), host_cores())"
    for parent, expected in ((str(os.getpid()), len(own)), ("999999999", 1), ("", 1), ("9" * 30, 1)):
        env = os.environ | {host.PARENT: parent}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.stdout.split() == ["1", str(expected)], done.stderr
