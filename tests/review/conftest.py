"""Shared by the tests of what changes reviewed files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.adopting import AdoptTree
from tests.support.reports import bumpgate

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Return a function that calls bumpgate in this process -> exit code, stdout, stderr."""
    monkeypatch.delenv("BUMPGATE_GATE", raising=False)

    def run(*args: str) -> tuple[int, str, str]:
        code = bumpgate(monkeypatch, *args)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def tree(gated: AdoptTree, tmp_path: Path) -> Iterator[AdoptTree]:
    """A copy of the module's tree with its gates, for one test."""
    made = gated.copy(tmp_path / "tree", tmp_path / "home")
    yield made
    made.end()
