"""Checks whether a wheel file may be installed next to a torch: its bytes, its label, its symbols, then two runs.

The checks go from cheap to expensive, and nothing of the wheel is executed before all static checks pass. Each check
finds faults that the others miss: a struct whose fields moved keeps its symbols, so a wheel built for another minor
release of torch is only accepted after a run over shapes of the model.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import platform
import re
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from email.parser import Parser
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from bumpgate.core.errors import BumpgateError, is_line, one_fault
from bumpgate.doctor import abi
from bumpgate.doctor.abi import Fault
from bumpgate.env.inventory import Distribution, Inventory
from bumpgate.env.packages import Smoke, label_of, same_minor
from bumpgate.env.store import sha256_of
from bumpgate.env.versions import tag_ranks
from bumpgate.process.child import TOKEN, ChildFault, Interpreter

IMPORT_SECONDS = 120
# The machine field of an ELF header.
MACHINES = {"x86_64": 62, "aarch64": 183}
# A container of GPU code, and its entries: kind, header size, size of the code, and the architecture that it is for.
FATBIN, HEADER, ENTRY = b"\x50\xed\x55\xba", struct.Struct("<4xHHQ"), struct.Struct("<HHIQ12xI")
PTX, CUBIN = 1, 2
# Imports every module of a wheel's top level after torch. A dependency missing from the environment is not counted
# as a fault of the wheel.
IMPORT = f"""
import importlib, sys, torch
{TOKEN}
did = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in sys.argv[1:]:
            raise
    did.append(name)
print(token(*did))
"""


@dataclass(frozen=True)
class Target:
    """The environment that a wheel is to be installed into.

    arch: of the lane's GPU, as in sm_90; 0 without a GPU.
    devices: "cpu" and "cuda", on which smoke cases can run here.
    """

    interpreter: Interpreter
    found: Inventory
    arch: int = 0
    devices: tuple[str, ...] = ("cpu",)

    @property
    def python(self) -> str:
        """Return the Python version, such as "3.12"."""
        return ".".join(self.found.python.split(".")[:2])


@dataclass(frozen=True)
class Audit:
    """Result of the checks of one wheel file. notes: what could not be checked here, and a variant."""

    path: Path
    faults: tuple[Fault, ...]
    notes: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """Return the first fault, "" for a wheel that may be installed."""
        return self.faults[0].reason if self.faults else ""


@dataclass(frozen=True)
class WheelFile:
    """A wheel file of a package to audit.

    sha256: the expected hash, "" if unknown.
    built_for: the torch that it was compiled against, "" if no reviewed source states it.
    """

    path: Path
    package: str
    sha256: str = ""
    built_for: str = ""


def audit(file: WheelFile, target: Target, smoke: Smoke | None = None) -> Audit:
    """Audit one wheel file. Anything that goes wrong with it is a fault of the file: others are audited after it.

    smoke: the cases that run it.
    """
    try:
        with (
            one_fault("cannot be audited"),
            tempfile.TemporaryDirectory(prefix="bumpgate-wheel-") as folder,
        ):
            if fault := _file_fault(file, target):
                return Audit(file.path, (fault,))
            with zipfile.ZipFile(file.path) as archive:
                archive.extractall(folder)
            wheel = _distribution(Path(folder), file.path)
            faults = (*_binary_faults(wheel, target), *abi.audit(wheel, target.found))
            return Audit(file.path, faults) if faults else _run(file, wheel, Path(folder), target, smoke)
    except BumpgateError as error:
        return Audit(file.path, (Fault(file.package, "file", f"{file.path.name}: {error}"),))


def _run(file: WheelFile, wheel: Distribution, place: Path, target: Target, smoke: Smoke | None) -> Audit:
    """Import the wheel and run its cases, in separate processes."""
    source = f"{place}{os.pathsep}{target.interpreter.root}"
    child = replace(target.interpreter, environment={**target.interpreter.environment, "PYTHONPATH": source})
    modules = _top_level(place)
    try:
        child.prove("-c", IMPORT, *modules, did=modules, timeout=IMPORT_SECONDS)
    except ChildFault as fault:
        return Audit(file.path, (Fault(wheel.name, "import", f"{file.path.name} does not import: {fault}"),))
    ran = smoke is not None and smoke.device in target.devices
    if smoke is not None and ran and (faults := tuple(abi.run_cases({wheel.name: smoke}, child))):
        return Audit(file.path, faults)
    compiled_for = file.built_for or str(label_of(wheel).torch or "")
    torch = target.found.torch_version
    known = compiled_for and same_minor(compiled_for, torch)
    if wheel.extensions and not known and not ran:
        unknown = "does not state the torch that it was built for"
        what = f"was built for torch {compiled_for}" if compiled_for else unknown
        reason = f"{file.path.name} {what}, and no device here can verify its results on {torch}"
        return Audit(file.path, (Fault(wheel.name, "unproven", reason),))
    notes = [] if wheel.extensions else ["no compiled extension: Python and Triton only"]
    notes += [] if ran else ["not run over shapes of the model: no device here"]
    return Audit(file.path, (), tuple(notes))


def _file_fault(file: WheelFile, target: Target) -> Fault | None:
    """Return the first fault of the file itself: its bytes, its name, its list of contents, and its tags."""
    path, name, kind = file.path, canonicalize_name(file.package), "file"
    try:
        if file.sha256 and (found := sha256_of(path)) != file.sha256:
            kind = "hash"
            raise BumpgateError(f"sha256 {found[:12]}..., expected {file.sha256[:12]}...")
        with one_fault("not a complete wheel"):
            claimed, version, _, tags = parse_wheel_filename(path.name)
            with zipfile.ZipFile(path) as archive:
                _check_contents(archive, claimed, version)
        if claimed != name:
            raise BumpgateError(f"the name of another package than {name}")
        if not tags & tag_ranks(target.python).keys():
            kind = "tag"
            raise BumpgateError(f"not for Python {target.python} on this platform")
    except BumpgateError as fault:
        return Fault(name, kind, f"{path.name}: {fault}")
    return None


def _check_contents(archive: zipfile.ZipFile, name: str, version: Version) -> None:
    """Raise BumpgateError if a wheel's file name, its metadata, its RECORD and its files differ."""
    names = [entry.filename for entry in archive.infolist() if not entry.is_dir()]
    files = set(names)
    for file in names:
        if file.startswith("/") or "\\" in file or ".." in file.split("/") or not is_line(file):
            raise BumpgateError(f"its member {file!r} is outside of the wheel")
    infos = {file.split("/")[0] for file in files if file.split("/")[0].endswith(".dist-info")}
    if len(infos) != 1 or len(names) != len(files):
        raise BumpgateError(f"{len(infos)} dist-info folders and {len(names) - len(files)} repeated names")
    info = infos.pop()
    metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode("utf-8"))
    own = canonicalize_name(str(metadata["Name"])), Version(str(metadata["Version"]))
    if own != (name, version):
        raise BumpgateError(f"its metadata is of {own[0]} {own[1]}")
    lines = csv.reader(io.StringIO(archive.read(f"{info}/RECORD").decode("utf-8")))
    record = {line[0]: line[1] for line in lines if line}
    signatures = {f"{info}/RECORD", f"{info}/RECORD.jws", f"{info}/RECORD.p7s"}
    if absent := sorted(record.keys() - files - signatures):
        raise BumpgateError(f"{absent[0]} of its RECORD is not in the archive")
    for file in sorted(files - signatures):
        algorithm, _, digest = record.get(file, "").partition("=")
        if algorithm not in ("sha256", "sha384", "sha512"):
            raise BumpgateError(f"{file} is not in its RECORD")
        real = base64.urlsafe_b64encode(hashlib.new(algorithm, archive.read(file)).digest())
        if real.rstrip(b"=").decode() != digest:
            raise BumpgateError(f"{file} does not match its RECORD")


