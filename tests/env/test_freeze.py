"""The lock of a lane: independent of the host, pins every byte, builds anywhere, and is written atomically."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bumpgate import cli
from bumpgate.core.errors import BumpgateError
from bumpgate.env import store, uv
from bumpgate.env.build import BuildError, build
from bumpgate.env.freeze import pinned_requirements
from bumpgate.env.lane import LaneContext, lane_lock, lane_request
from bumpgate.env.locks import LockError, read_lock
from bumpgate.env.packages import satisfies
from suites.support.lanes import LANES
from suites.support.planted import planted
from tests.support.lane_files import declare_lanes
from tests.support.local_index import LocalIndex, fake_wheel, isolated
from tests.support.tree import ROOT


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIndex]:
    folder = tmp_path / "wheels"
    wheels = [fake_wheel(folder, "torch", v, requires=["triton"]) for v in ("1.0", "1.1")]
    wheels += [fake_wheel(folder, name, "1.0") for name in ("triton", "helper")]
    with LocalIndex(wheels) as served:
        isolated(monkeypatch, tmp_path, served.url)
        yield served


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "tree"
    declare_lanes(root)
    (root / "pyproject.toml").write_text(
        '[project]\nname = "bumpgate"\n[project.optional-dependencies]\ncpu = ["helper>=1", "torch==1.0"]\n'
    )
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def freeze(
    index: LocalIndex, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Call `bumpgate freeze` -> exit code, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bumpgate", "freeze", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


Freeze = Callable[..., tuple[int, str, str]]


def test_lock_pins_every_file_without_locations(freeze: Freeze, tree: Path) -> None:
    code, out, err = freeze("--lane", "cpu")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "froze 3 packages in lanes/cpu/pylock.toml; review: git diff"
    text = lane_lock(tree, "cpu").read_text()
    assert "://" not in text
    assert str(tree.parent) not in text
    lock = read_lock(lane_lock(tree, "cpu"))
    assert lock.versions == {"helper": "1.0", "torch": "1.0", "triton": "1.0"}
    assert lock.python == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert all(store.verify(wheel) for package in lock.packages for wheel in package.wheels)
    check = ["sha256sum", "--check", "--quiet", store.SUMS]
    assert subprocess.run(check, cwd=store.store_root()).returncode == 0
    assert freeze()[:2] == (0, out.splitlines()[-1] + "\n"), "a second freeze changes nothing"
    assert lane_lock(tree, "cpu").read_text() == text


def test_lock_builds_from_index_and_from_store(
    freeze: Freeze, index: LocalIndex, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze("--lane", "cpu")
    monkeypatch.setenv("BUMPGATE_STORE", str(tmp_path / "empty"))
    there = build(lane_request(tree, "cpu"), root=tmp_path / "there")
    monkeypatch.delenv("BUMPGATE_STORE")
    index.fail(500)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "another cache"))
    here = build(lane_request(tree, "cpu", offline=True), root=tmp_path / "here")
    assert dict(there.packages) == dict(here.packages) == {"helper": "1.0", "torch": "1.0", "triton": "1.0"}
    assert there.key == here.key, "the key does not depend on where the files come from"


@planted("C39", "an index serves other bytes under the adopted wheel's name")
def test_wheel_with_another_hash_is_refused(
    freeze: Freeze, index: LocalIndex, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze("--lane", "cpu")
    monkeypatch.setenv("BUMPGATE_STORE", str(tmp_path / "empty"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "another cache"))
    fake_wheel(tmp_path / "wheels", "torch", "1.0", "changed = True\n", requires=["triton"])
    with pytest.raises(BuildError, match=r"[Hh]ash"):
        build(lane_request(tree, "cpu"))


def test_freeze_of_candidate_moves_the_pin_of_the_extra(freeze: Freeze, tree: Path) -> None:
    project = (tree / "pyproject.toml").read_text()
    freeze("--lane", "cpu")
    code, out, _ = freeze("--lane", "cpu", "--candidate", "torch==1.1")
    assert (code, out.splitlines()[0]) == (0, "  torch 1.0 -> 1.1")
    assert (tree / "pyproject.toml").read_text() == project.replace("torch==1.0", "torch==1.1")
    assert str(LaneContext(tree, "cpu").packages.torch) == "==1.1"


@pytest.mark.parametrize("absolute", [True, False], ids=["absolute", "relative"])
def test_freeze_of_a_wheel_file_stores_it(freeze: Freeze, tree: Path, tmp_path: Path, absolute: bool) -> None:
    """The folder's name has a space, and characters that a URL would quote in this way."""
    path = fake_wheel(tmp_path / "my%20own wheels", "torch", "1.1", requires=["triton"])
    code, _, err = freeze(
        "--lane", "cpu", "--candidate", str(path if absolute else f"../{path.parent.name}/{path.name}")
    )
    assert (code, err) == (0, ""), err
    lock = read_lock(lane_lock(tree, "cpu"))
    assert lock.versions["torch"] == "1.1"
    (wheel,) = next(p.wheels for p in lock.packages if p.name == "torch")
    assert store.verify(wheel).read_bytes() == path.read_bytes()
    assert build(lane_request(tree, "cpu", str(path))).packages["torch"] == "1.1"


