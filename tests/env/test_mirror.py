"""`bumpgate mirror`: nightlies with the wheels that they pin, from indexes with the quirks of the real ones.

The HTML pages have the form of download.pytorch.org's: hrefs with %2B and a link text with +, metadata digests without
a digest of the wheel (pytorch issues 164347 and 173099), wheels of other platforms, and days on which triton was
missing (141956, 161833).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bumpgate.core.errors import BumpgateError
from bumpgate.env.mirror import Mirror, mirror_root
from bumpgate.env.request import Request
from bumpgate.env.store import SUMS, sha256_of
from bumpgate.gate import command as gate
from tests.env.conftest import Run
from tests.support.local_index import LocalIndex, fake_wheel, isolated
from tests.support.tree import ROOT

TRITON, CUBLAS = "triton==3.8.0+gitbeef123", "cuda-toolkit[cublas]==13.0.*; platform_system == 'Linux'"
LARGE = {"torch/__init__.py": "", "torch/data.txt": "x" * 200_000}


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIndex]:
    with LocalIndex(html=True) as found:
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
    tmp_path: Path, pages: LocalIndex, mirror: Mirrored
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
    tmp_path: Path, pages: LocalIndex, mirror: Mirrored, run: Run
) -> None:
    old, new = torch(tmp_path, "20261101"), torch(tmp_path, "20261102")
    for pages.wheels in ([old], [new], []):
        mirror(2)
    assert copies() == [old.name, new.name]
    _, out, _ = run("versions", "torch", "--pre", "--find-links", str(mirror_root()))
    assert [line.split()[0][-14:] for line in out.splitlines()] == ["20261101+cu130", "20261102+cu130"]


def test_bisect_and_gate_install_mirrored_nights(
    tmp_path: Path, pages: LocalIndex, mirror: Mirrored, run: Run, monkeypatch: pytest.MonkeyPatch
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
        lane = ("--lane", "cpu", "--candidate", "torch==2.15.0.dev20261103", "--out", str(tmp_path / "gate"))
        code, _, err = run("gate", *lane, "--store", folder)
        assert (code, words in err) == (4, True)


def test_mirror_completes_a_half_published_night_later(
    tmp_path: Path, pages: LocalIndex, mirror: Mirrored
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


def test_mirror_skips_a_yanked_night_of_a_json_index(
    tmp_path: Path, pages: LocalIndex, mirror: Mirrored
) -> None:
    with LocalIndex([torch(tmp_path, day) for day in ("20261101", "20261102")]) as index:
        index.yank("torch", "2.15.0.dev20261102+cu130", "wrong commit")
        assert mirror(9, "--index", index.url)[:2] == [
            "2.15.0.dev20261102+cu130: yanked: wrong commit",
            "2.15.0.dev20261101+cu130: copied",
        ]


def test_mirror_drops_older_nights_and_keeps_shared_wheels(
    tmp_path: Path, pages: LocalIndex, mirror: Mirrored
) -> None:
    pages.wheels = [torch(tmp_path, day, TRITON) for day in ("20261101", "20261102")] + cuda(tmp_path)
    mirror(2)
    pages.wheels += [torch(tmp_path, "20261103")]
    mirror(2)
    versions = sorted(key.split()[-1] for key in Mirror.read(mirror_root()).nights)
    assert versions == ["2.15.0.dev20261102+cu130", "2.15.0.dev20261103+cu130"]
    assert [name.split("-")[0] for name in copies()] == ["torch", "torch", "triton"]
    mirror(1)
    assert [name.split("-")[0] for name in copies()] == ["torch"]


@pytest.mark.parametrize("listed", [True, False])
def test_mirror_deletes_a_corrupt_or_cut_copy(
    tmp_path: Path, pages: LocalIndex, mirror: Mirrored, listed: bool
) -> None:
    pages.wheels = [torch(tmp_path, "20261101", body=LARGE)]
    pages.spoilt = pages.wheels[0].name
    pages.plain = set() if listed else {pages.spoilt}
    (line,) = mirror(1, code=125)
    assert ": corrupt copy (sha256 " in line
    pages.spoilt, pages.cut = "", 150_000
    (line,) = mirror(1, code=125)
    assert line.startswith("bumpgate: 2.15.0.dev20261101+cu130: http://127.0.0.1:")
    assert line.endswith("; the next call copies it again")
    assert [path.name for path in mirror_root().iterdir() if path.suffix in (".whl", ".partial")] == []
    pages.cut = 0
    mirror(1)
    assert copies() == [pages.wheels[0].name]


def test_mirror_limit_keeps_the_newest_nights(tmp_path: Path, pages: LocalIndex, mirror: Mirrored) -> None:
    """Wheels of 200 kB in 500 kB: two fit."""
    pages.wheels = [torch(tmp_path, f"2026110{n}", body=LARGE) for n in (1, 2, 3)]
    assert "--limit 0.0005 GB: no room for the night of 2026-11-01" in mirror(9, "--limit", "0.0005")
    assert copies() == [path.name for path in pages.wheels[1:]]
    pages.wheels += [torch(tmp_path, "20261104", body=LARGE)]
    mirror(9, "--limit", "0.0005")
    assert copies() == [path.name for path in pages.wheels[2:]]
    assert sum(path.stat().st_size for path in mirror_root().iterdir()) <= 500_000


def test_mirror_limit_keeps_wheels_of_the_current_night(
    tmp_path: Path, pages: LocalIndex, mirror: Mirrored
) -> None:
    """The older night shares triton with the newer one, whose CUDA wheel needs the space of the older torch."""
    pages.wheels = [torch(tmp_path, "20261101", TRITON, body=LARGE), *cuda(tmp_path)[:1]]
    mirror(9, "--limit", "0.0005")
    large = fake_wheel(tmp_path, "nvidia-cublas", "13.1.0.3", {"cublas.txt": "x" * 300_000})
    pages.wheels += [torch(tmp_path, "20261102", "nvidia-cublas==13.1.0.3", TRITON), large]
    mirror(9, "--limit", "0.0005")
    assert [name.split("-")[0] for name in copies()] == ["nvidia_cublas", "torch", "triton"]


@pytest.mark.parametrize(
    ("keep", "arguments", "words"),
    [
        (0, (), "--keep"),
        (1, (), "bumpgate: torch: no nightly found; name their index with --index"),
        (1, ("--index", "http://127.0.0.1:1/index"), "does not answer"),
    ],
)
def test_mirror_bad_input_prints_one_line(
    keep: int, arguments: tuple[str, ...], words: str, pages: LocalIndex, mirror: Mirrored
) -> None:
    (line,) = mirror(keep, *arguments, code=4)
    assert words in line


def test_damaged_list_is_one_line(pages: LocalIndex, mirror: Mirrored) -> None:
    mirror_root().mkdir(parents=True)
    (mirror_root() / "mirror.json").write_text("[]")
    (line,) = mirror(1, code=4)
    assert "mirror.json: not a mirror's list" in line
