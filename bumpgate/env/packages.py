"""The packages of a lane's environment: the adopted set, its kernel wheels, and checks of an installed one.

Versions are compared by `packaging`. As text "2.9" is newer than "2.12"; and by PEP 440 2.12.0.dev20260304 is older
than 2.12, though its C++ structures and its wheels are those of 2.12: `release` gives the release of a build.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from bumpgate.core.errors import BumpgateError
from bumpgate.core.lanes import FILE, WORDS, Lane
from bumpgate.env.inventory import Distribution, Inventory
from bumpgate.env.locks import SHA256, Lock, read_lock

ANY = SpecifierSet("")
Types = Mapping[str, type]


class PackagesError(BumpgateError):
    """The packages of a lane are not declared correctly. One line: the file, the field and what it should be."""


@dataclass(frozen=True)
class Label:
    """Build target in the name of a wheel; None for parts that the name does not state."""

    torch: Version | None = None
    cuda: str | None = None
    cxx11_abi: bool | None = None


@dataclass(frozen=True)
class Smoke:
    """Smoke test of a kernel wheel: `python *command case`, a process for each case. device: "cpu" or "cuda".

    The program prints the SHA-256 of its case (bumpgate.process.child.token) once it has checked the result.
    """

    command: tuple[str, ...]
    cases: tuple[str, ...]
    device: str


@dataclass(frozen=True)
class KernelWheel:
    """A wheel with compiled extensions. version: exact, "" if the source states none. torch: of the build.

    sha256: of the wheel; sdist: of the source distribution that `bumpgate wheels build` compiles.
    patch: a file next to the lane.toml, applied to those sources.
    smoke: how the wheel is run; None if it is only audited.
    """

    name: str
    version: str
    torch: str
    sha256: str = ""
    sdist: str = ""
    patch: str = ""
    smoke: Smoke | None = None


@dataclass(frozen=True)
class PackageSet:
    """The packages of an environment. python, torch and packages: specifiers that a build must satisfy, with its label.

    wheels: the kernel wheels that it has.
    without: names of the kernel wheels that the lane has given up; their rows are NOT RUN, also under --gate.
    given_up: their tables, from which they can be built for another torch.
    driver: the oldest GPU driver.
    """

    name: str
    python: SpecifierSet = ANY
    torch: SpecifierSet = ANY
    packages: Mapping[str, SpecifierSet] = field(default_factory=dict)
    wheels: tuple[KernelWheel, ...] = ()
    without: tuple[str, ...] = ()
    given_up: tuple[KernelWheel, ...] = ()
    driver: Version | None = None

    @property
    def known_wheels(self) -> tuple[KernelWheel, ...]:
        """Return the kernel wheels that a candidate may have: also those that were given up."""
        return (*self.wheels, *self.given_up)


@dataclass(frozen=True)
class Mismatch:
    """An installed version that differs from the row. found: "" if it is absent."""

    package: str
    expected: str
    found: str


def release(version: str | Version) -> Version:
    """Return the release that a build leads to: 2.12.0 for 2.12.0.dev20260304+cu130 and for 2.12.0a0+git21fec65."""
    return Version((version if isinstance(version, Version) else Version(version)).base_version)


def same_minor(a: str | Version, b: str | Version) -> bool:
    """Whether two torch versions belong to one minor release: between minors, C++ structures and symbols move."""
    return release(a).release[:2] == release(b).release[:2]


def label(text: str) -> Label:
    """Parse a wheel's local version or file name: `2.8.3+cu130torch2.10`, `...+cu12torch2.8cxx11abiTRUE-cp312-...`."""
    local = text.replace("%2B", "+").partition("+")[2].lower()
    torch = re.search(r"(?:torch|pt)(\d+\.\d+(?:\.\d+)?)", local)
    cuda = re.search(r"cu(\d{2})(\d?)", local)
    abi = re.search(r"cxx11abi(true|false)", local)
    return Label(
        torch=Version(torch[1]) if torch else None,
        cuda=cuda and (f"{cuda[1]}.{cuda[2]}" if cuda[2] else cuda[1]),
        cxx11_abi=abi and abi[1] == "true",
    )


def label_of(wheel: Distribution) -> Label:
    """Return the label of an installed wheel: from its version, else its file name, else its torch pin."""
    pins = (re.fullmatch(r"torch\s*\(?==\s*(\d+\.\d+)[\w.*+]*\)?", text.strip()) for text in wheel.requires)
    pinned = next((Version(pin[1]) for pin in pins if pin), None)
    claims = [label(wheel.version), label(wheel.file), Label(torch=pinned)]
    fields = ([v for c in claims if (v := getattr(c, name)) is not None] for name in vars(Label()))
    return Label(*(stated[0] if stated else None for stated in fields))


