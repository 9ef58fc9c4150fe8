"""`bumpgate bisect`: finds the first bad version between two, and which package of its set is at fault."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Protocol

import typer
from packaging.utils import canonicalize_name
from rich.console import Console

from bumpgate.bisect import blame, gate_finding, ranges, shell
from bumpgate.bisect import journal as journals
from bumpgate.bisect.answer import Answer, Watcher, answer, closing_text, so_far, text, write_json
from bumpgate.bisect.bisection import BisectContext, Bisection, MachineError
from bumpgate.bisect.candidates import Range
from bumpgate.bisect.compiler import compiler_part
from bumpgate.bisect.journal import BisectPlan, Journal, JournalExistsError
from bumpgate.bisect.options import BisectError, Options
from bumpgate.bisect.prefetch import Prefetch
from bumpgate.bisect.probe import Hosts, Test
from bumpgate.bisect.search import SearchFailure, SearchResult
from bumpgate.env.build import Environment, build
from bumpgate.env.cached import Disk
from bumpgate.env.mirror import copies
from bumpgate.wheels.fitting import Fitter, missing
from bumpgate.wheels.fitting import variables as absent_variables


class FleetHosts(Protocol):
    """Hosts that `bumpgate fleet` has connected to."""

    def check(self, options: Options) -> None:
        """Raise BumpgateError, one line, for a bisect that hosts cannot share."""

    def readings(self, options: Options, good: str) -> Hosts:
        """Return what takes the readings of a bisect. good: the version of the good endpoint."""

    def line(self) -> tuple[str, ...]:
        """Return the start of the command line that connects again."""


STATE, JSON = "state.jsonl", "bisect.json"
UNKNOWN, INTERRUPTED = 125, 130


def command(
    context: typer.Context,
    good: Annotated[
        str, typer.Option(help="A good version, or the date of a good nightly (2026-10-01).")
    ] = "",
    bad: Annotated[str, typer.Option(help="A bad version or date; later, unless --find-fix.")] = "",
    selection: Annotated[list[str] | None, typer.Argument(help="After --: what pytest runs.")] = None,
    lane: Annotated[str, typer.Option(help="A declared lane; its set is installed around the package.")] = "",
    package: Annotated[str, typer.Option(help="torch, triton, or any package of the set.")] = "torch",
    test: Annotated[
        str,
        typer.Option("--command", help="Your own test instead: exit 0 good, 1-124 bad, 125 skip; {python}."),
    ] = "",
    from_gate: Annotated[
        Path | None,
        typer.Option(help="gate.json: bisect its worst finding between its two sides, SLOWER included."),
    ] = None,
    builder: Annotated[
        str,
        typer.Option(
            help="Bisect the commits of --repository: CMD gets a commit, prints a Python's path; not in a fleet."
        ),
    ] = "",
    repository: Annotated[
        list[str] | None,
        typer.Option(help="A local clone, or https://api.github.com: lists commits; repeatable."),
    ] = None,
    environments: Annotated[
        str,
        typer.Option(
            help="Build nothing: the candidates are the environments DIR/NAME (bin/python); not in a fleet."
        ),
    ] = "",
    row: Annotated[
        str, typer.Option(help="With --from-gate: the finding that has this row, instead of the worst.")
    ] = "",
    index: Annotated[str | None, typer.Option(help="An index that takes precedence over the host's.")] = None,
    find_links: Annotated[
        list[str] | None, typer.Option(help="A folder or page of wheels; repeatable.")
    ] = None,
    launch: Annotated[
        str, typer.Option(help="Instead of a bisect: a shell in the environment of this version or night.")
    ] = "",
    interactive: Annotated[
        bool,
        typer.Option(
            "--interactive", help="Answer good, bad, skip, retry or back for each version; not in a fleet."
        ),
    ] = False,
    compiler: Annotated[
        float | None,
        typer.Option(min=0, help="Then run torch's CompilerBisector, at most this many minutes."),
    ] = None,
    store: Annotated[
        list[str] | None, typer.Option(help="A store with nightlies of `bumpgate mirror`; repeatable.")
    ] = None,
    extra: Annotated[
        list[str] | None, typer.Option("--with", help="A requirement in addition to the package; repeatable.")
    ] = None,
    find_fix: Annotated[
        bool, typer.Option("--find-fix", help="Find the first good version after a bad one.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds after which a probe ends without a verdict.")
    ] = None,
    false_bad: Annotated[
        float | None, typer.Option(help="How often a good version reads bad; estimated by default.")
    ] = None,
    false_good: Annotated[
        float | None, typer.Option(help="How often a bad version reads good; estimated by default.")
    ] = None,
    confidence: Annotated[float, typer.Option(help="The posterior at which an answer is sure.")] = 0.98,
    budget: Annotated[
        int | None, typer.Option(help="Readings after which the likeliest answer is given; 60 by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where state, logs and bisect.json go.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the bisect in --out.")] = False,
    attribution: Annotated[
        bool, typer.Option(help="Then find the package of the set that is at fault.")
    ] = True,
    disk: Disk = None,
    prefetch: Annotated[bool, typer.Option(help="Build the next candidates while one is probed.")] = True,
) -> None:
    """Find the first bad version of a package between a good and a bad one, then the package of its set at fault.

    Both endpoints are verified first. A version that does not install or import is skipped. Ctrl-C loses no reading.

    Exit codes: 0 found, 4 bad input or endpoints without the claimed result, 125 no sure answer or a machine failure,
    130 interrupted.
    """
    options = Options(
        canonicalize_name(package),
        good,
        bad,
        lane,
        tuple(selection or ()),
        test,
        index,
        (*(find_links or ()), *copies(store or ())),
        tuple(extra or ()),
        timeout,
        find_fix,
        false_bad,
        false_good,
        confidence,
        budget,
        builder=builder,
        repository=tuple(repository or ()),
        interactive=interactive,
        environments=environments,
    )
    if launch:
        if builder:
            raise BisectError("--launch is for versions: for a commit, run the --builder CMD itself")
        if environments:
            raise BisectError(f"--launch builds an environment: run {environments}/NAME/bin/python itself")
        raise typer.Exit(_launch(options, launch))
    if from_gate or row:
        options = _with_finding(options, from_gate, row)
    place = out or Path(f"bisect-{options.package}-{options.good}-{options.bad}".replace("/", "-"))
    with _terminable():
        raise typer.Exit(run(options, place, resume, attribution, prefetch, compiler, context.obj, disk))


def _with_finding(options: Options, path: Path | None, row: str) -> Options:
    """Return the options with lane, selection and, by default, endpoints of a gate's finding."""
    if path is None:
        raise BisectError("--row names a row of --from-gate GATE_JSON, which is missing")
    if options.lane or options.selection or options.command:
        raise BisectError(
            "--from-gate takes lane and tests from the gate: leave out --lane, --command and --"
        )
    found = gate_finding.load(path, row)
    good, bad = options.good, options.bad
    if not (good and bad):
        versions = found.versions(options.package)
        good, bad = good or versions[0], bad or versions[1]
    return replace(
        options,
        good=good,
        bad=bad,
        lane=found.lane,
        selection=(*found.options, *found.nodes),
        gate=os.path.abspath(path),
        row=row,
        finding=found,
    )


