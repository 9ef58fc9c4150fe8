"""Disk space of environments: files are shared and downloaded once, old ones make room, a full disk is named."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bumpgate.env import cached
from bumpgate.env.build import BuildError, Environment, Request, build, release
from bumpgate.env.cached import VARIABLE, discard, kept, usage
from bumpgate.env.uv import uv_cache
from suites.support.planted import planted
from tests.env.conftest import Run
from tests.support.local_index import LocalIndex, fake_wheel, isolated

MIB = 1 << 20
SIZE = 3 * MIB


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIndex]:
    """torch 1.0 to 4.0 of SIZE each, which need one CUDA library of SIZE."""
    folder = tmp_path / "wheels"
    wheels = [fake_wheel(folder, "cuda", "1.0", {"cuda/__init__.py": "", "cuda/library": "c" * SIZE})]
    for n in "1234":
        body = {"torch/__init__.py": f"__version__ = '{n}.0'\n", "torch/data": n * SIZE}
        wheels.append(fake_wheel(folder, "torch", f"{n}.0", body, requires=["cuda==1.0"]))
    with LocalIndex(wheels) as served:
        isolated(monkeypatch, tmp_path, served.url)
        yield served


def torch(n: int, *, used: float = 0) -> Environment:
    """Build an environment and release it. used: the time of its last use."""
    environment = build(Request((f"torch=={n}.0",)))
    release(environment)
    if used:
        os.utime(environment.python.parents[1] / cached.NOTE, (used, used))
    return environment


def unpacked() -> list[str]:
    """Return the packages in uv's cache, by the name of their folder and first letter of its content."""
    return sorted(
        f"{path.parent.name} {path.read_text()[0]}" for path in uv_cache().glob("archive-v*/*/*/[dl]*a*")
    )


def test_second_build_downloads_nothing(index: LocalIndex) -> None:
    """The index sends no header that makes its files cacheable."""
    first = torch(1)
    index.requests.clear()
    shutil.rmtree(first.python.parents[1])
    assert torch(1).packages == first.packages
    assert index.fetched == []


def test_saved_resolution_is_dropped_if_the_index_lacks_it(index: LocalIndex, tmp_path: Path) -> None:
    index.add(newer := fake_wheel(tmp_path / "wheels", "cuda", "1.0.1"))
    request = Request(("torch==1.0", "cuda>=1.0"), dependencies=False)
    first = build(request)
    assert first.packages["cuda"] == "1.0.1"
    release(first)
    discard(first.key)
    index.remove(newer)
    shutil.rmtree(uv_cache())
    assert build(request).packages["cuda"] == "1.0"


def test_environments_share_files_and_count_them_once(index: LocalIndex) -> None:
    first, second = torch(1), torch(2)
    library = "lib/python*/site-packages/cuda/library"
    inodes = {next(e.python.parents[1].glob(library)).stat().st_ino for e in (first, second)}
    assert len(inodes) == 1
    assert 3 * SIZE < usage() < 4 * SIZE < sum(entry.size for entry in kept())


def test_discard_frees_what_only_that_environment_used(index: LocalIndex) -> None:
    first, second = torch(1), torch(2)
    assert unpacked() == ["cuda c", "torch 1", "torch 2"]
    assert discard(first.key)
    assert unpacked() == ["cuda c", "torch 2"]
    assert torch(1).packages == first.packages, "uv downloads it again"
    assert discard(second.key)
    assert unpacked() == ["cuda c", "torch 1"]


def test_local_wheel_is_installed_again_after_a_discard(index: LocalIndex, tmp_path: Path) -> None:
    path = fake_wheel(tmp_path / "local", "fast", "1.0", {"fast/data": "f" * SIZE})
    for request in (
        Request((f"fast @ {path.as_uri()}",)),
        Request(("fast==1.0",), find_links=(str(path.parent),), offline=True),
    ):
        first = build(request)
        release(first)
        assert discard(first.key)
        assert unpacked() == []
        assert build(request).packages == {"fast": "1.0"}
        release(first)
        discard(first.key)


@planted("C19", "environments that exceed the disk budget")
def test_build_deletes_the_oldest_environments_first(
    index: LocalIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest, newer = torch(1, used=1000), torch(2, used=2000)
    in_use = build(Request(("torch==3.0",)))
    os.utime(in_use.python.parents[1] / cached.NOTE, (500, 500))
    monkeypatch.setenv(VARIABLE, "17M")
    said: list[str] = []
    made = build(Request(("torch==4.0",)), say=said.append)
    assert [entry.key for entry in kept()] == [in_use.key, newer.key, made.key]
    assert said[1].startswith("deleted the environment torch==1.0 (last used 1970-01-01 ")
    assert usage() <= 17 * MIB
    assert not (cached.home() / "environments" / oldest.key).exists()


def test_budget_smaller_than_environments_in_use_is_one_line(
    index: LocalIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_use = build(Request(("torch==1.0",)))
    monkeypatch.setenv(VARIABLE, "7M")
    with pytest.raises(BuildError, match=r"--disk 7M: .* in use and .* needed; allow 0\.0 GiB") as caught:
        build(Request(("torch==2.0",)))
    assert "\n" not in str(caught.value)
    assert [entry.key for entry in kept()] == [in_use.key]


def test_nearly_full_disk_is_reported_before_a_download(
    index: LocalIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch(1)
    free = namedtuple("free", "free")(MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: free)
    index.requests.clear()
    with pytest.raises(BuildError, match=r"torch==2\.0: the disk of .* is full: 0\.0 GiB free") as caught:
        build(Request(("torch==2.0",)))
    assert "\n" not in str(caught.value)
    assert "export BUMPGATE_HOME=DIR" in str(caught.value)
    assert kept() == [], "whatever was not in use is deleted first"


def test_disk_option_deletes_and_refuses_a_wrong_size(
    index: LocalIndex, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1G")  # restored after the option has set it
    torch(1, used=1000)
    newer = torch(2, used=2000)
    code, out, _ = run("environments", "--disk", "7M")
    assert (code, "deleted the environment torch==1.0" in out) == (0, True)
    assert [entry.key for entry in kept()] == [newer.key]
    fault = "bumpgate: --disk 40 G B: not a size (expected e.g. 40G)\n"
    assert run("environments", "--disk", "40 G B") == (4, "", fault)


def test_installations_unpack_together_and_deletions_wait(tmp_path: Path) -> None:
    def free(mode: int) -> bool:
        with cached.lock_of(tmp_path / cached.UNPACKING) as lock, suppress(BlockingIOError):
            fcntl.flock(lock, mode | fcntl.LOCK_NB)
            return True
        return False

    with cached.unpacking(tmp_path):
        assert (free(fcntl.LOCK_SH), free(fcntl.LOCK_EX)) == (True, False)
    with cached.unpacking(tmp_path, exclusive=True):
        assert not free(fcntl.LOCK_SH)
    assert free(fcntl.LOCK_EX)
