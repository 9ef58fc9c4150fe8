"""A verdict is valid for the tree, packages and options that were measured; `--resume` refuses any other."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bumpgate.gate.state import NAME
from bumpgate.process import tree_digest
from bumpgate.process.tree_digest import bind
from suites.support.planted import planted
from tests.support.gate_tree import COUNTS, Tree, wait_for
from tests.support.project import GOOD


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    made = Tree(tmp_path)
    yield made
    made.end()


def git(root: Path, *arguments: str) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *author, *arguments], cwd=root, check=True, capture_output=True)


def refused(tree: Tree, *words: str) -> None:
    done = tree.gate("--resume", *COUNTS)
    assert (done.code, done.out, len(done.err.splitlines())) == (4, "", 1), done.out + done.err
    for word in (*words, "gate again, in another --out"):
        assert word in done.err


@planted("C39", "the tree breaks after the gate, which is then resumed")
def test_resume_refuses_finished_gate_of_another_tree(tree: Tree) -> None:
    first = tree.gate(*COUNTS)
    assert first.code == 0, first.out + first.err
    again = tree.gate("--resume", *COUNTS)
    assert again.code == 0
    assert f"an earlier verdict, started {tree.raw()['started']}; nothing was measured now" in again.out
    test = tree.root / "suites/compile/test_a.py"
    whole = test.read_text()
    test.write_text(whole.replace("13, expected", "14, expected"))
    refused(tree, "g/gate.json does not match the present inputs (tree: suites/compile/test_a.py)")
    test.write_text(whole)
    (tree.root / "job-4711.log").write_text("of a scheduler")
    assert tree.gate("--resume", *COUNTS).code == 0, "the same content is the same tree"
    tree.write("helper-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: helper\nVersion: 1.0\n")
    refused(tree, "adopted packages differ from before (helper (absent) -> 1.0)")


def test_resume_refuses_unfinished_gate_of_another_tree(tree: Tree) -> None:
    first = tree.start("-c", "from bumpgate.cli import main; main()", *tree.sides(), *COUNTS)
    wait_for(lambda: (tree.root / "g" / NAME).exists())
    first.kill()
    first.communicate(timeout=120)
    assert not tree.raw()["finished"]
    tree.write("baselines/accepted.toml", "")
    refused(tree, "(tree: baselines/accepted.toml)")


def test_tree_changed_during_the_gate_is_unknown(tree: Tree) -> None:
    edit = "    open(f'suites/compile/helper_{os.environ[\"SIDE\"]}.py', 'w').close()\n"
    tree.tests(GOOD + edit)
    done = tree.gate(*COUNTS)
    assert done.code == 125, done.out + done.err
    assert (
        "INFRA the work tree changed while the gate measured (tree: suites/compile/helper_adopted.py, "
        in done.out
    )
    assert "-> bumpgate gate --lane cpu" in done.out


FILES = ("pyproject.toml", "suites/a.py", "data.bin")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "suites").mkdir(parents=True)
    for name in FILES:
        (root / name).write_text("1")
    (root / ".gitignore").write_text("build/\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    return root


CHANGES = {
    "tracked file": ("data.bin", "tree: data.bin"),
    "new source": ("suites/b.py", "tree: suites/b.py"),
    "new configuration": ("pytest.ini", "tree: pytest.ini"),
    "new YAML": ("config/model.yaml", "tree: config/model.yaml"),
    "log of a job": ("slurm-1.out", ""),
    "ignored file": ("build/x.py", ""),
    "result of a run": ("record.json", ""),
    "own output": ("out/candidate.json", ""),
    "another gate": ("other/candidate.json", ""),
}


@pytest.mark.parametrize("inside_git", [True, False], ids=["git", "no git"])
@pytest.mark.parametrize("change", CHANGES)
def test_binding_covers_files_that_a_lane_reads(repository: Path, change: str, inside_git: bool) -> None:
    path, words = CHANGES[change]
    if not inside_git:
        (repository / ".git").rename(repository.parent / "git")
        words = "" if change == "tracked file" else words  # neither a source file nor listed as relevant
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
    ],
)
def test_binding_covers_ignored_modules_that_are_imported(
    repository: Path, path: str, line: str, bound: bool
) -> None:
    (repository / ".git/info/exclude").write_text("vendor\nx.py\n.venv\n")
    (repository / "suites/a.py").write_text(line)
    (repository / path).parent.mkdir(parents=True, exist_ok=True)
    (repository / path).write_text("1")
    before = bind(repository)
    (repository / path).write_text("2")
    assert before.differences(bind(repository)) == ([f"tree: {path}"] if bound else [])


def test_binding_covers_modules_that_ignored_modules_import(repository: Path) -> None:
    (repository / ".git/info/exclude").write_text("vendor\n")
    (repository / "suites/a.py").write_text("from vendor import x")
    (repository / "vendor").mkdir()
    (repository / "vendor/x.py").write_text("from . import y")
    (repository / "vendor/y.py").write_text("1")
    before = bind(repository)
    (repository / "vendor/y.py").write_text("2")
    assert before.differences(bind(repository)) == ["tree: vendor/y.py"]


def test_binding_covers_submodules(repository: Path) -> None:
    other = repository.parent / "other"
    other.mkdir()
    (other / "model.py").write_text("1")
    git(other, "init", "-q")
    git(other, "add", ".")
    git(other, "commit", "-qm", "one")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other), "model")
    before = bind(repository)
    (repository / "model/model.py").write_text("2")
    assert before.differences(bind(repository)) == ["tree: model/model.py"]


@pytest.mark.parametrize("folder", [".", ".."])
def test_folder_that_contains_the_tree_leaves_out_no_file(
    repository: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv("BUMPGATE_HOME", str(repository / folder))
    assert set(bind(repository, repository / folder).files) == {".gitignore", *FILES}


def test_binding_names_commit_version_and_deleted_files(repository: Path) -> None:
    before = bind(repository)
    git(repository, "commit", "-q", "--allow-empty", "-m", "two")
    (repository / "suites/a.py").unlink()
    now = replace(bind(repository), bumpgate="99")
    version, commit, files = before.differences(now)
    assert version == f"bumpgate {before.bumpgate} -> 99"
    assert commit == f"commit {before.commit[:12]} -> {now.commit[:12]}"
    assert files == "tree: suites/a.py"


def test_binding_outside_git_follows_links_once(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    (root / "a").mkdir(parents=True)
    (tmp_path / "linked").mkdir()
    for path in (root / "pyproject.toml", root / "a/x.py", tmp_path / "linked/y.py"):
        path.write_text("1")
    (root / "a/up").symlink_to(root)
    (root / "b").symlink_to(tmp_path / "linked")
    assert sorted(bind(root).files) == ["a/x.py", "b/y.py", "pyproject.toml"]
