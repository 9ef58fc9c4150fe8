"""What an adoption takes and a rollback gives back is verified: the measured set, and files by their hash."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core.errors import BumpgateError
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import Record
from bumpgate.env.lane import LaneContext
from bumpgate.history import adoptions
from bumpgate.history.adoptions import Adoption, Log
from bumpgate.process.file_transaction import AdoptionError, digest
from bumpgate.process.home import home
from bumpgate.review.measured_set import Named, measured_set
from suites.support.planted import planted
from tests.support.gate_files import gate_of

FILE = "lanes/cpu/pylock.toml"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path / "home"))
    root = tmp_path / "tree"
    for name, text in (("bumpgate.toml", "[lanes.cpu]\n"), (FILE, "old"), ("baselines/x", "")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def git(root: Path, *arguments: str) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *author, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout


def adopt(root: Path, path: str = FILE, commit: str = "", **kept: str) -> None:
    """Leave what an adoption of "new" over "old" leaves. kept: this machine's copies, by the content of their hash."""
    entry = Adoption(
        "cpu",
        date(2026, 3, 1),
        "",
        "1",
        "2",
        "ADOPT",
        "",
        commit,
        {path: digest("old")},
        {path: digest("new")},
    )
    (root / adoptions.FILE).write_text(adoptions.text(Log((entry,))))
    (root / path).write_text("new")
    for content, text in kept.items():
        place = home() / "adoptions" / digest(content)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


@planted("C39", "the local copy of a file that a rollback restores is corrupt")
def test_file_is_restored_only_with_the_content_that_it_had(root: Path) -> None:
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    good = git(root, "rev-parse", "HEAD").strip()
    (root / FILE).write_text("another")
    git(root, "commit", "-qam", "two")
    other = git(root, "rev-parse", "HEAD").strip()
    for kept, commit in (({}, ""), ({"old": "corrupt"}, ""), ({}, other), ({"old": "corrupt"}, other)):
        adopt(root, commit=commit, **kept)
        with pytest.raises(
            AdoptionError, match=r"its content before the adoption is neither in .* nor in git"
        ):
            adoptions.undo(root, "cpu", date(2026, 3, 2))
        assert (root / FILE).read_text() == "new"
    for kept, commit in (({"old": "old"}, ""), ({"old": "corrupt"}, good), ({"old": "old"}, other)):
        adopt(root, commit=commit, **kept)
        adoptions.undo(root, "cpu", date(2026, 3, 2))
        assert (root / FILE).read_text() == "old"
        assert adoptions.load(root).unverified == {"cpu"}


@planted("C39", "an adoption of a pull request names files of the user")
@pytest.mark.parametrize("path", ["../other", "src/code.py"])
def test_committed_adoption_cannot_name_other_files(root: Path, path: str) -> None:
    (root / "src").mkdir()
    adopt(root, path, old="old")
    with pytest.raises(AdoptionError, match="is no reviewed file of this repository"):
        adoptions.undo(root, "cpu", date(2026, 3, 2))
    assert (root / path).read_text() == "new"


LOCK = """lock-version = "1.0"
[[packages]]
name = "torch"
version = "9.0"
wheels = [{{ url = "https://e.org/{wheel}", hashes = {{ sha256 = "{digest}" }} }}]
[[packages]]
name = "numpy"
version = "2.0"
wheels = [{{ url = "https://e.org/numpy-2.0-py3-none-any.whl", hashes = {{ sha256 = "{digest}" }} }}]
"""
TORCH = "torch-9.0-py3-none-any.whl"
BOTH = {"torch": "9.0", "numpy": "2.0"}


def gated(folder: Path, wheel: str, candidate: dict[str, str], adopted: dict[str, str]) -> GateFile:
    """Return a gate of a requirement with the packages of both sides; the resolution is in the folder."""
    (folder / "candidate.pylock.toml").write_text(LOCK.format(wheel=wheel, digest="0" * 64))
    gate = gate_of()
    record = Record({"python": "3.12.1"}, ())
    sides = {
        "adopted": replace(gate.adopted, packages=adopted),
        "candidate": replace(gate.candidate, packages=candidate, record=record),
    }
    return replace(gate, **sides, config={"candidate": "torch==9.0"})


@planted("C39", "a package that the candidate lacked is taken from the adopted side")
@pytest.mark.parametrize(
    ("candidate", "adopted", "words"),
    [
        ({"torch": "9.0"}, BOTH, "numpy 2.0 -> (absent)"),
        ({"torch": "9.0"}, {}, "numpy 2.0 -> (absent)"),
        (BOTH | {"numpy": "2.1"}, BOTH, "numpy 2.0 -> 2.1"),
        (BOTH | {"torch": "9.0+cpu"}, BOTH, "torch 9.0 -> 9.0+cpu"),
        (BOTH, {"torch": "8.0"}, ""),
        (BOTH | {"pip": "1"}, {}, ""),
    ],
)
def test_lock_is_the_set_that_the_candidate_had(
    root: Path, tmp_path: Path, candidate: dict[str, str], adopted: dict[str, str], words: str
) -> None:
    gate = gated(tmp_path, TORCH, candidate, adopted)

    def measure() -> Any:
        return measured_set(LaneContext(root, "cpu"), tmp_path / "gate.json", gate, Named())

    if not words:
        assert measure().lock.versions == BOTH
        return
    with pytest.raises(AdoptionError) as caught:
        measure()
    assert f"is not the set that was measured ({words}): gate again" in str(caught.value)


@pytest.mark.parametrize(
    "wheel", ["torch-9.0.tar.gz", "", "torch.whl", "%00", "torch-9.0-py3-none-any.whl\\n"]
)
def test_place_that_is_no_wheel_is_one_line(root: Path, tmp_path: Path, wheel: str) -> None:
    gate = gated(tmp_path, wheel, BOTH, BOTH)
    with pytest.raises(BumpgateError) as caught:
        measured_set(LaneContext(root, "cpu"), tmp_path / "gate.json", gate, Named())
    assert len(str(caught.value).splitlines()) == 1
