"""An index on loopback with fake wheels of torch, triton and a helper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local_index import LocalIndex, fake_wheel, isolated


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIndex]:
    folder = tmp_path / "wheels"
    wheels = [
        fake_wheel(folder, "torch", "1.0", requires=["triton==3.0"]),
        fake_wheel(folder, "torch", "1.1", requires=["triton==3.1"]),
        fake_wheel(folder, "torch", "1.2", tag="cp27-cp27mu-linux_x86_64"),
        fake_wheel(folder, "triton", "3.0"),
        fake_wheel(folder, "triton", "3.1"),
        fake_wheel(folder, "helper", "1.0"),
        fake_wheel(folder, "helper", "2.0"),
    ]
    with LocalIndex(wheels) as served:
        isolated(monkeypatch, tmp_path, served.url)
        yield served
