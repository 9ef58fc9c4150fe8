"""`bumpgate gate`: measures the adopted environment and a candidate in pairs on one machine; prints one verdict."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from packaging.markers import InvalidMarker, Marker, UndefinedEnvironmentName
from packaging.utils import canonicalize_name
from rich.console import Console

from bumpgate.core import accepted, lanes
from bumpgate.core.baseline import find_root
from bumpgate.core.errors import BumpgateError, ExtraMissingError, one_line
from bumpgate.core.findings import Decision
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import write_atomic
from bumpgate.core.text import redacted
from bumpgate.env.cached import Disk
from bumpgate.env.lane import LaneContext
from bumpgate.env.mirror import copies
from bumpgate.env.project import commit_of
from bumpgate.env.store import sha256_of
from bumpgate.gate import drift, state
from bumpgate.gate.environments import EnvSpec, environments, keep_locks, requests
from bumpgate.gate.evidence import read_judged
from bumpgate.gate.measure import other_packages, run_gate
from bumpgate.gate.plan import SessionPlan, plan_for
from bumpgate.gate.runner import Bench
from bumpgate.gate.state import FAST, Gate, GateConfig, GateError, SideState
from bumpgate.gate.view import View, findings_text, notes
from bumpgate.history import adoptions
from bumpgate.process.child import require_syntax
from bumpgate.process.file_transaction import ADOPTION, interrupted
from bumpgate.process.gpu_shares import divide, own_cores, requested
from bumpgate.process.host import gpu_models
from bumpgate.process.locks import device_lock
from bumpgate.process.runner import absolute, installed
from bumpgate.process.tree_digest import GENERATED, Binding, bind, sources_in
from bumpgate.table import part_of_lane

INTERRUPTED = 130
# Options that the gate sets itself; passing them twice would change the two runs.
OURS = ("-m", "--record", "--gate", "--launcher")
Texts = list[str] | None
T = TypeVar("T")
# The test of --command, for projects without pytest tests; bumpgate/plugin/metrics.py runs it and reads its output.
TEST = '''"""Written by `bumpgate gate --command`."""

import pytest

from bumpgate.plugin.metrics import report


@pytest.mark.{lane}
def test_command(row, exclusive_machine):
    report(row, {command!r})
'''


def command(
    lane: Annotated[str, typer.Option(help="A declared lane; by default the only one.")] = "",
    candidate: Annotated[str, typer.Option(help="The candidate: 'torch==2.14.0', or a wheel file.")] = "",
    adopted: Annotated[str, typer.Option(help="Change a package of the adopted side: triton==3.7.1.")] = "",
    base: Annotated[
        str, typer.Option(help="Compare the work tree with this commit of the project; one environment.")
    ] = "",
    anchor: Annotated[
        str, typer.Option(help="Also pair with this older build; `history`: a month ago.")
    ] = "",
    python_adopted: Annotated[str, typer.Option(help="Adopted side: this interpreter, unchanged.")] = "",
    python_candidate: Annotated[str, typer.Option(help="Candidate side: this interpreter, unchanged.")] = "",
    python_anchor: Annotated[str, typer.Option(help="Anchor side: this interpreter, unchanged.")] = "",
    without: Annotated[
        Texts, typer.Option(help="A kernel wheel that these lack on purpose; repeatable.")
    ] = None,
    index: Annotated[str | None, typer.Option(help="URL of an index before the host's.")] = None,
    find_links: Annotated[Texts, typer.Option(help="Folder or page of wheels; repeatable.")] = None,
    store: Annotated[Texts, typer.Option(help="A store of `bumpgate mirror`; repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of gate.json and both records.")] = None,
    sessions: Annotated[int | None, typer.Option(help="Maximum number of paired sessions, 6 to 72.")] = None,
    budget: Annotated[float | None, typer.Option(help="Minutes after which no session starts.")] = None,
    gpus: Annotated[str, typer.Option(help="GPUs to use at once, such as 0,1,2,3, or `all`.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the gate in --out.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore a kept run of the adopted side.")] = False,
    fast: Annotated[bool, typer.Option(FAST, help="Only short tests and no times. Cannot adopt.")] = False,
    disk: Disk = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print gate.json instead of the findings.")] = False,
    shell: Annotated[str | None, typer.Option("--command", help="Prints metrics, instead of pytest.")] = None,
    selection: Annotated[list[str] | None, typer.Argument(help="After --: what pytest runs.")] = None,
) -> None:
    """Measure the adopted build and a candidate in pairs: ADOPT, HOLD, or UNKNOWN if evidence is missing.

    Without a selection, the complete lane is measured.

    Exit codes: 0 ADOPT, 1 HOLD, 125 UNKNOWN, 4 bad input, 130 interrupted (--resume continues).
    """
    for wrong, message in (
        (
            shell is not None and not shell.strip(),
            "--command: the command is empty; an unset variable of the shell?",
        ),
        (shell and selection, "--command and a pytest selection: use one, not both"),
        (shell and fast, "--command and --fast: a command has no fast part; leave --fast out"),
        (
            budget is not None and not budget >= 0,
            f"--budget: must be a number of minutes of at least 0, got {budget or 0:g}",
        ),
    ):
        if wrong:
            raise BumpgateError(message)
    lane = lanes.require(find_root(Path.cwd()), lane).name
    is_file = candidate.endswith(".whl") and Path(candidate).expanduser().is_file()
    config = GateConfig(
        lane=lane,
        candidate=of_torch(candidate),
        adopted=of_torch(adopted),
        anchor=_adopted_a_month_ago(lane) if anchor == "history" else of_torch(anchor),
        python_adopted=absolute(python_adopted),
        python_candidate=absolute(python_candidate),
        python_anchor=absolute(python_anchor),
        sessions=sessions,
        selection=(test_path(lane, shell),) if shell else (*([FAST] if fast else []), *(selection or ())),
        candidate_file=sha256_of(Path(candidate).expanduser()) if is_file else "",
        without=tuple(sorted({str(canonicalize_name(name)) for name in without or ()})),
        command=shell or "",
        base=commit_of(find_root(Path.cwd()), base) if base else "",
    )
    links = (*(find_links or ()), *copies(store or ()))
    _run(config, out, budget, gpus, resume, fresh, index, links, as_json)


def of_torch(text: str) -> str:
    """Return the requirement on torch that a bare version means, "2.14.1"; other texts unchanged."""
    return f"torch=={text}" if re.fullmatch(r"\d[\w.+]*", text) else text


def _run(
    config: GateConfig,
    out: Path | None,
    budget: float | None,
    gpus: str,
    resume: bool,
    fresh: bool,
    index: str | None,
    links: Sequence[str],
    as_json: bool,
) -> None:
    """Run or resume a gate, print its verdict, and exit with its code."""
    root = find_root(Path.cwd())
    _require_usable(config, root)
    lane = lanes.require(root, config.lane)
    chosen = _selected_gpus(gpus, lane)
    place = _folder(config, root, out)
    view = View(Console(stderr=True, quiet=bool(os.environ.get("BUMPGATE_QUIET"))), config.lane)
    signal.signal(signal.SIGTERM, _interrupt)
    wanted = requests(config, root, index, links)  # bad input is refused before the wait for the device
    try:
        with device_lock(lane, view.say, chosen):
            if config.command:
                write_test(root, lane.name, config.command)
            plan = plan_for(config.sessions, lane.slow_modes, lane.device, lane.margins)
            gate = begin(config, plan, place, resume, bind(root, place))
            earlier = _judged_before(gate, root, place)
            specs = environments(config, root, view, wanted, new=not resume)
            if earlier and not gate.undecided:
                _check_packages(gate, specs, root)
            else:
                keep_locks(specs, place)
                now = time.monotonic()
                bench = Bench(
                    config=config,
                    root=root,
                    out=place,
                    environments=specs,
                    view=view,
                    plan=plan,
                    recent=_of_history(adoptions.recent),
                    oldest=_of_history(adoptions.oldest),
                    today=accepted.today(),
                    started=now - gate.wall_seconds,
                    deadline=float("inf") if budget is None else now + 60 * budget,
                    tree=lambda: bind(root, place),
                    fresh=fresh,
                    shares=divide(chosen, lane.count, own_cores()),
                )
                gate, earlier = run_gate(bench, gate), None
    except KeyboardInterrupt:
        view.say(f"interrupted; results so far are saved. Resume with: {_resume_line()}")
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        where = f"{error.filename or place}: {error.strerror}"
        view.say(f"bumpgate: {where}; results so far are saved. Resume with: {_resume_line()}")
        raise typer.Exit(Decision.UNKNOWN.value) from None
    found = earlier or gate.file(place)
    if as_json:
        typer.echo((place / state.NAME).read_text(encoding="utf-8"), nl=False)
    else:
        show(found, place, again=earlier is not None)
    if gate.undecided:
        view.say(f"the budget ended before every timed row was decided. Resume with: {_resume_line()}")
    if not (found.gaps() or config.selection or config.base):
        view.say(f"to adopt it: {_adoption(config, found, place / state.NAME)}")
    raise typer.Exit(found.decision.value)


def _folder(config: GateConfig, root: Path, out: Path | None) -> Path:
    """Return the folder of the gate, made. Raises BumpgateError if it holds sources of the work tree."""
    what = redacted(config.candidate) or (f"base-{config.base[:12]}" if config.base else "python")
    name = re.sub(r"[^A-Za-z0-9.+-]+", "-", what).strip("-")
    place = out or root / "build" / "gate" / f"{config.lane}-{name}"
    if not (place / state.NAME).exists() and (own := sources_in(root, place)):
        raise BumpgateError(
            f"--out {place} holds sources of the work tree ({own[0]}): choose a folder without sources"
        )
    place.mkdir(parents=True, exist_ok=True)
    return place


def begin(config: GateConfig, plan: SessionPlan, out: Path, resume: bool, now: Binding) -> Gate:
    """Create a gate, or load the one in `out`. Raises GateError if that one has other options or inputs."""
    found = state.read(out, plan)
    if found is None or (found.finished and not resume):
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        sides = {name: SideState() for name in config.requests}
        return Gate(config, started, shlex.join(["bumpgate", *sys.argv[1:]]), sides=sides, binding=now)
    where = out / state.NAME
    if not resume:
        raise GateError(f"{where} is of an unfinished gate: continue it with --resume, or name another --out")

    def written(options: GateConfig, name: str) -> str:
        return redacted(str(getattr(options, name)))

    names = [name for name in vars(config) if written(config, name) != written(found.config, name)]
    if names:
        names = [n for n in names if n != "selection" or "command" not in names]  # a command selects its test
        raise GateError(f"{where} is of another gate (other {', '.join(names)}): name another --out")
    if found.binding is None or (differences := found.binding.differences(now)):
        what = "; ".join(differences) if found.binding else "no record of its work tree"
        raise GateError(f"{where} does not match the present inputs ({what}): gate again, in another --out")
    return replace(found, config=config)


def _judged_before(gate: Gate, root: Path, out: Path) -> GateFile | None:
    """Return the file of a gate that had finished. Raises GateError if an acceptance has expired since."""
    if not gate.finished:
        return None
    found = read_judged(out / state.NAME)
    entries = accepted.load(root / "baselines" / accepted.FILE)
    if lapsed := accepted.lapsed(entries, gate.config.lane, gate.started, accepted.today()):
        raise GateError(f"{out / state.NAME} is stale ({'; '.join(lapsed)}): gate again, in another --out")
    return found if isinstance(found, GateFile) else None


def _check_packages(gate: Gate, specs: Mapping[str, EnvSpec], root: Path) -> None:
    """Raise GateError if an environment of a finished gate has changed."""
    for name, side in gate.sides.items():
        spec = specs[name]
        found = None if spec.failure else installed(spec.python, root, gate.config.lane, spec.variables)
        now = (found.packages, found.git_version) if found else ({}, {})
        for before, after in zip((side.packages, side.git_version), now):
            if before != after:
                raise other_packages(name, before, after)


def show(gate: GateFile, out: Path, *, again: bool) -> None:
    """Print the findings, the notes and a one-line summary. again: the gate had finished before this command."""
    console = Console()
    findings_text(gate.findings, console)
    number = len(gate.findings)
    parts = [
        f"{gate.decision.name}: {gate.candidate.name} against {gate.adopted.name}, lane {gate.lane}",
        f"{number} finding{'s' * (number != 1)}",
        f"{gate.wall_seconds / 60:.1f} min",
        part_of_lane(gate.adopted.record.provenance.get("part") if gate.adopted.record else None),
        f"an earlier verdict, started {gate.started}; nothing was measured now" if again else "",
        str(out / state.NAME),
    ]
    for line in [*notes(gate), "; ".join(filter(None, parts))]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _adoption(config: GateConfig, found: GateFile, path: Path) -> str:
    """Return the command that adopts the candidate of a gate."""
    words = ["bumpgate", "adopt", str(path)]
    if config.python_candidate:
        words += ["--candidate", f"torch=={found.candidate.packages.get('torch', 'X')}"]
        lacking = (name for name in config.without if name not in found.candidate.wheels)
        words += [word for name in lacking for word in ("--without", name)]
    holds = found.decision is not Decision.ADOPT
    return shlex.join(words) + " --reviewed ROW --reason TEXT, for each intended change" * holds


def _require_usable(config: GateConfig, root: Path) -> None:
    """Validate the options. Raises BumpgateError (one line)."""
    if cut := interrupted(root):
        end = "undo" if cut.kind == ADOPTION else "finish"
        fix = f"{end} it with: bumpgate rollback {cut.lane} --adoption"
        raise BumpgateError(f"{cut} was cut short here: {fix}")
    lanes.require(root, config.lane)
    if [bool(config.candidate), bool(config.python_candidate), bool(config.base)].count(True) != 1:
        which = (
            "--candidate 'torch==X', or --python-candidate PATH, or --base REF for a commit of the project"
        )
        raise BumpgateError(f"name the candidate: {which}")
    _require_candidate(config.candidate)
    for name, (python, requirement) in config.requests.items():
        if requirement and python:
            raise BumpgateError(f"--{name} cannot be combined with an interpreter for it")
    if config.without and not any(python for python, _ in config.requests.values()):
        fix = "name one, or leave it out"
        raise BumpgateError(f"--without is for interpreters (--python-candidate PATH): {fix}")
    if config.fast and (older := config.anchor or config.python_anchor):
        raise BumpgateError(f"--fast and the anchor {older}: a fast gate measures no drift; leave one out")
    LaneContext(root, config.lane).require_kernel_wheels(config.without)
    try:
        plan_for(config.sessions)
    except ValueError as error:
        raise BumpgateError(f"--sessions: {error}") from None
    for before, part in zip(("", *config.selection), () if config.command else config.selection):
        option, path = part.split("=")[0], part.split("::")[0]
        if option in OURS:
            raise BumpgateError(f"{option} is set by the gate: leave it out of the selection")
        if not part.startswith("-") and not before.startswith("-") and not (root / path).exists():
            raise BumpgateError(f"the selection names {path}, which does not exist")


def _require_candidate(text: str) -> None:
    """Raise GateError on a candidate that names no file, or nothing for this Python."""
    if text.endswith(".whl") and "://" not in text and not Path(text).expanduser().is_file():
        raise GateError(f"--candidate {text}: no such file")
    marker = text.partition(";")[2].strip()
    try:
        fits = not marker or Marker(marker).evaluate()
    except (InvalidMarker, UndefinedEnvironmentName) as error:
        raise GateError(f"--candidate {text}: {one_line(error)}") from None
    if not fits:
        raise GateError(f"--candidate {text}: its marker excludes this Python; leave it out")


def _selected_gpus(text: str, lane: lanes.Lane) -> list[str]:
    """Return the GPUs of --gpus; empty without the option. Raises BumpgateError."""
    if text and lane.device != "cuda":
        raise BumpgateError(f"--gpus {text}: lane {lane.name} runs on {lane.device}; leave the option out")
    return requested(text, lane.count, len(gpu_models()))


def test_path(lane: str, command: str) -> str:
    """Return the path of the generated test of a command below the root, where its node id holds on both sides.

    Each command has its own, so that gates of several commands can run at the same time.
    """
    return f"{GENERATED}{lane}_{hashlib.sha256(command.encode()).hexdigest()[:12]}.py"


def write_test(root: Path, lane: str, command: str) -> None:
    """Write the generated test of a command. Raises BumpgateError (one line) if the shell cannot parse it."""
    require_syntax(command)
    path = root / test_path(lane, command)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, TEST.format(lane=lane, command=command))


def _of_history(read: Callable[..., Mapping[str, T]]) -> Callable[..., Mapping[str, T]]:
    """Return a reader of the history that finds nothing if its optional libraries are missing: the gate still works."""

    def found(*what: Any) -> Mapping[str, T]:
        try:
            return read(*what)
        except ExtraMissingError:
            return {}

    return found


def _adopted_a_month_ago(lane: str) -> str:
    """Return the requirement for `--anchor history`; "", with a notice, if the history has no adopted build."""
    found = dict(adoptions.adopted(lane))
    day = drift.anchor(found, accepted.today())
    if day is None:
        none = f"the history has no adopted build of lane {lane} yet: no drift is measured"
        typer.echo(f"--anchor history: {none}", err=True)
        return ""
    return f"torch=={found[day]}"


def _resume_line() -> str:
    arguments = [a for a in sys.argv[1:] if a != "--resume"]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return shlex.join(["bumpgate", *arguments[:at], "--resume", *arguments[at:]])


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
