"""Runs pytest of one lane in another interpreter, and reports in one line why it has no result.

The source tree is on PYTHONPATH and bumpgate need not be installed there. The result is record.json and a log.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bumpgate.core import lanes
from bumpgate.core.errors import BumpgateError, one_line, text_lines
from bumpgate.core.rows import Record, read_record
from bumpgate.process.child import ChildFault, Interpreter, LoggedChild, ending, run_children
from bumpgate.process.home import home
from bumpgate.process.host import OWN_VARIABLES, PARENT, PROGRESS, PROJECT, read_or_empty

INTERRUPTED, USAGE, NOTHING_SELECTED = 2, 4, 5  # exit codes of pytest
IMPORT_SECONDS = 300
DESCRIBE = """
import importlib.metadata, json
import {modules}
# Reversed: of two distributions of one name, the first on the path is the one that is imported.
read = [d.metadata for d in importlib.metadata.distributions()]  # each access parses it again
found = {{m["Name"].lower(): m["Version"] for m in reversed(read)}}
version = getattr(torch, "version", None)
git = {{"torch": version.git_version}} if getattr(version, "git_version", None) else {{}}
print(json.dumps([dict(sorted(found.items())), git]))
"""


@dataclass(frozen=True)
class Installed:
    """Contents of an environment.

    packages: installed distributions by name.
    git_version: torch's commit, if it states one.
    failure: why the environment is not usable.
    """

    packages: Mapping[str, str] = field(default_factory=dict)
    git_version: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class LaneRun:
    """Result of a lane run. code: pytest's exit code, or minus the signal number. record: None if it is unreadable.

    failure: why the run is incomplete, in one line (it died, it was refused, torch does not import); "" otherwise.
    seconds: wall time. log: output of the run.
    """

    code: int
    record: Record | None
    failure: str
    seconds: float
    log: Path


def installed(python: Path, root: Path, lane: str, environment: Mapping[str, str] = {}) -> Installed:
    """Import torch in that interpreter. If it fails to import, crashes or hangs, the result has a `failure`."""
    modules = "torch, torch_xla" if lanes.require(root, lane).device == "xla" else "torch"
    child = Interpreter(python, root, child_environment(python, root, environment))
    program = ("-X", "faulthandler", "-c", DESCRIBE.format(modules=modules))
    try:
        packages, git_version = child.json(*program, timeout=IMPORT_SECONDS)
    except ChildFault as fault:
        return Installed(failure=f"import {modules}: {fault}")
    return Installed(packages, git_version)


@dataclass(frozen=True)
class LaneCall:
    """One `pytest -m LANE SELECTION` under `python`, not yet run.

    selection: paths, node ids and options of pytest.
    record: output path of the rows; an older file is removed.
    environment: variables in addition to the environment of this process.
    log: path of the output, by default next to `record`.
    keep_open: descriptors that the run inherits.
    """

    python: Path
    root: Path
    lane: str
    selection: Sequence[str]
    record: Path
    gate: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None
    keep_open: tuple[int, ...] = ()

    @property
    def output(self) -> Path:
        return self.log or self.record.with_suffix(".log")

    @property
    def progress(self) -> Path:
        """The file that the run rewrites with its progress."""
        return self.record.with_suffix(".progress")

    @property
    def child(self) -> LoggedChild:
        # Another repository may have no pytest configuration: the folder of the selected tests would be the root.
        foreign = ["-p", "bumpgate.plugin", f"--rootdir={self.root}"]
        flags = foreign if lanes.is_foreign(self.root) else []
        flags += ["-m", self.lane, f"--record={self.record.resolve()}", *(["--gate"] if self.gate else [])]
        flags += ["--part"] if self.selection else []
        return LoggedChild(
            (str(self.python), "-X", "faulthandler", "-m", "pytest", *flags, *self.selection),
            self.root,
            child_environment(
                self.python,
                self.root,
                {**self.environment, PARENT: str(os.getpid()), PROGRESS: str(self.progress.resolve())},
            ),
            self.output,
            self.keep_open,
        )

    def read(self, code: int, seconds: float, timeout: float | None) -> LaneRun:
        try:
            found: Record | None = read_record(self.record)
        except BumpgateError:
            found = None
        if found and "started" not in found.provenance:  # it ended before it began to collect
            found = None
        if code == USAGE and found and found.problems:
            code = INTERRUPTED  # a file cannot be collected: USAGE only because the selection names its tests
        elif code == USAGE:
            found = None
        failure = "" if found else _last_words(self.output)
        if found and found.problems and not found.complete and not found.judgements:
            # A run that collected nothing: its problem is the cause, and an empty record would be read as lost rows.
            failure, found = str(found.problems[0]), None
        failure = str(ending(code, seconds, timeout)) or failure
        return LaneRun(code, found, failure, seconds, self.output)


def run_lane(call: LaneCall, timeout: float | None = None, *, check_import: bool = True) -> LaneRun:
    """Run pytest, in a process group that is killed when this call ends.

    timeout: wall seconds.
    check_import: import torch in a process first, so that a crash there is one line and not a run of crashes.
    Raises KeyboardInterrupt after the run has been stopped and has written its record.
    """
    started = time.monotonic()
    if check_import and (failure := installed(call.python, call.root, call.lane, call.environment).failure):
        call.record.unlink(missing_ok=True)
        return LaneRun(1, None, failure, time.monotonic() - started, call.output)
    return run_lanes([call], timeout)[0]


def run_lanes(calls: Sequence[LaneCall], timeout: float | None = None) -> list[LaneRun]:
    """Run all lanes at once and return when the last one has ended; otherwise like run_lane."""
    for call in calls:
        call.record.unlink(missing_ok=True)
        call.progress.unlink(missing_ok=True)
    ended = run_children([call.child for call in calls], timeout)
    return [call.read(code, seconds, timeout) for call, (code, seconds) in zip(calls, ended)]


def options_of(selection: Sequence[str], record: Record | None) -> list[str]:
    """Return the options of a selection, without the paths and node ids that pytest found in it.

    record: of a run of this selection. A later run of some of its tests needs the same options: they may choose what
    the tests measure. `-n 0` after them overrides a number of workers among them.
    """
    left = list(selection)
    for path in record.provenance.get("paths", ()) if record else ():
        places = [i for i, part in enumerate(left) if part == path]
        # A value of an option may equal a path: `tests -k tests`.
        free = [i for i in places if i == 0 or not left[i - 1].startswith("-")]
        for i in (free or places)[-1:]:
            del left[i]
    return [part for part in left if part != "--"]


def by_hand(python: Path, root: Path, command: str, options: Sequence[str]) -> str:
    """Return a line for a shell in `root` that runs `pytest ...` as `run_lane` does.

    It names that interpreter, the options of the selection, and in other repositories the plugin of this bumpgate.
    """
    paths, plugin = "", ""
    if lanes.is_foreign(root):
        paths = f"PYTHONPATH={shlex.quote(os.pathsep.join(['.', *_ourselves(root)]))} "
        plugin = "-p bumpgate.plugin --rootdir=. "
    given = "".join(f"{shlex.quote(part)} " for part in options)
    pytest = f"{shlex.quote(str(python))} -m pytest"
    return f"{paths}{pytest} {plugin}{given}{command.removeprefix('pytest ')}"


def child_environment(python: Path, root: Path | None, extra: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the variables of a process in which that interpreter's environment is active.

    The variables of this bumpgate and of an outer pytest are left out.

    root: a source tree to import from; None for a command that is not ours.
    """
    gate = ("BUMPGATE_GATE", "BUMPGATE_TIERS", *OWN_VARIABLES, PARENT)
    ours = (*gate, "PYTEST_", "PYTHONHOME", "PYTHONOPTIMIZE", "PYTHONPATH", "VIRTUAL_ENV")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join([str(python.parent), clean.get("PATH", os.defpath)])
    project = [extra[PROJECT]] if extra.get(PROJECT) else []
    source = {} if root is None else {"PYTHONPATH": os.pathsep.join([*project, str(root), *_ourselves(root)])}
    bytecode = _bytecode(python)
    if bytecode:
        clean.pop("PYTHONDONTWRITEBYTECODE", None)
    return clean | {"PATH": path} | bytecode | source | dict(extra)


