"""Readings of a bisect, taken on the hosts of a fleet."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bumpgate.bisect.bisection import MachineError
from bumpgate.bisect.options import Options
from bumpgate.bisect.probe import READING, Cause, Reading, exactly, keep, load, take
from bumpgate.env.build import Environment, build
from bumpgate.env.request import Request
from bumpgate.fleet.engine import Engine, FleetError, Lost, Task
from bumpgate.fleet.files import folder_on_host, pack, unpack
from bumpgate.wheels.fitting import Fitter


@dataclass(frozen=True)
class Readings:
    """Takes the readings of one bisect. needs: what a host must offer. most: how many to take at once.

    folder: the working directory, on every host. good: the good endpoint, with which timed rows are paired.
    """

    engine: Engine
    options: Options
    needs: tuple[str, ...]
    most: int
    folder: Path
    good: str

    def number(self) -> int:
        slots = sum(host.slots for host in self.engine.hosts(self.needs))
        if not slots:
            raise MachineError(f"no host of the fleet offers {' and '.join(self.needs) or 'a processor'}")
        return min(slots, self.most)

    def take(self, jobs: Sequence[tuple[Path, Request]]) -> Iterator[Reading]:
        tasks = [
            Task(read, (self.options, self.folder, str(place.absolute()), request, self.good), self.needs)
            for place, request in jobs
        ]
        lost: list[tuple[Path, Lost]] = []
        for number, result in self.engine.run(tasks):
            place = jobs[number][0]
            place.mkdir(parents=True, exist_ok=True)
            if isinstance(result, Lost):
                if result.refused:
                    raise FleetError(result.why)
                lost.append((place, result))
                continue
            unpack(result.value, place, READING)
            reading = load(place)
            assert reading is not None, f"{place} has no reading"
            reading = replace(reading, host=result.host)
            keep(reading)
            yield reading
        # Without a host, no candidate is at fault, and none is skipped.
        if lost and not self.engine.hosts(self.needs):
            raise MachineError(lost[0][1].why)
        for place, result in lost:
            reading = Reading(place, Cause.MACHINE, failure=result.why)
            keep(reading)
            yield reading


def read(options: Options, folder: Path, name: str, request: Request, good: str) -> dict[str, bytes]:
    """Take one reading on this host and return its files. name: of the reading, for the folder here."""
    os.chdir(folder)
    root = options.root()
    requested = options.request(root)
    fitter = Fitter(root, options.lane, options.find_links) if root else None
    make = fitter or build

    def reference() -> Environment:
        return make(requested(good))

    def variables(environment: Environment) -> dict[str, str]:
        return fitter.variables(environment) if fitter else {}

    test = options.test(root, reference, lambda line: None, variables)
    pins = [
        text.partition("===")[2] for text in request.requirements if text.startswith(f"{options.package}===")
    ]
    checked = exactly(make, options.package, pins[0]) if pins else make
    with folder_on_host("probes", hashlib.sha256(name.encode()).hexdigest()[:16]) as place:
        take(place, request, checked, test)
        return pack(place)
