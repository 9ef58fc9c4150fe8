"""A shell in one version, probes judged at a prompt, and torch's CompilerBisector (a fake one)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bumpgate.bisect import journal
from bumpgate.bisect.compiler import compiler_part
from bumpgate.bisect.search import ProbeOutcome, Search
from bumpgate.env.build import Environment
from tests.support import builds
from tests.support.builds import bisecting, make_builds
from tests.support.local_index import LocalIndex, isolated
from tests.support.tree import ROOT

JUDGE = ("--command", "{python} -c 'import torch; print(torch.graph_breaks())'")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalIndex]:
    """Twelve weeks of torch; the fault is in torch from week 3 on."""
    with LocalIndex() as served:
        make_builds(tmp_path_factory.mktemp("wheels"), served, torch_fault=3)
        yield served


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def isolated_environment(
    index: LocalIndex, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolated(monkeypatch, cache, index.url)
    monkeypatch.chdir(tmp_path)


def run_interactive(folder: Path, answers: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run an interactive bisect with its answers in a pipe, one per word."""
    ends = ("--good", "2.0.0", "--bad", "2.11.0", "--out", "out", "--no-prefetch", "--interactive")
    return subprocess.run(
        [sys.executable, "-c", "from bumpgate.cli import main; main()", "bisect", *ends, *more],
        input="".join(f"{word}\n" for word in answers.split()),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def steps(search: Search, first_bad: int) -> Iterator[tuple[int, str]]:
    """Yield the probes of a search and their right answers."""
    while due := search.next():
        outcome = ProbeOutcome.BAD if due[0] >= first_bad else ProbeOutcome.GOOD
        search.record(due[0], outcome)
        yield due[0], outcome.value


def test_interactive_answers_from_pipe_find_first_bad_version(tmp_path: Path) -> None:
    """2.0.0 is withdrawn once, 2.11.0 is tried twice, 2.5.0 is skipped, an unclear answer repeats the prompt."""
    first = run_interactive(tmp_path, "bad back good retry bad skip", *JUDGE)
    assert first.returncode == 130, "the end of input interrupts the bisect"
    assert "bumpgate bisect" in first.stderr
    assert first.stdout.count("torch 2.0.0: good, bad, skip, retry or back?") == 2
    assert first.stdout.count("torch 2.11.0: good, bad, skip, retry or back?") == 3
    plan = journal.BisectPlan(tuple(map(builds.torch, range(12))), "2.0.0", "2.11.0", (), 0.0, 0.0, confirm=0)
    search = plan.search()
    for index, outcome in ((0, ProbeOutcome.GOOD), (11, ProbeOutcome.BAD), (5, ProbeOutcome.SKIP)):
        search.record(index, outcome)
    words = [word.lower() for _, word in steps(search, first_bad=3)]
    wrong = "good" if words[0] == "bad" else "bad"
    again = run_interactive(tmp_path, " ".join(["b", wrong, "back", *words]), *JUDGE, "--resume")
    assert again.returncode == 0, again.stdout + again.stderr
    answer = json.loads((tmp_path / "out" / "bisect.json").read_text())
    outcomes = [(r["version"], r["outcome"]) for r in answer["readings"]]
    assert outcomes[:3] == [("2.0.0", "GOOD"), ("2.11.0", "BAD"), ("2.5.0", "SKIP")]
    assert (answer["first"], answer["sure"], answer["at_fault"]) == ("2.3.0", True, [])
    assert "14" in first.stdout.splitlines()
    assert "exit 0" in first.stdout


def test_withdrawn_outcome_is_absent_after_resume(tmp_path: Path) -> None:
    plan = journal.BisectPlan(("a", "b", "c", "d"), "a", "d", ())
    with journal.begin(tmp_path / "state", plan) as state:
        for index, outcome in ((0, ProbeOutcome.GOOD), (3, ProbeOutcome.BAD), (1, ProbeOutcome.BAD)):
            state.decide()
            state.record(index, outcome)
        state.back()
        due = state.decide()
    with journal.resume(tmp_path / "state") as state:
        assert state.search.history == [(0, ProbeOutcome.GOOD), (3, ProbeOutcome.BAD)]
        assert state.decide() == due


def test_launch_opens_a_shell_in_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "shell"
    program.write_text("#!/bin/sh\npython -c 'import torch; print(torch.__version__)' > seen\nexit 7\n")
    program.chmod(0o755)
    monkeypatch.setenv("SHELL", str(program))
    with bisecting(tmp_path) as call:
        for name in ("2.4.0", "2026-02-03"):
            ran = call("--launch", name)
            assert ran.code == 7, ran
            assert (tmp_path / "seen").read_text() == "2.4.0\n"
            assert "built from      torch===2.4.0" in ran.out
            assert "bin/python" in ran.out
        ran = call("--launch", "9.9")
        assert (ran.code, ran.err.count("\n")) == (4, 1)
        assert "torch 9.9 is not among the 12 versions" in ran.err


FAKE = """
import os, subprocess, sys
assert sys.argv[1] == "run"
for backend in ("eager", "inductor"):
    code = subprocess.call(sys.argv[2:], env=os.environ | {"TORCH_BISECT_BACKEND": backend})
    if code:
        break
RESULT
"""
FOUND = "print('Bisection complete: BisectionResult(backend=%r, ' % backend + REST + ')')"


@pytest.mark.parametrize(
    ("result", "line"),
    [
        (
            FOUND.replace("REST", "\"subsystem='lowerings', bisect_number=42, debug_info='aten.sin(x)'\""),
            "backend inductor, subsystem lowerings, application 42: aten.sin(x)",
        ),
        (
            FOUND.replace("REST", "'subsystem=None, bisect_number=None, debug_info=None'"),
            "backend inductor, in none",
        ),
        ("print('Bisection complete: no issue found')", "passes with every backend"),
        (
            "sys.exit('Invalid command: run')",
            "no answer: torch._inductor.compiler_bisector ended with 1 (Invalid",
        ),
        ("import time; time.sleep(60)", "no answer within 0.01 minutes"),
    ],
)
def test_answer_of_compiler_bisector_is_one_line(tmp_path: Path, result: str, line: str) -> None:
    package = tmp_path / "site" / "torch" / "_inductor"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "compiler_bisector.py").write_text(FAKE.replace("RESULT", result))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    fails = 'test "$TORCH_BISECT_BACKEND" != inductor'
    minutes = 0.01 if "sleep" in result else 5
    found = compiler_part(Environment("", python, ""), fails, None, tmp_path, minutes)
    assert line in found
    assert "\n" not in found


def test_compiler_bisector_cannot_change_the_verdict(tmp_path: Path) -> None:
    """The fake torch has no CompilerBisector: a line reports it, and the answer stays."""
    with bisecting(tmp_path) as call:
        program = "import torch; raise SystemExit(torch.graph_breaks() > 13)"
        ran = call(
            "--good", "2.2.0", "--bad", "2.3.0", "--command", f"{{python}} -c '{program}'", "--compiler", "1"
        )
    assert ran.code == 0, ran
    assert f"first bad   torch {builds.torch(3)}" in ran.out
    assert "compiler    no answer: torch._inductor.compiler_bisector ended with 1" in ran.out
