"""The cost of a training step against depth: measured in a process, formatted and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import scale_depth


@pytest.mark.long(20)
def test_depth_is_measured_in_a_new_process() -> None:
    found = scale_depth.in_child("per_block", 6)
    assert found["graphs"] > 0
    assert found["guards"] > found["graphs"]
    assert found["cpu_seconds"] > 0.1
    assert found["peak_rss_bytes"] > 2**27


def test_failed_process_is_reported_with_its_case() -> None:
    with pytest.raises(SystemExit, match="magic, 6 layers: exit 1"):
        scale_depth.in_child("magic", 6)


def test_table_and_plot_have_a_line_per_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"cpu_seconds": 2.0, "graphs": 3, "guards": 1234, "peak_rss_bytes": 2**30}
    measured = {policy: dict.fromkeys(scale_depth.DEPTHS, one) for policy in ("eager", "regional")}
    lines = scale_depth.table(measured).splitlines()
    assert lines[3].startswith("| regional | 2.0 s, 3 graphs, 1,234 guards, 1,024 MiB |")
    monkeypatch.setattr(scale_depth, "PLOT", tmp_path / "plot.png")
    scale_depth.plot(measured)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
