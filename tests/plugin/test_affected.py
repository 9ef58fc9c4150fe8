"""--affected selects each test that depends on a changed file, by import, by name or by pattern."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bumpgate.plugin import affected
from tests.support.foreign import Foreign
from tests.support.project import GOOD, REPO, Project, counted

FILES = {
    "pyproject.toml": "",
    "README.md": "prose",
    "model/__init__.py": "",
    "model/net.py": "from model.parts import part\n",
    "model/parts.py": "",
    "ops/__init__.py": "",
    "ops/a.py": "",
    "ops/b.py": "",
    "data/table.csv": "1,2\n",
    "data/other.csv": "3,4\n",
    "unused.bin": "?",
    "csrc/op.cu": "",
    "setup.py": 'SOURCES = ["csrc/op.cu"]\n',
    "bumpgate.toml": "",
    "docs/use.md": ">>> 1\n1\n",
    "src/lib/__init__.py": "",
    "src/lib/api.py": "from . import core\n",
    "src/lib/core.py": "",
    "tests/conftest.py": "import ops\n",
    "tests/test_import.py": "from model import net\n",
    "tests/test_relative.py": "from . import helper\n",
    "tests/helper.py": "import model.parts\n",
    "tests/test_child.py": 'run("-m", "ops.a")\n',
    "tests/test_format.py": 'for op in "ab": load(f"ops.{op}")\n',
    "tests/test_file.py": 'PATH = ROOT / "data" / "table.csv"\n',
    "tests/test_glob.py": 'PATHS = list(ROOT.glob("data/*.csv"))\n',
    "tests/test_nothing.py": "",
    "tests/test_src.py": "import lib.api\n",
    "tests/test_sibling.py": "import helper\n",
    "tests/test_lazy.py": 'NAMES = ["src/lib/core.py", "bumpgate.toml"]\n',
    "tests/test_prose.py": 'TEXT = open("docs/use.md").read()\n',
}
TESTS = {path for path in FILES if "test_" in path}


def git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", root, *identity, *arguments], check=True, capture_output=True)


def commit_all(root: Path) -> None:
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "all")):
        git(root, *command)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    commit_all(tmp_path)
    return tmp_path


def names(tree: Path, *paths: str) -> set[str]:
    """Return the affected tests, without "tests/test_"."""
    found = affected.affected(tree, TESTS, paths)
    return {Path(path).stem.removeprefix("test_") for path in found}


EVERYTHING = {Path(path).stem.removeprefix("test_") for path in TESTS}
DEPENDS = {
    "an import of an import": ("model/parts.py", {"import", "relative", "sibling"}),
    "a package": ("model/__init__.py", {"import", "relative", "sibling"}),
    "a module run in a child": ("ops/a.py", {"child", "format"}),
    "a module named by an f-string": ("ops/b.py", {"format"}),
    "a file": ("data/table.csv", {"file", "glob"}),
    "a file of a pattern": ("data/other.csv", {"glob"}),
    "a test": ("tests/test_file.py", {"file"}),
    "prose": ("README.md", set()),
    "prose that a test reads": ("docs/use.md", {"prose"}),
    "a module below src": ("src/lib/core.py", {"src", "lazy"}),
    "a source that no test names": ("csrc/op.cu", EVERYTHING),
    "the lanes": ("bumpgate.toml", EVERYTHING),
    "the conftest": ("tests/conftest.py", EVERYTHING),
    "what the conftest imports": ("ops/__init__.py", EVERYTHING),
    "the configuration": ("pyproject.toml", EVERYTHING),
    "a file that nothing names": ("unused.bin", EVERYTHING),
    "a deleted file": ("model/gone.py", EVERYTHING),
}


@pytest.mark.parametrize("case", DEPENDS)
def test_affected_selects_tests_that_depend_on_a_file(tree: Path, case: str) -> None:
    path, expected = DEPENDS[case]
    assert names(tree, path) == expected


def test_changed_lists_edited_new_deleted_and_renamed_files(tree: Path) -> None:
    (tree / "ops/a.py").write_text("x = 1\n")
    (tree / "ops/new.py").write_text("")
    (tree / "ops/b.py").unlink()
    git(tree, "mv", "tests/helper.py", "tests/other.py")
    moved = {"tests/helper.py", "tests/other.py"}
    assert affected.changed(tree, "HEAD") == {"ops/a.py", "ops/new.py", "ops/b.py"} | moved


@pytest.mark.parametrize(
    "base", ["no-such-commit", "--output=victim", "HEAD~1..HEAD", "HEAD~1...HEAD", "HEAD^!"]
)
def test_base_must_be_one_commit(tree: Path, base: str) -> None:
    """It is no option of git. The end of a range is not the work tree: uncommitted changes would be left out."""
    git(tree, "commit", "-q", "--allow-empty", "-m", "more")
    (tree / "ops/a.py").write_text("x = 1\n")
    with pytest.raises(affected.AffectedError, match=rf"^--affected {re.escape(base)}: not one commit"):
        affected.changed(tree, base)
    assert not (tree / "victim").exists()


def test_import_graph_contains_modules_loaded_by_a_test() -> None:
    """Compare the graph with what Python loads for a test of the launcher, which has many light imports."""
    test = "suites/launch/test_logs.py"
    code = f"import runpy, sys; sys.path.insert(0, '.'); runpy.run_path({test!r})\n"
    code += "print(*{getattr(m, '__file__', None) or '' for m in list(sys.modules.values())}, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    loaded = {Path(line) for line in done.stdout.splitlines() if line.startswith(str(REPO))}
    graph = affected.graph_of(REPO)
    names = {path.relative_to(REPO).as_posix() for path in loaded} & graph.keys()
    assert len(names) > 3
    assert names <= affected.closure(graph, test)


def test_changed_pytest_configuration_selects_all(tmp_path: Path) -> None:
    foreign = Foreign(tmp_path)
    foreign.write("bumpgate.toml", "[lanes.mine]\ntests = ['tests']\n")
    foreign.write(".gitignore", "record.json\n.tmp/\n")
    foreign.write("tests/test_a.py", "def test_a(): pass\n")
    foreign.write("tests/test_b.py", "def test_b(): assert open('setup.cfg').read()\n")
    foreign.write("setup.cfg", "[tool:pytest]\n")
    commit_all(tmp_path)
    foreign.write("setup.cfg", "[tool:pytest]\nxfail_strict = true\n")
    ran = foreign.pytest("-m", "mine", "--affected", "HEAD")
    assert "2 passed" in ran.out, ran.out + ran.err


def test_affected_option_selects_tests_of_a_lane_run(project: Project) -> None:
    project.baseline(good=counted("test_good"))
    project.tests(GOOD)
    project.tests(GOOD.replace("good", "other"), path="suites/compile/test_b.py")
    (project.root / ".gitignore").write_text("*\n!*/\n!*.py\n!*.toml\n")
    commit_all(project.root)
    on = ("-m", "cpu", "-n", "0", "--affected")
    nothing = project.pytest(*on, "HEAD")
    assert nothing.code == 5
    assert "no test of the lane depends on what changed since HEAD: not green" in nothing.out
    project.tests(GOOD + "\n", path="suites/compile/test_a.py")
    one = project.pytest("-m", "cpu", "-n", "1", "--affected", "HEAD")
    assert one.code == 0, one.out
    assert "1 passed" in one.out
    refused = project.pytest(*on, "HEAD", "--gate")
    assert refused.code == 1
    assert "deselected under --gate" in refused.out
    unknown = project.pytest(*on, "no-such-commit")
    assert unknown.code == 4
    assert "ERROR: --affected no-such-commit: not one commit" in unknown.err