def _launch(options: Options, name: str) -> int:
    """Open a shell in the environment of one version, and return its exit code."""
    root = options.root()
    request = options.request(root)(options.version(root, name))
    typer.echo(f"{request.title}: building, unless it is in the cache", err=True)
    environment = _fitter(options, root)(request) if root else build(request)
    typer.echo(shell.origin(request, environment))
    return shell.shell(environment)


def run(
    options: Options,
    out: Path,
    resume: bool,
    attribution: bool,
    prefetch: bool,
    compiler: float | None,
    fleet: FleetHosts | None,
    disk: str | None,
) -> int:
    """Run the command and return its exit code. fleet: where its readings are taken, instead of this process.

    Raises BumpgateError on bad input, before anything is installed.
    """
    root = options.check()
    if fleet:
        fleet.check(options)
    state, span = _continue(options, out) if resume else (None, None)
    if state is None or span is None:
        span = options.range(root)
        if root is not None and options.selection and not options.timed:
            options.check_selection(root)
        state = _begin(out, options.plan(span, _test(options, root, span)))
        typer.echo(span.summary(state.search.steps_left()))
    hosts = fleet.readings(options, span.good) if fleet else None
    again = [*(fleet.line() if fleet else ()), "bisect"]
    flags = [*([] if attribution else ["--no-attribution"]), *([] if prefetch else ["--no-prefetch"])]
    flags += ["--compiler", f"{compiler:g}"] if compiler else []
    flags += ["--disk", disk] if disk else []
    with state:
        try:
            # A build at the same time would disturb the times, and a builder has one folder.
            apart = options.timed or options.builder or options.environments or hosts
            prefetch = prefetch and not apart
            attribution = attribution and not (options.builder or options.interactive)
            return _search(options, out, state, span, root, attribution, prefetch, compiler, hosts)
        except KeyboardInterrupt:
            typer.echo(f"interrupted; {len(state.search.history)} probes are saved. Continue with:", err=True)
            typer.echo(f"  {_resume_command(options, out, flags, again)}", err=True)
            return INTERRUPTED
        except MachineError as error:
            why = str(error)
        except OSError as error:
            why = f"{error.filename or out}: {error.strerror}"
        if known := so_far(state.search):
            typer.echo(known)
        return _stopped(why, _resume_command(options, out, flags, again))


