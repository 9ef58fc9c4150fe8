"""`bumpgate gate`: measures the adopted environment and a candidate in pairs on one machine; prints one verdict."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.utils import canonicalize_name
from rich.console import Console

from bumpgate.core import accepted, gate_file, lanes
from bumpgate.core.baseline import find_root
from bumpgate.core.errors import BumpgateError, ExtraMissingError, one_line
from bumpgate.core.findings import Decision, DriftReading
from bumpgate.core.gate_file import GateFile
from bumpgate.env import compiled
from bumpgate.env.build import BuildError, build
from bumpgate.env.cached import Disk
from bumpgate.env.lane import lane_request, require_kernel_wheels
from bumpgate.env.mirror import copies
from bumpgate.env.packages import lock_variables
from bumpgate.env.store import sha256_of
from bumpgate.gate import drift, metrics, result
from bumpgate.gate.bench import GateRunner, other_packages
from bumpgate.gate.plan import SessionPlan, plan_for
from bumpgate.gate.result import Gate, GateConfig, GateError, SideState
from bumpgate.gate.sides import TITLES, EnvSpec
from bumpgate.gate.view import View, cut, findings_text
from bumpgate.history import adoptions
from bumpgate.process.file_transaction import ADOPTION, interrupted
from bumpgate.process.gpu_shares import divide, own_cores, requested
from bumpgate.process.host import gpu_models
from bumpgate.process.locks import device_lock
from bumpgate.process.runner import absolute, installed
from bumpgate.process.tree_digest import Binding, bind, sources_in
from bumpgate.table import part_of_lane
from bumpgate.wheels import fitting as wheels

# Options that the gate sets itself; passing them twice would change the two runs.
OURS = ("-m", "--record", "--gate", "--launcher")
INTERRUPTED = 130


def command(
    lane: Annotated[str, typer.Option(help="A declared lane.")],
    candidate: Annotated[str, typer.Option(help="The candidate: 'torch==2.14.0', or a wheel file.")] = "",
    adopted: Annotated[
        str, typer.Option(help="Change a package of the adopted side, such as triton==3.7.1.")
    ] = "",
    anchor: Annotated[
        str,
        typer.Option(help="Also pair the candidate with this older build; `history`: that of a month ago."),
    ] = "",
    python_adopted: Annotated[str, typer.Option(help="Adopted side: this interpreter, unchanged.")] = "",
    python_candidate: Annotated[str, typer.Option(help="Candidate side: this interpreter, unchanged.")] = "",
    python_anchor: Annotated[str, typer.Option(help="Anchor side: this interpreter, unchanged.")] = "",
    without: Annotated[
        list[str] | None,
        typer.Option(help="A kernel wheel that these interpreters lack on purpose; repeatable."),
    ] = None,
    index: Annotated[
        str | None, typer.Option(help="URL of an index that takes precedence over the host's.")
    ] = None,
    find_links: Annotated[
        list[str] | None, typer.Option(help="Folder or page of wheels; repeatable.")
    ] = None,
    store: Annotated[
        list[str] | None, typer.Option(help="A store with nightlies of `bumpgate mirror`; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of gate.json and both records.")] = None,
    sessions: Annotated[int | None, typer.Option(help="Maximum number of paired sessions, 6 to 72.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="Minutes after which no session starts; --resume continues.")
    ] = None,
    gpus: Annotated[
        str,
        typer.Option(
            help="GPUs to use at once, such as 0,1,2,3, or `all`: lanes of both sides, then sessions."
        ),
    ] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the gate in --out.")] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Run the adopted side again, even if a run of the last 24 hours is kept."
        ),
    ] = False,
    fast: Annotated[
        bool,
        typer.Option(
            result.FAST, help="An early answer: only tests of a few seconds, and no times. Cannot adopt."
        ),
    ] = False,
    disk: Disk = None,
    shell: Annotated[
        str | None,
        typer.Option(
            "--command", help="Instead of pytest: a command that prints metrics as JSON (docs/gate.md)."
        ),
    ] = None,
    selection: Annotated[list[str] | None, typer.Argument(help="After --: what pytest runs.")] = None,
) -> None:
    """Measure the adopted build and a candidate in pairs: ADOPT, HOLD, or UNKNOWN if evidence is missing.

    Without a selection, the complete lane is measured.

    Exit codes: 0 ADOPT, 1 HOLD, 125 UNKNOWN, 4 bad input, 130 interrupted (--resume continues).
    """
    if shell is not None and not shell.strip():
        raise BumpgateError("--command: the command is empty; an unset variable of the shell?")
    if shell and selection:
        raise BumpgateError("--command and a pytest selection: use one, not both")
    if shell and fast:
        raise BumpgateError("--command and --fast: a command has no fast part; leave --fast out")
    if budget is not None and not budget >= 0:
        raise BumpgateError(f"--budget: must be a number of minutes of at least 0, got {budget:g}")
    config = GateConfig(
        lane=lane,
        candidate=candidate,
        adopted=adopted,
        anchor=_adopted_a_month_ago(lane) if anchor == "history" else anchor,
        python_adopted=absolute(python_adopted),
        python_candidate=absolute(python_candidate),
        python_anchor=absolute(python_anchor),
        sessions=sessions,
        selection=(metrics.test_path(lane, shell),)
        if shell
        else (*([result.FAST] if fast else []), *(selection or ())),
        candidate_file=_file_digest(candidate),
        without=tuple(sorted({str(canonicalize_name(name)) for name in without or ()})),
        command=shell or "",
    )
    root = find_root(Path.cwd())
    _refuse(config, root)
    needed = lanes.require(root, lane)
    chosen = _gpus(gpus, needed)
    place = out or root / "build" / "gate" / f"{lane}-{_slug(candidate or 'python')}"
    if not (place / result.NAME).exists() and (own := sources_in(root, place)):
        raise BumpgateError(
            f"--out {place} holds sources of the work tree ({own[0]}): choose a folder without sources"
        )
    place.mkdir(parents=True, exist_ok=True)
    view = View(Console(stderr=True))
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with device_lock(needed, view.say, chosen):
            if shell:
                metrics.write_test(root, lane, shell)
            now = bind(root, place)
            plan = plan_for(sessions, lane, needed.device, needed.margins)
            gate = _begin(config, plan, place, resume, now)
            if gate.finished:
                _refuse_lapsed(gate, root, place)
            links = (*(find_links or ()), *copies(store or ()))
            specs = _env_specs(config, view, root, {"index": index, "find_links": links}, not resume)
            again = gate.finished and not gate.undecided
            if again:
                _check_packages(gate, specs, root)
            else:
                _keep_locks(specs, place)
                limit = time.monotonic() + 60 * budget if budget is not None else float("inf")
                GateRunner(
                    gate,
                    root,
                    place,
                    specs,
                    view,
                    plan,
                    _recent,
                    accepted.today(),
                    limit,
                    lambda: bind(root, place),
                    fresh,
                    divide(chosen, needed.count, own_cores()),
                ).run()
    except KeyboardInterrupt:
        view.say(f"interrupted; results so far are saved. Resume with: {_resume_line()}")
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        where = error.filename or place
        view.say(
            f"bumpgate: {where}: {error.strerror}; results so far are saved. Resume with: {_resume_line()}"
        )
        raise typer.Exit(Decision.UNKNOWN.value) from None
    found = gate_file.read(place / result.NAME)
    assert isinstance(found, GateFile)
    _show(found, place, again)
    if gate.undecided:
        view.say(f"the budget ended before every timed row was decided. Resume with: {_resume_line()}")
    if not (found.gaps() or config.selection):
        view.say(f"to adopt it: {_adoption(config, found, place / result.NAME)}")
    raise typer.Exit(found.decision.value)


def _adoption(config: GateConfig, found: GateFile, path: Path) -> str:
    """Return the command that adopts the candidate of a gate."""
    words = ["bumpgate", "adopt", str(path)]
    if config.python_candidate:
        words += ["--candidate", f"torch=={found.candidate.packages.get('torch', 'X')}"]
        words += [
            w for name in config.without if name not in found.candidate.wheels for w in ("--without", name)
        ]
    holds = found.decision is not Decision.ADOPT
    return shlex.join(words) + " --reviewed ROW --reason TEXT, for each intended change" * holds


def _refuse(config: GateConfig, root: Path) -> None:
    """Validate the options. Raises BumpgateError (one line)."""
    if cut := interrupted(root):
        end = "undo" if cut.kind == ADOPTION else "finish"
        raise BumpgateError(
            f"{cut} was cut short here: {end} it with: bumpgate rollback {cut.lane} --adoption"
        )
    lanes.require(root, config.lane)
    if bool(config.candidate) == bool(config.python_candidate):
        raise BumpgateError("name the candidate: --candidate 'torch==X', or --python-candidate PATH")
    for name in ("adopted", "anchor"):
        python = {"adopted": config.python_adopted, "anchor": config.python_anchor}[name]
        if getattr(config, name) and python:
            raise BumpgateError(f"--{name} cannot be combined with an interpreter for it")
    if config.without and not (config.python_adopted or config.python_candidate or config.python_anchor):
        raise BumpgateError(
            "--without is for interpreters (--python-candidate PATH): name one, or leave it out"
        )
    if config.fast and (older := config.anchor or config.python_anchor):
        raise BumpgateError(f"--fast and the anchor {older}: a fast gate measures no drift; leave one out")
    require_kernel_wheels(root, config.lane, config.without)
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


def _gpus(text: str, lane: lanes.Lane) -> list[str]:
    """Return the GPUs of --gpus; empty without the option. Raises BumpgateError."""
    if text and lane.device != "cuda":
        raise BumpgateError(f"--gpus {text}: lane {lane.name} runs on {lane.device}; leave the option out")
    return requested(text, lane.count, len(gpu_models()))


def _file_digest(candidate: str) -> str:
    """Return the sha256 of a candidate that is a wheel file; "" for a requirement."""
    path = Path(candidate).expanduser()
    return sha256_of(path) if candidate.endswith(".whl") and path.is_file() else ""


def _begin(config: GateConfig, plan: SessionPlan, out: Path, resume: bool, now: Binding) -> Gate:
    """Create a gate, or load the one in `out`. Raises GateError if that one has other options or inputs."""
    found = result.read(out, plan)
    if found is None or (found.finished and not resume):
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        gate = Gate(config, started, shlex.join(["bumpgate", *sys.argv[1:]]), binding=now)
        if config.anchor or config.python_anchor:
            gate.sides["anchor"] = SideState()
        return gate
    where = out / result.NAME
    if not resume:
        raise GateError(f"{where} is of an unfinished gate: continue it with --resume, or name another --out")
    if found.config != config:
        names = [n for n in vars(config) if getattr(config, n) != getattr(found.config, n)]
        names = [n for n in names if n != "selection" or "command" not in names]  # a command selects its test
        raise GateError(f"{where} is of another gate (other {', '.join(names)}): name another --out")
    if found.binding is None or (differences := found.binding.differences(now)):
        what = "; ".join(differences) if found.binding else "no record of its work tree"
        raise GateError(f"{where} does not match the present inputs ({what}): gate again, in another --out")
    return found


def _refuse_lapsed(gate: Gate, root: Path, out: Path) -> None:
    """Raise GateError if a finished gate used an acceptance that has expired since."""
    entries = accepted.load(root / "baselines" / accepted.FILE)
    if lapsed := accepted.lapsed(entries, gate.config.lane, gate.started, accepted.today()):
        raise GateError(f"{out / result.NAME} is stale ({'; '.join(lapsed)}): gate again, in another --out")


def _check_packages(gate: Gate, specs: Mapping[str, EnvSpec], root: Path) -> None:
    """Raise GateError if an environment of a finished gate has changed."""
    for name, side in gate.sides.items():
        spec = specs[name]
        found = None if spec.failure else installed(spec.python, root, gate.config.lane, spec.variables)
        now = (found.packages, found.git_version) if found else ({}, {})
        for before, after in zip((side.packages, side.git_version), now):
            if before != after:
                raise other_packages(name, before, after)


def _keep_locks(specs: Mapping[str, EnvSpec], out: Path) -> None:
    """Keep the resolved lock next to gate.json: `bumpgate adopt` needs it when the environment is gone."""
    for name, spec in specs.items():
        (out / f"{name}.pylock.toml").unlink(missing_ok=True)
        if spec.lock:
            shutil.copyfile(spec.lock, out / f"{name}.pylock.toml")


def _env_specs(
    config: GateConfig, view: View, root: Path, sources: dict[str, Any], new: bool
) -> dict[str, EnvSpec]:
    """Return an interpreter for each side. A side that cannot be built has its `failure` set. new: not resumed."""
    requested = {
        "adopted": (config.python_adopted, config.adopted),
        "candidate": (config.python_candidate, config.candidate),
    }
    if config.anchor or config.python_anchor:
        requested["anchor"] = (config.python_anchor, config.anchor)
    requests = {
        name: lane_request(root, config.lane, requirement or None, **sources)
        for name, (python, requirement) in requested.items()
        if not python
    }
    specs: dict[str, EnvSpec] = {}
    for name, (python, _) in requested.items():
        if python:
            try:
                absent = wheels.missing(root, config.lane, Path(python))
                contents = wheels.contents(root, config.lane, Path(python))
            except BumpgateError as error:
                specs[name] = EnvSpec(Path(), {}, one_line(error), f"{shlex.quote(python)} -m pip list")
                continue
            _refuse_unprepared(config, python, absent)
            lacking = wheels.variables({each: f"{why} (--without)" for each, why in absent.items()})
            key = compiled.HANDED_IN + hashlib.sha256(python.encode()).hexdigest()[:16]
            own = {**lock_variables(None), **lacking, **compiled.bytecode(key, name, new=new)}
            first, *more = ({**c, **own} for c in compiled.copies(key, name))
            specs[name] = EnvSpec(
                Path(python),
                first,
                command=f"{shlex.quote(python)} -m pip list",
                more=tuple(more),
                wheels=contents,
            )
            continue
        try:
            with view.doing(f"{TITLES[name]}: building its environment"):
                made = build(requests[name], say=view.say)
                fitted = wheels.fit(root, config.lane, requests[name], made, sources["find_links"], view.say)
            made = fitted.environment
            own = {**lock_variables(made.lock), **wheels.variables(fitted.absent)}
            first, *more = ({**c, **own} for c in compiled.copies(made.key, name))
            specs[name] = EnvSpec(
                made.python,
                first,
                command=f"cat {made.lock}" if made.lock else "",
                lock=made.lock,
                more=tuple(more),
            )
        except BuildError as error:
            specs[name] = EnvSpec(Path(), {}, one_line(error), f"less {shlex.quote(str(error.log))}")
        except BumpgateError as error:
            specs[name] = EnvSpec(Path(), {}, one_line(error), "bumpgate doctor")
    return specs


def _refuse_unprepared(config: GateConfig, python: str, absent: Mapping[str, str]) -> None:
    """Raise GateError if an interpreter lacks kernel wheels of the lane that `--without` does not name.

    Otherwise an environment that was prepared badly would be judged without the rows of its peers.
    """
    unnamed = [package for package in absent if package not in config.without]
    if unnamed:
        options = " ".join(f"--without {package}" for package in unnamed)
        raise GateError(
            f"{python} lacks {', '.join(unnamed)} of lane {config.lane}: install them"
            f" (bumpgate wheels plan --lane {config.lane} --python {shlex.quote(python)} lists which fit),"
            f" or add, if that is intended: {options}"
        )


def _show(gate: GateFile, out: Path, again: bool) -> None:
    """Print the findings and a one-line summary. again: the gate had finished before this command."""
    console = Console()
    findings_text(gate.findings, console)
    lines = [f"moved: {line}" for line in cut(gate.moved)]
    lines += [note] if (note := other_variant(gate)) else []
    lines += [f"acceptance: {line}" for line in gate.accepted]
    adopted = gate.adopted.record.provenance if gate.adopted.record else {}
    lines += [f"margin: {line}" for line in adopted.get("margins", ())]
    parts = [f"{gate.decision.name}: {gate.candidate.name} against {gate.adopted.name}, lane {gate.lane}"]
    parts += [
        f"{len(gate.findings)} finding{'s' * (len(gate.findings) != 1)}",
        f"{gate.wall_seconds / 60:.1f} min",
    ]
    part = part_of_lane(adopted.get("part"))
    parts += [part] if part else []
    parts += [f"an earlier verdict, started {gate.started}; nothing was measured now"] if again else []
    for line in [*lines, "; ".join([*parts, str(out / result.NAME)])]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def other_variant(gate: GateFile) -> str:
    """Return a note if the sides run different variants of torch, such as +cpu and +cu130; "" otherwise.

    A label that names a commit (+git21fec65) is no variant.
    """
    sides = [
        side.record.provenance.get("torch") if side.record else None
        for side in (gate.adopted, gate.candidate)
    ]
    labels = [str(torch).partition("+")[2].partition(".")[0] for torch in sides if torch]
    if len(set(labels)) < 2 or not all(labels) or any(label.startswith("git") for label in labels):
        return ""
    return (
        f"note: {sides[0]} and {sides[1]} are different variants: times of imports and compile caches, and memory,"
        f' include this difference. Compare one variant: --index URL, --candidate "torch==X+{labels[0]}"'
    )


def _recent(lane: str, rows: Sequence[str], days: int) -> Mapping[str, Sequence[DriftReading]]:
    """Return readings from the history; empty if its optional libraries are missing, so that the gate still works."""
    try:
        return adoptions.recent(lane, rows, days)
    except ExtraMissingError:
        return {}


def _adopted_a_month_ago(lane: str) -> str:
    """Return the requirement for `--anchor history`; "", with a notice, if the history has no adopted build."""
    found = adoptions.adopted(lane)
    day = drift.anchor([day for day, _ in found], accepted.today())
    if day is None:
        typer.echo(
            f"--anchor history: the history has no adopted build of lane {lane} yet: no drift is measured",
            err=True,
        )
        return ""
    return f"torch=={dict(found)[day]}"


def _resume_line() -> str:
    arguments = [a for a in sys.argv[1:] if a != "--resume"]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return shlex.join(["bumpgate", *arguments[:at], "--resume", *arguments[at:]])


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", text).strip("-")
