"""`bumpgate gate`: measures the adopted environment and a candidate in pairs on one machine; prints one verdict."""

from __future__ import annotations

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
from packaging.utils import canonicalize_name
from rich.console import Console

from bumpgate.core import accepted, lanes
from bumpgate.core.baseline import find_root
from bumpgate.core.errors import BumpgateError, ExtraMissingError
from bumpgate.core.findings import NO_REGRESSION, Decision
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import Record
from bumpgate.core.text import redacted
from bumpgate.env.cached import Disk
from bumpgate.env.mirror import copies
from bumpgate.gate import drift, metrics, state
from bumpgate.gate.environments import EnvSpec, environments, keep_locks, requests
from bumpgate.gate.evidence import read_judged
from bumpgate.gate.materiality import variants
from bumpgate.gate.measure import other_packages, run_gate
from bumpgate.gate.options import (
    FAST,
    GateConfig,
    GateError,
    RunOptions,
    file_digest,
    require_combination,
    require_usable,
    selected_gpus,
)
from bumpgate.gate.plan import SessionPlan, plan_for
from bumpgate.gate.runner import Bench
from bumpgate.gate.state import Gate, SideState
from bumpgate.gate.view import View, cut, findings_text
from bumpgate.history import adoptions
from bumpgate.process.gpu_shares import divide, own_cores
from bumpgate.process.locks import device_lock
from bumpgate.process.runner import absolute, installed
from bumpgate.process.tree_digest import Binding, bind, sources_in
from bumpgate.table import part_of_lane

INTERRUPTED = 130
Texts = list[str] | None
T = TypeVar("T")
EQUAL_OUTCOMES = tuple(outcome.value for outcome in NO_REGRESSION)


def command(
    lane: Annotated[str, typer.Option(help="A declared lane.")],
    candidate: Annotated[str, typer.Option(help="The candidate: 'torch==2.14.0', or a wheel file.")] = "",
    adopted: Annotated[str, typer.Option(help="Change a package of the adopted side: triton==3.7.1.")] = "",
    anchor: Annotated[
        str, typer.Option(help="Also pair with this older build; `history`: a month ago.")
    ] = "",
    python_adopted: Annotated[str, typer.Option(help="Adopted side: this interpreter, unchanged.")] = "",
    python_candidate: Annotated[str, typer.Option(help="Candidate side: this interpreter, unchanged.")] = "",
    python_good: Annotated[str, typer.Option(hidden=True)] = "",
    python_bad: Annotated[str, typer.Option(hidden=True)] = "",
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
    shell: Annotated[str | None, typer.Option("--command", help="Prints metrics, instead of pytest.")] = None,
    selection: Annotated[list[str] | None, typer.Argument(help="After --: what pytest runs.")] = None,
) -> None:
    """Measure the adopted build and a candidate in pairs: ADOPT, HOLD, or UNKNOWN if evidence is missing.

    Without a selection, the complete lane is measured.

    Exit codes: 0 ADOPT, 1 HOLD, 125 UNKNOWN, 4 bad input, 130 interrupted (--resume continues).
    """
    require_combination(shell, selection, fast)
    if budget is not None and not budget >= 0:
        raise BumpgateError(f"--budget: must be a number of minutes of at least 0, got {budget:g}")
    config = GateConfig(
        lane=lane,
        candidate=candidate,
        adopted=adopted,
        anchor=_adopted_a_month_ago(lane) if anchor == "history" else anchor,
        python_adopted=absolute(python_adopted or python_good),
        python_candidate=absolute(python_candidate or python_bad),
        python_anchor=absolute(python_anchor),
        sessions=sessions,
        selection=(metrics.test_path(lane, shell),)
        if shell
        else (*([FAST] if fast else []), *(selection or ())),
        candidate_file=file_digest(candidate),
        without=tuple(sorted({str(canonicalize_name(name)) for name in without or ()})),
        command=shell or "",
    )
    links = (*(find_links or ()), *copies(store or ()))
    how = RunOptions(
        out=out, budget=budget, gpus=gpus, resume=resume, fresh=fresh, index=index, find_links=links
    )
    _run(config, how)


