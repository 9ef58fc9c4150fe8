"""`bumpgate bisect --builder` over a small git repository with injected faults."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.builds import Ran, bisecting
from tests.support.git_repository import GitRepository

Run = Callable[..., Ran]
# Makes one folder hold one commit. `python` there imports the package of the commit.
BUILDER = f"""#!/bin/sh
cd "$BUMPGATE_BUILD" || exit 1
echo "building $1"
rm -rf __pycache__  # of another commit, written within the same second
git -C "$BUMPGATE_REPOSITORY" show "$BUMPGATE_COMMIT:mod.py" > mod.py
grep -q "does not compile" mod.py && {{ echo "mod.py:1: error" >&2; exit 125; }}
echo "$1" >> built
printf '#!/bin/sh\\nPYTHONPATH=%s exec %s -S "$@"\\n' "$PWD" {shlex.quote(sys.executable)} > python
chmod +x python
echo "$PWD/python"
"""
JUDGE = '{python} -c "import mod; raise SystemExit(mod.FAULT)"'


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a bisect of the commits of ./clone with ./builder; --command is JUDGE."""
    monkeypatch.delenv("BUMPGATE_BUILD", raising=False)
    builder = tmp_path / "builder"
    builder.write_text(BUILDER)
    builder.chmod(0o755)
    with bisecting(tmp_path) as call:

        def bisect(*arguments: str, builder: str = "./builder") -> Ran:
            common = ("--builder", builder, "--repository", "clone", "--package", "mod", "--out", "out")
            return call(*common, "--command", JUDGE, *arguments)

        yield bisect


@pytest.fixture
def clone(tmp_path: Path) -> GitRepository:
    folder = tmp_path / "clone"
    folder.mkdir()
    return GitRepository(folder)


def module(fault: int, note: str = "") -> dict[str, str]:
    return {"mod.py": f"FAULT = {fault}  # {note}\n"}


def history(clone: GitRepository, first_bad: int, broken: tuple[int, ...] = (), count: int = 8) -> list[str]:
    """Commit `count` states. broken: those that do not build."""
    return [
        clone.commit(
            f"Step {i} (#{100 + i})",
            module(int(i >= first_bad), "does not compile" if i in broken else f"step {i}"),
        )
        for i in range(count)
    ]


def found(folder: Path) -> dict[str, Any]:
    answer = json.loads((folder / "out" / "bisect.json").read_text())
    assert isinstance(answer, dict)
    return answer


def test_first_bad_commit_has_title_date_and_pull(run: Run, clone: GitRepository, tmp_path: Path) -> None:
    commits = history(clone, first_bad=5)
    clone.git("remote", "add", "origin", "https://github.com/owner/mod.git")
    ran = run("--good", commits[0], "--bad", "main")
    assert (ran.code, ran.err) == (0, ""), ran.out
    answer = found(tmp_path)
    assert answer["first"] == commits[5][:12]
    assert answer["commits"] == [
        {"commit": commits[5], "date": "2026-11-07", "title": "Step 5 (#105)", "pull": 105}
    ]
    assert f"{commits[5][:12]} 2026-11-07 Step 5 (#105)" in ran.out
    assert "https://github.com/owner/mod/pull/105" in ran.out
    assert f"https://github.com/owner/mod/compare/{commits[4]}...{commits[5]}" in ran.out
    assert "6 commits between" in ran.out
    # A reading that repeats the commit just built does not build it again.
    built = (tmp_path / "out" / "build" / "built").read_text().split()
    assert all(one != other for one, other in pairwise(built))
    log = tmp_path / "out" / "builds" / commits[5][:12]
    assert (log / "stdout.log").read_text().startswith(f"building {commits[5]}")


def test_commits_that_do_not_build_leave_a_range(run: Run, clone: GitRepository, tmp_path: Path) -> None:
    commits = history(clone, first_bad=5, broken=(3, 4))
    ran = run("--good", commits[0], "--bad", commits[-1])
    answer = found(tmp_path)
    assert (ran.code, answer["suspects"]) == (0, [commits[i][:12] for i in (3, 4, 5)])
    assert [c["pull"] for c in answer["commits"]] == [103, 104, 105]
    for i in (3, 4, 5):
        assert f"{commits[i][:12]} 2026-11-{i + 2:02} Step {i} (#{100 + i})" in ran.out
    assert "--builder skipped it (exit 125" in ran.out
    assert "mod.py:1: error" in (tmp_path / "out" / "builds" / commits[4][:12] / "build.log").read_text()


def test_merge_is_one_candidate_and_can_be_bisected(run: Run, clone: GitRepository, tmp_path: Path) -> None:
    base = clone.commit("Base", module(0))
    clone.git("checkout", "--quiet", "-b", "side")
    side = [clone.commit(f"Side {i}", module(int(i >= 2), f"side {i}")) for i in range(4)]
    clone.git("checkout", "--quiet", "main")
    clone.commit("Main", {"other": "1"})
    merge = clone.merge("side", "Merge side (#7)")
    last = clone.commit("Last", {"other": "2"})
    ran = run("--good", base, "--bad", last)
    assert found(tmp_path)["commits"][0]["commit"] == merge
    hint = f"with --good {base[:12]} --bad {side[-1][:12]}"
    assert hint in ran.out
    ran = run(*hint.split()[1:], "--out", "inside")
    answer = json.loads((tmp_path / "inside" / "bisect.json").read_text())
    assert (ran.code, answer["first"]) == (0, side[2][:12])


