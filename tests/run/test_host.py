"""The class of a host: numbers of different classes are not compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.run import host


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
