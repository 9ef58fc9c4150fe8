"""`bumpgate mirror`: nightlies with the wheels that they pin, from indexes with the quirks of the real ones.

The HTML pages have the form of download.pytorch.org's: hrefs with %2B and a link text with +, metadata digests without
a digest of the wheel (pytorch issues 164347 and 173099), wheels of other platforms, and days on which triton was
missing (141956, 161833).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from bumpgate.core.errors import BumpgateError
from bumpgate.env.mirror import Mirror, mirror_root
from bumpgate.env.request import RUNNING, Request
from bumpgate.env.store import SUMS, sha256_of
from bumpgate.gate import command as gate
from tests.env.conftest import Run
from tests.support.local_index import LocalIndex, fake_wheel, isolated
from tests.support.loopback import Loopback
from tests.support.tree import ROOT

TRITON, CUBLAS = "triton==3.8.0+gitbeef123", "cuda-toolkit[cublas]==13.0.*; platform_system == 'Linux'"
LARGE = {"torch/__init__.py": "", "torch/data.txt": "x" * 200_000}


@dataclass
class Pages(Loopback):
    """An index of HTML pages on loopback, which serves ranges.

    plain: file names without a digest.
    gone: files that answer 404, or 403 if unlisted.
    unlisted: files that no page lists.
    cut: bytes after which each transfer breaks off, 0 for none.
    spoilt: a file whose bytes differ from the listed ones.
    """

    wheels: list[Path] = field(default_factory=list)
    plain: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    unlisted: set[str] = field(default_factory=set)
    cut: int = 0
    spoilt: str = ""
    ranges: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/whl/nightly/cu130"

    def __enter__(self) -> Pages:
        pages = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = unquote(self.path.rstrip("/").rsplit("/", 1)[-1])
                if not name.endswith(".whl"):
                    self.answer(*pages.page(name), "text/html")
                    return
                pages.fetched.append(name)
                content = {p.name: p for p in pages.wheels}[name].read_bytes()
                if name == pages.spoilt:
                    content = content[:100] + b"spoilt" + content[106:]
                byte_range = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
                pages.ranges += [byte_range[0]] if byte_range else []
                if name in pages.gone:
                    self.answer(403 if name in pages.unlisted else 404, b"")
                elif byte_range and int(byte_range[1]) >= len(content):
                    self.answer(416, b"")
                else:
                    start = int(byte_range[1]) if byte_range else 0
                    self.answer(206 if byte_range else 200, content[start:])

            def answer(self, status: int, content: bytes, kind: str = "binary/octet-stream") -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    cut = pages.cut if kind != "text/html" else 0
                    self.wfile.write(content[: cut or None])
                self.close_connection = True

            def log_message(self, *args: object) -> None:
                """Suppress logging."""

        self.serve(Handler)
        return self

    def page(self, package: str) -> tuple[int, bytes]:
        lines = []
        for path in self.wheels:
            if path.name.split("-")[0].replace("_", "-") != package or path.name in self.unlisted:
                continue
            digest = "" if path.name in self.plain else f"#sha256={sha256_of(path)}"
            metadata = f'"sha256={hashlib.sha256(path.name.encode()).hexdigest()}"'
            lines.append(
                f'<a href="/whl/nightly/cu130/{quote(path.name)}{digest}" data-dist-info-metadata={metadata} '
                f"data-core-metadata={metadata}>{path.name}</a><br/>"
            )
        text = f"<!DOCTYPE html>\n<html>\n  <body>\n    <h1>Links for {package}</h1>\n{''.join(lines)}</body></html>"
        return (200 if lines else 404), text.encode()


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pages]:
    with Pages() as found:
        isolated(monkeypatch, tmp_path, found.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield found


def torch(folder: Path, day: str, *requires: str, **more: object) -> Path:
    body = more.pop("body", "")
    return fake_wheel(folder, "torch", f"2.15.0.dev{day}+cu130", body, requires, **more)  # type: ignore[arg-type]


def cuda(folder: Path) -> list[Path]:
    """Wheels of triton and of the CUDA libraries, of which one version fits."""
    cublas = ("nvidia-cublas==13.1.*; extra == 'cublas'", "nvidia-nccl==1.0; extra == 'nccl'")
    return [
        fake_wheel(folder, "triton", "3.8.0+gitbeef123"),
        fake_wheel(folder, "triton", "3.8.0+git0ld0000"),
        fake_wheel(folder, "cuda-toolkit", "13.0.2", "", cublas),
        fake_wheel(folder, "nvidia-cublas", "13.1.0.3"),
        fake_wheel(folder, "nvidia-cublas", "13.2.0.1"),
    ]


def copies() -> list[str]:
    return sorted(path.name for path in mirror_root().glob("*.whl"))


@pytest.fixture
def mirror(run: Run) -> Callable[..., list[str]]:
    """Return a function that calls `bumpgate mirror --keep N`, checks its exit code, and returns its lines."""

    def call(keep: int, *arguments: str, code: int = 0) -> list[str]:
        found, out, err = run("mirror", "--keep", str(keep), *arguments)
        assert found == code, err
        return (err if code else out).splitlines()

    return call


Mirrored = Callable[..., list[str]]


def test_mirror_copies_a_night_with_the_wheels_it_pins(
    tmp_path: Path, pages: Pages, mirror: Mirrored
) -> None:
    pages.wheels = [
        *(torch(tmp_path, day, TRITON, CUBLAS, "filelock") for day in ("20261101", "20261102", "20261105")),
        torch(tmp_path, "20261106", tag="cp39-cp39-manylinux_2_28_aarch64"),
        *cuda(tmp_path),
    ]
    pages.plain = {path.name for path in pages.wheels if "triton" in path.name or "1105" in path.name}
    lines = mirror(2)
    assert lines[:3] == [
        "2.15.0.dev20261105+cu130: copied",
        "2.15.0.dev20261102+cu130: copied",
        "days without a nightly: 2026-11-03, 2026-11-04",
    ]
    assert lines[3].startswith("2 nights copied, 2 kept, 0.00 GB: --find-links ")
    assert copies() == [
        "cuda_toolkit-13.0.2-py3-none-any.whl",
        "nvidia_cublas-13.1.0.3-py3-none-any.whl",
        "torch-2.15.0.dev20261102+cu130-py3-none-any.whl",
        "torch-2.15.0.dev20261105+cu130-py3-none-any.whl",
        "triton-3.8.0+gitbeef123-py3-none-any.whl",
    ]
    sums = dict(reversed(line.split("  ")) for line in (mirror_root() / SUMS).read_text().splitlines())
    assert sums == {name: sha256_of(mirror_root() / name) for name in copies()}
    assert len(pages.fetched) == 5, "each wheel once"
    mirror(2)
    assert len(pages.fetched) == 5, "and no wheel twice"


def test_mirror_keeps_nights_gone_from_the_index(
    tmp_path: Path, pages: Pages, mirror: Mirrored, run: Run
) -> None:
    old, new = torch(tmp_path, "20261101"), torch(tmp_path, "20261102")
    for pages.wheels in ([old], [new], []):
        mirror(2)
    assert copies() == [old.name, new.name]
    _, out, _ = run("versions", "torch", "--pre", "--find-links", str(mirror_root()))
    assert [line.split()[0][-14:] for line in out.splitlines()] == ["20261101+cu130", "20261102+cu130"]


def test_mirror_copies_nights_by_url_that_no_page_lists(
    tmp_path: Path, pages: Pages, mirror: Mirrored
) -> None:
    pages.wheels = [*(torch(tmp_path, f"2026110{day}", TRITON) for day in (1, 2, 3)), *cuda(tmp_path)[:1]]
    old, gone, _, triton = pages.wheels
    pages.unlisted, pages.gone = {path.name for path in (old, gone, triton)}, {gone.name}
    address = f"{pages.url.rpartition('/whl')[0]}/whl/nightly/cu130/"
    urls = [
        "--url",
        f"{address}{quote(old.name)}#sha256={sha256_of(old).upper()}",
        "--url",
        address + quote(gone.name),
    ]
    lines = mirror(9, *urls)
    assert lines[0] == "2.15.0.dev20261103+cu130: half-published: no triton==3.8.0+gitbeef123"
    assert lines[2] == "2.15.0.dev20261101+cu130: half-published: no triton==3.8.0+gitbeef123"
    assert mirror(9, *urls, "--url", address + quote(triton.name))[:3] == [
        "2.15.0.dev20261103+cu130: copied",
        f"2.15.0.dev20261102+cu130: half-published: no {gone.name} (403)",
        "2.15.0.dev20261101+cu130: copied",
    ]
    assert copies() == sorted(path.name for path in pages.wheels if path is not gone)
    Mirror.read(mirror_root()).drop(f"torch {RUNNING} 2.15.0.dev20261101+cu130")
    (line,) = mirror(9, "--url", f"{address}{quote(old.name)}#sha256={'0' * 64}", code=125)
    assert ": corrupt copy (sha256 " in line


def test_bisect_and_gate_install_mirrored_nights(
    tmp_path: Path, pages: Pages, mirror: Mirrored, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index no longer lists any night but the last."""
    pages.wheels = [
        fake_wheel(tmp_path / "wheels", "torch", f"2.15.0.dev2026110{day}", f"FAULT = {int(day > 2)}\n")
        for day in (1, 2, 3, 4)
    ]
    mirror(9)
    for name in ("numpy", "setuptools"):
        fake_wheel(tmp_path / "required", name, "1.0")
    pages.wheels = pages.wheels[-1:]
    store = str(mirror_root().parent)
    monkeypatch.chdir(tmp_path)
    ends = ("--good", "2026-11-01", "--bad", "2026-11-04", "--out", "out")
    judge = ("--command", "{python} -c 'import torch; raise SystemExit(torch.FAULT)'")
    code, out, _ = run("bisect", "--store", store, "--find-links", str(tmp_path / "required"), *ends, *judge)
    assert (code, "first bad   torch 2.15.0.dev20261103" in out) == (0, True)

    def places(
        config: object, root: object, view: object, wanted: dict[str, list[Request]], new: bool
    ) -> None:
        raise BumpgateError(f"install from {wanted['candidate'][0].find_links}")

    monkeypatch.setattr(gate, "environments", places)
    monkeypatch.chdir(ROOT)
    for folder, words in (
        (store, f"install from ('{mirror_root()}',)"),
        (str(mirror_root()), f"install from ('{mirror_root()}',)"),
        (str(tmp_path), "no copies of nightlies there; bumpgate mirror makes them"),
    ):
        lane = ("--lane", "cpu", "--candidate", "torch==2.15", "--out", str(tmp_path / "gate"))
        code, _, err = run("gate", *lane, "--store", folder)
        assert (code, words in err) == (4, True)


