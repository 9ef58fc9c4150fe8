"""Options of a gate: made once from the command line, checked, and the same for every step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import InvalidMarker, Marker, UndefinedEnvironmentName

from bumpgate.core import lanes
from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.env.lane import LaneContext
from bumpgate.env.store import sha256_of
from bumpgate.gate.plan import plan_for
from bumpgate.process.file_transaction import ADOPTION, interrupted
from bumpgate.process.gpu_shares import requested
from bumpgate.process.host import gpu_models

# The option of pytest that selects the part of a lane that a fast gate measures.
FAST = "--fast"
# Options that the gate sets itself; passing them twice would change the two runs.
OURS = ("-m", "--record", "--gate", "--launcher")


class GateError(BumpgateError):
    """Gate that cannot be started or resumed. One line: the reason and the fix."""


@dataclass(frozen=True)
class GateConfig:
    """What a gate measures; `--resume` requires the same. Interpreters and requirements as the user wrote them.

    candidate_file: sha256 of a candidate that is a wheel file; its version alone may stand for several builds.
    adopted: a requirement that changes the adopted set.
    anchor: the older build that is paired with the candidate, too.
    python_*: interpreters instead of requirements.
    sessions: the maximum; None for the plan's.
    selection: of pytest.
    without: kernel wheels that an interpreter of the user lacks on purpose.
    command: prints metrics, in place of the pytest selection.
    """

    lane: str
    candidate: str = ""
    adopted: str = ""
    anchor: str = ""
    python_adopted: str = ""
    python_candidate: str = ""
    python_anchor: str = ""
    sessions: int | None = None
    selection: tuple[str, ...] = ()
    candidate_file: str = ""
    without: tuple[str, ...] = ()
    command: str = ""

    @property
    def fast(self) -> bool:
        """Whether only tests of a few seconds run, without paired sessions: an early answer that cannot adopt."""
        return FAST in self.selection

    @property
    def requests(self) -> dict[str, tuple[str, str]]:
        """Return side -> its interpreter and its requirement, of which the user named one at most."""
        found = {
            "adopted": (self.python_adopted, self.adopted),
            "candidate": (self.python_candidate, self.candidate),
        }
        if self.anchor or self.python_anchor:
            found["anchor"] = (self.python_anchor, self.anchor)
        return found


@dataclass(frozen=True)
class RunOptions:
    """How a gate runs this time; a resumed gate may run in another way.

    out: folder of gate.json and both records; None for the default one.
    budget: minutes after which no session starts; None for no limit.
    index, find_links: where wheels come from.
    """

    out: Path | None = None
    budget: float | None = None
    gpus: str = ""
    resume: bool = False
    fresh: bool = False
    index: str | None = None
    find_links: tuple[str, ...] = ()


def require_usable(config: GateConfig, root: Path) -> None:
    """Validate the options. Raises BumpgateError (one line)."""
    if cut := interrupted(root):
        end = "undo" if cut.kind == ADOPTION else "finish"
        raise BumpgateError(
            f"{cut} was cut short here: {end} it with: bumpgate rollback {cut.lane} --adoption"
        )
    lanes.require(root, config.lane)
    if bool(config.candidate) == bool(config.python_candidate):
        raise BumpgateError("name the candidate: --candidate 'torch==X', or --python-candidate PATH")
    _require_candidate(config.candidate)
    for name, requirement, python in (
        ("adopted", config.adopted, config.python_adopted),
        ("anchor", config.anchor, config.python_anchor),
    ):
        if requirement and python:
            raise BumpgateError(f"--{name} cannot be combined with an interpreter for it")
    if config.without and not any(python for python, _ in config.requests.values()):
        raise BumpgateError(
            "--without is for interpreters (--python-candidate PATH): name one, or leave it out"
        )
    if config.fast and (older := config.anchor or config.python_anchor):
        raise BumpgateError(f"--fast and the anchor {older}: a fast gate measures no drift; leave one out")
    LaneContext(root, config.lane).require_kernel_wheels(config.without)
    try:
        plan_for(config.sessions)
    except ValueError as error:
        raise BumpgateError(f"--sessions: {error}") from None
    for before, part in zip(("", *config.selection), () if config.command else config.selection):
        if part.split("=")[0] in OURS:
            raise BumpgateError(f"{part.split('=')[0]} is set by the gate: leave it out of the selection")
        path = part.split("::")[0]
        if not part.startswith("-") and not before.startswith("-") and not (root / path).exists():
            raise BumpgateError(f"the selection names {path}, which does not exist")


def _require_candidate(text: str) -> None:
    """Raise GateError on a candidate that names no package, no file, or nothing for this Python."""
    if re.fullmatch(r"\d[\w.+]*", text):
        raise GateError(f"--candidate {text} names no package: --candidate torch=={text}")
    if text.endswith(".whl") and "://" not in text and not Path(text).expanduser().is_file():
        raise GateError(f"--candidate {text}: no such file")
    marker = text.partition(";")[2].strip()
    try:
        fits = not marker or Marker(marker).evaluate()
    except (InvalidMarker, UndefinedEnvironmentName) as error:
        raise GateError(f"--candidate {text}: {one_line(error)}") from None
    if not fits:
        raise GateError(f"--candidate {text}: its marker excludes this Python; leave it out")


def require_combination(command: str | None, selection: list[str] | None, fast: bool) -> None:
    """Validate --command together with the options that it excludes. Raises BumpgateError (one line)."""
    if command is not None and not command.strip():
        raise BumpgateError("--command: the command is empty; an unset variable of the shell?")
    if command and selection:
        raise BumpgateError("--command and a pytest selection: use one, not both")
    if command and fast:
        raise BumpgateError("--command and --fast: a command has no fast part; leave --fast out")


def selected_gpus(text: str, lane: lanes.Lane) -> list[str]:
    """Return the GPUs of --gpus; empty without the option. Raises BumpgateError."""
    if text and lane.device != "cuda":
        raise BumpgateError(f"--gpus {text}: lane {lane.name} runs on {lane.device}; leave the option out")
    return requested(text, lane.count, len(gpu_models()))


def file_digest(candidate: str) -> str:
    """Return the sha256 of a candidate that is a wheel file; "" for a requirement."""
    path = Path(candidate).expanduser()
    return sha256_of(path) if candidate.endswith(".whl") and path.is_file() else ""