def test_freeze_keeps_versions_without_upgrade(
    freeze: Freeze, index: LocalIndex, tree: Path, tmp_path: Path
) -> None:
    freeze("--lane", "cpu")
    index.add(fake_wheel(tmp_path / "wheels", "helper", "2.0"))
    assert len(freeze("--lane", "cpu")[1].splitlines()) == 1
    assert freeze("--lane", "cpu", "--upgrade")[1].splitlines()[0] == "  helper 1.0 -> 2.0"


@pytest.mark.parametrize(
    "damage", ["", "{", 'lock-version = "1.0"\n[[packages]]\nname = "x\\ny"\nversion = "1"\n']
)
def test_freeze_writes_a_damaged_lock_again(freeze: Freeze, tree: Path, damage: str) -> None:
    freeze("--lane", "cpu")
    path = lane_lock(tree, "cpu")
    whole = path.read_text()
    path.write_text(damage)
    code, out, err = freeze("--lane", "cpu")
    assert (code, path.read_text()) == (0, whole), err
    assert "all versions are chosen anew" in err
    assert "froze 3 packages" in out


@pytest.mark.parametrize("fault", ["500", "file gone", "unknown", "no lane", "no lock"])
def test_failed_freeze_is_one_line_and_changes_nothing(
    fault: str, freeze: Freeze, index: LocalIndex, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, code = {
        "500": (("--lane", "cpu"), 125),
        "file gone": (("--lane", "cpu"), 4),
        "unknown": (("--lane", "cpu", "--candidate", "torch==9"), 4),
        "no lane": (("--lane", "tpu"), 4),
        "no lock": ((), 4),
    }[fault]
    if fault != "no lock":
        freeze("--lane", "cpu")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "another cache"))
    if fault == "500":
        index.fail(500)
    elif fault == "file gone":
        index.add(late := fake_wheel(tmp_path / "wheels", "torch", "1.1", requires=["triton"]))
        index.vanish(late)
        args = (*args, "--candidate", "torch==1.1")
    before = {path: path.read_bytes() for path in (tree / "lanes").glob("*/*")}
    ended, out, err = freeze(*args)
    assert (ended, out, len(err.splitlines())) == (code, "", 1), err
    assert {path: path.read_bytes() for path in (tree / "lanes").glob("*/*")} == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a lock file"),
        ('lock-version = "2.0"\n', "version 1.0"),
        ('lock-version = "1.0"\n', "packages"),
        ('lock-version = "1.0"\n[[packages]]\nname = "a"\nversion = "1"\n', "has no wheel"),
        (
            'lock-version = "1.0"\n[[packages]]\nname = "a"\nversion = "1"\n'
            'wheels = [{ path = "a-1-py3-none-any.whl", hashes = { md5 = "0" } }]\n',
            "without its sha256",
        ),
    ],
)
def test_invalid_lock_file_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "pylock.cpu.toml"
    with pytest.raises(LockError, match="cannot be read"):
        read_lock(path)
    path.write_text(text)
    with pytest.raises(LockError, match=words) as caught:
        read_lock(path)
    assert "\n" not in str(caught.value)


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
    assert pinned_requirements(context, lock) == {}, (
        f"bumpgate freeze --lane {lane} moves the pins of the extra"
    )
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
