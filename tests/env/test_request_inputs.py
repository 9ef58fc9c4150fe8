"""What a candidate's environment is made from: the extras of the other pins, and the files that settings name."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.env.build import build
from bumpgate.env.freeze import freeze
from bumpgate.env.lane import LaneContext, lane_request
from bumpgate.env.request import Request, request_key
from tests.support.lane_files import declare_lanes
from tests.support.local_index import LocalIndex, fake_wheel, isolated


@pytest.mark.parametrize("variable", ["UV_CONSTRAINT", "PIP_CONSTRAINT", "UV_OVERRIDE", "UV_CONFIG_FILE"])
def test_key_depends_on_the_content_of_a_settings_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    isolated(monkeypatch, tmp_path, "http://127.0.0.1:9/index")
    file = tmp_path / "settings.txt"
    monkeypatch.setenv(variable, str(file))
    keys = {request_key(Request(("torch==1.0",)), None)}
    for text in ("helper==1.0\n", "helper==2.0\n"):
        file.write_text(text)
        keys.add(request_key(Request(("torch==1.0",)), None))
    assert len(keys) == 3


def test_environment_is_built_again_after_an_edit_of_constraints(
    index: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "constraints.txt"
    monkeypatch.setenv("PIP_CONSTRAINT", str(file))
    for version in ("1.0", "2.0"):
        file.write_text(f"helper=={version}\n")
        assert build(Request(("torch==1.0", "helper"))).packages["helper"] == version


def test_candidate_keeps_the_extras_of_other_pins(index: LocalIndex, tmp_path: Path) -> None:
    """What they bring would be missing on its side only, and torch would be blamed."""
    root = tmp_path / "tree"
    declare_lanes(root)
    index.add(fake_wheel(tmp_path / "wheels", "ray", "2.0", requires=["helper>=1; extra == 'tune'"]))
    (root / "pyproject.toml").write_text(
        '[project]\nname = "bumpgate"\n[project.optional-dependencies]\n'
        'cpu = ["torch==1.0", "ray[tune]==2.0"]\n'
    )
    freeze(LaneContext(root, "cpu"))
    adopted = build(lane_request(root, "cpu")).packages
    assert adopted == {"helper": "2.0", "ray": "2.0", "torch": "1.0", "triton": "3.0"}
    candidate = build(lane_request(root, "cpu", "torch==1.1")).packages
    assert candidate == adopted | {"torch": "1.1", "triton": "3.1"}
    assert build(lane_request(root, "cpu", "ray==2.0")).packages == adopted
