"""`bumpgate diff`: the code that two environments compile, aligned by structure."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bumpgate.report.diffs import aligned
from bumpgate.reproduce.code import Code, compare, read_code
from tests.support.reports import bumpgate

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """The command in this process, called in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: (bumpgate(monkeypatch, *args), *capsys.readouterr())


ADD = [
    'add_3: "f32[8]" = aten.add(mul_1, primals_2)',
    'mul_4: "f32[8]" = aten.mul(add_3, 2)',
    'exp: "f32[8]" = aten.exp(mul_4)',
]


def changed(before: list[str], after: list[str]) -> list[str]:
    return [str(line) for line in aligned(before, after) if line.kind != " "]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ([line.replace("_3", "_5").replace("_4", "_9") for line in ADD], []),
        (["neg = aten.neg(primals_2)", *ADD], ["+ neg = aten.neg(primals_2)"]),
        ([ADD[0], ADD[1], ADD[2].replace("mul_4", "mul_1")], [f"- {ADD[2]}", f"+ {ADD[2].replace('mul_4', 'mul_1')}"]),
        ([ADD[0].replace("f32", "f16"), *ADD[1:]], [f"- {ADD[0]}", f"+ {ADD[0].replace('f32', 'f16')}"]),
        ([ADD[0].replace("add(", "sub("), *ADD[1:]], [f"- {ADD[0]}", f"+ {ADD[0].replace('add(', 'sub(')}"]),
    ],
    ids=["renumbered", "inserted", "rewired", "dtype", "operator"],
)  # fmt: skip
def test_numbers_of_names_are_no_difference_unless_they_are_used_otherwise(
    after: list[str], expected: list[str]
) -> None:
    assert changed(ADD, after) == expected


def test_name_may_be_assigned_again() -> None:
    loops = ["auto tmp0 = load(x0);", "auto tmp1 = exp(tmp0);"]
    other = ["auto tmp0 = load(x0);", "auto tmp2 = exp(tmp0);"]
    assert changed(loops + loops, loops + other) == []


PROGRAM = """
import os, torch
@torch.compile(backend=os.environ.get("BACKEND", "inductor"))
def f(x):
    y = x.sin() * 2
    return (y + y.cos() if os.environ.get("PLANTED") else y).sum(-1)
f(torch.ones(8, 16))
"""


def environments(folder: Path, **planted: str) -> list[str]:
    """Two interpreters: this one, and this one with other variables."""
    found = []
    for name, variables in (("a", {}), ("b", planted)):
        path = folder / name / "bin" / "python"
        path.parent.mkdir(parents=True)
        exports = "".join(f"export {key}={value}\n" for key, value in variables.items())
        path.write_text(f'#!/bin/sh\n{exports}exec {sys.executable} "$@"\n')
        path.chmod(0o755)
        found.append(str(folder / name))
    (folder / "program.py").write_text(PROGRAM)
    return found


def test_changed_kernel_is_shown_with_its_operators(run: Run, tmp_path: Path) -> None:
    code, out, error = run("diff", *environments(tmp_path, PLANTED="1"), "--", "program.py")
    assert code == 1, out + error
    assert "1 of 1 kernels differ" in out
    assert "- cpp_fused_mul_sin_sum\n+ cpp_fused_add_cos_mul_sin_sum\n" in out
    page = (tmp_path / "build/diff/diff.html").read_text()
    assert "The code differs" in page
    assert ".cos()" in page
    text = (tmp_path / "build/diff/diff.md").read_text()
    assert "| kernels | 1 | 1 |" in text
    assert "aten.cos.default" in text


def test_equal_sides_end_with_0(run: Run, tmp_path: Path) -> None:
    sides = environments(tmp_path, BACKEND="eager")
    (tmp_path / "program.py").write_text(PROGRAM.replace('"inductor"', '"eager"'))
    code, out, error = run("diff", *sides, "--", "program.py")
    assert code == 0, out + error
    assert "0 of 1 graphs differ" in out
    assert "the code is equal" in out
    assert "The code is equal" in (tmp_path / "build/diff/diff.html").read_text()


@pytest.mark.parametrize(
    ("side", "test", "fault"),
    [("", "empty.py", "it compiled nothing on either side"), ("none", "program.py", "environment is gone")],
)
def test_bad_input_is_one_line(run: Run, tmp_path: Path, side: str, test: str, fault: str) -> None:
    sides = environments(tmp_path)
    (tmp_path / "empty.py").write_text("")
    code, _, error = run("diff", side or sides[0], sides[1], "--", test)
    assert (code, len(error.splitlines())) == (4, 1)
    assert fault in error


def test_a_folder_of_the_user_is_kept(run: Run, tmp_path: Path) -> None:
    mine = tmp_path / "results/adopted/notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    code, _, error = run("diff", *environments(tmp_path), "--out", "results", "--", "program.py")
    assert (code, "adopted: this folder is no earlier output" in error) == (4, True), error
    assert mine.read_text() == "mine"


def kernel(folder: Path, shared: int, ttir: str, name: str = "scan") -> Code:
    place = folder / "triton" / "hash"
    place.mkdir(parents=True)
    (place / f"{name}.json").write_text(json.dumps({"name": name, "shared": shared, "num_warps": 4}))
    (place / f"{name}.ttir").write_text(ttir)
    (place / "__grp__scan.json").write_text('{"child_paths": {}}')
    return read_code(folder / "none", folder / "triton", Path(sys.executable))


def test_triton_kernels_are_compared_by_resources_and_code(tmp_path: Path) -> None:
    one = kernel(tmp_path / "a", 1024, "%1 = tt.load %0 : f32 loc(#loc3)\n%2 = tt.exp %1")
    two = kernel(tmp_path / "b", 2048, "%4 = tt.load %3 : f32 loc(#loc9)\n%5 = tt.sin %4")
    changes = {c.kind: list(map(str, c.lines)) for c in compare(one, two).changes}
    assert changes == {
        "resources": ["  num_warps 4", "- shared memory 1024 bytes", "+ shared memory 2048 bytes"],
        "triton": ["  %4 = tt.load %3 : f32", "- %2 = tt.exp %1", "+ %5 = tt.sin %4"],
    }
    assert not compare(one, one).changes


def test_setting_that_one_side_lacks_is_no_difference() -> None:
    one, two = Code(), Code()
    one.add("settings", "inductor.fast", ["true"])
    two.add("settings", "inductor.fast", ["false"])
    two.add("settings", "inductor.new", ["1"])
    (change,) = compare(one, two).changes
    assert change.names == ("inductor.fast",)
