"""A C++ compiler that keeps its output files: the same sources, headers and flags are compiled once.

Inductor calls the compiler named by CXX for every CPU kernel, and suites compile one model in many processes with
empty Inductor caches. `program` writes a script to use as CXX. It runs this file, which returns the kept output if

* the flags, the contents of the source and object files, the folder of a source with a relative include, the compiler,
  its environment variables, the folders named by -I and -L, and the processor are the same (`-march=native`), and
* each header that the first compile read has the same size and modification time.

Only the output of a successful compile is kept, with its messages. Everything else goes to the compiler as it is.
(ccache and sccache keep the output of `-c` only; Inductor compiles and links a kernel in one call.)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = (".cpp", ".hpp", ".cc", ".h", ".o", ".a")
#: Precompiled headers have a separate store: Inductor's folder of them, which is not emptied.
PRECOMPILED = (".gch", ".pch")
#: An include that the compiler looks for in the folder of the source first.
RELATIVE = re.compile(rb'#\s*include\s*"(?!/)')
#: Variables that g++ and clang++ read.
VARIABLES = (
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "GCC_EXEC_PREFIX",
    "COMPILER_PATH",
    "SOURCE_DATE_EPOCH",
)
#: Bytes of kept output; the files that were not used for the longest time are removed above it.
LIMIT = 1 << 30


def program(store: Path, compiler: str) -> Path:
    """Write the script for CXX that runs `compiler` with `store`; return its path.

    The script runs a copy of this file. Its path depends on the text of this file and not on the folder: Inductor names
    a precompiled header by the path of the compiler, and every compile includes that name.
    """
    text = Path(__file__).read_bytes()
    start = [sys.executable, "-IS"]
    digest = hashlib.sha256(repr((start, text, str(store), compiler)).encode()).hexdigest()
    # Inductor reads from the file's name whether the compiler is g++ or clang++.
    path = store / digest[:12] / Path(compiler).name
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        copy = path.with_name("cxx.py")
        _write(copy, text)
        command = shlex.join([*start, str(copy), str(store), compiler])
        _write(path, f'#!/bin/sh\nexec {command} "$@"\n'.encode(), 0o755)
    return path


def prune(store: Path) -> None:
    """Remove the output that was not used for the longest time until the store is below LIMIT bytes."""
    files = sorted(
        (path for path in store.glob("??/*") if path.is_file()), key=lambda path: path.stat().st_mtime
    )
    size = sum(path.stat().st_size for path in files)
    for path in files:
        if size <= LIMIT:
            return
        size -= path.stat().st_size
        path.unlink(missing_ok=True)


def main(store: Path, compiler: str, *arguments: str) -> int:
    """Compile, or write the kept output of the same compile."""
    output = Path(arguments[arguments.index("-o") + 1]) if "-o" in arguments[:-1] else Path()
    # Standard input and response files are inputs that the arguments do not show, a list of headers is more output.
    hidden = any(argument == "-" or argument.startswith(("@", "-M", "-Wp,-M")) for argument in arguments)
    if not shutil.which(compiler):
        print(f"{compiler}: no such compiler; install it or set CXX", file=sys.stderr)
        return 127
    if hidden or output.suffix in ("", *PRECOMPILED) or not any(map(_source, arguments)):
        return subprocess.call([compiler, *arguments])
    key = _key(compiler, arguments, output)
    kept = store / key[:2] / key
    with contextlib.suppress(OSError, ValueError):
        facts = json.loads(kept.with_suffix(".json").read_text())
        if facts["headers"] == [[path, *_state(path)] for path, *_ in facts["headers"]]:
            content = kept.read_bytes()
            if facts["digest"] == hashlib.sha256(content).hexdigest():
                _write(output, content, facts["mode"])
                os.utime(kept)
                os.utime(kept.with_suffix(".json"))
                sys.stderr.write(facts["messages"])
                return 0
    with tempfile.TemporaryDirectory() as scratch:
        rule = Path(scratch, "rule")
        # g++ reads no precompiled header while it lists headers; the name of Inductor's is a digest of its text.
        listed = [] if any(map(_precompiled, arguments)) else ["-MD", "-MF", str(rule)]
        done = subprocess.run(
            [compiler, *arguments, *listed], stderr=subprocess.PIPE, text=True, errors="replace"
        )
        sys.stderr.write(done.stderr)
        if not done.returncode:
            with contextlib.suppress(OSError):
                headers = [[path, *_state(path)] for path in _headers(rule)]
                content = output.read_bytes()
                facts = {
                    "headers": headers,
                    "digest": hashlib.sha256(content).hexdigest(),
                    "mode": output.stat().st_mode & 0o777,
                    "messages": done.stderr,
                }
                kept.parent.mkdir(parents=True, exist_ok=True)
                _write(kept, content)
                _write(kept.with_suffix(".json"), json.dumps(facts).encode())
    return done.returncode


def _precompiled(argument: str) -> bool:
    return "/precompiled_headers/" in argument


def _source(argument: str) -> bool:
    return argument.endswith(SOURCES) and os.path.isfile(argument) and not _precompiled(argument)


def _key(compiler: str, arguments: tuple[str, ...], output: Path) -> str:
    build = (compiler, _state(shutil.which(compiler) or compiler), output.suffix, _processor())
    digest = hashlib.sha256(repr((build, [os.environ.get(name) for name in VARIABLES])).encode())
    for argument in arguments:
        if argument == str(output):
            text = "output"
        elif _source(argument):
            content = Path(argument).read_bytes()
            folder = Path(argument).parent.absolute() if RELATIVE.search(content) else ""
            text = f"{hashlib.sha256(content).hexdigest()} {folder}"
        elif argument.startswith(("-I", "-L")) and os.path.isdir(argument[2:]):
            text = f"{argument} {_state(argument[2:])}"
        else:
            text = argument
        digest.update(f"{len(text)} {text}".encode())
    return digest.hexdigest()


def _processor() -> str:
    """Return the instruction sets of this machine's processor: several machines may share a store."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return ""


def _state(path: str) -> tuple[int, int]:
    state = os.stat(path)
    return state.st_size, state.st_mtime_ns


def _headers(rule: Path) -> list[str]:
    """Return the headers that the compiler read, from a rule of make; the source file comes first there."""
    text = rule.read_text() if rule.is_file() else ""
    return text.replace("\\\n", " ").partition(": ")[2].split()[1:]


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_bytes(content)
    draft.chmod(mode)
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