def _search(
    options: Options,
    out: Path,
    state: Journal,
    span: Range,
    root: Path | None,
    attribution: bool,
    prefetch: bool,
    compiler: float | None,
    hosts: Hosts | None,
) -> int:
    started = time.monotonic()
    builder = options.commit_builder(out) if options.builder else None
    source = builder or options.prepared
    fitter = _fitter(options, root) if root and not source else None
    test = _test(options, root, span, fitter)
    watcher = Watcher(Console(soft_wrap=True), live=not options.interactive)
    context = BisectContext(
        options.package,
        out,
        source.request if source else options.request(root),
        source or fitter or build,
        test,
        watcher,
        Prefetch() if prefetch else None,
        reliable=options.timed,
        recall=builder and builder.recall,
        follow=fitter.names - {options.package} if fitter else frozenset(),
        together=options.prepared.together if options.prepared else blame.together,
        hosts=hosts,
    )
    bisection = Bisection(state, context)

    def seconds() -> dict[str, float]:
        # A resumed bisect reuses the reading, and its seconds, of a probe that had finished before the kill.
        overhead = max(0.0, time.monotonic() - started - watcher.seconds)
        return {"probes": watcher.seconds, "overhead": overhead}

    with watcher:
        result = bisection.run()
    if not result.found:
        found = Answer(span, state.plan, result, deciding=test.deciding)
        write_json(out / JSON, found, bisection, seconds=seconds())
        return _no_answer(result, test, watcher.last)
    found = answer(bisection, span, result, None, test)
    if builder:
        found = builder.described(found)
    # Print and save now: attribution may take longer than the search, and may be interrupted.
    write_json(out / JSON, found, bisection, seconds=seconds())
    typer.echo(text(found))
    if attribution:
        with watcher:
            blamed = bisection.attribute(result)
        found = answer(bisection, span, result, blamed, test)
        write_json(out / JSON, found, bisection, seconds=seconds())
    if compiler and not builder and (options.command or options.selection):
        bad = bisection.environments(result)[1]
        found = replace(found, compiler=compiler_part(bad, found.repro, root, out, compiler))
    if options.repository and not builder:
        found = ranges.described(found, bisection.in_order(result), options.repository)
    write_json(out / JSON, found, bisection, seconds=seconds())
    typer.echo(closing_text(found, **seconds()))
    typer.echo(f"{'written':11} {out / JSON}")
    return 0 if found.sure else UNKNOWN


