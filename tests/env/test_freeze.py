"""The lock of a lane: independent of the host, pins every byte, builds anywhere, and is written atomically."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bumpgate.core.errors import BumpgateError
from bumpgate.env import store, uv
from bumpgate.env.build import BuildError, build
from bumpgate.env.freeze import pinned_requirements
from bumpgate.env.lane import LaneContext, lane_lock, lane_request
from bumpgate.env.locks import read_lock
from bumpgate.env.packages import satisfies
from suites.support.lanes import LANES
from suites.support.planted import planted
from tests.env.conftest import Run
from tests.support.local_index import LocalIndex, fake_wheel
from tests.support.tree import ROOT

Freeze = Callable[..., tuple[int, str, str]]
ADOPTED = {"helper": "2.0", "torch": "1.0", "triton": "3.0"}


@pytest.fixture
def freeze(index: LocalIndex, tree: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Freeze:
    """Return a function that calls `bumpgate freeze --lane cpu` in the tree."""
    monkeypatch.chdir(tree)
    return lambda *args, lane=("--lane", "cpu"): run("freeze", *lane, *args)


@pytest.fixture
def elsewhere(freeze: Freeze, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze the lane, then take the store and the cache of another host."""
    freeze()
    monkeypatch.setenv("BUMPGATE_STORE", str(tmp_path / "empty"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "another cache"))


def test_lock_pins_every_file_without_locations(freeze: Freeze, tree: Path) -> None:
    code, out, err = freeze()
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "froze 3 packages in lanes/cpu/pylock.toml; review: git diff"
    text = lane_lock(tree, "cpu").read_text()
    assert "://" not in text
    assert str(tree.parent) not in text
    lock = read_lock(lane_lock(tree, "cpu"))
    assert lock.versions == ADOPTED
    assert lock.python == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert all(store.verify(wheel) for package in lock.packages for wheel in package.wheels)
    check = ["sha256sum", "--check", "--quiet", store.SUMS]
    assert subprocess.run(check, cwd=store.store_root()).returncode == 0
    assert freeze(lane=())[:2] == (0, out.splitlines()[-1] + "\n"), "a second freeze changes nothing"
    assert lane_lock(tree, "cpu").read_text() == text


def test_lock_builds_from_index_and_from_store(
    elsewhere: None, index: LocalIndex, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = build(lane_request(tree, "cpu"), root=tmp_path / "there")
    monkeypatch.delenv("BUMPGATE_STORE")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "a third cache"))
    index.fail(500)
    here = build(lane_request(tree, "cpu", offline=True), root=tmp_path / "here")
    assert dict(there.packages) == dict(here.packages) == ADOPTED
    assert there.key == here.key, "the key does not depend on where the files come from"


@planted("C39", "an index serves other bytes under the adopted wheel's name")
def test_wheel_with_another_hash_is_refused(elsewhere: None, tree: Path, tmp_path: Path) -> None:
    fake_wheel(tmp_path / "wheels", "torch", "1.0", "changed = True\n", requires=["triton==3.0"])
    with pytest.raises(BuildError, match=r"[Hh]ash"):
        build(lane_request(tree, "cpu"))


def test_freeze_of_candidate_moves_the_pin_of_the_extra(freeze: Freeze, tree: Path) -> None:
    project = (tree / "pyproject.toml").read_text()
    freeze()
    code, out, _ = freeze("--candidate", "torch==1.1")
    assert (code, out.splitlines()[:2]) == (0, ["  torch 1.0 -> 1.1", "  triton 3.0 -> 3.1"])
    assert (tree / "pyproject.toml").read_text() == project.replace("torch==1.0", "torch==1.1")
    assert str(LaneContext(tree, "cpu").packages.torch) == "==1.1"


@pytest.mark.parametrize("absolute", [True, False], ids=["absolute", "relative"])
def test_freeze_of_a_wheel_file_stores_it(freeze: Freeze, tree: Path, tmp_path: Path, absolute: bool) -> None:
    """The folder's name has a space, and characters that a URL would quote in this way."""
    path = fake_wheel(tmp_path / "my%20own wheels", "torch", "1.1", requires=["triton"])
    code, _, err = freeze("--candidate", str(path if absolute else f"../{path.parent.name}/{path.name}"))
    assert (code, err) == (0, ""), err
    (locked,) = (p for p in read_lock(lane_lock(tree, "cpu")).packages if p.name == "torch")
    assert locked.version == "1.1"
    assert store.verify(*locked.wheels).read_bytes() == path.read_bytes()
    assert build(lane_request(tree, "cpu", str(path))).packages["torch"] == "1.1"