def test_mirror_completes_a_half_published_night_later(
    tmp_path: Path, pages: Pages, mirror: Mirrored
) -> None:
    pages.wheels = [torch(tmp_path, "20261101", TRITON), torch(tmp_path, "20261102")]
    pages.gone = {pages.wheels[1].name}
    lines = mirror(9)
    assert lines[:2] == [
        "2.15.0.dev20261102+cu130: half-published: no torch-2.15.0.dev20261102+cu130-py3-none-any.whl (404)",
        "2.15.0.dev20261101+cu130: half-published: no triton==3.8.0+gitbeef123",
    ]
    assert lines[2].startswith("0 nights copied, 0 kept")
    pages.wheels += cuda(tmp_path)
    pages.gone = set()
    assert "2 nights copied, 2 kept" in mirror(9)[-1]
    assert pages.fetched.count(pages.wheels[0].name) == 1


def test_mirror_skips_a_yanked_night_of_a_json_index(tmp_path: Path, pages: Pages, mirror: Mirrored) -> None:
    with LocalIndex([torch(tmp_path, day) for day in ("20261101", "20261102")]) as index:
        index.yank("torch", "2.15.0.dev20261102+cu130", "wrong commit")
        assert mirror(9, "--index", index.url)[:2] == [
            "2.15.0.dev20261102+cu130: yanked: wrong commit",
            "2.15.0.dev20261101+cu130: copied",
        ]


