"""The binding of a verdict to a tree: every edit that can change a measurement changes it, in git and outside."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from bumpgate.process.tree_digest import OWN, bind, measured_tree
from tests.support.git_repository import GitRepository
from tests.support.tree import ROOT

FILES = {"pyproject.toml": "[project]\n", "a.py": "A = 1\n", "data/b.json": "{}\n", "docs/c.md": "c\n"}

Edit = Callable[[Path], object]


def link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


EDITS: dict[str, Edit] = {
    "text": lambda root: (root / "a.py").write_text("A = 2\n"),
    "mode": lambda root: (root / "a.py").chmod(0o755),
    "removed": lambda root: (root / "a.py").unlink(),
    "new source": lambda root: (root / "new.py").write_text("\n"),
    "new data": lambda root: (root / "data" / "new.npz").write_text("\n"),
    "target of a link": lambda root: (root.parent / "outside.py").write_text("O = 2\n"),
    "another target of a dangling link": lambda root: link(root / "gone.py", "elsewhere.py"),
    "file for a link": lambda root: [
        (root / "linked.py").unlink(),
        (root / "linked.py").write_text("L = 1\n"),
    ],
}
# Files that do not change the binding.
UNSEEN = {
    "time": ["a.py"],
    "log": ["run.log"],
    "record of a run": ["record.json"],
    "environment": ["env/pyvenv.cfg", "env/x.py"],
    "bisect": ["bisect-torch-1-2/state.jsonl", "bisect-torch-1-2/probes/reading.json"],
    "output": ["out/x.py"],
}


@pytest.fixture(params=["git", "no git"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    root.mkdir()
    (tmp_path / "outside.py").write_text("O = 1\n")
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    link(root / "linked.py", "../outside.py")
    link(root / "gone.py", "nowhere.py")
    if request.param == "git":
        repository = GitRepository(root)
        repository.git("add", ".")
        repository.commit("all")
    return root


@pytest.mark.parametrize("name", EDITS)
def test_edit_changes_the_binding_and_is_named(root: Path, name: str) -> None:
    before = bind(root)
    EDITS[name](root)
    after = bind(root)
    assert before.tree != after.tree
    (line,) = before.differences(after)
    assert line.startswith("tree: ")


@pytest.mark.parametrize("name", UNSEEN)
def test_change_without_effect_keeps_the_binding(root: Path, name: str) -> None:
    before = bind(root, root / "out")
    for path in UNSEEN[name]:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    assert before.differences(bind(root, root / "out")) == []


def test_documents_are_bound_but_not_measured(root: Path) -> None:
    record = root / "r.json"
    before = measured_tree(root, record)
    (root / "docs" / "c.md").write_text("d\n")
    record.write_text("{}\n")
    assert measured_tree(root, record) == before
    (root / "data" / "b.json").write_text("[]\n")
    assert measured_tree(root, record) != before


def test_commit_is_part_of_the_binding(tmp_path: Path) -> None:
    repository = GitRepository(tmp_path)
    repository.commit("one", FILES)
    before = bind(tmp_path)
    head = repository.commit("two")
    assert before.differences(bind(tmp_path)) == [f"commit {before.commit[:12]} -> {head[:12]}"]


def test_git_lists_a_tree_without_pyproject(tmp_path: Path) -> None:
    """`bumpgate init` writes no pyproject.toml: the commit is bound, and .gitignore holds, without one."""
    head = GitRepository(tmp_path).commit("one", {"bumpgate.toml": "[lanes]\n", ".gitignore": "kept/\n"})
    before = bind(tmp_path)
    assert before.commit == head
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x.json").write_text("{}\n")
    assert before.differences(bind(tmp_path)) == []


def test_own_tree_binds_its_bumpgate_by_its_files(root: Path) -> None:
    """A gate that ran from the sources can be adopted by an installed bumpgate of the same tree."""
    assert bind(ROOT).bumpgate == OWN
    assert bind(root).bumpgate == metadata.version("bumpgate")
