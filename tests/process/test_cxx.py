"""bumpgate.process.cxx returns kept output only for the same compile, and leaves everything else to the compiler."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from bumpgate.process import cxx

SOURCE = '#include "size.h"\nint main() { int unused; return SIZE; }\n'


class Tree:
    """A source file with a header, and a compiler that counts its calls."""

    def __init__(self, place: Path) -> None:
        self.place, self.store = place, place / "store"
        (place / "a.cpp").write_text(SOURCE)
        (place / "size.h").write_text("#define SIZE 3\n")
        real = place / "bin" / "g++"
        real.parent.mkdir()
        real.write_text(f'#!/bin/sh\necho call >> {place / "calls"}\nexec {shutil.which("g++")} "$@"\n')
        real.chmod(0o755)
        self.program = cxx.program(self.store, str(real))

    @property
    def calls(self) -> int:
        path = self.place / "calls"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def compile(self, *flags: str, output: str = "a.out") -> subprocess.CompletedProcess[str]:
        command = [self.program, "a.cpp", "-Wall", *flags, "-o", output]
        return subprocess.run(command, cwd=self.place, capture_output=True, text=True)

    def run(self, output: str = "a.out") -> int:
        return subprocess.run([self.place / output]).returncode


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


@pytest.mark.parametrize("part", ["source", "header", "flag", "kept output", "compiler"])
def test_changed_input_is_recompiled(tree: Tree, part: str) -> None:
    assert not tree.compile().returncode
    flags: tuple[str, ...] = ()
    if part == "source":
        (tree.place / "a.cpp").write_text(SOURCE.replace("SIZE;", "SIZE + 1;"))
    elif part == "header":
        (tree.place / "size.h").write_text("#define SIZE (3 + 1)\n")
    elif part == "flag":
        flags = ("-O2",)
    elif part == "compiler":
        compiler = tree.place / "bin" / "g++"
        compiler.write_text(compiler.read_text() + "\n# an update\n")
    else:
        (kept,) = (path for path in tree.store.glob("??/*") if path.suffix != ".json")
        kept.write_bytes(kept.read_bytes()[:-1])
    assert not tree.compile(*flags).returncode
    assert tree.calls == 2
    assert tree.run() == (4 if part in ("source", "header") else 3)


def test_other_processor_recompiles(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tree.place)
    compiler = str(tree.place / "bin" / "g++")
    for flags in ("avx2", "avx2 avx512f", "avx2"):
        monkeypatch.setattr(cxx, "_processor", lambda flags=flags: flags)
        assert cxx.main(tree.store, compiler, "a.cpp", "-march=native", "-o", "a.out") == 0
    assert tree.calls == 2


def test_other_header_path_recompiles(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree.place / "a.cpp").write_text("#include <width.h>\nint main() { return WIDTH; }\n")
    for width in (1, 2):
        folder = tree.place / f"include{width}"
        folder.mkdir()
        (folder / "width.h").write_text(f"#define WIDTH {width}\n")
        monkeypatch.setenv("CPATH", str(folder))
        assert not tree.compile().returncode
        assert tree.run() == width


def test_same_source_with_another_header_next_to_it_recompiles(tree: Tree) -> None:
    for code in (3, 4):
        folder = tree.place / f"tree{code}"
        folder.mkdir()
        (folder / "a.cpp").write_text(SOURCE)
        (folder / "size.h").write_text(f"#define SIZE {code}\n")
        for name in ("a.out", "b.out"):
            subprocess.run([tree.program, folder / "a.cpp", "-o", folder / name], check=True)
            assert subprocess.run([folder / name]).returncode == code
    assert tree.calls == 2, "each once"


def test_list_of_headers_is_written_each_time(tree: Tree) -> None:
    for _ in range(2):
        assert not tree.compile("-c", "-MMD", "-MF", "a.d", output="a.o").returncode
        (tree.place / "a.o").unlink()
        assert "size.h" in (tree.place / "a.d").read_text()
        (tree.place / "a.d").unlink()


def test_missing_compiler_is_one_line(tree: Tree) -> None:
    (tree.place / "bin" / "g++").unlink()
    done = tree.compile()
    assert done.returncode == 127
    assert done.stderr == f"{tree.place}/bin/g++: no such compiler; install it or set CXX\n"


def test_failed_compile_is_not_cached(tree: Tree) -> None:
    (tree.place / "size.h").write_text("#error no size\n")
    for _ in range(2):
        done = tree.compile()
        assert done.returncode
        assert "no size" in done.stderr
    assert tree.calls == 2


def test_source_on_stdin_is_always_compiled(tree: Tree) -> None:
    for code in (5, 6):
        command = [tree.program, "-x", "c++", "-", "-o", "c.out"]
        source = f"int main() {{ return {code}; }}\n"
        subprocess.run(command, cwd=tree.place, input=source, text=True, check=True)
        assert tree.run("c.out") == code
    assert tree.calls == 2


def test_response_file_is_passed_to_the_compiler(tree: Tree) -> None:
    for code in (5, 6):
        (tree.place / "size.h").write_text(f"#define SIZE {code}\n")
        (tree.place / "arguments").write_text("a.cpp")
        subprocess.run([tree.program, "@arguments", "-o", "d.out"], cwd=tree.place, check=True)
        assert tree.run("d.out") == code


def test_call_without_output_file_is_passed_to_the_compiler(tree: Tree) -> None:
    done = subprocess.run([tree.program, "--version"], capture_output=True, text=True, check=True)
    assert "g++" in done.stdout
    assert tree.calls == 1


def test_prune_removes_least_recently_used_output(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.compile()
    tree.compile("-O2")
    tree.compile()
    size = sum(path.stat().st_size for path in tree.store.glob("??/*"))
    monkeypatch.setattr(cxx, "LIMIT", size * 2 // 3)
    cxx.prune(tree.store)
    tree.compile()
    assert tree.calls == 2
    tree.compile("-O2")
    assert tree.calls == 3


def test_recorded_headers_are_those_the_compiler_read(tree: Tree) -> None:
    tree.compile()
    (facts,) = tree.store.glob("??/*.json")
    names = {Path(path).name for path, *_ in json.loads(facts.read_text())["headers"]}
    assert "size.h" in names
    assert "a.cpp" not in names


def test_program_of_another_checkout_has_the_same_path(tree: Tree, tmp_path: Path) -> None:
    """Otherwise Inductor would build another precompiled header, and no kept kernel would be found."""
    copy = tmp_path / "checkout/cxx.py"
    copy.parent.mkdir()
    copy.write_bytes(Path(cxx.__file__).read_bytes())
    compiler = str(tree.place / "bin/g++")
    assert runpy.run_path(str(copy))["program"](tree.store, compiler) == tree.program
    copy.write_text(copy.read_text() + "# changed\n")
    assert runpy.run_path(str(copy))["program"](tree.store, compiler) != tree.program
    copy.unlink()
    assert tree.compile().returncode == 0
