"""`bumpgate bisect`: finds the first bad version between two, and which package of its set is at fault."""

from __future__ import annotations

import json
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from bumpgate.bisect import journal as journals
from bumpgate.bisect.answer import Watcher, answer, closing_text, so_far, text
from bumpgate.bisect.attribution import Attribution
from bumpgate.bisect.bisection import Bisection, MachineError, Setup
from bumpgate.bisect.candidates import Range
from bumpgate.bisect.journal import BisectPlan, Journal, JournalExistsError
from bumpgate.bisect.options import BisectError, Options
from bumpgate.bisect.probe import Test
from bumpgate.bisect.search import SearchFailure, SearchResult
from bumpgate.core.command_line import takes
from bumpgate.core.rows import write_atomic

STATE, JSON = "state.jsonl", "bisect.json"
UNKNOWN, INTERRUPTED = 125, 130


@takes(Options)
def command(options: Options) -> None:
    """Find the first bad version of a package between a good and a bad one, then the package of its set at fault.

    Both endpoints are verified first. A version that does not install or import is skipped. Ctrl-C loses no reading.

    Exit codes: 0 found, 4 bad input or endpoints without the claimed result, 125 no sure answer or a machine failure,
    130 interrupted.
    """
    raise typer.Exit(_run(options.resolved()))


def _run(options: Options) -> int:
    """Run a bisect and return its exit code. Raises BumpgateError on bad input, before anything is installed."""
    with _terminable():
        root = options.check()
        state, span = _continue(options) if options.resume else (None, None)
        span = span or options.range(root)
        setup = options.setup(root, span.good, say=lambda line: typer.echo(line, err=True))
        if state is None:
            if root is not None and options.selection and not options.timed:
                options.check_selection(root)
            state = _begin(options.folder, options.plan(span, setup.test))
            typer.echo(span.summary(state.search.steps_left()))
        again = options.resume_line()
        with state:
            try:
                return _search(options, state, span, setup)
            except KeyboardInterrupt:
                count = len(state.search.history)
                typer.echo(f"interrupted; {count} probes are saved. Continue with:\n  {again}", err=True)
                return INTERRUPTED
            except MachineError as error:
                why = str(error)
            except OSError as error:
                why = f"{error.filename or options.folder}: {error.strerror}"
            if known := so_far(state.search):
                typer.echo(known)
            typer.echo(f"bumpgate: {why}; readings so far are saved. Continue with: {again}", err=True)
            return UNKNOWN


def _search(options: Options, state: Journal, span: Range, setup: Setup) -> int:
    """Search, print and save the answer, then attribute it. Returns the exit code."""
    started = time.monotonic()
    watcher = Watcher(Console(soft_wrap=True))
    bisection = Bisection(state, setup, options.folder, watcher)
    with watcher:
        result = bisection.run()

    def save(attribution: Attribution | None = None) -> dict[str, object]:
        # A resumed bisect reuses the reading, and its seconds, of a probe that had finished before the kill.
        overhead = max(0.0, time.monotonic() - started - watcher.seconds)
        found = answer(bisection, span, result, attribution)
        found["seconds"] = {"probes": watcher.seconds, "overhead": overhead}
        write_atomic(options.folder / JSON, json.dumps(found, indent=1) + "\n")
        return found

    # Print and save now: attribution may take longer than the search, and may be interrupted.
    found = save()
    if not result.found:
        return _no_answer(result, setup.test, watcher.last)
    typer.echo(text(found, span))
    if options.attribution:
        with watcher:
            blamed = bisection.attribute(result)
        found = save(blamed)
    typer.echo(closing_text(found))
    typer.echo(f"{'written':11} {options.folder / JSON}")
    return 0 if found["sure"] else UNKNOWN


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


def _begin(out: Path, plan: BisectPlan) -> Journal:
    plan.search()
    out.mkdir(parents=True, exist_ok=True)
    try:
        return journals.begin(out / STATE, plan)
    except JournalExistsError:
        raise BisectError(
            f"{out} already holds a bisect: continue it with --resume, or name another --out"
        ) from None


def _continue(options: Options) -> tuple[Journal | None, Range | None]:
    """Load the state of a bisect and its range, without querying an index; (None, None) if there is none."""
    out = options.folder
    path = out / STATE
    if not path.exists() or b"\n" not in path.read_bytes():
        typer.echo(f"nothing to resume in {out}: starting")
        return None, None
    state = journals.resume(path)
    plan, other = state.plan, ""
    if plan.command != options.line():
        line = shlex.join(["bumpgate", "bisect", *plan.command])
        other = f"{out} holds another bisect: name another --out, or continue it: {line} --resume"
    elif plan.finding and options.finding and plan.finding != options.finding.digest:
        other = f"{out} is of another finding than {options.from_gate} has now, which was written again"
        other += ": name another --out"
    if other:
        state.close()
        raise BisectError(other)
    left = "it has its answer" if state.search.result() else state.search.progress()
    typer.echo(f"resuming after {len(state.search.history)} probes: {left}")
    return state, Range(options.package, plan.candidates, plan.good, plan.bad, {})


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