def _fitter(options: Options, root: Path) -> Fitter:
    return Fitter(root, options.lane, options.find_links)


def _test(options: Options, root: Path | None, span: Range, fitter: Fitter | None = None) -> Test:
    """Return the test that judges a candidate. fitter: builds the environments of a lane."""

    def good() -> Environment:
        if options.prepared:
            return options.prepared(options.prepared.request(span.good))
        return (fitter or build)(options.request(root)(span.good))

    def variables(environment: Environment) -> dict[str, str]:
        if options.environments and root:
            return absent_variables(missing(root, options.lane, environment.python))
        return fitter.variables(environment) if fitter else {}

    return options.test(root, good, lambda line: typer.echo(line, err=True), variables)


def _no_answer(result: SearchResult, test: Test, last: str) -> int:
    """Report a failed search: raise BisectError if other endpoints would help, else print why and return UNKNOWN.

    last: why the last version was skipped, "" if none was.
    """
    failure = result.failure
    if result.cause is SearchFailure.NOISE:
        typer.echo(f"bumpgate: no answer: {failure}", err=True)
        return UNKNOWN
    named = ", ".join(test.deciding[:3])
    if named and not test.differs:
        raise BisectError(f"no row differs between the two ends; red at both: {named}")
    if result.cause is SearchFailure.SKIPPED and last:
        failure += f" ({last})"
    if named:
        failure += f" (by {named})"
    elif result.cause is SearchFailure.SWAPPED:
        failure += "; --find-fix is for a bad endpoint that comes first"
    raise BisectError(failure)


def _stopped(why: str, again: str) -> int:
    typer.echo(f"bumpgate: {why}; readings so far are saved. Continue with: {again}", err=True)
    return UNKNOWN


def _resume_command(
    options: Options, out: Path, flags: Sequence[str], command: Sequence[str] = ("bisect",)
) -> str:
    """Return the command that resumes a bisect. flags: options that are not part of `options`."""
    line = options.line()
    cut = line.index("--") if "--" in line else len(line)
    line = (*line[:cut], "--out", str(out), *flags, "--resume", *line[cut:])
    return shlex.join(["bumpgate", *command, *line])


def _begin(out: Path, plan: BisectPlan) -> Journal:
    plan.search()
    out.mkdir(parents=True, exist_ok=True)
    try:
        return journals.begin(out / STATE, plan)
    except JournalExistsError:
        raise BisectError(
            f"{out} already holds a bisect: continue it with --resume, or name another --out"
        ) from None


def _continue(options: Options, out: Path) -> tuple[Journal | None, Range | None]:
    """Load the state in `out` and its range, without querying an index; (None, None) if there is nothing to resume."""
    path = out / STATE
    if not path.exists() or b"\n" not in path.read_bytes():
        typer.echo(f"nothing to resume in {out}: starting")
        return None, None
    state = journals.resume(path)
    if state.plan.command != options.line():
        state.close()
        other = shlex.join(["bumpgate", "bisect", *state.plan.command])
        raise BisectError(f"{out} holds another bisect: name another --out, or continue it: {other} --resume")
    plan = state.plan
    if plan.finding and options.finding and plan.finding != options.finding.digest:
        state.close()
        raise BisectError(
            f"{out} is of another finding than {options.gate} has now, which was written again: name another --out"
        )
    left = "it has its answer" if state.search.result() else state.search.progress()
    typer.echo(f"resuming after {len(state.search.history)} probes: {left}")
    unit = "commit" if options.builder else "version"
    return state, Range(options.package, plan.candidates, plan.good, plan.bad, {}, unit=unit)


@contextmanager
def _terminable() -> Iterator[None]:
    """Handle SIGTERM, which a cancelled CI job sends, like ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
