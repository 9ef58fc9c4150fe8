"""What a record states about its run, and what the header of a run notes about its interpreter."""

from __future__ import annotations

import importlib.util
import py_compile
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bumpgate.plugin.provenance import command_line, missing_bytecode


def test_command_line_omits_the_installation_path() -> None:
    assert command_line(["/opt/env/lib/pytest/__main__.py", "-m", "cpu"]) == "python -m pytest -m cpu"
    assert command_line(["/opt/env/bin/pytest", "-k", "a b"]) == "pytest -k 'a b'"


def test_missing_bytecode_of_torch_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "torch" / "__init__.py"
    source.parent.mkdir()
    source.touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(source)))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert missing_bytecode().endswith(f"python -m compileall -q -j 0 {source.parent}")
    py_compile.compile(str(source))
    assert missing_bytecode() == ""


def test_bytecode_that_the_next_process_writes_is_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", "/nowhere")
    assert missing_bytecode() == ""
