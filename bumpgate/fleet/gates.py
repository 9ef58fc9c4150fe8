"""Gates on the hosts of a fleet: one lane is one task, so both sides of all its pairs run on one host."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bumpgate.core import gate_file
from bumpgate.core.baseline import find_root
from bumpgate.core.errors import BumpgateError
from bumpgate.core.gate_file import GateFile
from bumpgate.fleet.engine import Engine, Lost, Task, features
from bumpgate.fleet.files import folder_on_host, pack, unpack
from bumpgate.gate.result import NAME
from bumpgate.process.child import last_line, run_child
from bumpgate.process.tree_digest import bind

LOG = "fleet.log"
BAD_INPUT = 4
MAIN = "from bumpgate.cli import main; main()"


@dataclass(frozen=True)
class LaneGate:
    """Gate of one lane. gate: None if it has no verdict, and why. bad_input: every host would refuse it."""

    lane: str
    host: str = ""
    gate: GateFile | None = None
    why: str = ""
    bad_input: bool = False


def run(
    engine: Engine, lanes: Sequence[str], host_class: str, arguments: Sequence[str], out: Path
) -> Iterator[LaneGate]:
    """Yield the gate of each lane as it ends, with its files in a folder of `out`. arguments: of `bumpgate gate`."""
    tasks = []
    for lane in lanes:
        name = f"{os.path.abspath(out)} {lane}"
        tasks.append(Task(measure, (lane, (*arguments,), Path.cwd(), name), features(lane, host_class)))
    for number, found in engine.run(tasks):
        lane = lanes[number]
        if isinstance(found, Lost):
            yield LaneGate(lane, why=found.why, bad_input=found.refused)
        else:
            unpack(found.value, out / lane, NAME)
            yield LaneGate(lane, found.host, read(out / lane))


def read(folder: Path) -> GateFile | None:
    """Return the finished gate in a folder, or None."""
    path = folder / NAME
    found = gate_file.read(path) if path.exists() else None
    return found if isinstance(found, GateFile) and found.finished else None


def differences(found: GateFile, lane: str, arguments: Sequence[str], out: Path) -> str:
    """Return in what a kept gate differs from the one that these arguments request, "" if in nothing."""
    words = shlex.split(found.command)[2:]
    place = words[words.index("--out") + 1] if "--out" in words else ""
    if words != _options(lane, arguments, place):
        return f"its command is {found.command!r}"
    if found.binding.get("tree") != bind(find_root(Path.cwd()), out).tree:
        return "the source tree has changed since"
    return ""


def _options(lane: str, arguments: Sequence[str], out: str, *resume: str) -> list[str]:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    return ["--lane", lane, *arguments[:cut], "--out", out, *resume, *arguments[cut:]]


def measure(lane: str, arguments: tuple[str, ...], folder: Path, name: str) -> dict[str, bytes]:
    """Run a gate on this host and return its files. A task that is repeated here continues the gate.

    name: of the gate, for the folder here. Raises BumpgateError on bad input, OSError if the gate was cut short.
    """
    with folder_on_host("gates", hashlib.sha256(name.encode()).hexdigest()[:16]) as out:
        resume = ("--resume",) if (out / NAME).exists() else ()
        options = _options(lane, arguments, str(out), *resume)
        log = out / LOG
        code, _ = run_child([sys.executable, "-c", MAIN, "gate", *options], folder, os.environ, None, log)
        if code == BAD_INPUT:
            raise BumpgateError(last_line(log).removeprefix("bumpgate: "))
        found = read(out)
        if found is None or found.decision.value != code:  # Python ends with 1, too, if it fails
            raise OSError(f"the gate ended with {code}: {last_line(log)}")
        return pack(out)
