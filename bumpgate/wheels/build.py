"""Builds a kernel wheel from its sdist against one torch: isolated from the host, limited, logged and resumable.

The recipe is for CUDA packages; the machine needs no GPU. Their setup scripts add further architectures and ignore
TORCH_CUDA_ARCH_LIST, so a wrapper of nvcc keeps only the lane's. A copy of the sources stays next to the log until the
wheel is built, so that a stopped build continues with its existing objects (ninja).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bumpgate.core.errors import BumpgateError, one_fault, one_line, text_lines
from bumpgate.env.locks import SHA256
from bumpgate.env.store import save, sha256_of
from bumpgate.env.uv import blocks, find_uv, run_uv
from bumpgate.env.versions import source_distributions
from bumpgate.process.child import Interpreter, run_child
from bumpgate.process.home import home
from bumpgate.process.host import read_or_empty
from bumpgate.wheels import store
from bumpgate.wheels.audit import Target, WheelFile, audit
from bumpgate.wheels.store import Build

# Build requirements of a package in addition to torch.
TOOLS = ("setuptools", "wheel", "ninja", "packaging", "psutil", "numpy", "einops")
# Without these, their setup scripts look for a prebuilt wheel on GitHub, or build for every architecture.
SWITCHES: Mapping[str, Mapping[str, str]] = {
    "causal-conv1d": {"CAUSAL_CONV1D_FORCE_BUILD": "TRUE"},
    "mamba-ssm": {"MAMBA_FORCE_BUILD": "TRUE"},
    "flash-attn": {"FLASH_ATTENTION_FORCE_BUILD": "TRUE"},
}
# Starts nvcc or a C++ compiler: with one -gencode pair, without line information, which is most of a wheel's size, and
# with the C++ standard that torch's headers require, if the package names an older one.
COMPILER = """#!{python}
import os, sys
given, kept = sys.argv[1:], []
while given:
    word = given.pop(0)
    if word.lstrip("-").startswith("std=c++") and word[-2:].isdigit() and int(word[-2:]) < {standard}:
        kept.append("-std=c++{standard}")
    elif word in ("-gencode", "--generate-code"):
        pair = given.pop(0)
        kept += [word, pair] if "sm_{arch}" in pair else []
    elif word.startswith(("-gencode=", "--generate-code=")):
        kept += [word] if "sm_{arch}" in word else []
    elif word == "--threads":
        given.pop(0)
    elif word != "-lineinfo":
        kept.append(word)
os.execv({compiler!r}, [{compiler!r}, *kept])
"""
# Python before 3.10.12 and 3.11.4 has no filter against paths outside: there the digest of the lane is the check.
UNPACKING: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
TAIL_LINES = 3
PATCH_SECONDS = 60.0


class WheelBuildError(BumpgateError):
    """A wheel that could not be built. One line, which names the log."""


@dataclass(frozen=True)
class Limits:
    """jobs: compiler processes at once. seconds: wall time per package. memory_gib: of each process, 0: unlimited."""

    jobs: int = 2
    seconds: float = 4 * 3600.0
    memory_gib: float = 0.0


def build_wheel(build: Build, target: Target, sdist: Path, limits: Limits, patch: Path | None = None) -> Path:
    """Compile one package against the torch of an environment, and put the wheel into the kernel store.

    sdist: its source archive.
    patch: an edit of the sources, as `git diff` writes one.
    Raises WheelBuildError with the log on a failure, at the time limit, or if the wheel fails its audit; the next call
    uses the objects compiled so far.
    """
    if SHA256.fullmatch(build.sdist) and (found := sha256_of(sdist)) != build.sdist:
        raise WheelBuildError(f"{sdist.name}: sha256 {found[:12]}..., the lane has {build.sdist[:12]}...")
    place = home() / "building" / f"{build.package}-{build.key}"
    place.mkdir(parents=True, exist_ok=True)
    log = place.with_suffix(".log")
    python = target.interpreter.python
    tools = _tools(place / "tools", python, log)
    source = _unpacked(sdist, place / "source", patch, log)
    variables = _variables(build, target.interpreter, tools, place, limits)
    isolated = ("--wheel", "--no-build-isolation", "--offline", "--python", str(python))
    command = [find_uv(), "build", *isolated, "--out-dir", str(place / "out"), str(source)]
    code, seconds = run_child([*_limited(limits), *command], source, variables, limits.seconds, log)
    wheels = sorted((place / "out").glob("*.whl"))
    title = f"{build.package} {build.version}"
    if code or len(wheels) != 1:
        ended = f"no wheel within {limits.seconds:.0f} s" if seconds >= limits.seconds else f"exit {code}"
        raise WheelBuildError(f"{title}: {ended}: {_cause(log)} (log: {log}; the same command continues it)")
    audited = audit(WheelFile(wheels[0], build.package, built_for=build.torch), target)
    if audited.faults:
        raise WheelBuildError(f"{title}: built, and refused: {audited.reason} (log: {log})")
    stored = store.put(build, wheels[0])
    shutil.rmtree(place, ignore_errors=True)
    return stored


def _limited(limits: Limits) -> list[str]:
    kib = int(limits.memory_gib * 2**20)
    return ["nice", "-n", "10", *(["sh", "-c", f'ulimit -v {kib}; exec "$@"', "sh"] if kib else [])]


def _variables(
    build: Build, interpreter: Interpreter, tools: Path, place: Path, limits: Limits
) -> dict[str, str]:
    """Return the env_vars of the compilation: torch from the interpreter, the tools, and nvcc for one architecture."""
    given = interpreter.environment.items()
    clean = {name: value for name, value in given if not name.startswith(("TORCH_CUDA_ARCH", "BUMPGATE_"))}
    path = clean.get("PATH")
    folders = [str(tools / "bin"), str(interpreter.python.parent), path or os.defpath]
    variables = {**clean, **SWITCHES.get(build.package, {}), "PATH": os.pathsep.join(folders)}
    variables |= {"PYTHONPATH": str(tools), "MAX_JOBS": str(limits.jobs)}
    packages = sorted(interpreter.python.parents[1].glob("lib/python*/site-packages"))
    standard = max((required_standard(each / "torch" / "include") for each in packages), default=0)
    if cxx := shutil.which(clean.get("CXX") or "c++", path=path):
        variables["CXX"] = str(compiler(place / "bin" / Path(cxx).name, cxx, build.arch, standard))
    if build.arch and (nvcc := shutil.which("nvcc", path=path)):
        prefix = cuda_prefix(Path(nvcc))
        wrapper = compiler(place / "bin" / "nvcc", str(prefix / "bin" / "nvcc"), build.arch, standard)
        headers = [str(header) for each in packages for header in each.glob("nvidia/*/include")]
        variables |= {
            "CUDA_HOME": str(prefix),
            "PYTORCH_NVCC": str(wrapper),
            "TORCH_CUDA_ARCH_LIST": f"{build.arch // 10}.{build.arch % 10}",
            "FLASH_ATTN_CUDA_ARCHS": str(build.arch),
            # pip's headers of cuBLAS and other libraries, which a toolkit may lack.
            "CPATH": os.pathsep.join([*headers, *filter(None, [clean.get("CPATH")])]),
        }
    return variables


def compiler(wrapper: Path, program: str, arch: int, standard: int) -> Path:
    """Write the script that starts a compiler for one GPU architecture and at least one C++ standard, e.g. 20."""
    wrapper.parent.mkdir(exist_ok=True)
    text = COMPILER.format(python=sys.executable, arch=arch, standard=standard, compiler=program)
    wrapper.write_text(text, encoding="utf-8")
    wrapper.chmod(0o755)
    return wrapper


def required_standard(include: Path) -> int:
    """Return the C++ standard that torch's headers require: 17 up to torch 2.13, then 20; 0 if they name none."""
    found = re.search(r"__cplusplus < 20(\d\d)\d\dL", read_or_empty(include / "ATen" / "ATen.h"))
    return int(found[1]) if found else 0


