"""Stubs for the NVIDIA libraries that a CUDA build of torch links, so that it imports without CUDA installed.

    python lanes/v6e/make_cuda_stubs.py [SITE_PACKAGES]

For every NVIDIA library that a torch library needs and that is not installed, write torch/lib/LIBRARY.so.N with each
symbol that torch imports from it, with the symbol's version: the loader asserts that versions match. A call into a
stub traps; no code path on a CPU or a TPU does so. Takes about 5 s, or no time if the stubs exist.
Needs readelf and cc. Exit codes: 0 done, 2 usage or a missing tool.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

NVIDIA = re.compile(
    r"lib(cublas|cublasLt|cudnn|cudart|cufft|cufile|cupti|curand|cusolver|cusparse|cusparseLt|nccl|nvJitLink"
    r"|nvToolsExt|nvrtc|nvshmem_host)\.so"
)
# Symbols without a version do not name their library; the loader looks for them in every library.
UNVERSIONED = re.compile(r"cu[A-Z]|cu(blas|dnn|fft|file|rand|solver|sparse)|nccl|nvshmem|nvrtc|nvJit")

Symbols = dict[str, dict[str, str]]  # library -> symbol -> version, "" if it has none


def readelf(library: Path, *what: str) -> list[str]:
    """Return readelf's output lines for a library."""
    done = subprocess.run(["readelf", "-W", *what, library], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def owners_of_versions(library: Path) -> dict[str, str]:
    """Map each version name to its library, from the "version needs" section."""
    owners, owner = {}, ""
    for line in readelf(library, "-V"):
        if found := re.search(r"File: (\S+)", line):
            owner = found[1]
        elif (found := re.search(r"Name: (\S+)\s+Flags", line)) and owner:
            owners[found[1]] = owner
    return owners


def needed_libraries(libraries: list[Path]) -> set[str]:
    """Return names of the NVIDIA libraries that the loader will look for."""
    lines = [line for library in libraries for line in readelf(library, "-d")]
    names = {found[1] for line in lines if (found := re.search(r"NEEDED.*\[(.*)\]", line))}
    return {name for name in names if NVIDIA.match(name)}


def missing_symbols(libraries: list[Path], absent: set[str]) -> Symbols:
    """Return the symbols that the libraries import from the missing ones."""
    symbols_of: Symbols = {name: {} for name in absent}
    defined, loose = set[str](), set[str]()
    for library in libraries:
        owners = owners_of_versions(library)
        for fields in map(str.split, readelf(library, "--dyn-syms")):
            if len(fields) < 8 or not fields[0].rstrip(":").isdigit():
                continue
            binding, section, (name, _, version) = fields[4], fields[6], fields[7].partition("@")
            version = version.lstrip("@")
            if section != "UND":
                defined.add(name)
            elif owners.get(version) in symbols_of:
                symbols_of[owners[version]][name] = version
            elif not version and binding != "WEAK" and UNVERSIONED.match(name):
                loose.add(name)
    versioned = {name for symbols in symbols_of.values() for name in symbols}
    symbols_of[min(symbols_of)].update(dict.fromkeys(sorted(loose - defined - versioned), ""))
    return symbols_of


def write_stub(path: Path, symbols: dict[str, str]) -> None:
    """Write a shared library that defines the symbols and traps when one is called."""
    by_version: dict[str, list[str]] = defaultdict(list)
    for name, version in symbols.items():
        by_version[version].append(name)
    with tempfile.TemporaryDirectory() as directory:
        source, script = Path(directory, "stub.c"), Path(directory, "versions.map")
        source.write_text("".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in sorted(symbols)))
        blocks = [
            f"{v} {{ global: {'; '.join(sorted(by_version[v]))}; }};\n" for v in sorted(by_version) if v
        ]
        script.write_text("".join(blocks))
        command = ["cc", "-w", "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{path.name}", "-o"]
        command += [str(path.with_suffix(".new")), str(source)]
        command += [f"-Wl,--version-script={script}"] if blocks else []
        subprocess.run(command, check=True)
    path.with_suffix(".new").replace(path)


def main(arguments: list[str]) -> int:
    """Run the script and return its exit code."""
    site = Path(arguments[0] if arguments else sysconfig.get_path("platlib"))
    folder = site / "torch" / "lib"
    missing = [tool for tool in ("readelf", "cc") if shutil.which(tool) is None]
    if missing or not folder.is_dir() or len(arguments) > 1:
        reason = (
            f"no {missing[0]} on PATH: install binutils and gcc" if missing else f"{folder}: no torch there"
        )
        print(f"make_cuda_stubs: {reason}", file=sys.stderr)
        return 2
    libraries = sorted(path for path in folder.glob("*.so*") if not NVIDIA.match(path.name))
    present = {path.name for root in (folder, site / "nvidia") for path in root.rglob("*.so*")}
    absent = needed_libraries(libraries) - present
    for name, symbols in sorted(missing_symbols(libraries, absent).items()) if absent else ():
        write_stub(folder / name, symbols)
        print(f"{name}: {len(symbols)} symbols")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
