"""The project under test on a side of a gate: its sources at a commit, its build, and that a run imports them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bumpgate.env import project
from bumpgate.env.build import BuildError
from bumpgate.env.requirements import locked
from bumpgate.env.uv import run_uv
from bumpgate.process.host import PARENT, PROJECT
from tests.support.foreign import LANE, Foreign
from tests.support.local_index import LocalIndex, fake_wheel, isolated

BACKEND = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "net"
version = "1"
"""
# A build without downloads: one module in a wheel.
BACKEND_CODE = """
import zipfile
def build_wheel(folder, *_):
    name = "net-1-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.write("src/net.py", "net.py")
        wheel.writestr("net-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: net\\nVersion: 1\\n")
        wheel.writestr("net-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("net-1.dist-info/RECORD", "")
    return name
"""


def git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path / "home"))
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "src/net.py").write_text("WIDTH = 1\n")
    (root / "bumpgate.toml").write_text(LANE)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "One")
    (root / "src/net.py").write_text("WIDTH = 2\n")
    return root


@pytest.mark.parametrize("built", [True, False], ids=["built", "copied"])
def test_each_side_imports_its_own_sources(root: Path, built: bool) -> None:
    if built:
        (root / "pyproject.toml").write_text(BACKEND)
        (root / "backend.py").write_text(BACKEND_CODE)
        git(root, "add", "pyproject.toml", "backend.py")
        git(root, "commit", "-qm", "Build", "--", "pyproject.toml", "backend.py")
    said: list[str] = []
    commit = project.commit_of(root, "HEAD")
    python = Path(sys.executable)
    before = project.installed(root, python, "environment", said.append, commit)
    now = project.installed(root, python, "environment", said.append)
    found = [(place / "net.py").read_text() for place in (before, now)]
    assert found == ["WIDTH = 1\n", "WIDTH = 2\n"]
    assert any(place.name == "net-1.dist-info" for place in now.iterdir()) == built
    assert project.installed(root, python, "environment", said.append) == now
    assert len(said) == 2
    assert project.installed(root, python, "other environment", said.append) != now


@pytest.mark.parametrize("history", [True, False])
def test_a_build_reads_files_that_no_row_depends_on(root: Path, history: bool) -> None:
    if not history:
        shutil.rmtree(root / ".git")
    for path in ("README.md", "data/LICENSE", ".venv/pyvenv.cfg", "env/pyvenv.cfg"):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text("x")
    (root / ".gitignore").write_text(".venv\nenv\n")
    tree = project.sources(root, root.parent / "copy")
    found = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    assert found == {"README.md", "data/LICENSE", "src/net.py", "bumpgate.toml", ".gitignore"}


def test_a_build_that_fails_names_its_log(root: Path) -> None:
    (root / "pyproject.toml").write_text(BACKEND)
    (root / "backend.py").write_text("def build_wheel(*_): raise RuntimeError('no compiler')\n")
    words = r"the project cannot be built: RuntimeError: no compiler \(log: "
    with pytest.raises(BuildError, match=words) as failed:
        project.installed(root, Path(sys.executable), "environment", lambda line: None)
    assert "no compiler" in failed.value.log.read_text()


def test_a_build_may_import_torch_without_a_word(root: Path) -> None:
    (root / "pyproject.toml").write_text(BACKEND)
    (root / "backend.py").write_text(f"import torch\n{BACKEND_CODE}")
    place = project.installed(root, Path(sys.executable), "environment", lambda line: None)
    assert (place / "net.py").is_file()


def test_a_base_must_be_a_commit(root: Path) -> None:
    with pytest.raises(project.ProjectError, match="--base gone: no such commit here"):
        project.commit_of(root, "gone")


def test_a_run_imports_the_project_of_its_side(tmp_path: Path) -> None:
    """Also if pytest puts the sources of the work tree in front of the path."""
    foreign = Foreign(tmp_path)
    foreign.write("pytest.ini", "[pytest]\npythonpath = src\n")
    foreign.write("bumpgate.toml", LANE)
    foreign.write("src/net.py", "WIDTH = 2\n")
    foreign.write("side/net.py", "WIDTH = 1\n")
    foreign.write(
        "tests/test_net.py",
        "import pytest\nimport net\n@pytest.mark.mine\ndef test_width(row):\n"
        "    row.count('net/a/width', net.WIDTH, seen=1, expected=2)\n",
    )
    assert "not reviewed: measured 2" in foreign.pytest("-m", "mine").out
    side = foreign.pytest("-m", "mine", **{PROJECT: str(tmp_path / "side")})
    assert (side.code, f"{PROJECT} in the environment: only bumpgate sets them" in side.err) == (4, True)
    plugin = (sys.executable, "-m", "pytest", "-p", "bumpgate.plugin", "-m", "mine")
    env = foreign.env | {PROJECT: str(tmp_path / "side"), PARENT: str(os.getpid())}
    done = subprocess.run(plugin, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "expected 2 (derived), measured 1" in done.stdout, done.stdout + done.stderr


LOCKED = """
[project]
name = "net"
version = "1"
requires-python = ">=3.10"
dependencies = ["torch>=1,<3"]
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIndex]:
    wheels = [fake_wheel(tmp_path, "torch", version) for version in ("1.0", "2.0", "3.0")]
    with LocalIndex(wheels) as made:
        isolated(monkeypatch, tmp_path, made.url)
        yield made


def test_the_projects_own_lock_moves_through_uv(root: Path, index: LocalIndex) -> None:
    (root / "pyproject.toml").write_text(LOCKED)
    code, output = run_uv(("lock", "--project", root, "--upgrade-package", "torch==1.0"), root / "log")
    before = (root / "uv.lock").read_text()
    assert (code, locked(before)["torch"]) == (0, "1.0"), output
    moved = project.relocked(root, {"torch": "2.0", "other": "1"})
    assert locked(moved)["torch"] == "2.0"
    assert (root / "uv.lock").read_text() == before
    with pytest.raises(project.ProjectError, match=r"uv\.lock cannot have torch==3\.0: .*allow it"):
        project.relocked(root, {"torch": "3.0"})
