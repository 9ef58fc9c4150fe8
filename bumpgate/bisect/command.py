"""`bumpgate bisect`: finds the first bad version between two, and which package of its set is at fault."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from packaging.utils import canonicalize_name
from rich.console import Console

from bumpgate import lanes
from bumpgate.baseline import find_root, tier
from bumpgate.bisect.answer import Answer, Watcher, answer, closing_text, text, write_json
from bumpgate.bisect.bisection import Bench, Bisection, MachineError
from bumpgate.bisect.candidates import Range, between, wants_prereleases
from bumpgate.bisect.journal import Journal, JournalError, Plan, begin, resume
from bumpgate.bisect.prefetch import Prefetch
from bumpgate.bisect.probe import CommandTest, SuiteTest
from bumpgate.environments.build import build
from bumpgate.environments.request import RUNNING, Request, lane_request
from bumpgate.environments.uv import public_url
from bumpgate.environments.versions import versions
from bumpgate.rows import BumpgateError, one_line

STATE, JSON = "state.jsonl", "bisect.json"
USAGE, NOTHING_SELECTED = 4, 5
UNKNOWN, INTERRUPTED = 125, 130


class BisectError(BumpgateError):
    """Invalid bisect: bad options, or an endpoint that does not have the claimed result."""


@dataclass(frozen=True)
class Question:
    """Bisect options, apart from the output folder. A resumed bisect must use the same ones.

    index and find_links have uv's format; passwords in their URLs are not saved.
    """

    package: str
    good: str
    bad: str
    lane: str
    selection: tuple[str, ...]
    command: str
    index: str | None
    find_links: tuple[str, ...]
    extra: tuple[str, ...]
    timeout: float | None
    find_fix: bool
    false_bad: float | None
    false_good: float | None
    confidence: float
    budget: int | None

    def line(self) -> tuple[str, ...]:
        """Return the command-line arguments that repeat this bisect."""
        valued = {
            "--lane": self.lane,
            "--package": self.package,
            "--good": self.good,
            "--bad": self.bad,
            "--index": public_url(self.index or ""),
            "--command": self.command,
            "--timeout": "" if self.timeout is None else f"{self.timeout:g}",
            "--false-bad": "" if self.false_bad is None else f"{self.false_bad:g}",
            "--false-good": "" if self.false_good is None else f"{self.false_good:g}",
            "--confidence": f"{self.confidence:g}",
            "--budget": "" if self.budget is None else str(self.budget),
        }
        parts = [part for option, value in valued.items() if value for part in (option, value)]
        parts += [part for place in self.find_links for part in ("--find-links", public_url(place))]
        parts += [part for requirement in self.extra for part in ("--with", requirement)]
        parts += ["--find-fix"] if self.find_fix else []
        return (*parts, *(["--", *self.selection] if self.selection else []))


def command(
    good: Annotated[str, typer.Option(help="A good version, or the date of a good nightly (2026-10-01).")],
    bad: Annotated[str, typer.Option(help="A bad version or date; later, unless --find-fix.")],
    selection: Annotated[list[str] | None, typer.Argument(help="After --: what pytest runs.")] = None,
    lane: Annotated[str, typer.Option(help="A declared lane; its set is installed around the package.")] = "",
    package: Annotated[str, typer.Option(help="torch, triton, or any package of the set.")] = "torch",
    test: Annotated[
        str,
        typer.Option(
            "--command", help="A test of your own instead: exit 0 good, 1-124 bad, 125 skip; {python}."
        ),
    ] = "",
    index: Annotated[str | None, typer.Option(help="An index asked before the host's own.")] = None,
    find_links: Annotated[
        list[str] | None, typer.Option(help="A folder or page of wheels; repeatable.")
    ] = None,
    extra: Annotated[
        list[str] | None, typer.Option("--with", help="A requirement beside the package; repeatable.")
    ] = None,
    find_fix: Annotated[
        bool, typer.Option("--find-fix", help="Find the first good version after a bad one.")
    ] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which a probe says nothing.")] = None,
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
    go_on: Annotated[
        bool, typer.Option("--resume", help="Continue the bisect that stands in --out.")
    ] = False,
    attribution: Annotated[
        bool, typer.Option(help="Then find the package of the set that is at fault.")
    ] = True,
    prefetch: Annotated[bool, typer.Option(help="Build the next candidates while one is probed.")] = True,
) -> None:
    """Find the first bad version of a package between a good and a bad one, then the package of its set at fault.

    Ends are verified first. A version that does not install or import is skipped. Ctrl-C keeps what was read.

    Exit codes: 0 found, 4 bad input or ends that are not what they are said to be, 125 no sure answer or a machine
    that fails, 130 interrupted.
    """
    question = Question(
        canonicalize_name(package),
        good,
        bad,
        lane,
        tuple(selection or ()),
        test,
        index,
        tuple(find_links or ()),
        tuple(extra or ()),
        timeout,
        find_fix,
        false_bad,
        false_good,
        confidence,
        budget,
    )
    place = out or Path(f"bisect-{question.package}-{good}-{bad}")
    with _terminable():
        raise typer.Exit(run(question, place, go_on=go_on, attribution=attribution, prefetch=prefetch))


def run(asked: Question, out: Path, *, go_on: bool, attribution: bool = True, prefetch: bool = True) -> int:
    """Run the whole command and return its exit code.

    Raises BumpgateError on bad input, before anything is installed.
    """
    root = _check(asked)
    state, span = _continue(asked, out) if go_on else (None, None)
    if state is None or span is None:
        span = _range(asked, root)
        if root is not None and not asked.command:
            _check_selection(root, asked)
        state = _begin(asked, out, span)
        typer.echo(span.summary(state.search.steps_left()))
    flags = [*([] if attribution else ["--no-attribution"]), *([] if prefetch else ["--no-prefetch"])]
    with state:
        try:
            return _search(asked, out, state, span, root, attribution, prefetch)
        except KeyboardInterrupt:
            typer.echo(f"interrupted; {len(state.search.history)} probes are kept. Continue with:", err=True)
            typer.echo(f"  {_again(asked, out, flags)}", err=True)
            return INTERRUPTED
        except MachineError as error:
            return _stopped(str(error), _again(asked, out, flags))
        except OSError as error:
            return _stopped(f"{error.filename or out}: {error.strerror}", _again(asked, out, flags))


def _search(
    asked: Question,
    out: Path,
    state: Journal,
    span: Range,
    root: Path | None,
    attribution: bool,
    prefetch: bool,
) -> int:
    started = time.monotonic()
    test = _test(asked, root)
    watcher = Watcher(Console(soft_wrap=True))
    ahead = Prefetch() if prefetch else None
    bench = Bench(asked.package, out, _requests(asked, root), build, test, watcher, ahead)
    bisection = Bisection(state, bench)

    def seconds() -> dict[str, float]:
        # A resumed bisect reuses the reading, and its seconds, of a probe that had finished before the kill.
        return {
            "probes": watcher.seconds,
            "beside": max(0.0, time.monotonic() - started - watcher.seconds),
        }

    with watcher:
        result = bisection.run()
    if not result.found:
        found = Answer(span, state.plan, result, deciding=test.deciding)
        write_json(out / JSON, found, bisection, seconds=seconds())
        return _no_answer(result.failure, test, watcher.last)
    found = answer(bisection, span, result, None, test)
    # Print and save now: attribution may take longer than the search, and may be interrupted.
    write_json(out / JSON, found, bisection, seconds=seconds())
    typer.echo(text(found))
    if attribution:
        with watcher:
            blamed = bisection.attribute(result)
        found = answer(bisection, span, result, blamed, test)
        write_json(out / JSON, found, bisection, seconds=seconds())
    typer.echo(closing_text(found, **seconds()))
    typer.echo(f"{'written':11} {out / JSON}")
    return 0 if found.sure else UNKNOWN


def _no_answer(failure: str, test: SuiteTest | CommandTest, last: str) -> int:
    """Report a failed search: raise BisectError if other endpoints would help, else print why and return UNKNOWN."""
    failure = failure.replace("does not install", f"was skipped ({last})" if last else "was skipped")
    if failure.startswith(("the good end", "the bad end")) or failure.endswith("look swapped"):
        named = ", ".join(test.deciding[:3])
        if named and not test.differs:
            raise BisectError(f"nothing is red at one end alone; red at both, and no help: {named}")
        swapped = "; --find-fix is for a bad end that comes first" if failure.endswith("look swapped") else ""
        raise BisectError(f"{failure} (by {named})" if named else failure + swapped)
    typer.echo(f"bumpgate: no answer: {failure}", err=True)
    return UNKNOWN


def _stopped(why: str, again: str) -> int:
    typer.echo(f"bumpgate: {why}; what was read is kept, continue with: {again}", err=True)
    return UNKNOWN


def _again(asked: Question, out: Path, flags: Sequence[str]) -> str:
    """Return the command that resumes a bisect. flags: options that are not part of `asked`."""
    line = asked.line()
    cut = line.index("--") if "--" in line else len(line)
    line = (*line[:cut], "--out", str(out), *flags, "--resume", *line[cut:])
    return shlex.join(["bumpgate", "bisect", *line])


def _check(asked: Question) -> Path | None:
    """Check the options and return the source tree, if the bisect needs one. Raises BumpgateError, one line."""
    if asked.command and asked.selection:
        raise BisectError("--command and a pytest selection: name one of them")
    if not asked.command and not (asked.lane and asked.selection):
        raise BisectError(
            "name what to run: --lane LANE -- PYTEST-SELECTION, or --command '{python} test.py'"
        )
    if asked.timeout is not None and asked.timeout <= 0:
        raise BisectError(f"--timeout {asked.timeout:g}: a probe needs more time than none")
    if not asked.lane:
        return None
    root = find_root(Path.cwd())
    lanes.require(root, asked.lane)
    return root


def _range(asked: Question, root: Path | None) -> Range:
    found = versions(
        asked.package,
        index=asked.index,
        find_links=asked.find_links,
        python=lane_request(root, asked.lane).python if root else RUNNING,
        pre=wants_prereleases(asked.good, asked.bad),
    )
    return between(asked.package, found, asked.good, asked.bad, find_fix=asked.find_fix)


def _check_selection(root: Path, asked: Question) -> None:
    """Raise BisectError if this interpreter's pytest selects no test or rejects an option.

    A collection error is ignored: this interpreter may lack torch. A tier is not checked, because its package
    is only installed with the candidate.
    """
    if any(tier(f"{part}/") for part in asked.selection):
        return
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        asked.lane,
        "-n",
        "0",
        "-q",
        "--collect-only",
        *asked.selection,
    ]
    done = subprocess.run(line, cwd=root, capture_output=True, text=True)
    if done.returncode == NOTHING_SELECTED:
        raise BisectError(f"{shlex.join(asked.selection)} selects no test of lane {asked.lane}")
    if done.returncode == USAGE:
        words = [w for w in (done.stdout + done.stderr).splitlines() if w.startswith("ERROR: ")]
        raise BisectError(one_line(words[0].removeprefix("ERROR: ") if words else done.stderr))


def _plan(asked: Question, candidates: tuple[str, ...], good: str, bad: str) -> Plan:
    return Plan(
        candidates,
        good,
        bad,
        asked.line(),
        asked.false_bad,
        asked.false_good,
        asked.confidence,
        asked.find_fix,
        asked.budget,
    )


def _begin(asked: Question, out: Path, span: Range) -> Journal:
    plan = _plan(asked, span.versions, span.good, span.bad)
    plan.search()
    out.mkdir(parents=True, exist_ok=True)
    try:
        return begin(out / STATE, plan)
    except JournalError as error:
        if "exists" not in str(error):
            raise
        raise BisectError(
            f"{out} holds a bisect already: continue it with --resume, or name another --out"
        ) from None


def _continue(asked: Question, out: Path) -> tuple[Journal | None, Range | None]:
    """Load the state in `out` and its range, without querying an index; (None, None) if there is nothing to resume."""
    path = out / STATE
    if not path.exists() or b"\n" not in path.read_bytes():
        typer.echo(f"nothing to resume in {out}: beginning")
        return None, None
    state = resume(path)
    if state.plan.command != asked.line():
        state.close()
        other = shlex.join(["bumpgate", "bisect", *state.plan.command])
        raise BisectError(f"{out} holds another bisect: name another --out, or continue it: {other} --resume")
    plan = state.plan
    left = "it has its answer" if state.search.result() else state.search.progress()
    typer.echo(f"resuming after {len(state.search.history)} probes: {left}")
    return state, Range(asked.package, plan.candidates, plan.good, plan.bad, {})


def _test(asked: Question, root: Path | None) -> SuiteTest | CommandTest:
    if asked.command or root is None:
        return CommandTest(asked.command, asked.package, Path.cwd(), asked.timeout)
    return SuiteTest(root, asked.lane, asked.selection, asked.package, asked.timeout)


def _requests(asked: Question, root: Path | None) -> Callable[[str], Request]:
    """Return a function from a version to its environment request.

    A package other than torch replaces the version that torch requires.
    """

    def request(version: str) -> Request:
        # "==2.13.0" also matches 2.13.0+cpu, which is a different build.
        requirement = f"{asked.package}==={version}"
        name = f"{asked.package} {version}"
        if root is None:
            found = Request((requirement,), name=name)
        else:
            found = lane_request(root, asked.lane, requirement, name=name)
        requirements = (*found.requirements, *asked.extra)
        return replace(found, requirements=requirements, index=asked.index, find_links=asked.find_links)

    return request


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