def _run(config: GateConfig, how: RunOptions) -> None:
    """Run or resume a gate, print its verdict, and exit with its code."""
    root = find_root(Path.cwd())
    require_usable(config, root)
    lane = lanes.require(root, config.lane)
    chosen = selected_gpus(how.gpus, lane)
    place = (
        how.out or root / "build" / "gate" / f"{lane.name}-{_slug(redacted(config.candidate) or 'python')}"
    )
    if not (place / state.NAME).exists() and (own := sources_in(root, place)):
        raise BumpgateError(
            f"--out {place} holds sources of the work tree ({own[0]}): choose a folder without sources"
        )
    place.mkdir(parents=True, exist_ok=True)
    view = View(Console(stderr=True))
    signal.signal(signal.SIGTERM, _interrupt)
    requests(config, root, how)  # bad input is refused before the wait for the device
    try:
        with device_lock(lane, view.say, chosen):
            gate, earlier = _measured(config, how, root, place, view, chosen)
    except KeyboardInterrupt:
        view.say(f"interrupted; results so far are saved. Resume with: {_resume_line()}")
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        where = error.filename or place
        view.say(
            f"bumpgate: {where}: {error.strerror}; results so far are saved. Resume with: {_resume_line()}"
        )
        raise typer.Exit(Decision.UNKNOWN.value) from None
    found = earlier or gate.file(place)
    _show(found, place, again=earlier is not None)
    if gate.undecided:
        view.say(f"the budget ended before every timed row was decided. Resume with: {_resume_line()}")
    if not (found.gaps() or config.selection):
        view.say(f"to adopt it: {_adoption(config, found, place / state.NAME)}")
    raise typer.Exit(found.decision.value)


def _measured(
    config: GateConfig, how: RunOptions, root: Path, place: Path, view: View, gpus: Sequence[str]
) -> tuple[Gate, GateFile | None]:
    """Return the finished gate, and its file if it had finished before this command."""
    if config.command:
        metrics.write_test(root, config.lane, config.command)
    lane = lanes.require(root, config.lane)
    plan = plan_for(config.sessions, lane.slow_modes, lane.device, lane.margins)
    gate = _begin(config, plan, place, how.resume, bind(root, place))
    earlier: Record | GateFile | None = None
    if gate.finished:
        earlier = read_judged(place / state.NAME)
        _refuse_lapsed(gate, root, place)
    specs = environments(config, root, view, how)
    if isinstance(earlier, GateFile) and not gate.undecided:
        _check_packages(gate, specs, root)
        return gate, earlier
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
        deadline=now + 60 * how.budget if how.budget is not None else float("inf"),
        tree=lambda: bind(root, place),
        fresh=how.fresh,
        shares=divide(gpus, lane.count, own_cores()),
    )
    return run_gate(bench, gate), None


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


def _begin(config: GateConfig, plan: SessionPlan, out: Path, resume: bool, now: Binding) -> Gate:
    """Create a gate, or load the one in `out`. Raises GateError if that one has other options or inputs."""
    found = state.read(out, plan)
    if found is None or (found.finished and not resume):
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        sides = {name: SideState() for name in config.requests}
        return Gate(config, started, shlex.join(["bumpgate", *sys.argv[1:]]), sides=sides, binding=now)
    where = out / state.NAME
    if not resume:
        raise GateError(f"{where} is of an unfinished gate: continue it with --resume, or name another --out")
    names = [n for n in vars(config) if _kept(getattr(config, n)) != _kept(getattr(found.config, n))]
    if names:
        names = [n for n in names if n != "selection" or "command" not in names]  # a command selects its test
        raise GateError(f"{where} is of another gate (other {', '.join(names)}): name another --out")
    if found.binding is None or (differences := found.binding.differences(now)):
        what = "; ".join(differences) if found.binding else "no record of its work tree"
        raise GateError(f"{where} does not match the present inputs ({what}): gate again, in another --out")
    return replace(found, config=config)


