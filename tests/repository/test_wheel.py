"""The wheel of this repository: what it holds, and that it works without the sources."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.tree import ROOT

FILES = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
ENTRY_POINTS = {
    ("console_scripts", "bumpgate", "bumpgate.cli:main"),
    ("pytest11", "bumpgate.plugin", "bumpgate.plugin"),
}


def run(*args: str, cwd: Path, **env: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "BUMPGATE_", "PYTHON"))}
    done = subprocess.run([sys.executable, *args], cwd=cwd, env=kept | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder), cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "bumpgate")
    sources = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    info = f"bumpgate-{wheel.name.split('-')[1]}.dist-info"
    assert {f"{info}/{name}" for name in FILES} | set(sources) == set(zipfile.ZipFile(wheel).namelist())


def test_wheel_alone_runs_init_and_the_plugin(wheel: Path, tmp_path: Path) -> None:
    """The plugin of the unpacked wheel takes the test of another repository into its lane."""
    site, root = tmp_path / "site", tmp_path / "theirs"
    zipfile.ZipFile(wheel).extractall(site)
    (found,) = metadata.distributions(name="bumpgate", path=[str(site)])
    plain = [each for each in found.requires or [] if ";" not in each]
    assert len(plain) <= 8, plain
    assert set(found.metadata.get_all("Provides-Extra")) == {"report", "fleet", "notify"}, "a guest's extras"
    assert found.version == run("-c", "import bumpgate; print(bumpgate.__version__)", cwd=site).strip()
    assert {(e.group, e.name, e.value) for e in found.entry_points} == ENTRY_POINTS
    root.mkdir()
    (root / "test_a.py").write_text(
        "import bumpgate.plugin as p\n\ndef test_a(): print('plugin:', p.__file__)\n"
    )
    path = {"PYTHONPATH": str(site), "TMPDIR": str(tmp_path)}
    init = "from bumpgate.cli import main; main()"
    run("-c", init, "init", "--torch", "2.13.0", "--tests", "test_a.py", cwd=root, **path)
    out = run("-m", "pytest", "-m", "mine", "-s", cwd=root, **path)
    assert f"plugin: {site / 'bumpgate/plugin/__init__.py'}" in out
    assert ": 1 PASS; device cpu;" in out