def _distribution(place: Path, path: Path) -> Distribution:
    """Return an unpacked wheel, as the inventory of an environment describes an installed one."""
    (info,) = place.glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text(encoding="utf-8"))
    libraries = sorted(p for p in place.rglob("*") if p.name.endswith(".so") or ".so." in p.name)
    return Distribution(
        str(canonicalize_name(str(metadata["Name"]))),
        str(metadata["Version"]),
        file=path.name,
        place=place,
        requires=tuple(metadata.get_all("Requires-Dist", [])),
        extensions=tuple(libraries),
    )


def _binary_faults(wheel: Distribution, target: Target) -> Iterator[Fault]:
    """Yield a fault for each extension built for another processor, Python or GPU than the target's."""
    machine = platform.machine()
    expected = f"cpython-{target.python.replace('.', '')}"
    for path in wheel.extensions:
        data = path.read_bytes()
        if data[:4] != b"\x7fELF" or int.from_bytes(data[18:20], "little") != MACHINES.get(machine, -1):
            yield Fault(wheel.name, "arch", f"{path.name} is not a library for {machine}")
            continue
        tagged = re.search(r"\.(cpython-\d+)[\w-]*\.so$", path.name)
        if tagged and tagged[1] != expected:
            yield Fault(wheel.name, "tag", f"{path.name} is not for Python {target.python}")
        archs = sorted(gpu_archs(data)) if target.arch else []
        if archs and not any(_runs_on(kind, arch, target.arch) for kind, arch in archs):
            held = ", ".join(f"sm_{arch}" for _, arch in archs)
            what = f"{path.name} has GPU code for {held} (expected sm_{target.arch})"
            yield Fault(wheel.name, "arch", what)


def _runs_on(kind: int, code: int, device: int) -> bool:
    """Return whether code runs on a GPU: a cubin on its major architecture from its minor one up, PTX on all later."""
    return code <= device and (kind == PTX or code // 10 == device // 10)


def gpu_archs(data: bytes) -> frozenset[tuple[int, int]]:
    """Return (kind, architecture) of all GPU code in a library, kind PTX or CUBIN; empty if it has none."""
    found, at = set(), data.find(FATBIN)
    while at >= 0:
        version, header, size = HEADER.unpack_from(data.ljust(at + HEADER.size, b"\0"), at)
        end = at + header + size
        entry = at + header
        while version == 1 and entry + ENTRY.size <= min(end, len(data)):
            kind, _, length, code, arch = ENTRY.unpack_from(data, entry)
            if kind not in (PTX, CUBIN) or not length:
                break
            found.add((kind, arch))
            entry += length + code
        at = data.find(FATBIN, max(entry, at + len(FATBIN)) if version == 1 else at + len(FATBIN))
    return frozenset(found)


def _top_level(place: Path) -> list[str]:
    """Return the modules that the wheel installs; extensions first, which only need torch."""
    extensions = [p.name.split(".")[0] for p in place.glob("*.so")]
    packages = [p.parent.name for p in place.glob("*/__init__.py")]
    modules = [p.stem for p in place.glob("*.py")]
    return [name for name in (*extensions, *sorted(packages), *sorted(modules)) if name.isidentifier()]
