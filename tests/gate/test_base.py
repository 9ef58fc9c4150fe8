"""`bumpgate gate --base`: two commits of a project in one environment, with real processes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bumpgate.env.build import Environment
from bumpgate.gate import environments
from tests.env.test_project import git
from tests.support.foreign import LANE, Foreign
from tests.support.project import Result, in_process, wrapped_python

NET = "GRAPH_BREAKS = {}\n"
TEST = """
import pytest
import net

@pytest.mark.mine
def test_net(row):
    row.count("compile/net/graph_breaks", net.GRAPH_BREAKS, unit="breaks", seen=3, paired=True)
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Foreign]:
    """A project of one commit whose package net counts 13. Its environment has a torch that imports at once."""
    made = Foreign(tmp_path)
    made.write("bumpgate.toml", f'{LANE}requirements = "requirements.txt"\n')
    made.write("requirements.txt", "torch==1.0\n")
    made.write(".gitignore", ".*/\n")
    made.write(".site/torch.py", "")
    made.write(".env/bin/python", wrapped_python(site=tmp_path / ".site"))
    (tmp_path / ".env/bin/python").chmod(0o755)
    made.write("src/net.py", NET.format(13))
    made.write("tests/test_net.py", TEST)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "One")
    made.env["BUMPGATE_HOME"] = str(tmp_path / ".home")
    environment = Environment("net", tmp_path / ".env/bin/python", "0" * 20)
    monkeypatch.setattr(environments, "build", lambda request, say: environment)
    handler = signal.getsignal(signal.SIGTERM)
    yield made
    signal.signal(signal.SIGTERM, handler)


def gate(foreign: Foreign, base: str) -> tuple[Result, dict[str, Any]]:
    ran = in_process(foreign.root, "gate", "--base", base, "--out", "build/g", env=foreign.env)
    path = foreign.root / "build/g/gate.json"
    return ran, json.loads(path.read_text()) if path.exists() else {}


def test_a_changed_count_is_found_between_two_commits(foreign: Foreign) -> None:
    foreign.write("src/net.py", NET.format(14))
    git(foreign.root, "commit", "-qam", "Two")
    ran, found = gate(foreign, "HEAD~1")
    assert ran.code == 1, ran.out + ran.err
    (held,) = [f for f in found["findings"] if f["decision"] == "HOLD"]
    assert (held["label"], held["rows"]) == ("CHANGED", ["compile/net/graph_breaks"])
    assert ": 13 breaks" in held["adopted"][0]
    assert ": 14 breaks" in held["candidate"][0]
    assert "work tree (candidate) against commit " in ran.out


def test_tests_inside_of_the_package_run_on_both_sides(foreign: Foreign) -> None:
    git(foreign.root, "rm", "-qr", "src", "tests")
    for path, text in (("", NET.format(13)), ("tests/", ""), ("tests/test_net.py", TEST)):
        foreign.write(f"net/{path}" if path.endswith(".py") else f"net/{path}__init__.py", text)
    git(foreign.root, "add", "-A")
    git(foreign.root, "commit", "-qm", "Package")
    foreign.write("net/__init__.py", NET.format(14))
    ran, found = gate(foreign, "HEAD")
    assert (ran.code, found["findings"][0]["rows"]) == (1, ["compile/net/graph_breaks"]), ran.out + ran.err


def test_an_edit_is_compared_with_the_last_commit(foreign: Foreign) -> None:
    foreign.write("src/net.py", NET.format(14))
    assert gate(foreign, "HEAD")[0].code == 1
    foreign.write("src/net.py", NET.format("12 + 1"))
    ran, found = gate(foreign, "HEAD")
    assert (ran.code, found["decision"]) == (0, "ADOPT"), ran.out + ran.err


def test_equal_sides_are_refused_before_anything_is_measured(foreign: Foreign) -> None:
    ran, found = gate(foreign, "HEAD")
    assert (ran.code, found) == (4, {})
    assert "the sides are equal: the work tree has the project of commit " in ran.err
