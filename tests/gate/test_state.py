"""A verdict is valid for the tree, packages and options that were measured; `--resume` refuses any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bumpgate.gate import command
from bumpgate.gate.plan import SessionPlan
from bumpgate.gate.state import NAME, GateConfig, GateError
from bumpgate.process import tree_digest
from bumpgate.process.tree_digest import Binding, bind
from suites.support.planted import planted
from tests.support.gate_tree import COUNTS, Tree
from tests.support.gating import Machine
from tests.support.git_repository import GitRepository


def refused(tree: Tree, words: str) -> None:
    done = tree.gate("--resume", *COUNTS)
    assert (done.code, done.out, len(done.err.splitlines())) == (4, "", 1), done.out + done.err
    assert words in done.err
    assert "gate again, in another --out" in done.err


@planted("C39", "the tree breaks after the gate, which is then resumed")
def test_resume_refuses_finished_gate_of_another_tree(tree: Tree) -> None:
    first = tree.gate(*COUNTS)
    assert first.code == 0, first.out + first.err
    test = tree.root / "suites/compile/test_a.py"
    whole = test.read_text()
    test.write_text(whole.replace("13, expected", "14, expected"))
    refused(tree, "g/gate.json does not match the present inputs (tree: suites/compile/test_a.py)")
    test.write_text(whole)
    (tree.root / "job-4711.log").write_text("of a scheduler")
    again = tree.gate("--resume", *COUNTS)
    assert again.code == 0, "the same content is the same tree"
    assert f"an earlier verdict, started {tree.raw()['started']}; nothing was measured now" in again.out
    tree.write("helper-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: helper\nVersion: 1.0\n")
    refused(tree, "adopted packages differ from before (helper (absent) -> 1.0)")


TREE = Binding("1.0", "c0ffee", {"suites/a.py": "1234"})
CONFIG = GateConfig("cpu", candidate="torch==2.14.0")
BEGUN = {
    "other options": (replace(CONFIG, sessions=9), True, TREE, "other sessions"),
    "no --resume": (CONFIG, False, TREE, "of an unfinished gate: continue it with --resume"),
    "another tree": (CONFIG, True, replace(TREE, files={"suites/a.py": "5"}), r"\(tree: suites/a.py\)"),
    "the same": (CONFIG, True, TREE, ""),
}


@pytest.mark.parametrize("name", BEGUN)
def test_unfinished_gate_is_continued_by_the_same_gate_alone(machine: Machine, out: Path, name: str) -> None:
    config, resume, tree, words = BEGUN[name]
    made = machine.prepare(out, CONFIG)
    made.bench.save(replace(made.gate, binding=TREE))
    if not words:
        assert command.begin(config, SessionPlan(), out, resume, tree).binding == TREE
        return
    with pytest.raises(GateError, match=words):
        command.begin(config, SessionPlan(), out, resume, tree)


FILES = {"pyproject.toml": "1", "suites/a.py": "1", "data.bin": "1", ".gitignore": "build/\n"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    root.mkdir()
    GitRepository(root).commit("one", FILES)
    return root


# tests/process/test_tree_digest.py has the other files.
CHANGES = {
    "new configuration": ("pytest.ini", "tree: pytest.ini"),
    "new YAML": ("config/model.yaml", "tree: config/model.yaml"),
    "ignored file": ("build/x.py", ""),
    "own output": ("out/candidate.json", ""),
    "another gate": ("other/candidate.json", ""),
}


@pytest.mark.parametrize("inside_git", [True, False], ids=["git", "no git"])
@pytest.mark.parametrize("change", CHANGES)
def test_binding_covers_files_that_a_lane_reads(repository: Path, change: str, inside_git: bool) -> None:
    path, words = CHANGES[change]
    if not inside_git:
        (repository / ".git").rename(repository.parent / "git")
    for name in ("out", "other"):
        (repository / name).mkdir()
        (repository / name / NAME).write_text("{}")
    before = bind(repository, repository / "out")
    (repository / path).parent.mkdir(exist_ok=True)
    (repository / path).write_text("2")
    now = bind(repository, repository / "out")
    assert before.differences(now) == ([words] if words else [])
    assert (before.tree == now.tree) is not bool(words)
    assert tree_digest.Binding.from_json(before.to_json()) == before


@pytest.mark.parametrize(
    ("path", "line", "bound"),
    [
        ("vendor/x.py", "from vendor import x", True),
        ("vendor/pack/__init__.py", "import vendor.pack as p", True),
        ("vendor/x.py", "from vendor import (\n    y,\n    x,\n)", True),
        ("x.py", "importlib.import_module('x')", True),
        ("vendor/output_code.py", "from vendor import x", False),
        ("build/x.py", "import x", False),
        (".venv/lib/x.py", "import x", False),
        ("vendor/y.py", "from vendor import z", True),  # z imports it
    ],
)
def test_binding_covers_ignored_modules_that_are_imported(
    repository: Path, path: str, line: str, bound: bool
) -> None:
    (repository / ".git/info/exclude").write_text("vendor\nx.py\n.venv\n")
    (repository / "suites/a.py").write_text(line)
    (repository / "vendor").mkdir()
    (repository / "vendor/z.py").write_text("from . import y")
    (repository / path).parent.mkdir(parents=True, exist_ok=True)
    (repository / path).write_text("1")
    before = bind(repository)
    (repository / path).write_text("2")
    assert before.differences(bind(repository)) == ([f"tree: {path}"] if bound else [])


def test_binding_covers_submodules(repository: Path) -> None:
    other = repository.parent / "other"
    other.mkdir()
    GitRepository(other).commit("one", {"model.py": "1"})
    add = ("submodule", "add", "-q", str(other), "model")
    GitRepository(repository).git("-c", "protocol.file.allow=always", *add)
    before = bind(repository)
    (repository / "model/model.py").write_text("2")
    assert before.differences(bind(repository)) == ["tree: model/model.py"]


@pytest.mark.parametrize("folder", [".", ".."])
def test_folder_that_contains_the_tree_leaves_out_no_file(
    repository: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv("BUMPGATE_HOME", str(repository / folder))
    assert set(bind(repository, repository / folder).files) == {*FILES}


def test_binding_names_the_version(repository: Path) -> None:
    before = bind(repository)
    assert before.differences(replace(before, bumpgate="99")) == [f"bumpgate {before.bumpgate} -> 99"]


def test_binding_outside_git_follows_links_once(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    (root / "a").mkdir(parents=True)
    (tmp_path / "linked").mkdir()
    for path in (root / "pyproject.toml", root / "a/x.py", tmp_path / "linked/y.py"):
        path.write_text("1")
    (root / "a/up").symlink_to(root)
    (root / "b").symlink_to(tmp_path / "linked")
    assert sorted(bind(root).files) == ["a/x.py", "b/y.py", "pyproject.toml"]