def test_resumed_bisect_does_not_rebuild_read_commits(run: Run, clone: GitRepository, tmp_path: Path) -> None:
    commits = history(clone, first_bad=5)
    ends = ("--good", commits[0], "--bad", commits[-1])
    assert run(*ends).code == 0
    first = found(tmp_path)
    state = tmp_path / "out" / "state.jsonl"
    state.write_text("\n".join(state.read_text().splitlines()[:-2]) + "\n")
    built = tmp_path / "out" / "build" / "built"
    before = len(built.read_text().split())
    ran = run(*ends, "--resume")
    assert (ran.code, found(tmp_path)["first"]) == (0, first["first"])
    assert f"{commits[5][:12]} " in ran.out
    assert len(built.read_text().split()) == before, "a reading on disk was built again"


def test_first_good_commit_is_found(run: Run, clone: GitRepository, tmp_path: Path) -> None:
    commits = [clone.commit(f"Step {i}", module(int(i < 4), str(i))) for i in range(6)]
    assert run("--bad", commits[0], "--good", commits[-1], "--find-fix").code == 0
    assert found(tmp_path)["commits"][0]["title"] == "Step 4"


def test_endpoints_off_the_mainline_are_refused(run: Run, clone: GitRepository) -> None:
    base = clone.commit("Base", module(0))
    clone.git("checkout", "--quiet", "-b", "side")
    side = clone.commit("Side", {"side": "1"})
    clone.git("checkout", "--quiet", "main")
    clone.commit("Main", {"other": "1"})
    merge = clone.merge("side", "Merge side")
    last = clone.commit("Last", {"other": "2"})
    clone.git("checkout", "--quiet", "-b", "open", base)
    unmerged = clone.commit("Open", {"open": "1"})
    clone.git("checkout", "--quiet", "--orphan", "alone")
    unrelated = clone.commit("Alone", {"alone": "1"})
    cases = {
        (unrelated, last): f"--good {unrelated[:12]} is not an ancestor of {last[:12]}",
        (side, last): f"--good {side[:12]} is on a branch that {merge[:12]} merged: name --good {merge[:12]}",
        (
            unmerged,
            last,
        ): f"--good {unmerged[:12]} is not an ancestor of {last[:12]}: name --good {base[:12]}",
        (last, base): "swap them",
        (last, "main"): "are one commit",
        ("v9", last): "clone has no commit 'v9': name another, or git -C clone fetch",
        ("--all", last): "clone has no commit '--all'",
    }
    for (good, bad), words in cases.items():
        ran = run(f"--good={good}", f"--bad={bad}")
        assert ran.code == 4, ran
        assert words in ran.err, ran.err
        assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("builder", "code", "words"),
    [
        ("no-such-builder", 4, "--builder ended with 127"),
        ("echo nothing; true", 4, "is not the path of an interpreter"),
        ("false", 125, "--builder ended with 1 ("),
        ("exit 125; true", 4, "--builder skipped it (exit 125"),
    ],
)
def test_broken_builder_is_one_line(
    run: Run, clone: GitRepository, builder: str, code: int, words: str
) -> None:
    commits = history(clone, first_bad=2, count=4)
    ran = run("--good", commits[0], "--bad", commits[-1], builder=builder)
    assert (ran.code, ran.err.count("\n")) == (code, 1), ran
    assert words in ran.err


def test_builder_of_another_commit_is_refused(run: Run, clone: GitRepository, tmp_path: Path) -> None:
    """An interpreter whose package names its commit must have the requested one."""
    commits = history(clone, first_bad=2, count=4)
    site = tmp_path / "stale" / "lib" / "python3" / "site-packages"
    (site / "mod").mkdir(parents=True)
    (site / "mod" / "version.py").write_text(f"git_version = {commits[3]!r}\n")
    python = tmp_path / "stale" / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    ran = run("--good", commits[0], "--bad", commits[-1], builder=f"echo {python}; true")
    assert ran.code == 4
    assert f"made commit {commits[3]} of mod instead of {commits[0]}" in ran.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--repository", "nowhere"), "nowhere: the folder does not exist"),
        ((), "name it with --repository DIR"),
        (("--repository", "clone", "--with", "numpy"), "leave out --index, --find-links, --with"),
    ],
)
def test_bad_options_are_one_line(tmp_path: Path, more: tuple[str, ...], words: str) -> None:
    with bisecting(tmp_path) as call:
        ran = call("--good", "a", "--bad", "b", "--builder", "true", "--command", "true", *more)
    assert (ran.code, ran.err.count("\n")) == (4, 1)
    assert words in ran.err
