"""Fixtures of the suite's own tests."""

from __future__ import annotations

import compileall
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from suites.support.lanes import LANES
from suites.support.planted import planted_faults as planted_faults
from tests.support.project import Project

if TYPE_CHECKING:
    from tests.support.gating import Machine


def pytest_configure(config: pytest.Config) -> None:
    """Compile the sources that the tests' child processes import.

    pytest stores the bytecode of a package with assertions of its own under another name, so that each of the children,
    which write none, would compile the package again: a third of the CPU time of `bumpgate --help`.
    """
    if not hasattr(config, "workerinput") and not sys.dont_write_bytecode:
        for folder in ("bumpgate", "suites/support"):
            compileall.compile_dir(config.rootpath / folder, quiet=2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip these tests in lane runs: they belong to no lane, and a lane's environment lacks their imports."""
    markers = re.findall(r"\w+", config.option.markexpr)
    return True if set(markers) & set(LANES) and collection_path.name.startswith("test_") else None


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path)
    yield made
    made.end()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A simulated machine that runs gates. Imported here: a lane's environment lacks the controller's libraries."""
    from tests.support.gating import Machine, attach

    made = Machine(tmp_path / "tree")
    attach(made, monkeypatch)
    return made


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Folder of a gate, not yet made."""
    return tmp_path / "out"
