"""`bumpgate lanes candidates` and `moved`: what a night or a pull request gates."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bumpgate.core.baseline import write_atomic
from tests.env.conftest import Run
from tests.support.local_index import LocalIndex, fake_wheel


@pytest.fixture
def frozen(index: LocalIndex, tree: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that calls bumpgate in a tree whose only lane has adopted torch 1.0."""
    monkeypatch.chdir(tree)
    for lane in (tree / "lanes").iterdir():
        if lane.name != "cpu":
            (lane / "lane.toml").unlink()
    assert run("freeze", "--lane", "cpu")[0] == 0
    return run


def listed(run: Run, *more: str) -> list[str]:
    code, out, err = run("lanes", "candidates", "--json", *more)
    assert code == 0, err
    return [each["candidate"] for each in json.loads(out)]


def test_candidate_is_the_newest_version_that_resolves(
    frozen: Run, index: LocalIndex, tmp_path: Path
) -> None:
    assert listed(frozen) == ["torch==1.1"]
    # As a torch for which no torch_xla was released.
    index.add(fake_wheel(tmp_path / "more", "torch", "1.3", requires=["triton==9.0"]))
    assert listed(frozen) == ["torch==1.1"]
    index.add(fake_wheel(tmp_path / "more", "torch", "1.4.dev20261101"))
    assert listed(frozen, "--pre") == ["torch==1.4.dev20261101"]


def test_pin_of_a_lane_without_a_lock_is_its_adopted_version(frozen: Run, tree: Path) -> None:
    (tree / "lanes/cpu/pylock.toml").unlink()
    assert listed(frozen) == ["torch==1.1"]
    project = (tree / "pyproject.toml").read_text()
    (tree / "pyproject.toml").write_text(project.replace("torch==1.0", "torch>=1.0"))
    assert listed(frozen) == [""], "nothing says what is adopted"


def test_lane_without_a_newer_version_has_no_candidate(frozen: Run) -> None:
    assert frozen("freeze", "--lane", "cpu", "--candidate", "torch==1.1")[0] == 0
    assert listed(frozen) == [""]
    assert frozen("lanes", "candidates")[1] == "cpu: no newer candidate\n"


def test_index_that_does_not_answer_is_no_green_night(frozen: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/index")
    code, out, err = frozen("lanes", "candidates", "--json")
    assert (code, out) == (4, "")
    assert "does not answer" in err


PYLOCK = '[[packages]]\nname = "torch"\nversion = "{}"\n'


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the lane `mine`, whose last commit moves nothing."""
    files = {"bumpgate.toml": '[lanes.mine]\nrequirements = "r.txt"\npins = ["torch", "triton"]\n'}
    files |= {
        "r.txt": "torch==2.13.0\npytest\n",
        "uv.lock": PYLOCK.format("2.13.0").replace("packages", "package"),
    }
    for name, text in files.items():
        write_atomic(tmp_path / name, text)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "base"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "candidate"),
    [
        ("r.txt", "torch==2.14.0\npytest\n", "torch==2.14.0\n"),
        ("r.txt", "torch==2.13.0\npytest==8.4\ntriton==3.7.1\n", "triton==3.7.1\n"),
        ("uv.lock", PYLOCK.format("2.14.1").replace("packages", "package"), "torch==2.14.1\n"),
        ("r.txt", "torch==2.13.0\npytest==8.4\n", ""),
    ],
    ids=["requirement", "second pin", "lock", "nothing of the lane"],
)
def test_candidate_of_a_pull_request_is_what_it_moves(
    file: str, text: str, candidate: str, repository: Path, run: Run
) -> None:
    before = (repository / file).read_text()
    (repository / file).write_text(text)
    assert run("lanes", "moved", "mine", "--base", "HEAD") == (0, candidate, "")
    assert (repository / file).read_text() == text
    assert run("lanes", "moved", "mine", "--base", "HEAD", "--restore") == (0, candidate, "")
    assert (repository / file).read_text() == before, "the tree has the adopted side"


def test_base_that_was_not_fetched_is_one_line(repository: Path, run: Run) -> None:
    code, _, err = run("lanes", "moved", "mine", "--base", "HEAD^1")
    assert code == 4
    assert err.startswith("bumpgate: --base HEAD^1: fatal: ")
    assert err.endswith(": fetch it, or name a commit\n")