def test_mirror_drops_older_nights_and_keeps_shared_wheels(
    tmp_path: Path, pages: Pages, mirror: Mirrored
) -> None:
    pages.wheels = [torch(tmp_path, day, TRITON) for day in ("20261101", "20261102")] + cuda(tmp_path)
    mirror(2)
    pages.wheels.append(torch(tmp_path, "20261103"))
    mirror(2)
    versions = sorted(key.split()[-1] for key in Mirror.read(mirror_root()).nights)
    assert versions == ["2.15.0.dev20261102+cu130", "2.15.0.dev20261103+cu130"]
    assert [name.split("-")[0] for name in copies()] == ["torch", "torch", "triton"]
    mirror(1)
    assert [name.split("-")[0] for name in copies()] == ["torch"]


@pytest.mark.parametrize("listed", [True, False])
def test_mirror_resumes_an_interrupted_transfer(
    tmp_path: Path, pages: Pages, mirror: Mirrored, listed: bool
) -> None:
    """Without a listed digest the parts could be of different files, so the transfer starts again."""
    pages.wheels = [torch(tmp_path, "20261101", body=LARGE)]
    pages.plain = set() if listed else {pages.wheels[0].name}
    pages.cut = 150_000
    (line,) = mirror(1, code=125)
    assert line.startswith(f"bumpgate: 2.15.0.dev20261101+cu130: {pages.url}/torch-")
    assert line.endswith("; the next call continues")
    assert copies() == []
    pages.cut = 0
    mirror(1)
    assert pages.ranges == (["bytes=131072-"] if listed else [])
    assert sha256_of(mirror_root() / copies()[0]) == sha256_of(pages.wheels[0])
    assert list(mirror_root().glob(".*.partial")) == []


