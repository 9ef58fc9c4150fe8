"""Doctor's first part: checks before any process imports torch. Nothing here imports torch or queries a driver."""

from __future__ import annotations

import errno
import hashlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from bumpgate.doctor.findings import Check, Defect, NotRun, Part, Site
from bumpgate.env.packages import satisfies
from bumpgate.process.child import ChildFault, run

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a quota, a limit on file sizes
COMPILE_SECONDS = 120
# OpenMP and a vector header, as every kernel that Inductor writes for a CPU.
CPP = "#include <omp.h>\n#include <vector>\nint f(std::vector<int> v) { return v.size() + omp_get_max_threads(); }\n"
Found = Iterator[Defect | NotRun | str]


def interpreter(site: Site) -> Found:
    """BG101: the interpreter runs a program."""
    try:
        yield f"{site.inventory.implementation} {site.inventory.python}, {site.interpreter.python}"
    except ChildFault as fault:
        reason = f"{site.interpreter.python} does not answer: {fault}"
        yield Defect("BG101", reason, "name another interpreter with --python")


def python(site: Site) -> Found:
    """BG102: the interpreter's version is one that the lane was adopted with."""
    found, expected = site.inventory, site.row.python
    if not satisfies(found.python, expected) or found.implementation != "CPython":
        yield Defect(
            "BG102",
            f"{found.implementation} {found.python}, lane {site.lane} requires CPython {expected}",
            f"uv venv --python '{expected}' .venv, then --python .venv/bin/python",
        )
    yield f"{found.python} is one of {expected}"


def python_variables(site: Site) -> Found:
    """BG103: no variable of Python itself breaks the assumptions of the suites."""
    for name, rule in site.contract["wheels"]["python"].items():
        if site.env_vars.get(name):
            yield Defect("BG103", f"{name}={site.env_vars[name]}: {rule['reason']}", f"unset {name}")
    yield "none that the contract rejects"


def kernels(site: Site) -> Found:
    """BG104: `import kernels` finds this repository's package. PyPI has another one of this name."""
    found = site.inventory
    ours = site.root / "kernels"
    if found.kernels is None or found.kernels.resolve() != ours.resolve():
        yield Defect(
            "BG104",
            f"`import kernels` is {found.kernels or 'nothing'}, not {ours}",
            f"{site.interpreter.python} -m pip uninstall kernels, or export PYTHONPATH={shlex.quote(str(site.root))}",
        )
    other = found.kernels_of_scripts
    if other is None or other.resolve() == ours.resolve():
        yield "ours"
        return
    on_path = [Path(p).resolve() for p in site.env_vars.get("PYTHONPATH", "").split(os.pathsep) if p]
    if other.parent.resolve() in on_path:
        yield Defect(
            "BG104",
            f"PYTHONPATH puts {other} before ours for programs that are started by their file",
            f"export PYTHONPATH={shlex.quote(str(site.root))}",
        )
    yield f"ours; {other} is installed as well, later on the path"


def contract_document(site: Site) -> Found:
    """BG105: contract.toml is the reviewed one."""
    lock, command = (
        site.root / "launch/contract.lock",
        "sha256sum launch/contract.toml > launch/contract.lock",
    )
    try:
        pinned = (lock.read_text().split() or [""])[0]
    except OSError as error:
        yield Defect("BG105", f"contract.lock cannot be read ({error.strerror})", f"after review: {command}")
        return
    digest = hashlib.sha256((site.root / "launch/contract.toml").read_bytes()).hexdigest()
    if digest != pinned:
        yield Defect(
            "BG105",
            f"contract.toml has sha256 {digest[:12]}, reviewed was {pinned[:12] or 'none'}",
            f"git checkout launch/contract.toml; after review: {command}",
        )
    yield f"sha256 {digest[:12]}, as reviewed"


def contract_variables(site: Site) -> Found:
    """BG106: no variable contradicts the contract. An absent one is not a defect: the launcher adds it."""
    tables = site.contract["environment"]
    for name, rule in tables["always"].items():
        if site.env_vars.get(name, rule["value"]) != rule["value"]:
            yield Defect(
                "BG106",
                f"{name}={site.env_vars[name]}, the contract requires {rule['value']}: {rule['reason']}",
                f"unset {name}",
            )
    for name, rule in tables["rank"].items():
        if name in site.env_vars and not site.env_vars.get("LOCAL_RANK"):
            yield Defect("BG106", f"{name} is set without LOCAL_RANK: {rule['reason']}", f"unset {name}")
    for name, rule in tables["refused"].items():
        if site.env_vars.get(name):
            yield Defect("BG106", f"{name}={site.env_vars[name]}: {rule['reason']}", f"unset {name}")
    for name, rule in tables["inert"].items():
        if site.env_vars.get(name):
            yield Defect("BG106", f"{name} does nothing: {rule['reason']}", f"unset {name}", warning=True)
    yield "none contradicts the contract"


