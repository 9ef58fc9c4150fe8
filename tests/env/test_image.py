"""`bumpgate image`: the Containerfile of a lock, and its installation step executed by pip without a container."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bumpgate.env import store
from bumpgate.env.lane import lane_lock
from bumpgate.env.locks import Lock, Locked, Wheel
from bumpgate.env.store import sha256_of
from suites.support.planted import planted
from tests.env.conftest import Run
from tests.support import golden
from tests.support.lane_files import declare_lanes, save_lock
from tests.support.local_index import fake_wheel

BASE = f"docker.io/library/python:3.12@sha256:{'ab' * 32}"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree whose lane v6e has a lock of two wheels, one of them with a local version label, and a script."""
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("BUMPGATE_STORE", raising=False)
    root = tmp_path / "tree"
    declare_lanes(root)
    (root / "lanes/v6e/make_cuda_stubs.py").touch()
    packages = []
    for name, version in (("torch", "1.0+cpu"), ("numpy", "2.0")):
        path = fake_wheel(tmp_path / "wheels", name, version)
        wheel = Wheel(path.name, sha256_of(path))
        store.put(wheel, [path.read_bytes()])
        packages.append(Locked(name, version, (wheel,)))
    save_lock(lane_lock(root, "v6e"), Lock(tuple(packages), "3.12"))
    monkeypatch.chdir(root)
    return root


def test_image_matches_the_reviewed_containerfile(tree: Path, run: Run) -> None:
    code, out, err = run("image", "v6e", "--base", BASE)
    names = {str(tree): "TREE", str(store.store_root()): "STORE"}
    text = golden.transcript(["image", "v6e", "--base", BASE], code, out, err, names)
    text += (tree / "Containerfile.v6e").read_text()
    golden.check("image_v6e", re.sub(r"(?<!@sha256:)\b[0-9a-f]{64}\b", "SHA256", text))


def install(tree: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Run the pip command of Containerfile.v6e on the store, which the build mounts as /wheels."""
    text = (tree / "Containerfile.v6e").read_text()
    listed = re.search(r"<<END /requirements.txt\n(.*?)END\n", text, re.DOTALL)
    command = re.search(r"python -m (pip install .*) -r /wheels/requirements.txt", text)
    assert listed
    assert command
    requirements = target.with_suffix(".txt")
    requirements.write_text(listed[1].replace("/wheels", str(store.store_root())))
    flags = ["--target", str(target), "--python-version", "3.12", "--only-binary", ":all:"]
    return subprocess.run(
        [sys.executable, "-m", *command[1].split(), *flags, "-r", str(requirements)],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
    )


@planted("C19", "a wheel of the image has other bytes than the lock")
def test_image_installs_only_the_locked_bytes(tree: Path, run: Run, tmp_path: Path) -> None:
    run("image", "v6e", "--base", BASE)
    text = (tree / "Containerfile.v6e").read_text()
    copied = re.findall(r"^COPY --from=store (\S+) /(\S+)$", text, re.MULTILINE)
    installed = re.findall(r"^/wheels/(\S+) --hash=", text, re.MULTILINE)
    assert copied == [(path, path) for path in installed], "every wheel that it installs"
    assert all((store.store_root() / path).is_file() for path in installed)
    done = install(tree, tmp_path / "good")
    assert done.returncode == 0, done.stderr
    found = sorted(path.name for path in (tmp_path / "good").glob("*.dist-info"))
    assert found == ["numpy-2.0.dist-info", "torch-1.0+cpu.dist-info"]
    path = next(path for _, path in store.contents() if path.name.startswith("numpy"))
    path.write_bytes(path.read_bytes() + b" ")
    done = install(tree, tmp_path / "bad")
    assert done.returncode
    assert "DO NOT MATCH THE HASHES" in done.stderr


def test_image_names_wheels_that_the_store_lacks(tree: Path, run: Run) -> None:
    path = next(path for _, path in store.contents() if path.name.startswith("numpy"))
    path.unlink()
    code, out, _ = run("image", "v6e", "--base", BASE)
    assert code == 0
    assert out.splitlines()[-1] == "1 of them are not in the wheel store: bumpgate freeze --lane v6e"


@pytest.mark.parametrize("base", ["python", "python:3.12", "python@sha256:abc", f"a b@sha256:{'0' * 64}"])
def test_image_refuses_a_base_without_digest(base: str, tree: Path, run: Run) -> None:
    code, out, err = run("image", "v6e", "--base", base)
    assert (code, out, len(err.splitlines())) == (4, "", 1)
    assert f"invalid base image {base!r} (expected NAME@sha256: and 64 digits)" in err
    assert not (tree / "Containerfile.v6e").exists()


def test_image_of_a_lane_without_lock_prints_one_line(tree: Path, run: Run) -> None:
    code, out, err = run("image", "cpu", "--base", BASE)
    lacking = "lanes/cpu/pylock.toml: cannot be read (No such file or directory); bumpgate freeze writes it"
    assert (code, out, err) == (4, "", f"bumpgate: {lacking}\n")
