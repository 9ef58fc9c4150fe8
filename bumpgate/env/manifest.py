"""wheels/manifest.toml: python, torch, triton and kernel wheels of each environment, and checks of an installed one.

Versions are compared by `packaging`. As text "2.9" is newer than "2.12"; and by PEP 440 2.12.0.dev20260304 is older
than 2.12, though its C++ structures and its wheels are those of 2.12: `release` gives the release of a build.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from bumpgate.core import lanes as declared
from bumpgate.core.errors import BumpgateError
from bumpgate.core.toml import tomllib
from bumpgate.env.inventory import Distribution, Inventory

SCHEMA = 1
STATUS = ("adopted", "historic", "parked")
Types = Mapping[str, type]
SHA256 = re.compile(r"[0-9a-f]{64}")


class ManifestError(BumpgateError):
    """wheels/manifest.toml is not a manifest. One line: the row, the field and what it should be."""


@dataclass(frozen=True)
class Label:
    """Build target in the name of a wheel; None for parts that the name does not state."""

    torch: Version | None = None
    cuda: str | None = None
    cxx11_abi: bool | None = None


@dataclass(frozen=True)
class KernelWheel:
    """A wheel with compiled extensions. version: exact, "" if the source states none. torch: of the build.

    sha256: of the wheel; sdist: of the source distribution that `bumpgate wheels build` compiles. patch: a file next to
    the manifest, applied to those sources.
    fault: text on the known contradiction of a historic row; an adopted row has none.
    """

    name: str
    version: str
    torch: str
    sha256: str = ""
    fault: str = ""
    sdist: str = ""
    patch: str = ""


@dataclass(frozen=True)
class ManifestRow:
    """One row. python, torch and packages are PEP 440 specifiers; a build must satisfy them, local label included.

    wheels: kernel wheels that the environment has. without: names of those that the lane has given up; their rows are
    NOT RUN, also under --gate. given_up: their tables, from which they can be built for another torch.
    """

    name: str
    status: str
    lane: str
    source: str
    python: SpecifierSet
    torch: SpecifierSet
    driver: Version | None = None
    packages: Mapping[str, SpecifierSet] = field(default_factory=dict)
    wheels: tuple[KernelWheel, ...] = ()
    without: tuple[str, ...] = ()
    given_up: tuple[KernelWheel, ...] = ()

    @property
    def known_wheels(self) -> tuple[KernelWheel, ...]:
        """Return the kernel wheels that a candidate may have: also those that were given up."""
        return (*self.wheels, *self.given_up)


@dataclass(frozen=True)
class Smoke:
    """Smoke test of a kernel wheel: `python *command case`, a process for each case. device: "cpu" or "cuda"."""

    command: tuple[str, ...]
    cases: tuple[str, ...]
    device: str


@dataclass(frozen=True)
class Manifest:
    """Content of the file. smoke: by canonical wheel name."""

    environments: tuple[ManifestRow, ...]
    smoke: Mapping[str, Smoke]

    def adopted(self, lane: str) -> ManifestRow:
        """Return the adopted row of a lane. Raises ManifestError."""
        for row in self.environments:
            if (row.status, row.lane) == ("adopted", lane):
                return row
        raise ManifestError(f"manifest.toml: no adopted environment of lane {lane!r}")


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
    claims = [label(wheel.version), label(wheel.file), Label(torch=_pinned_torch(wheel.requires))]
    return Label(
        *(
            next((v for c in claims if (v := getattr(c, name)) is not None), None)
            for name in ("torch", "cuda", "cxx11_abi")
        )
    )


def _pinned_torch(requires: tuple[str, ...]) -> Version | None:
    """Return the torch version that a wheel pins: `torch==2.10.*`."""
    pins = (re.fullmatch(r"torch\s*\(?==\s*(\d+\.\d+)[\w.*+]*\)?", text.strip()) for text in requires)
    return next((Version(pin[1]) for pin in pins if pin), None)


def satisfies(version: str, specifier: SpecifierSet) -> bool:
    """Check a PEP 440 specifier, with pre-releases included: a row may name a nightly."""
    try:
        return specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def mismatches(row: ManifestRow, found: Inventory) -> Iterator[Mismatch]:
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
        elif wheel.sha256 and installed.sha256 and installed.sha256 != wheel.sha256:
            yield Mismatch(
                wheel.name, f"the wheel of sha256 {wheel.sha256[:12]}", f"one of {installed.sha256[:12]}"
            )


def _same(a: str, b: str) -> bool:
    """Compare versions with their local labels: only the label distinguishes 2.8.3+cu130torch2.10 from 2.8.3."""
    try:
        return Version(a) == Version(b)
    except InvalidVersion:
        return a == b


def contradictions(row: ManifestRow) -> Iterator[str]:
    """Yield the kernel wheels of a row whose label or build does not match the row's torch."""
    pinned = _exact(row.torch)
    for wheel in row.wheels if pinned else ():
        claimed = label(wheel.version).torch
        if claimed and not same_minor(claimed, wheel.torch):
            yield f"{wheel.name}: its label names torch {claimed}, it was built against {wheel.torch}"
        if not same_minor(wheel.torch, pinned):
            yield f"{wheel.name}: built against torch {wheel.torch}, the row has {pinned}"


def _exact(specifier: SpecifierSet) -> str:
    return next((s.version for s in specifier if s.operator in ("==", "===") and "*" not in s.version), "")