def cache_places(site: Site) -> Mapping[str, Path]:
    """Return variable -> its directory: the configured one, else the default of the launcher and the suites."""
    home = Path(
        site.env_vars.get("XDG_CACHE_HOME") or Path(site.env_vars.get("HOME") or Path.home()) / ".cache"
    )
    folders = site.contract["caches"]["directory"]
    return {
        n: Path(site.env_vars.get(n) or home / "bumpgate" / rule["folder"]) for n, rule in folders.items()
    }


def caches(site: Site) -> Found:
    """BG107: a cache directory does not exist; BG108: cannot be written; BG109: its disk is full."""
    minimum = site.contract["caches"]["minimum_free_bytes"]
    places = cache_places(site)
    for name, place in places.items():
        if site.env_vars.get(name):
            yield from _directory(place, f"{name}={place}", name, minimum)
        else:  # the launcher creates it, in the first existing parent
            parent = next(p for p in place.parents if p.exists())
            yield from _directory(parent, f"{name} is not set, and its default {place}", name, minimum)
    yield ", ".join(f"{place}{'' if site.env_vars.get(n) else ' (default)'}" for n, place in places.items())


def temporary(site: Site) -> Found:
    """BG110: the temporary directory, where compilers write before anything reaches a cache."""
    place = Path(site.env_vars.get("TMPDIR") or tempfile.gettempdir())
    if fault := _write_fault(place):
        yield Defect(
            "BG110", f"TMPDIR={place}: {fault[1]}", "export TMPDIR to a writable directory with space"
        )
    yield str(place)


def compiler(site: Site) -> Found:
    """BG111: Inductor compiles with $CXX, else with g++; the one that it will use compiles a program here."""
    chosen = shlex.split(site.env_vars.get("CXX", "")) or ["g++"]
    path = shutil.which(chosen[0], path=site.env_vars.get("PATH"))
    fix = "apt-get install g++, or export CXX to a C++ compiler"
    if path is None:
        yield Defect("BG111", f"no C++ compiler: {chosen[0]} is not on PATH", fix)
        return
    try:
        with tempfile.TemporaryDirectory() as directory:
            (source := Path(directory) / "probe.cpp").write_text(CPP)
            flags = ["-fopenmp", "-fPIC", "-shared", str(source), "-o", str(source.with_suffix(".so"))]
            run([path, *chosen[1:], *flags], site.root, site.env_vars, COMPILE_SECONDS)
    except ChildFault as fault:
        yield Defect("BG111", f"{chosen[0]} does not compile a small OpenMP library: {fault}", fix)
    yield path


def _directory(place: Path, what: str, name: str, minimum: int) -> Iterator[Defect]:
    """Yield the defects of one directory: missing, not writable, full."""
    elsewhere = f"export {name} to a writable directory on a volume that outlives the run"
    if not place.is_dir():
        if place.exists():
            yield Defect("BG107", f"{what}: {place} is a file", elsewhere)
        else:
            make = f"mkdir -p {shlex.quote(str(place))}, or {elsewhere}"
            yield Defect("BG107", f"{what} does not exist", make)
        return
    fault = _write_fault(place)
    if fault and fault[0] not in FULL:
        yield Defect("BG108", f"{what} cannot be written: {fault[1]}", elsewhere)
        return
    free = 0 if fault else shutil.disk_usage(place).free
    if fault or free < minimum:
        why = fault[1] if fault else f"{free >> 20} MiB free"
        yield Defect(
            "BG109",
            f"{what}: {why}, the contract requires {minimum >> 20} MiB",
            f"free space, or {elsewhere}",
        )


def _write_fault(place: Path) -> tuple[int, str] | None:
    """Return errno and message of a failed 4 KiB write, or None. Root ignores mode bits, so a file is written."""
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(bytes(4096))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return error.errno or 0, error.strerror or str(error)
    return None


CHECKS = (
    Check("BG101", Part.ENVIRONMENT, "interpreter", interpreter),
    Check("BG102", Part.ENVIRONMENT, "python", python, needs=("BG101",)),
    Check("BG103", Part.ENVIRONMENT, "python variables", python_variables),
    Check("BG104", Part.ENVIRONMENT, "package `kernels`", kernels, needs=("BG101",)),
    Check("BG105", Part.ENVIRONMENT, "contract document", contract_document),
    Check("BG106", Part.ENVIRONMENT, "contract variables", contract_variables),
    Check("BG107", Part.ENVIRONMENT, "cache directories", caches),
    Check("BG110", Part.ENVIRONMENT, "temporary directory", temporary),
    Check("BG111", Part.ENVIRONMENT, "C++ compiler", compiler, needs=("BG110",)),
)
