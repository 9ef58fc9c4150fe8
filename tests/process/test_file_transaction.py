"""Reviewed files have one writer at a time, and nothing in the work tree can name other files to write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bumpgate.process.file_transaction import (
    ADOPTION,
    IN_TREE,
    AdoptionError,
    Edit,
    Operation,
    Recovered,
    digest,
    interrupted,
    journal,
    read,
    recover,
    replace_all,
    writing,
)
from suites.support.planted import planted

ADOPTING = Operation(ADOPTION, "mini")
BASELINE = "baselines/mini.json"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a repository in git, below its top folder."""
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path / "home"))
    root = tmp_path / "top/tree"
    root.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(root.parent)], check=True)
    (root / "bumpgate.toml").write_text('[lanes.mini]\nrequirements = "needs/mini.txt"\n')
    return root


def cut_short(root: Path, files: object) -> Path:
    """Leave the journal of a killed adoption."""
    place = journal(root)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps({**vars(ADOPTING), "files": files}))
    return place


def test_linked_file_is_replaced_where_it_is(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "shared" / "mini.json"
    (root / "baselines").mkdir()
    elsewhere.parent.mkdir()
    elsewhere.write_text("old\n")
    elsewhere.chmod(0o640)
    (root / BASELINE).symlink_to(elsewhere)
    replace_all(root, [Edit(BASELINE, "old\n", "new\n")], ADOPTING)
    assert (root / BASELINE).is_symlink()
    assert (elsewhere.read_text(), elsewhere.stat().st_mode & 0o777) == ("new\n", 0o640)
    assert [path.name for path in elsewhere.parent.iterdir()] == ["mini.json"]


@planted("C39", "another program changes a reviewed file after it was read")
@pytest.mark.parametrize("operation", [None, ADOPTING])
def test_file_that_changed_meanwhile_is_kept(root: Path, operation: Operation | None) -> None:
    replace_all(root, [Edit(BASELINE, None, "one")])
    edits = [Edit("needs/mini.txt", None, "torch"), Edit(BASELINE, "one", "two")]
    (root / BASELINE).write_text("mine")
    with pytest.raises(AdoptionError, match=r"baselines/mini\.json was changed by another program meanwhile"):
        replace_all(root, edits, operation)
    assert (read(root / BASELINE), read(root / "needs/mini.txt")) == ("mine", None)


@planted("C39", "two commands read a reviewed file before either writes it")
def test_writers_wait_for_each_other(root: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from bumpgate.process.file_transaction import Edit, read, replace_all, writing
root = Path({str(root)!r})
with writing(root):
    before = read(root / {BASELINE!r})
    time.sleep(0.1)
    replace_all(root, [Edit({BASELINE!r}, before, (before or "") + sys.argv[1])])
"""

    started = []
    with writing(root):
        for name in "abc":
            command = [sys.executable, "-c", program, name]
            started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        for process in started:
            assert process.stderr
            said = process.stderr.readline()
            assert said.startswith("another command changes the reviewed files of this tree; waiting")
    assert [(*process.communicate(), process.returncode) for process in started] == [(None, "", 0)] * 3
    assert sorted(read(root / BASELINE) or "") == ["a", "b", "c"]


FOREIGN = [
    "/tmp/pwned",
    "../pwned",
    "baselines/../../pwned.json",
    "src/code.py",
    ".git/config",
    "conftest.py",
]


@planted("C39", "a journal or an adoption names a file that is no reviewed one")
@pytest.mark.parametrize("path", FOREIGN)
def test_other_file_is_neither_written_nor_restored(root: Path, tmp_path: Path, path: str) -> None:
    path = path.replace("/tmp", str(tmp_path))
    for operation in (None, ADOPTING):
        with pytest.raises(AdoptionError, match="is no reviewed file of this repository: nothing is changed"):
            replace_all(root, [Edit(BASELINE, None, "x"), Edit(path, None, "pwned")], operation)
    place = cut_short(root, {path: {"before": "pwned", "after": ""}})
    for read_journal in (recover, interrupted):
        with pytest.raises(AdoptionError, match="is no reviewed file of this repository: nothing is changed"):
            read_journal(root)
    assert place.exists()
    assert not [*tmp_path.rglob("*pwned*"), *tmp_path.rglob("code.py")]
    assert not (root / BASELINE).exists()


@planted("C39", "a journal in the work tree, from a commit of anybody")
def test_journal_in_the_tree_is_refused(root: Path) -> None:
    (root / "baselines").mkdir()
    files = {BASELINE: {"before": "pwned", "after": ""}}
    (root / IN_TREE).write_text(json.dumps({**vars(ADOPTING), "files": files}))
    for use in (recover, interrupted, lambda root: replace_all(root, [Edit(BASELINE, None, "x")])):
        with pytest.raises(AdoptionError, match=f"{IN_TREE}: a journal in the work tree may be anybody's"):
            use(root)
    assert not (root / BASELINE).exists()


def test_journal_is_where_no_commit_can_have_it(root: Path, tmp_path: Path) -> None:
    git = root.parent / ".git"
    assert journal(root) == git / "bumpgate/tree/adoption.json"
    (tmp_path / "worktree").mkdir()
    (tmp_path / "worktree/.git").write_text(f"gitdir: {git}\n")
    assert journal(tmp_path / "worktree") == git / "bumpgate/adoption.json"
    outside = tmp_path / "outside"
    assert journal(outside) == tmp_path / f"home/trees/{digest(str(outside))[:16]}/adoption.json"


def test_operation_that_was_cut_short_is_recovered_before_another_write(root: Path) -> None:
    (root / "needs").mkdir()
    (root / "needs/mini.txt").write_text("new")
    cut_short(root, {"needs/mini.txt": {"before": "old", "after": digest("new")}})
    with pytest.raises(
        AdoptionError, match="was cut short here: undo it with: bumpgate rollback mini --adop"
    ):
        replace_all(root, [Edit(BASELINE, None, "x")])
    with writing(root):
        assert recover(root) == Recovered(ADOPTING, ("needs/mini.txt",))
    assert (read(root / "needs/mini.txt"), journal(root).exists()) == ("old", False)
