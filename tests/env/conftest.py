"""An index on loopback with fake wheels of torch, triton and a helper, a tree of lanes, and a call of the command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.lane_files import declare_lanes
from tests.support.local_index import LocalIndex, fake_wheel, isolated
from tests.support.reports import bumpgate

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIndex]:
    folder = tmp_path / "wheels"
    wheels = [fake_wheel(folder, "torch", f"1.{n}", requires=[f"triton==3.{n}"]) for n in (0, 1)]
    wheels.append(fake_wheel(folder, "torch", "1.2", tag="cp27-cp27mu-linux_x86_64"))
    wheels += [fake_wheel(folder, "triton", version) for version in ("3.0", "3.1")]
    wheels += [fake_wheel(folder, "helper", version) for version in ("1.0", "2.0")]
    with LocalIndex(wheels) as served:
        isolated(monkeypatch, tmp_path, served.url)
        yield served


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The lanes without their locks, and groups of the lanes cpu and h200."""
    root = tmp_path / "tree"
    declare_lanes(root)
    (root / "pyproject.toml").write_text(
        '[project]\nname = "bumpgate"\n[dependency-groups]\nsuite = ["helper>=1"]\n'
        'cpu = [{ include-group = "suite" }, "torch==1.0"]\nh200 = [{ include-group = "suite" }]\n'
    )
    return root


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that calls bumpgate and returns its exit code, output and errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = bumpgate(monkeypatch, *arguments)
        return code, *capsys.readouterr()

    return call
