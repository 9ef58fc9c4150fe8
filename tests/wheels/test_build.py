"""Parts of a wheel's build: its sources, its tools, and the cause of a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from bumpgate.wheels import build as building

TARGET: Any = SimpleNamespace(interpreter=None)
CONTENT = b"sources of fast"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """An index with two archives of one package. Returns the URLs that are fetched."""
    fetched: list[str] = []

    @contextmanager
    def get(url: str, **options: object) -> Iterator[Any]:
        fetched.append(url)
        yield SimpleNamespace(
            raise_for_status=lambda: None, iter_content=lambda size: [CONTENT[:4], CONTENT[4:]]
        )

    def listed(name: str, content: bytes) -> Any:
        return SimpleNamespace(
            filename=name, url=f"https://x/{name}", digests={"sha256": sha256(content).hexdigest()}
        )

    files = [listed("fast-0.9.tar.gz", b"older"), listed("fast-1.0.tar.gz", CONTENT)]
    monkeypatch.setattr(building, "source_distributions", lambda package, index: files)
    monkeypatch.setattr(building, "home", lambda: tmp_path)
    monkeypatch.setattr(requests, "get", get)
    return fetched


def test_archive_is_downloaded_once_by_its_digest(index: list[str]) -> None:
    build: Any = SimpleNamespace(package="fast", version="1.0", sdist=sha256(CONTENT).hexdigest())
    for _ in range(2):
        found = building.download_sdist(build)
        assert (found.name, found.read_bytes()) == ("fast-1.0.tar.gz", CONTENT)
    assert index == ["https://x/fast-1.0.tar.gz"]
    assert [path.name for path in found.parent.iterdir()] == [found.name]


@pytest.mark.parametrize(
    ("version", "digest", "words"),
    [
        ("1.1", "a" * 64, r"^fast 1.1: the index has no sdist of sha256 a{12}\.\.\."),
        ("0.9", sha256(b"older").hexdigest(), r"^fast-0.9.tar.gz: the index served a file with another"),
    ],
)
def test_archive_that_the_index_lacks_or_changed_is_refused(
    version: str, digest: str, words: str, index: list[str]
) -> None:
    build: Any = SimpleNamespace(package="fast", version=version, sdist=digest)
    with pytest.raises(building.WheelBuildError, match=words):
        building.download_sdist(build)
    assert not [*building.home().rglob("*.partial")]


def test_cause_of_a_failed_build_is_its_first_error_or_its_end(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    assert building._cause(log) == "no output"
    log.write_text("one\n\ntwo\nthree\n" + "four\n" * building.TAIL_LINES)
    assert building._cause(log) == " | ".join(["four"] * building.TAIL_LINES)
    log.write_text("one\na.cu:3: error: no such type\nb.cu:4: error: because of it\nmake: failed\n")
    assert building._cause(log) == "a.cu:3: error: no such type"


@pytest.mark.parametrize("digest", ["0" * 64, "f" * 64])
def test_archive_of_another_digest_is_not_built(digest: str, tmp_path: Path) -> None:
    archive = tmp_path / "fast-1.0.tar.gz"
    archive.write_bytes(b"sources")
    build: Any = SimpleNamespace(package="fast", sdist=digest)
    words = rf"^{archive.name}: sha256 \w+..., the lane has {digest[:12]}"
    with pytest.raises(building.WheelBuildError, match=words):
        building.build_wheel(build, TARGET, archive, building.Limits())


def test_build_tools_are_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[object]] = []
    code = 1

    def run_uv(arguments: list[object], log: Path) -> tuple[int, str]:
        calls.append(arguments)
        tmp_path.joinpath("tools").mkdir(exist_ok=True)
        return code, "no such index"

    monkeypatch.setattr(building, "run_uv", run_uv)
    place, log = tmp_path / "tools", tmp_path / "log"
    with pytest.raises(building.WheelBuildError, match=r"tools cannot be installed: no such index \(log: "):
        building._tools(place, Path("python3.12"), log)
    code = 0
    for _ in range(2):
        assert building._tools(place, Path("python3.12"), log) == place
    assert len(calls) == 2
    assert {*building.TOOLS} <= {*calls[1]}
    assert calls[1][calls[1].index("--target") + 1] == str(place)
