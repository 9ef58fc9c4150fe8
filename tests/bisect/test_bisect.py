"""`bumpgate bisect` on real environments: fake wheels on a loopback index, installed by uv, probed by children."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import builds, golden
from tests.support.builds import (
    CRASHES,
    JUDGE,
    RAISES,
    Bisect,
    answer_of,
    bisecting,
    host_pytest,
    make_builds,
)
from tests.support.lane_files import declare_lanes
from tests.support.local_index import LocalIndex, fake_wheel, isolated
from tests.support.project import HEAD, REPO
from tests.support.reports import bumpgate

pytestmark = pytest.mark.long(64)


@pytest.fixture(scope="module")
def triton_breaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalIndex]:
    """The fault is in triton from week 7 on; builds around it are missing, yanked, or fail to import."""
    with LocalIndex() as index:
        import_text = {5: RAISES, 6: CRASHES}
        make_builds(tmp_path_factory.mktemp("a"), index, triton_fault=7, import_text=import_text, missing=[4])
        index.yank("torch", builds.torch(8), "broken")
        yield index


@pytest.fixture(scope="module")
def torch_breaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalIndex]:
    """The fault is in torch from week 3 on."""
    with LocalIndex() as index:
        folder = tmp_path_factory.mktemp("b")
        make_builds(folder, index, torch_fault=3)
        # "==2.3.0" would match this one, and find no fault in 2.3.0.
        other = {"torch/__init__.py": builds.TORCH.format(fault=0)}
        index.add(fake_wheel(folder, "torch", "2.3.0+cpu", other, ["triton==3.3.0"]))
        index.add(host_pytest(folder))
        yield index


def test_triton_fault_is_attributed_to_triton(
    run: Bisect, triton_breaks: LocalIndex, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By dates, with a missing week, a yanked build, one that raises at import and one that segfaults at import."""
    isolated(monkeypatch, cache, triton_breaks.url)
    arguments = ("--good", "2026-01-05", "--bad", "2026-03-23", "--command", JUDGE, "--out", "out")
    ran = run(*arguments)
    assert (ran.code, ran.err) == (0, "")
    names = {str(cache): "CACHE"}
    golden.check("bisect_triton", golden.transcript(["bisect", *arguments], *vars(ran).values(), names))
    answer = answer_of(tmp_path / "out")
    assert (answer["suspects"], answer["first"]) == (["2.5.0", "2.6.0", "2.7.0"], "2.7.0")
    assert answer["last"] == "2.3.0"
    assert answer["at_fault"] == [{"name": "triton", "old": "3.3.0", "new": "3.7.0"}]
    triton = "https://github.com/triton-lang/triton/compare"
    assert answer["compare"] == [f"{triton}/{builds.commit(3)}...{builds.commit(7)}"]
    skipped = {r["version"]: r["failure"] for r in answer["readings"] if r["outcome"] == "SKIP"}
    assert skipped.keys() == {"2.5.0", "2.6.0"}
    assert "libcudart.so.13" in skipped["2.5.0"]
    assert "SIGSEGV" in skipped["2.6.0"]
    assert "2.8.0" not in {r["version"] for r in answer["readings"]}, "a yanked build was probed"