def cuda_prefix(nvcc: Path) -> Path:
    """Return the toolkit folder of an nvcc; one on PATH may be a script that starts the real one."""
    real = nvcc.resolve()
    with suppress(OSError, UnicodeDecodeError):
        for word in real.read_text(encoding="utf-8").split():
            if word.startswith("/") and word.endswith("/bin/nvcc") and Path(word).is_file():
                real = Path(word)
    return real.parents[1]


def _tools(place: Path, python: Path, log: Path) -> Path:
    """Return a folder with what a setup script imports, separate from the environment, which is not changed."""
    done = place / ".done"
    if not done.exists():
        flags = ("--quiet", "--no-build", "--python", str(python), "--target", str(place))
        code, output = run_uv(["pip", "install", *flags, *TOOLS], log)
        if code:
            why = one_line(output, 200)
            raise WheelBuildError(f"the build tools cannot be installed: {why} (log: {log})")
        done.touch()
    return place


def _unpacked(sdist: Path, place: Path, patch: Path | None, log: Path) -> Path:
    """Return the unpacked and patched source tree; an existing one is kept with its compiled objects."""
    done = place / ".unpacked"
    if not done.exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        with one_fault(f"{sdist.name}: cannot be unpacked", WheelBuildError), tarfile.open(sdist) as archive:
            archive.extractall(place, **UNPACKING)
    folders = [p for p in place.iterdir() if p.is_dir()]
    if len(folders) != 1:
        raise WheelBuildError(f"{sdist.name}: {len(folders)} folders (expected one)")
    if patch and not done.exists():
        # In a repository, git would take the paths from its top, and skip those that it does not track.
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(place)}
        apply = ["git", "apply", str(patch.resolve())]
        code, _ = run_child(apply, folders[0], environment, PATCH_SECONDS, log)
        if code:
            raise WheelBuildError(f"{patch.name} does not apply: {_cause(log)} (log: {log})")
    done.touch()
    return folders[0]


def _cause(log: Path) -> str:
    """Return the first error of a compiler in the log, else the last lines."""
    lines = [line.strip() for line in text_lines(read_or_empty(log))] or ["no output"]
    errors = [line for line in lines if re.search(r"\berror: ", line)]
    return one_line(" | ".join(errors[:1] or lines[-TAIL_LINES:]), 300)


def download_sdist(build: Build, index: str | None = None) -> Path:
    """Download the source archive of a package, by its sha256, from the index of this host.

    Raises WheelBuildError if the index has no such file, UnreachableError if it does not answer.
    """
    place = home() / "sdists" / build.sdist
    if kept := [p for p in place.glob("*.tar.gz") if sha256_of(p) == build.sdist]:
        return kept[0]
    files = [f for f in source_distributions(build.package, index) if f.digests.get("sha256") == build.sdist]
    if not files:
        lacking = f"the index has no sdist of sha256 {build.sdist[:12]}..."
        raise WheelBuildError(f"{build.package} {build.version}: {lacking}")
    name, url = files[0].filename, files[0].url
    try:
        whole = save(place / name, build.sdist, blocks(url))
    except BumpgateError as error:
        raise WheelBuildError(str(error)) from None
    if not whole:
        raise WheelBuildError(f"{name}: the index served a file with another sha256 than it lists")
    return place / name