def _kept(option: object) -> str:
    """Return an option as gate.json keeps it, for a comparison."""
    return redacted(str(option))


def _refuse_lapsed(gate: Gate, root: Path, out: Path) -> None:
    """Raise GateError if a finished gate used an acceptance that has expired since."""
    entries = accepted.load(root / "baselines" / accepted.FILE)
    if lapsed := accepted.lapsed(entries, gate.config.lane, gate.started, accepted.today()):
        raise GateError(f"{out / state.NAME} is stale ({'; '.join(lapsed)}): gate again, in another --out")


def _check_packages(gate: Gate, specs: Mapping[str, EnvSpec], root: Path) -> None:
    """Raise GateError if an environment of a finished gate has changed."""
    for name, side in gate.sides.items():
        spec = specs[name]
        found = None if spec.failure else installed(spec.python, root, gate.config.lane, spec.variables)
        now = (found.packages, found.git_version) if found else ({}, {})
        for before, after in zip((side.packages, side.git_version), now):
            if before != after:
                raise other_packages(name, before, after)


def _show(gate: GateFile, out: Path, *, again: bool) -> None:
    """Print the findings and a one-line summary. again: the gate had finished before this command."""
    console = Console()
    findings_text(gate.findings, console)
    lines = [f"moved: {line}" for line in cut(gate.moved)]
    lines += [note] if (note := other_variant(gate)) else []
    lines += [f"acceptance: {line}" for line in gate.accepted]
    adopted = gate.adopted.record.provenance if gate.adopted.record else {}
    lines += [f"margin: {line}" for line in adopted.get("margins", ())]
    lines += [explained(gate)] if gate.decision is Decision.UNKNOWN else []
    parts = [f"{gate.decision.name}: {gate.candidate.name} against {gate.adopted.name}, lane {gate.lane}"]
    parts += [
        f"{len(gate.findings)} finding{'s' * (len(gate.findings) != 1)}",
        f"{gate.wall_seconds / 60:.1f} min",
    ]
    part = part_of_lane(adopted.get("part"))
    parts += [part] if part else []
    parts += [f"an earlier verdict, started {gate.started}; nothing was measured now"] if again else []
    for line in [*lines, "; ".join([*parts, str(out / state.NAME)])]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def other_variant(gate: GateFile) -> str:
    """Return a note if the sides run different variants of torch, such as +cpu and +cu130; "" otherwise."""
    sides = [s.record.provenance.get("torch") if s.record else None for s in (gate.adopted, gate.candidate)]
    if not (labels := variants(*sides)):
        return ""
    return (
        f"note: {sides[0]} and {sides[1]} are different variants: times of imports and compile caches, and memory,"
        f' include this difference. Compare one variant: --index URL, --candidate "torch==X+{labels[0]}"'
    )


def explained(gate: GateFile) -> str:
    """Return what an UNKNOWN gate knows, in one sentence: what is equal, and what lacks data for which reason."""
    rows = [
        {j.row.id for j in s.record.judgements} if s.record else set() for s in (gate.adopted, gate.candidate)
    ]
    gaps = [f for f in gate.findings if f.decision is Decision.UNKNOWN]
    decided = (rows[0] & rows[1]) - {row for f in gaps for row in f.rows}
    other = {row for f in gate.findings for row in f.rows if f.label not in EQUAL_OUTCOMES} & decided
    compared = f"{len(decided) - len(other)} of {len(decided)} decided rows are equal"
    parts = [f"nothing was found against the candidate: {compared if decided else 'no row was decided'}"]
    for f in gaps:
        number = len(f.rows)
        what = f"{number} row{'s lack' if number != 1 else ' lacks'} data: " if f.rows else ""
        parts.append(what + (f.head or f.cause))
    return "; ".join(cut(parts))


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
