"""One probe of a candidate: its saved reading, the outcome of the reading, and the interface of a test.

A probe saves its reading next to its log before the bisect uses it, so that a killed bisect repeats no finished probe.
Outcomes are a pure function of the readings: a resumed bisect gets the same ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Protocol

from packaging.version import Version

from bumpgate.bisect.search import ProbeOutcome
from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.core.findings import Finding
from bumpgate.core.rows import Record, read_record, write_atomic
from bumpgate.env.build import BuildError, Environment, NotInstallable, release
from bumpgate.env.request import Request
from bumpgate.process.child import ChildFault, Interpreter, ending
from bumpgate.process.runner import IMPORT_SECONDS, child_environment

READING, LOG, RECORD = "reading.json", "test.log", "record.json"
IMPORT = """
import importlib, importlib.util, sys
for name in sys.argv[1:]:
    if importlib.util.find_spec(name):
        importlib.import_module(name)
"""


class ProbeError(BumpgateError):
    """The test itself cannot be run, for any candidate; ends the bisect."""


class BackError(Exception):
    """The user takes the last answer back."""


class Cause(Enum):
    """How a reading ended."""

    RAN = "ran"
    BROKEN = "broken"
    """It does not install or does not import; a repeat would not change that."""
    MACHINE = "machine"
    """Disk, index, memory or time ran out: a repeat may succeed, so the bisect makes one."""


@dataclass(frozen=True)
class Reading:
    """Saved result of one probe.

    code: exit code of the command or of pytest, or minus the signal number; None if it never ran.
    failure: why it never ran, or ended early; one line. seconds: of only the test. packages: name to version.
    host: the name of the host that took it, "" for this one.
    """

    place: Path
    cause: Cause
    code: int | None = None
    failure: str = ""
    seconds: float = 0.0
    packages: dict[str, str] = field(default_factory=dict)
    host: str = ""

    @cached_property
    def record(self) -> Record | None:
        path = self.place / RECORD
        return read_record(path) if path.exists() else None

    @property
    def whole(self) -> bool:
        return self.record is not None and self.record.complete

    @property
    def crash(self) -> str:
        """`died of SIGSEGV` if the test crashed, else empty."""
        ended = ending(self.code)
        return str(ended) if ended.crash else ""


@dataclass(frozen=True)
class ProbeResult:
    """Outcome of a reading, and its reason in one line."""

    outcome: ProbeOutcome
    reason: str


class Test(Protocol):
    """Test that judges a candidate.

    deciding: names of the rows and tests that decide. differs: False if they are red at both endpoints.
    """

    deciding: tuple[str, ...]
    differs: bool

    def run(self, environment: Environment, place: Path) -> Reading:
        """Run once. Raises ProbeError if no candidate could ever pass, KeyboardInterrupt on ctrl-C."""

    def unusable(self, reading: Reading) -> ProbeResult | None:
        """Return why a reading cannot represent an endpoint, whatever the other one reads; None if it can."""

    def learn(self, good: Sequence[Reading], bad: Sequence[Reading]) -> None:
        """Learn the deciding rows from all endpoint readings so far: those that differ between the endpoints."""

    def judge(self, reading: Reading) -> ProbeResult:
        """Return the outcome of a reading."""

    def findings(self, good: str, before: Reading, bad: str, after: Reading) -> list[Finding]:
        """Return how the bad neighbour differs from the good one, one finding per cause. good, bad: their names."""

    def repro(self, environment: Environment, reading: Reading | None) -> str:
        """Return the command that repeats the failure in the environment of the bad neighbour."""


Build = Callable[[Request], Environment]


class Hosts(Protocol):
    """Hosts that take readings in parallel."""

    def number(self) -> int:
        """Return how many readings can be taken at once. Raises BumpgateError if no host is there."""

    def take(self, jobs: Sequence[tuple[Path, Request]]) -> Iterator[Reading]:
        """Yield the reading of each job as it ends, saved at the job's place; one that was lost has Cause.MACHINE."""


def exactly(build: Build, package: str, version: str) -> Build:
    """Return a function that builds a request and refuses another version of the package."""

    def checked(request: Request) -> Environment:
        environment = build(request)
        installed = environment.packages.get(package)
        if installed is None or Version(installed) != Version(version):
            raise NotInstallable(f"{request.title}: {installed} was installed instead", Path(), "")
        return environment

    return checked


def take(place: Path, request: Request, build: Build, test: Test) -> Reading:
    """Return the reading saved at `place`, or take a new one and save it there atomically."""
    if kept := load(place):
        return kept
    place.mkdir(parents=True, exist_ok=True)
    try:
        environment = build(request)
        try:
            reading = test.run(environment, place)
        finally:
            # Later environments may need its space; another use builds it again, or finds it in the cache.
            release(environment)
    except NotInstallable as error:
        reading = Reading(place, Cause.BROKEN, failure=f"does not install: {one_line(error, 200)}")
    except BuildError as error:
        reading = Reading(place, Cause.MACHINE, failure=one_line(error, 200))
    keep(reading)
    return reading


def keep(reading: Reading) -> None:
    """Write a reading to its place."""
    raw = asdict(reading) | {"cause": reading.cause.value, "place": reading.place.name}
    write_atomic(reading.place / READING, json.dumps(raw, indent=1) + "\n")


def load(place: Path) -> Reading | None:
    """Load the reading at `place`; None if it is missing or unreadable, in which case it is taken again."""
    try:
        raw = json.loads((place / READING).read_text(encoding="utf-8"))
        return Reading(**raw | {"place": place, "cause": Cause(raw["cause"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def fresh_caches(place: Path) -> Iterator[dict[str, str]]:
    """Yield env_vars that point torch, Triton and the C++ compiler at empty caches.

    No reading may depend on an earlier one. The caches are deleted at the end; those of a killed probe are deleted when
    it is repeated.
    """
    caches = place / "caches"
    shutil.rmtree(caches, ignore_errors=True)
    caches.mkdir(parents=True)
    try:
        yield cache_variables(caches)
    finally:
        shutil.rmtree(caches, ignore_errors=True)


def cache_variables(folder: Path) -> dict[str, str]:
    """Return env_vars that point torch and Triton at compile caches in a folder."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str((folder / "inductor").absolute()),
        "TRITON_CACHE_DIR": str((folder / "triton").absolute()),
        "BUMPGATE_OBJECTS": str((folder / "objects").absolute()),
    }


def import_fault(environment: Environment, *packages: str) -> str:
    """Return why an installed package does not import in the environment, in one line; "" if all do."""
    names = [name.replace("-", "_") for name in dict.fromkeys(packages) if name in environment.packages]
    if not names:
        return ""
    # Do not import from the working directory: it may hold a folder named torch.
    child = Interpreter(
        environment.python, environment.python.parent, child_environment(environment.python, None)
    )
    try:
        child.run("-I", "-X", "faulthandler", "-c", IMPORT, *names, timeout=IMPORT_SECONDS)
    except ChildFault as fault:
        return f"import {', '.join(names)}: {one_line(fault, 160)}"
    return ""


def without_verdict(reading: Reading) -> ProbeResult | None:
    """Return SKIP for a candidate that does not install or import, or that the machine failed; None if it ran."""
    if reading.cause is Cause.BROKEN:
        return ProbeResult(ProbeOutcome.SKIP, reading.failure)
    if reading.cause is Cause.MACHINE:
        return ProbeResult(ProbeOutcome.SKIP, f"the machine: {reading.failure}")
    return None
