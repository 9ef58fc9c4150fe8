"""A wheel is reused for its own version and hash only: from the stores, the lock and a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bumpgate.env.inventory import take
from bumpgate.env.lane import LaneContext
from bumpgate.env.locks import Lock, Locked, Wheel
from bumpgate.env.store import put, sha256_of
from bumpgate.process.child import Interpreter
from bumpgate.wheels import store
from bumpgate.wheels.audit import Target
from bumpgate.wheels.plan import build_of, plan
from tests.support.lane_files import FAST, save_lock, write_lane
from tests.support.local_index import isolated
from tests.support.tree import ROOT
from tests.support.wheel_files import wheel

CODE = "def run(n):\n    return f'cpu:{n}'\n"


@pytest.fixture(scope="module")
def target() -> Target:
    interpreter = Interpreter(Path(sys.executable), ROOT, dict(os.environ))
    return Target(interpreter, take(interpreter), 90)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    isolated(monkeypatch, tmp_path, "http://127.0.0.1:9/index")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "bumpgate"\n')
    (tmp_path / "links").mkdir()
    return tmp_path


def declare(tree: Path, version: str, target: Target) -> None:
    text = FAST.format(torch=target.found.torch_version)
    write_lane(tree, "h200", text.replace('version = "1.0"', f'version = "{version}"'))


def pure(folder: Path, code: str = CODE) -> Path:
    """Make version 1.0 of a wheel that fits every torch."""
    folder.mkdir(exist_ok=True)
    return wheel(folder, b"", code, version="1.0", library="README", tag="py3-none-any")


def lock(tree: Path, path: Path) -> Wheel:
    """Lock a wheel as version 1.0."""
    found = Wheel(path.name, sha256_of(path))
    save_lock(tree / "lanes/h200/pylock.toml", Lock((Locked("fast", "1.0", (found,)),)))
    return found


def test_built_wheel_of_another_version_is_not_reused(tree: Path, target: Target) -> None:
    """Its row has no sha256 of a source distribution: `wheels build --sdist FILE` made it."""
    declare(tree, "1.0", target)
    (old,) = LaneContext(tree, "h200").packages.wheels
    store.put(build_of(LaneContext(tree, "h200"), old, target), pure(tree / "made"))
    (choice,) = plan(LaneContext(tree, "h200"), target, [])
    assert choice.wheel is not None
    declare(tree, "2.0", target)
    (choice,) = plan(LaneContext(tree, "h200"), target, [])
    assert choice.wheel is None


def test_locked_wheel_of_another_version_is_not_reused(tree: Path, target: Target) -> None:
    path = pure(tree / "made")
    put(lock(tree, path), [path.read_bytes()])
    declare(tree, "2.0", target)
    (choice,) = plan(LaneContext(tree, "h200"), target, [])
    assert choice.wheel is None


@pytest.mark.parametrize("sums", [False, True])
def test_adopted_torch_uses_the_adopted_file_only(tree: Path, target: Target, sums: bool) -> None:
    """The SHA256SUMS of a folder does not replace the hash of the lock."""
    lock(tree, pure(tree / "made"))
    declare(tree, "1.0", target)
    other = pure(tree / "links", CODE + "# other bytes\n")
    if sums:
        (tree / "links/SHA256SUMS").write_text(f"{sha256_of(other)}  {other.name}\n")
    (choice,) = plan(LaneContext(tree, "h200"), target, [str(tree / "links")])
    assert choice.wheel is None
