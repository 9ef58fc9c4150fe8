"""bumpgate.process.cxx returns kept output only for the same compile, and leaves everything else to the compiler."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bumpgate.process import cxx

SOURCE = '#include "size.h"\nint main() { int unused; return SIZE; }\n'


class Tree:
    """A source file with a header, and a compiler that counts its calls."""

    def __init__(self, place: Path) -> None:
        self.place, self.store, self.compiler = place, place / "store", place / "bin" / "g++"
        self.write("a.cpp", SOURCE)
        self.write("size.h", "#define SIZE 3\n")
        self.compiler.parent.mkdir()
        self.compiler.write_text(f'#!/bin/sh\necho call >> {place}/calls\nexec {shutil.which("g++")} "$@"\n')
        self.compiler.chmod(0o755)
        self.program = cxx.program(self.store, str(self.compiler))

    @property
    def calls(self) -> int:
        path = self.place / "calls"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def write(self, name: str, text: str) -> None:
        (self.place / name).parent.mkdir(exist_ok=True)
        (self.place / name).write_text(text)

    def call(self, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        command = [self.program, *arguments]
        return subprocess.run(command, cwd=self.place, capture_output=True, text=True, input=text)

    def compile(self, *flags: str, output: str = "a.out") -> subprocess.CompletedProcess[str]:
        return self.call("a.cpp", "-Wall", *flags, "-o", output)

    def run(self, output: str = "a.out") -> int:
        return subprocess.run([self.place / output]).returncode

    def spoil(self) -> None:
        (kept,) = (path for path in self.store.glob("??/*") if path.suffix != ".json")
        kept.write_bytes(kept.read_bytes()[:-1])


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_repeated_compile_runs_the_compiler_once(tree: Tree) -> None:
    first = tree.compile()
    (tree.place / "a.out").unlink()
    second = tree.compile(output="b.out")
    assert tree.calls == 1
    assert first.returncode == second.returncode == 0
    assert "unused" in first.stderr
    assert first.stderr == second.stderr
    assert tree.run("b.out") == 3
    (facts,) = tree.store.glob("??/*.json")
    names = {Path(path).name for path, *_ in json.loads(facts.read_text())["headers"]}
    assert ("size.h" in names, "a.cpp" in names) == (True, False), "the headers that the compiler read"


CHANGES: dict[str, tuple[Callable[[Tree], object], int]] = {
    "source": (lambda tree: tree.write("a.cpp", SOURCE.replace("SIZE;", "SIZE + 1;")), 4),
    "header": (lambda tree: tree.write("size.h", "#define SIZE (3 + 1)\n"), 4),
    "compiler": (lambda tree: tree.write("bin/g++", tree.compiler.read_text() + "\n# an update\n"), 3),
    "kept output": (Tree.spoil, 3),
    "flag": (lambda tree: None, 3),
}


@pytest.mark.parametrize("part", CHANGES)
def test_changed_input_is_recompiled(tree: Tree, part: str) -> None:
    change, code = CHANGES[part]
    assert not tree.compile().returncode
    change(tree)
    assert not tree.compile(*(["-O2"] if part == "flag" else [])).returncode
    assert (tree.calls, tree.run()) == (2, code)


def test_other_processor_recompiles(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree.place)
    for flags in ("avx2", "avx2 avx512f", "avx2"):
        monkeypatch.setattr(cxx, "_processor", lambda flags=flags: flags)
        assert cxx.main(tree.store, str(tree.compiler), "a.cpp", "-march=native", "-o", "a.out") == 0
    assert tree.calls == 2


def test_other_header_path_recompiles(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.write("a.cpp", "#include <width.h>\nint main() { return WIDTH; }\n")
    for width in (1, 2):
        tree.write(f"include{width}/width.h", f"#define WIDTH {width}\n")
        monkeypatch.setenv("CPATH", str(tree.place / f"include{width}"))
        assert not tree.compile().returncode
        assert tree.run() == width


def test_same_source_with_another_header_next_to_it_recompiles(tree: Tree) -> None:
    for code in (3, 4):
        tree.write(f"tree{code}/a.cpp", SOURCE)
        tree.write(f"tree{code}/size.h", f"#define SIZE {code}\n")
        for name in (f"tree{code}/a.out", f"tree{code}/b.out"):
            tree.call(str(tree.place / f"tree{code}/a.cpp"), "-o", name)
            assert tree.run(name) == code
    assert tree.calls == 2, "each once"


def test_list_of_headers_is_written_each_time(tree: Tree) -> None:
    for _ in range(2):
        assert not tree.compile("-c", "-MMD", "-MF", "a.d", output="a.o").returncode
        (tree.place / "a.o").unlink()
        assert "size.h" in (tree.place / "a.d").read_text()
        (tree.place / "a.d").unlink()


def test_missing_compiler_is_one_line(tree: Tree) -> None:
    tree.compiler.unlink()
    done = tree.compile()
    assert done.returncode == 127
    assert done.stderr == f"{tree.place}/bin/g++: no such compiler; install it or set CXX\n"


def test_failed_compile_is_not_cached(tree: Tree) -> None:
    tree.write("size.h", "#error no size\n")
    for calls in (1, 2):
        done = tree.compile()
        assert (bool(done.returncode), "no size" in done.stderr, tree.calls) == (True, True, calls)


def test_inputs_that_arguments_do_not_show_are_always_compiled(tree: Tree) -> None:
    """Standard input, response files, and calls without an output file."""
    tree.write("arguments", "a.cpp")
    for code in (5, 6):
        tree.call("-x", "c++", "-", "-o", "c.out", text=f"int main() {{ return {code}; }}\n")
        tree.write("size.h", f"#define SIZE {code}\n")
        tree.call("@arguments", "-o", "d.out")
        assert (tree.run("c.out"), tree.run("d.out")) == (code, code)
    assert "g++" in tree.call("--version").stdout
    assert tree.calls == 5


def test_prune_removes_least_recently_used_output(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    for flags in ((), ("-O2",), ()):
        tree.compile(*flags)
    size = sum(path.stat().st_size for path in tree.store.glob("??/*"))
    monkeypatch.setattr(cxx, "LIMIT", size * 2 // 3)
    cxx.prune(tree.store)
    tree.compile()
    assert tree.calls == 2
    tree.compile("-O2")
    assert tree.calls == 3


def test_program_of_another_checkout_has_the_same_path(tree: Tree) -> None:
    """Otherwise Inductor would build another precompiled header, and no kept kernel would be found."""
    tree.write("checkout/cxx.py", text := Path(cxx.__file__).read_text())
    copy, compiler = tree.place / "checkout/cxx.py", str(tree.compiler)
    assert runpy.run_path(str(copy))["program"](tree.store, compiler) == tree.program
    copy.write_text(text + "# changed\n")
    assert runpy.run_path(str(copy))["program"](tree.store, compiler) != tree.program
    copy.unlink()
    assert tree.compile().returncode == 0