def load(path: Path) -> Manifest:
    """Read and check a manifest. Raises ManifestError (one line)."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ManifestError(
            f"{path.name}: cannot be read ({error.strerror}); restore it: git checkout wheels"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path.name}: not TOML ({error}); restore it: git checkout wheels") from None
    reader = _Reader(path.name, declared.known(path))
    reader.table(raw, "", {"schema": int, "environment": dict}, {"smoke": dict})
    if raw["schema"] != SCHEMA:
        raise ManifestError(f"{path.name}: schema {raw['schema']}, this bumpgate reads {SCHEMA}")
    rows = tuple(reader.environment(name, row) for name, row in raw["environment"].items())
    lanes = [row.lane for row in rows if row.status == "adopted"]
    for lane in dict.fromkeys(lanes):
        if lanes.count(lane) > 1:
            raise ManifestError(f"{path.name}: two adopted environments of lane {lane!r}")
    smoke = {str(canonicalize_name(name)): reader.smoke(name, s) for name, s in raw.get("smoke", {}).items()}
    return Manifest(rows, smoke)


class _Reader:
    """Convert tables to records; every fault is a ManifestError that starts with file, row and field."""

    def __init__(self, file: str, lanes: tuple[str, ...]) -> None:
        self.file, self.lanes = file, lanes

    def fail(self, where: str, fault: str) -> ManifestError:
        return ManifestError(f"{self.file}: {where + ': ' if where else ''}{fault}")

    def table(self, raw: Any, where: str, needed: Types, optional: Types) -> None:
        """Check a table: all required fields, any optional ones, no others, each of its type."""
        if not isinstance(raw, dict):
            raise self.fail(where, "must be a table")
        for name in needed:
            if name not in raw:
                raise self.fail(where, f"the field {name!r} is missing")
        for name, value in raw.items():
            kind = {**needed, **optional}.get(name)
            if kind is None:
                raise self.fail(where, f"unknown field {name!r}; fields: {', '.join([*needed, *optional])}")
            if not isinstance(value, kind) or isinstance(value, bool):
                raise self.fail(where, f"{name} must be {_WORDS[kind]}, got {value!r}")

    def specifier(self, where: str, text: Any) -> SpecifierSet:
        try:
            return SpecifierSet(text, prereleases=True)
        except (InvalidSpecifier, AttributeError, TypeError):
            raise self.fail(where, f"invalid PEP 440 specifier {text!r} (expected e.g. ==2.13.0)") from None

    def version(self, where: str, text: str) -> Version:
        try:
            return Version(text)
        except InvalidVersion:
            raise self.fail(where, f"invalid PEP 440 version {text!r}") from None

    def environment(self, name: str, raw: Any) -> ManifestRow:
        texts = {"status": str, "lane": str, "source": str, "python": str, "torch": str}
        self.table(raw, name, texts, {"driver": str, "packages": dict, "wheels": dict, "without": list})
        if raw["status"] not in STATUS:
            raise self.fail(name, f"status must be one of {', '.join(STATUS)}, got {raw['status']!r}")
        if self.lanes and raw["lane"] not in self.lanes:
            raise self.fail(name, f"unknown lane {raw['lane']!r}; lanes: {', '.join(self.lanes)}")
        without = self.without(name, raw.get("without", []))
        wheels = [self.wheel(f"{name}.wheels.{n}", n, w) for n, w in raw.get("wheels", {}).items()]
        row = ManifestRow(
            name=name,
            status=raw["status"],
            lane=raw["lane"],
            source=raw["source"],
            python=self.specifier(f"{name}.python", raw["python"]),
            torch=self.specifier(f"{name}.torch", raw["torch"]),
            driver=self.version(f"{name}.driver", raw["driver"]) if "driver" in raw else None,
            packages={
                n: self.specifier(f"{name}.packages.{n}", v) for n, v in raw.get("packages", {}).items()
            },
            wheels=tuple(wheel for wheel in wheels if wheel.name not in without),
            without=without,
            given_up=tuple(wheel for wheel in wheels if wheel.name in without),
        )
        known = any(wheel.fault for wheel in row.wheels)
        for fault in contradictions(row):
            if row.status == "adopted" or not known:
                raise self.fail(name, fault)
        return row

    def without(self, where: str, raw: list[Any]) -> tuple[str, ...]:
        if not all(isinstance(each, str) for each in raw):
            raise self.fail(where, f"without must be a list of names, got {raw!r}")
        return tuple(str(canonicalize_name(each)) for each in raw)

    def wheel(self, where: str, name: str, raw: Any) -> KernelWheel:
        optional = dict.fromkeys(("version", "sha256", "fault", "sdist", "patch"), str)
        self.table(raw, where, {"torch": str}, optional)
        self.version(f"{where}.torch", raw["torch"])
        if raw.get("version"):
            self.version(f"{where}.version", raw["version"])
        for digest in ("sha256", "sdist"):
            if raw.get(digest) and not SHA256.fullmatch(raw[digest]):
                raise self.fail(where, f"{digest} must be 64 hexadecimal digits")
        if (patch := raw.get("patch")) and Path(patch).name != patch:
            raise self.fail(where, f"patch must be the name of a file next to {self.file}, got {patch!r}")
        return KernelWheel(**{"version": "", **raw, "name": str(canonicalize_name(name))})

    def smoke(self, name: str, raw: Any) -> Smoke:
        where = f"smoke.{name}"
        self.table(raw, where, {"command": list, "cases": list, "device": str}, {})
        if not all(raw[n] and all(isinstance(each, str) for each in raw[n]) for n in ("command", "cases")):
            raise self.fail(where, "command and cases must be non-empty lists of strings")
        if raw["device"] not in ("cpu", "cuda"):
            raise self.fail(where, f"device must be cpu or cuda, got {raw['device']!r}")
        return Smoke(tuple(raw["command"]), tuple(raw["cases"]), raw["device"])


_WORDS = {str: "a string", int: "a number", dict: "a table", list: "a list"}