def test_torch_fault_and_its_fix_are_attributed_to_torch(
    run: Bisect, torch_breaks: LocalIndex, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolated(monkeypatch, cache, torch_breaks.url)
    ran = run("--good", "2.0.0", "--bad", "2.11", "--command", JUDGE, "--out", "out")
    answer = answer_of(tmp_path / "out")
    assert (ran.code, answer["suspects"], answer["last"]) == (0, ["2.3.0"], "2.2.0")
    assert [change["name"] for change in answer["at_fault"]] == ["torch"]
    commits = f"{builds.commit(2)}...{builds.commit(3)}"
    assert answer["compare"] == [f"https://github.com/pytorch/pytorch/compare/{commits}"]
    assert (answer["confirmed"], answer["sure"], answer["misreads"]) == (True, True, 0)
    read = [r["version"] for r in answer["readings"]]
    assert min(read.count("2.2.0"), read.count("2.3.0")) >= 2
    assert answer["probes"] <= 9
    # The same wheels, with a test that fails without the fault: the fault is its fix.
    fixed = 'python -c "import torch; raise SystemExit(torch.graph_breaks() == 13)"'
    ran = run("--find-fix", "--bad", "2.0.0", "--good", "2.11.0", "--command", fixed, "--out", "fix")
    answer = answer_of(tmp_path / "fix")
    assert (ran.code, answer["suspects"], answer["last"]) == (0, ["2.3.0"], "2.2.0")
    assert answer["at_fault"] == [{"name": "torch", "old": "2.2.0", "new": "2.3.0"}]


def test_libraries_that_torch_pins_are_named_apart_from_it(
    run: Bisect, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, free = "nvidia-cudnn-cu13", "nvidia-ml-py"
    with LocalIndex(fake_wheel(tmp_path, name, "1.0") for name in ("numpy", "setuptools")) as index:
        for week in (1, 2):
            text = f"def fault():\n    import nvidia_ml_py\n    return {week == 2} and nvidia_ml_py.NEW\n"
            requires = [f"{library}==9.{week}", f"{free}>=13.{week}" if week == 2 else f"{free}<13.2"]
            index.add(fake_wheel(tmp_path, "torch", f"2.{week}.0", text, requires))
            index.add(fake_wheel(tmp_path, library, f"9.{week}"))
            index.add(fake_wheel(tmp_path, free, f"13.{week}", f"NEW = {week == 2}\n"))
        isolated(monkeypatch, cache, index.url)
        command = 'python -c "import torch; raise SystemExit(torch.fault())"'
        ran = run("--good", "2.1.0", "--bad", "2.2.0", "--command", command, "--out", "out")
    assert ran.code == 0, ran.out + ran.err
    lines = (
        f"at fault    {free} 13.1 -> 13.2, torch 2.1.0 -> 2.2.0\n"
        f"            with {library} 9.1 -> 9.2: pinned by it, not tried apart\n"
    )
    assert lines in ran.out
    answer = answer_of(tmp_path / "out")
    assert [change["name"] for change in answer["at_fault"]] == [library, free, "torch"]
    assert answer["pinned"] == [library]


SUITE = f"""{HEAD}
import torch

def breaks():
    return torch.graph_breaks()

@lanes("cpu")
def test_breaks(lane, row):
    row.count("compile/model/graph_breaks", breaks(), expected=13, program=breaks, **COUNT)

@lanes("cpu")
def test_red_everywhere(lane, row):
    row.count("compile/old/graph_breaks", 2, expected=1, **COUNT)

@lanes("cpu")
def test_red_for_a_while(lane, row):
    row.count("compile/passing/graph_breaks", int(torch.__version__ in ("2.1.0", "2.2.0")), expected=0, **COUNT)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with the row machinery and three tests; its lane needs pytest and torch."""
    root = tmp_path / "tree"
    for part in ("bumpgate", "suites/support"):
        (root / part).parent.mkdir(parents=True, exist_ok=True)
        (root / part).symlink_to(REPO / part)
    shutil.copy(REPO / "conftest.py", root / "conftest.py")
    text = (REPO / "pyproject.toml").read_text()
    pytest_options = text[text.index("[tool.pytest.ini_options]") : text.index("[tool.ruff]")]
    extras = '[project.optional-dependencies]\ncpu = ["pytest", "torch==2.0.0"]\n'
    (root / "pyproject.toml").write_text(f'[project]\nname = "bumpgate"\n{extras}\n{pytest_options}')
    declare_lanes(root)
    (root / "suites/__init__.py").touch()
    (root / "suites/compile").mkdir()
    (root / "suites/compile/test_a.py").write_text(SUITE)
    return root


def test_lane_bisect_decides_by_rows_differing_between_ends(
    tree: Path, torch_breaks: LocalIndex, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row is red at both endpoints, one only in between; neither misleads the search."""
    isolated(monkeypatch, cache, torch_breaks.url)
    ends = ("--lane", "cpu", "--good", "2.0.0", "--bad", "2.11.0", "--out", "out")
    arguments = (*ends, "--", "suites", "-n", "0")
    with bisecting(tree) as run:
        ran = run(*arguments)
    names = {str(cache): "CACHE", str(tree): "TREE"}
    golden.check("bisect_lane", golden.transcript(["bisect", *arguments], *vars(ran).values(), names))
    answer = answer_of(tree / "out")
    assert (ran.code, answer["suspects"], answer["last"]) == (0, ["2.3.0"], "2.2.0")
    assert answer["deciding"] == ["compile/model/graph_breaks"]
    assert [change["name"] for change in answer["at_fault"]] == ["torch"]
    assert answer["findings"][0]["adopted"] == ["compile/model/graph_breaks: 13 breaks"]
    assert answer["findings"][0]["candidate"] == ["compile/model/graph_breaks: 14 breaks (C6, limit = 13)"]

    monkeypatch.chdir(tree)  # the printed command writes a file that separates the two versions
    _, *words = shlex.split(answer["reproduce"])
    assert bumpgate(monkeypatch, *words) == 0
    file = tree / "suites_compile_test_a_py_breaks.py"
    ends = [subprocess.run([words[n], file], capture_output=True).returncode for n in (-3, -1)]
    assert (ends, "import bumpgate" in file.read_text()) == ([0, 1], False)


def test_bisect_starts_nothing_but_its_probes(
    run: Bisect, torch_breaks: LocalIndex, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In existing environments: one process a probe, and for a BAD one an import that distinguishes it from a SKIP."""
    isolated(monkeypatch, cache, torch_breaks.url)
    arguments = ("--good", "2.0.0", "--bad", "2.11.0", "--no-attribution", "--command", JUDGE, "--out")
    assert run(*arguments, "warm").code == 0
    started: list[str] = []
    popen = subprocess.Popen.__init__

    def counted(self: Any, command: Any, *more: Any, **options: Any) -> None:
        started.append(" ".join(map(str, command)))
        popen(self, command, *more, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", counted)
    assert run(*arguments, "out").code == 0
    codes = [json.loads(path.read_text())["code"] for path in (tmp_path / "out").rglob("reading.json")]
    syntax, *probes = started
    assert syntax.startswith("/bin/sh -n ")
    judged = [line for line in probes if "graph_breaks" in line]
    assert len(judged) == len(codes) > 4
    assert len(probes) == len(judged) + sum(map(bool, codes)), started