@pytest.mark.parametrize("listed", [True, False])
def test_mirror_deletes_a_corrupt_copy(tmp_path: Path, pages: Pages, mirror: Mirrored, listed: bool) -> None:
    pages.wheels = [torch(tmp_path, "20261101", body=LARGE)]
    pages.spoilt = pages.wheels[0].name
    pages.plain = set() if listed else {pages.spoilt}
    (line,) = mirror(1, code=125)
    assert ": corrupt copy (sha256 " in line
    assert copies() == []
    pages.spoilt = ""
    mirror(1)
    assert copies() == [pages.wheels[0].name]


def test_mirror_limit_keeps_the_newest_nights(tmp_path: Path, pages: Pages, mirror: Mirrored) -> None:
    """Wheels of 200 kB in 500 kB: two fit."""
    pages.wheels = [torch(tmp_path, f"2026110{n}", body=LARGE) for n in (1, 2, 3)]
    assert "--limit 0.0005 GB: no room for the night of 2026-11-01" in mirror(9, "--limit", "0.0005")
    assert copies() == [path.name for path in pages.wheels[1:]]
    pages.wheels.append(torch(tmp_path, "20261104", body=LARGE))
    mirror(9, "--limit", "0.0005")
    assert copies() == [path.name for path in pages.wheels[2:]]
    assert sum(path.stat().st_size for path in mirror_root().iterdir()) <= 500_000


def test_mirror_limit_keeps_wheels_of_the_current_night(
    tmp_path: Path, pages: Pages, mirror: Mirrored
) -> None:
    """The older night shares triton with the newer one, whose CUDA wheel needs the space of the older torch."""
    pages.wheels = [torch(tmp_path, "20261101", TRITON, body=LARGE), *cuda(tmp_path)[:1]]
    mirror(9, "--limit", "0.0005")
    large = fake_wheel(tmp_path, "nvidia-cublas", "13.1.0.3", {"cublas.txt": "x" * 300_000})
    pages.wheels += [torch(tmp_path, "20261102", "nvidia-cublas==13.1.0.3", TRITON), large]
    mirror(9, "--limit", "0.0005")
    assert [name.split("-")[0] for name in copies()] == ["nvidia_cublas", "torch", "triton"]


OTHER = "http://h/torch-2.0.dev20261101-cp39-cp39-win_amd64.whl"


@pytest.mark.parametrize(
    ("keep", "arguments", "words"),
    [
        (0, (), "--keep"),
        (1, ("--url", "http://u:p@h/torch.html"), "http://h/torch.html: not the URL of a wheel"),
        (1, ("--url", "http://h/torch-2.0-py3-none-any.whl"), "torch-2.0-py3-none-any.whl: not a nightly"),
        (1, ("--url", OTHER), f"{OTHER}: not a wheel for Python"),
        (1, (), "bumpgate: torch: no nightly found; name their index with --index"),
        (1, ("--index", "http://127.0.0.1:1/index"), "does not answer"),
    ],
)
def test_mirror_bad_input_prints_one_line(
    keep: int, arguments: tuple[str, ...], words: str, pages: Pages, mirror: Mirrored
) -> None:
    (line,) = mirror(keep, *arguments, code=4)
    assert words in line


def test_damaged_list_is_one_line(pages: Pages, mirror: Mirrored) -> None:
    mirror_root().mkdir(parents=True)
    (mirror_root() / "mirror.json").write_text("[]")
    (line,) = mirror(1, code=4)
    assert "mirror.json: not a mirror's list" in line