def absolute(python: str) -> str:
    """Make a path absolute without resolving links: the symlink is what makes an interpreter a venv's.

    Raises BumpgateError if there is no such file.
    """
    if python and not os.path.isfile(python):
        raise BumpgateError(f"{python}: no such interpreter; name a file such as ENVIRONMENT/bin/python")
    return os.path.abspath(python) if python else ""


def _bytecode(python: Path) -> dict[str, str]:
    """Keep the bytecode of all sources within the environment, if it is one that bumpgate built.

    uv installs none, and users set PYTHONDONTWRITEBYTECODE: each process then compiles the sources of torch again (3 s
    of CPU time for `import torch`). No __pycache__ is written into the work tree.
    """
    environment = python.parent.parent
    ours = environment.parent == home() / "environments"
    return {"PYTHONPYCACHEPREFIX": str(environment / "bytecode")} if ours else {}


def _ourselves(root: Path) -> list[str]:
    """Return a folder with only a link to this bumpgate: the other interpreter has a separate site-packages."""
    if not lanes.is_foreign(root):
        return []
    package = Path(__file__).resolve().parents[1]
    folder = home() / "import" / hashlib.sha256(str(package).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (folder / "bumpgate").symlink_to(package)
    return [str(folder)]


def _last_words(log: Path) -> str:
    """Return the line of a log in which pytest, or Python, reports why nothing ran."""
    lines = [line.strip() for line in text_lines(read_or_empty(log))]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if errors and errors[0].startswith("usage: "):
        errors = [line.split(": error: ", 1)[1] for line in lines if ": error: " in line] or errors
    raised = [line.removeprefix("E   ") for line in lines if line.startswith("E   ")]
    last = lines[-1:] or ["it printed nothing"]
    return one_line((errors[:1] or raised[-1:] or last)[0])
