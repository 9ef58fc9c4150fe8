"""Checks that a kernel wheel's extension was built for the installed torch, by its ELF symbols and then by a run.

`nm` and `c++filt` read the symbols: binutils is installed wherever g++ is, which Inductor needs, and nm reads the
74,000 exports of libtorch_cpu in half a second, which takes minutes in pure Python.

Symbols cannot show everything. A struct whose fields moved keeps its symbols; a lazily bound library imports with a
symbol missing. So each extension is also run, on shapes of the model, in its own process.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from bumpgate.core.errors import BumpgateError
from bumpgate.env.inventory import Distribution, Inventory
from bumpgate.env.packages import Smoke, label_of, same_minor
from bumpgate.process.child import ChildFault, Interpreter, side_by_side

TOOLS = ("nm", "c++filt", "readelf")
TOOL_SECONDS = 120
CASE_SECONDS = 300
# A mangled name whose outermost scope is torch's: of functions and data, of vtables, typeinfo, thunks and guards. And
# the C functions of torch's stable ABI, of which each release adds some.
TORCH_SYMBOL = re.compile(
    r"_Z(?:T[VTIS]|Th\w*?_|GV|GR)?N?[KVrRO]*(?:3c10|2at|5torch|6caffe2)(?=\d|[A-Z])|_?THP|_Z\d+THP|aoti_torch_"
)
TORCH_LIBRARY = re.compile(r"lib(?:torch|c10|caffe2|shm|aoti)[\w.-]*\.so")
CUDA_RUNTIME = re.compile(r"libcudart\.so\.\d+")
TORCH_OF_FILE = re.compile(r"torch(\d)\.?(\d+)(?!\d)")
NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
OLD_STRING = re.compile(r"std::(?:string|basic_string<char)\b")
NEW_STRING, STRING_TAG = "__cxx11::basic_string", "B5cxx11"
SHOWN = 3


class ToolError(BumpgateError):
    """nm, c++filt or readelf is missing, or cannot read a file."""


@dataclass(frozen=True)
class Fault:
    """A fault of a wheel. kind: "label", "library", "string-abi", "symbols" or "run". symbols: all, demangled."""

    wheel: str
    kind: str
    reason: str
    symbols: tuple[str, ...] = ()


@dataclass(frozen=True)
class Extension:
    """A shared library of a wheel. undefined: mangled, without those that the linker may leave unresolved (weak)."""

    path: Path
    undefined: frozenset[str]
    exported: frozenset[str]
    needed: tuple[str, ...]

    @property
    def uses_torch(self) -> bool:
        return any(map(TORCH_LIBRARY.fullmatch, self.needed)) or any(map(TORCH_SYMBOL.match, self.undefined))


def audit(wheel: Distribution, found: Inventory) -> Iterator[Fault]:
    """Yield the evidence that this wheel was not built for the installed torch. Raises ToolError."""
    return audit_all([wheel], found)


def audit_all(wheels: Sequence[Distribution], found: Inventory) -> Iterator[Fault]:
    """Like audit, of several wheels that may call each other. Neither they nor torch are imported."""
    for wheel in wheels:
        yield from label_faults(wheel, found)
    if found.torch is None or not wheels:
        return
    extensions = [(w.name, read_extension(path)) for w in wheels for path in w.extensions if path.is_file()]
    if not any(extension.uses_torch for _, extension in extensions):
        return
    libraries = {path.name: path for path in (found.torch / "lib").glob("*.so*")}
    exported = exports(libraries.values()).union(*(e.exported for _, e in extensions))
    for name, extension in extensions:
        if extension.uses_torch:
            yield from _library_faults(name, extension, set(libraries), found)
            yield from _symbol_faults(name, extension, exported, found.torch_version)


def built_on_torch(found: Inventory) -> list[Distribution]:
    """Return the installed distributions, other than torch, with a library that links torch or calls its C++.

    Ignored are files that are not libraries; with a CPU build of torch, libraries for CUDA, which it cannot load; and
    in a package with one library per torch release, those for other releases. Raises ToolError.
    """
    every = [d for first, *_ in found.distributions.values() for d in [first] if d.name != "torch"]
    paths = [str(path) for d in every for path in d.extensions if path.is_file()]
    if not paths:
        return []
    using, unloadable, current = set(), set(), ""
    for line in _tool("nm", "-D", "-A", "--undefined-only", "--no-demangle", *paths, strict=False):
        path, _, symbol = line.rpartition(" U ")
        if TORCH_SYMBOL.match(symbol):
            using.add(path.rstrip().removesuffix(":"))
    # The name of a file is printed only if there are several.
    for line in _tool("readelf", "--dynamic", "--wide", *paths, paths[0], strict=False):
        current = line.removeprefix("File: ") if line.startswith("File: ") else current
        needed = NEEDED.search(line)
        if needed and TORCH_LIBRARY.fullmatch(needed[1]):
            using.add(current)
            if "_cuda" in needed[1] and not found.version.get("cuda"):
                unloadable.add(current)
    using -= unloadable
    linked = [(d, [p for p in d.extensions if str(p) in using]) for d in every]
    kept = [replace(d, extensions=tuple(for_this_torch(paths, found.torch_version))) for d, paths in linked]
    return [d for d in kept if d.extensions]


def for_this_torch(paths: Sequence[Path], torch: str) -> list[Path]:
    """Drop the files whose names differ from others only in the torch version, and name another minor release.

    The loader of such a package chooses: libaddon_torch28.so, libaddon_torch29.so, libaddon_torch210.so.
    """
    releases = {p: (int(m[1]), int(m[2])) for p in paths if (m := TORCH_OF_FILE.search(p.name))}
    families: dict[str, set[tuple[int, int]]] = {}
    for path, release in releases.items():
        families.setdefault(_any_torch(path), set()).add(release)
    own = Version(torch).release[:2] if torch else ()
    return [p for p in paths if releases.get(p, own) == own or len(families[_any_torch(p)]) == 1]


def _any_torch(path: Path) -> str:
    return TORCH_OF_FILE.sub("torch*", str(path))


def label_faults(wheel: Distribution, found: Inventory) -> Iterator[Fault]:
    """Yield a fault if the label names another torch, CUDA or string ABI than the installed torch has.

    The label is trusted: a wheel labelled torch 2.10 was compiled with the structs of 2.10, even if it imports.
    """
    claim, torch, cuda = label_of(wheel), found.torch_version, found.version.get("cuda")
    built = []
    if claim.torch and torch and not same_minor(claim.torch, torch):
        built.append(f"for torch {claim.torch}, not {torch}")
    if claim.cuda and cuda and Version(claim.cuda).major != Version(cuda).major:
        built.append(f"for CUDA {claim.cuda}, torch for {cuda}")
    if claim.cxx11_abi is False:
        built.append("with _GLIBCXX_USE_CXX11_ABI=0, torch with 1")
    for how in built:
        yield Fault(wheel.name, "label", f"{wheel.name} {wheel.version} is built {how}")


def _library_faults(
    wheel: str, extension: Extension, libraries: set[str], found: Inventory
) -> Iterator[Fault]:
    name, torch, cuda = extension.path.name, found.torch_version, found.version.get("cuda")
    absent = [n for n in extension.needed if TORCH_LIBRARY.fullmatch(n) and n not in libraries]
    if absent:
        yield Fault(wheel, "library", f"{name} needs {', '.join(absent)}, which torch {torch} does not have")
    runtimes = [n for n in extension.needed if CUDA_RUNTIME.match(n)]
    if cuda and runtimes and runtimes[0] != f"libcudart.so.{Version(cuda).major}":
        yield Fault(wheel, "library", f"{name} needs {runtimes[0]}, torch {torch} brings CUDA {cuda}")


def _symbol_faults(wheel: str, extension: Extension, exported: frozenset[str], torch: str) -> Iterator[Fault]:
    name = extension.path.name
    missing = sorted(s for s in extension.undefined - exported if TORCH_SYMBOL.match(s))
    if not missing:
        return
    # The new ABI tags functions that return a string; in parameters, the string type itself has the tag.
    untagged = {s.replace(STRING_TAG, "") for s in exported if STRING_TAG in s}
    old: list[str] = []
    other: list[str] = []
    for symbol, shown in zip(missing, demangle(missing)):
        passes_old = OLD_STRING.search(shown) and NEW_STRING not in shown
        (old if passes_old or symbol in untagged else other).append(shown)
    if old:
        reason = f"{name} was compiled with _GLIBCXX_USE_CXX11_ABI=0, torch {torch} with 1: {_some(old)}"
        yield Fault(wheel, "string-abi", reason, tuple(old))
    if other:
        # Symbols of an absent CUDA library are reported elsewhere: sort the more informative ones first.
        other.sort(key=lambda shown: ("cuda" in shown.lower(), shown))
        reason = f"{name} calls what torch {torch} does not have: {_some(other)}"
        yield Fault(wheel, "symbols", reason, tuple(other))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return "; ".join(names[:SHOWN]) + more


def run_cases(
    wheels: Mapping[str, Smoke], interpreter: Interpreter, seconds: float = CASE_SECONDS
) -> Iterator[Fault]:
    """Run each case of each wheel in its own process; a crash, hang or wrong result is a fault of that case only."""

    def run(wheel_and_case: tuple[str, str]) -> Fault | None:
        wheel, case = wheel_and_case
        try:
            interpreter.prove(*wheels[wheel].command, case, did=[case], timeout=seconds)
        except ChildFault as fault:
            return Fault(wheel, "run", f"{wheel} {case}: {fault}")
        return None

    cases = [(wheel, case) for wheel, smoke in wheels.items() for case in smoke.cases]
    yield from filter(None, side_by_side(run, cases))


def read_extension(path: Path) -> Extension:
    """Read the symbols and needed libraries of one ELF file. Raises ToolError."""
    undefined, exported = set(), set()
    for line in _tool("nm", "-D", "--no-demangle", str(path)):
        kind, symbol = line.split()[-2:]
        symbol = symbol.partition("@")[0]
        if kind == "U":
            undefined.add(symbol)
        elif kind not in "wv":
            exported.add(symbol)
    entries = _tool("readelf", "--dynamic", "--wide", str(path))
    needed = map(NEEDED.search, entries)
    return Extension(path, frozenset(undefined), frozenset(exported), tuple(n[1] for n in needed if n))


def exports(libraries: Iterable[Path]) -> frozenset[str]:
    """Return the symbols that these libraries export. Raises ToolError."""
    lines = _tool("nm", "-D", "--defined-only", "--no-demangle", *map(str, libraries))
    return frozenset(line.split()[-1].partition("@")[0] for line in lines if len(line.split()) == 3)


def demangle(symbols: Iterable[str]) -> list[str]:
    """Demangle C++ names. Raises ToolError."""
    return _tool("c++filt", stdin="\n".join(symbols))


def missing_tool() -> str | None:
    """Return the first tool of TOOLS that is not on PATH, or None."""
    return next((tool for tool in TOOLS if shutil.which(tool) is None), None)


def _tool(name: str, *arguments: str, stdin: str = "", strict: bool = True) -> list[str]:
    """Return the lines that a tool prints. strict: False ignores files that it cannot read."""
    try:
        done = subprocess.run(
            [name, *arguments], input=stdin, capture_output=True, text=True, timeout=TOOL_SECONDS
        )
    except FileNotFoundError:
        raise ToolError(f"{name} is not on PATH: apt-get install binutils") from None
    except subprocess.TimeoutExpired:
        raise ToolError(f"{name}: no answer in {TOOL_SECONDS} s") from None
    if done.returncode and strict:
        last = (done.stderr.strip() or "failed").splitlines()[-1]
        raise ToolError(f"{name}: {last.removeprefix(f'{name}: ')}")
    return done.stdout.splitlines()