def satisfies(version: str, specifier: SpecifierSet) -> bool:
    """Check a PEP 440 specifier, with pre-releases included: a row may name a nightly."""
    try:
        return specifier.contains(Version(version), prereleases=True)
    except ValueError:
        return False


def mismatches(row: PackageSet, found: Inventory) -> Iterator[Mismatch]:
    """Yield the differences of an interpreter from a row: python, torch, packages, kernel wheels, in this order."""
    if not satisfies(found.python, row.python):
        yield Mismatch("python", str(row.python), found.python)
    if not satisfies(found.torch_version, row.torch):
        yield Mismatch("torch", str(row.torch), found.torch_version)
    for name, spec in row.packages.items():
        installed = found.installed(name)
        if installed is None or not satisfies(installed.version, spec):
            yield Mismatch(name, str(spec), installed.version if installed else "")
    for wheel in row.wheels:
        installed = found.installed(wheel.name)
        if installed is None or (wheel.version and not _same(installed.version, wheel.version)):
            yield Mismatch(wheel.name, wheel.version or "any version", installed.version if installed else "")
        elif wheel.sha256 and installed.sha256 not in ("", wheel.sha256):
            expected = f"the wheel of sha256 {wheel.sha256[:12]}"
            yield Mismatch(wheel.name, expected, f"one of {installed.sha256[:12]}")


def _same(a: str, b: str) -> bool:
    """Compare versions with their local labels: only the label distinguishes 2.8.3+cu130torch2.10 from 2.8.3."""
    try:
        return Version(a) == Version(b)
    except ValueError:
        return a == b


def contradictions(row: PackageSet) -> Iterator[str]:
    """Yield the kernel wheels of a row whose label or build does not match the row's torch.

    flash-attn 2.8.3+cu130torch2.10, installed by force over torch 2.12, imports and then fails inside a kernel under
    some shapes.
    """
    pinned = exact_version(row.torch)
    for wheel in row.wheels if pinned else ():
        claimed = label(wheel.version).torch
        if claimed and not same_minor(claimed, wheel.torch):
            yield f"{wheel.name}: its label names torch {claimed}, it was built against {wheel.torch}"
        if not same_minor(wheel.torch, pinned):
            yield f"{wheel.name}: built against torch {wheel.torch}, the row has {pinned}"


def exact_version(specifier: SpecifierSet) -> str:
    """Return the single version that a specifier allows; "" if it allows several."""
    return next((s.version for s in specifier if s.operator in ("==", "===") and "*" not in s.version), "")


def adopted(lane: Lane, lock: Lock | None) -> PackageSet:
    """Return the adopted set of a lane: its pins out of the lock, its kernel wheels out of the declaration.

    lock: None for a lane without one; then any python and torch are right. Raises PackagesError (one line).
    """
    reader = _Reader(lane.where)
    locked = lock.versions if lock else {}
    pins = {canonicalize_name(name): name for name in lane.pins if canonicalize_name(name) in locked}
    # An index may omit the label that the lock has, and the lock one that the build has.
    specifiers = {
        str(name): SpecifierSet(f"=={Version(locked[name]).public}", prereleases=True) for name in pins
    }
    locked_python = f"=={lock.python}.*" if lock and lock.python else ""
    found = PackageSet(
        lane.name,
        reader.specifier("python", lane.python or locked_python),
        specifiers.pop("torch", ANY),
        {str(pins[canonicalize_name(name)]): specifier for name, specifier in specifiers.items()},
        **reader.wheels(lane.wheels, lane.without),
        driver=reader.version("driver", lane.driver) if lane.driver else None,
    )
    for fault in contradictions(found):
        raise reader.fail("", fault)
    return found