def test_freeze_keeps_versions_without_upgrade(freeze: Freeze, index: LocalIndex, tmp_path: Path) -> None:
    freeze()
    index.add(fake_wheel(tmp_path / "wheels", "helper", "3.0"))
    assert len(freeze()[1].splitlines()) == 1
    assert freeze("--upgrade")[1].splitlines()[0] == "  helper 2.0 -> 3.0"


@pytest.mark.parametrize(
    "damage", ["", "{", 'lock-version = "1.0"\n[[packages]]\nname = "x\\ny"\nversion = "1"\n']
)
def test_freeze_writes_a_damaged_lock_again(freeze: Freeze, tree: Path, damage: str) -> None:
    freeze()
    path = lane_lock(tree, "cpu")
    whole = path.read_text()
    path.write_text(damage)
    code, out, err = freeze()
    assert (code, path.read_text()) == (0, whole), err
    assert "all versions are chosen anew" in err
    assert "froze 3 packages" in out


@pytest.mark.parametrize(
    ("fault", "args", "code"),
    [
        ("500", (), 125),
        ("file gone", ("--candidate", "torch==1.1"), 4),
        ("unknown", ("--candidate", "torch==9"), 4),
        ("no lane", ("--lane", "tpu"), 4),
        ("no lock", (), 4),
    ],
)
def test_failed_freeze_is_one_line_and_changes_nothing(
    fault: str,
    args: tuple[str, ...],
    code: int,
    freeze: Freeze,
    index: LocalIndex,
    tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fault != "no lock":
        freeze()
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "another cache"))
    if fault == "500":
        index.fail(500)
    elif fault == "file gone":
        index.gone.add("torch-1.1-py3-none-any.whl")
    before = {path: path.read_bytes() for path in (tree / "lanes").glob("*/*")}
    ended, out, err = freeze(*args, lane=()) if fault in ("no lane", "no lock") else freeze(*args)
    assert (ended, out, len(err.splitlines())) == (code, "", 1), err
    assert {path: path.read_bytes() for path in (tree / "lanes").glob("*/*")} == before


@pytest.mark.parametrize("lane", LANES)
def test_committed_lock_satisfies_the_lane_requirements(lane: str) -> None:
    """After an edit of the extra, the lane must be frozen again."""
    context = LaneContext(ROOT, lane)
    path, lock = context.lock_path, read_lock(context.lock_path)
    assert "://" not in path.read_text()
    for text in context.requirements():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": lock.python}):
            version = lock.versions[canonicalize_name(requirement.name)]
            assert satisfies(version, requirement.specifier), text
    moved = pinned_requirements(context, lock)
    assert moved == {}, f"bumpgate freeze --lane {lane} moves the pins of its group"
    row = context.packages
    assert {"torch", *row.packages} == set(context.declared.pins), "the lock has what the lane pins"
    files = {package.name: [wheel.sha256 for wheel in package.wheels] for package in lock.packages}
    assert [files[wheel.name] for wheel in row.wheels] == [[wheel.sha256] for wheel in row.wheels]


@pytest.mark.parametrize(
    ("settings", "verify"),
    [
        ({}, True),
        ({"SSL_CERT_FILE": "s.pem"}, "s.pem"),
        ({"REQUESTS_CA_BUNDLE": "r.pem", "SSL_CERT_FILE": "s.pem"}, "r.pem"),
    ],
    ids=["default", "OpenSSL's", "that of requests first"],
)
def test_wheels_are_fetched_with_the_certificates_of_the_host(
    settings: dict[str, str], verify: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, object]] = []

    def get(url: str, **options: object) -> None:
        calls.append(options)
        raise requests.ConnectionError("no such host\n  at all")

    monkeypatch.setattr(uv, "host_settings", lambda: settings)
    monkeypatch.setattr(requests, "get", get)
    with pytest.raises(BumpgateError, match=r"^https://x/a.whl cannot be fetched: no such host at all$"):
        list(uv.blocks("https://user:pass@x/a.whl"))
    assert calls == [{"stream": True, "timeout": 30.0, "verify": verify}]
    settings["UV_HTTP_TIMEOUT"] = "soon"
    with pytest.raises(
        BumpgateError, match=r"^UV_HTTP_TIMEOUT=soon: not a number of seconds; export UV_HTTP"
    ):
        list(uv.blocks("https://x/a.whl"))