@dataclass(frozen=True)
class _Reader:
    """Convert tables to records; every fault is a PackagesError that starts with file and field."""

    where: str

    def fail(self, where: str, fault: str) -> PackagesError:
        return PackagesError(f"{self.where}: {where + ': ' if where else ''}{fault}")

    def table(self, raw: Any, where: str, needed: Types, optional: Types) -> None:
        """Check a table: all required fields, any optional ones, no others, each of its type."""
        if not isinstance(raw, dict):
            raise self.fail(where, "must be a table")
        kinds = {**needed, **optional}
        if absent := [name for name in needed if name not in raw]:
            raise self.fail(where, f"the field {absent[0]!r} is missing")
        for name, value in raw.items():
            if name not in kinds:
                raise self.fail(where, f"unknown field {name!r}; fields: {', '.join(kinds)}")
            if not isinstance(value, kinds[name]) or (isinstance(value, bool) and kinds[name] is not bool):
                raise self.fail(where, f"{name} must be {WORDS[kinds[name]]}, got {value!r}")

    def specifier(self, where: str, text: str) -> SpecifierSet:
        try:
            return SpecifierSet(text, prereleases=True)
        except ValueError:
            raise self.fail(where, f"invalid PEP 440 specifier {text!r} (expected e.g. ==2.13.0)") from None

    def version(self, where: str, text: str) -> Version:
        try:
            return Version(text)
        except ValueError:
            raise self.fail(where, f"invalid PEP 440 version {text!r}") from None

    def wheels(self, raw: Mapping[str, Any], without: Iterable[str]) -> dict[str, Any]:
        """Return the fields of a set that its kernel wheels determine. without: those that were given up."""
        left = tuple(str(canonicalize_name(each)) for each in without)
        wheels = [self.wheel(f"wheels.{name}", name, table) for name, table in raw.items()]
        return {
            "wheels": tuple(wheel for wheel in wheels if wheel.name not in left),
            "without": left,
            "given_up": tuple(wheel for wheel in wheels if wheel.name in left),
        }

    def wheel(self, where: str, name: str, raw: Any) -> KernelWheel:
        optional: Types = dict.fromkeys(("version", "sha256", "sdist", "patch"), str)
        self.table(raw, where, {"torch": str}, {**optional, "smoke": dict})
        self.version(f"{where}.torch", raw["torch"])
        if raw.get("version"):
            self.version(f"{where}.version", raw["version"])
        for digest in ("sha256", "sdist"):
            if raw.get(digest) and not SHA256.fullmatch(raw[digest]):
                raise self.fail(where, f"{digest} must be 64 hexadecimal digits")
        if (patch := raw.get("patch")) and Path(patch).name != patch:
            raise self.fail(where, f"patch must be the name of a file next to {FILE}, got {patch!r}")
        smoke = self.smoke(f"{where}.smoke", raw["smoke"]) if "smoke" in raw else None
        return KernelWheel(**{"version": "", **raw, "name": str(canonicalize_name(name)), "smoke": smoke})

    def smoke(self, where: str, raw: Any) -> Smoke:
        self.table(raw, where, {"command": list, "cases": list, "device": str}, {})
        if not all(raw[n] and all(isinstance(each, str) for each in raw[n]) for n in ("command", "cases")):
            raise self.fail(where, "command and cases must be non-empty lists of strings")
        if raw["device"] not in ("cpu", "cuda"):
            raise self.fail(where, f"device must be cpu or cuda, got {raw['device']!r}")
        return Smoke(tuple(raw["command"]), tuple(raw["cases"]), raw["device"])


# Set by the gate and by bisect for the processes of one environment: the path of its lock, or NO_LOCK.
VARIABLE = "BUMPGATE_LOCK"
NO_LOCK = "none"


@dataclass(frozen=True)
class Reference:
    """Expected packages. source: where they are stated, for messages."""

    row: PackageSet
    source: str

    @property
    def facts(self) -> int:
        """Return the number of facts about the environment to check."""
        row = self.row
        return bool(row.python) + bool(row.torch) + len(row.packages) + len(row.wheels)


def lock_variables(lock: Path | None) -> dict[str, str]:
    """Return the env_vars for the processes of an environment with this lock."""
    return {VARIABLE: str(lock) if lock else NO_LOCK}


def of_lane(adopted: PackageSet) -> Reference:
    """Return the adopted row of a lane as the reference."""
    return Reference(adopted, f"the adopted row of lane {adopted.name}")


def reference(adopted: PackageSet, found: Inventory, env_vars: Mapping[str, str]) -> Reference:
    """Return the set that an environment is compared with, by VARIABLE in env_vars.

    adopted: the row of its lane. found: what is installed there. Raises LockError on a lock that cannot be read.
    """
    lock = env_vars.get(VARIABLE, "")
    if not lock:
        return of_lane(adopted)
    if lock == NO_LOCK:
        required = required_by_torch(found)
        row = replace(adopted, python=ANY, torch=ANY, packages=required, wheels=())
        return Reference(row, "the requirements of its own torch (the interpreter has no lock)")
    made = read_lock(Path(lock))
    pins = {name: SpecifierSet(f"=={version}", prereleases=True) for name, version in made.versions.items()}
    row = replace(
        adopted,
        python=SpecifierSet(f"=={made.python}.*") if made.python else ANY,
        torch=pins.pop("torch", ANY),
        packages=pins,
        wheels=(),
    )
    return Reference(row, "its own lock")


def required_by_torch(found: Inventory) -> dict[str, SpecifierSet]:
    """Return canonical name -> versions, from the metadata of the installed torch; extras and other platforms left out.

    Markers are evaluated for the interpreter that runs this.
    """
    torch = found.installed("torch")
    required = [Requirement(text) for text in torch.requires] if torch else []
    return {
        canonicalize_name(r.name): SpecifierSet(str(r.specifier), prereleases=True)
        for r in required
        if r.marker is None or r.marker.evaluate({"extra": ""})
    }
