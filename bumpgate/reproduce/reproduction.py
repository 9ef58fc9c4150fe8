"""Makes a file out of a program: which side is wrong, the smallest program that shows it, and its proof."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.core.rows import write_atomic
from bumpgate.reproduce.fault import Shown, better, probe, shown
from bumpgate.reproduce.proof import Bench, Environment, Proof, prove
from bumpgate.reproduce.reducer import Journal, reduce
from bumpgate.reproduce.standalone import COUNTED, HEAD, JUDGED, RAISED, TRIED, TRIED_PLAIN, Program

# Values of both sides must differ by this factor at least for a limit between them to hold in other runs.
APART = 1.1
READINGS = 3


class InseparableError(BumpgateError):
    """The environments could not be separated. The message says what both showed."""

    exit_code = 1


@dataclass(frozen=True)
class Reproduction:
    """A file and what is known about it.

    program: its title and name.
    source: the reduced program. text: the file. lines: of it.
    wrong: what it shows on the bad side. limit: of a number, None for any other fault.
    good, bad: the environments in which it is right and wrong.
    proof: its runs in fresh processes.
    runs, seconds: what finding it took. whole: False if the time limit ended the reduction.
    """

    program: Program
    source: str
    text: str
    wrong: Shown
    limit: float | None
    good: Environment
    bad: Environment
    proof: Proof
    runs: int
    seconds: float
    whole: bool

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


def reproduce(
    program: Program, bench: Bench, kept: Path, seconds: float, times: int, say: Callable[[str], None]
) -> Reproduction:
    """Reduce a program and prove it. Raises InseparableError if the two environments give the same result.

    kept: path of the smallest program so far; its journal lies next to it.
    seconds: limit of the whole, which keeps the time for the proof. times: proving runs in each environment.
    """
    started = time.monotonic()
    name = program.name
    right, wrong = _both(program, bench)
    limit = _limit(program, bench, right, wrong) if name and not wrong.faults else None
    say(f"{bench.good}: {right}\n{bench.bad}: {wrong}")
    start = time.monotonic()
    whole_text = program.text + _frame(program, right, wrong, limit)
    write_atomic(kept, whole_text)
    first = prove(bench, whole_text, 1)
    if first.fault:
        raise InseparableError(f"the program does not separate them: {first.fault}; it is kept in {kept}")
    until = started + seconds - times * (time.monotonic() - start)

    def run(side: Environment, text: str) -> Shown | None:
        return shown(bench.run(side, probe(text, name)), name)

    def still(text: str) -> bool:
        bad = run(bench.bad, text)
        if not bad or bad.signature != wrong.signature or not _beyond(bad, limit):
            return False
        good = run(bench.good, text)
        if not good or good.faults or type(good.value) is not type(right.value):
            return False
        if limit is not None and _beyond(good, limit):
            return False
        write_atomic(kept, text + _frame(program, right, bad, limit))
        return True

    keep = frozenset({name} if name else ())
    journal = Journal(kept.with_suffix(".journal"), f"{bench.good}: {right}; {bench.bad}: {wrong}")
    text = reduce(program.text, still, journal, until, keep)
    whole = time.monotonic() < until
    right, wrong = run(bench.good, text) or right, run(bench.bad, text) or wrong
    body = _with_head(program, text + _frame(program, right, wrong, limit), bench, right, wrong)
    write_atomic(kept, body)
    proof = prove(bench, body, times)
    took = time.monotonic() - started
    found = Reproduction(
        program, text, body, wrong, limit, bench.good, bench.bad, proof, bench.runs, took, whole
    )
    if proof.fault:
        raise InseparableError(f"{proof.fault}; the smallest program so far is {kept}")
    return found


def _both(program: Program, bench: Bench) -> tuple[Shown, Shown]:
    """Run the program on both sides, and put the side that is wrong into `bench.bad`."""
    found = []
    for side in (bench.good, bench.bad):
        outcome = bench.run(side, probe(program.text, program.name))
        one = shown(outcome, program.name)
        if one is None:
            raise InseparableError(
                f"{program.name} returned neither a list nor a number under {side}: {outcome.last}"
            )
        found.append(one)
    right, wrong = found
    if better(wrong, right):
        bench.swapped()
        right, wrong = wrong, right
    if not better(right, wrong):
        raise InseparableError(
            f"both environments give the same result: {bench.good} {right}, {bench.bad} {wrong}"
        )
    return right, wrong


def _beyond(found: Shown, limit: float | None) -> bool:
    return limit is None or (isinstance(found.value, int | float) and found.value > limit)


def _frame(program: Program, right: Shown, wrong: Shown, limit: float | None) -> str:
    """Return what calls the program and ends with 0 or 1.

    A list has a line for each fault. A number is compared with a limit between the values of both sides. A script has
    its own end.
    """
    if not program.name:
        return ""
    if wrong.kind == "RAISED":
        ends = JUDGED if isinstance(right.value, list) else RAISED
        return HEAD + TRIED.format(name=program.name, words=wrong.words) + ends
    call = TRIED_PLAIN.format(name=program.name)
    ends = JUDGED if limit is None else COUNTED.format(what=program.title, limit=limit)
    return HEAD + call + ends


def _limit(program: Program, bench: Bench, right: Shown, wrong: Shown) -> float:
    """Return a limit between the numbers of both sides; above it lies the wrong one.

    A whole number repeats, so that the right one is the limit. Others are read again, until their ranges are known.
    """
    if isinstance(right.value, int) and isinstance(wrong.value, int):
        return right.value
    reads: dict[str, list[float]] = {bench.good.name: [right.value], bench.bad.name: [wrong.value]}
    for _ in range(READINGS - 1):
        for side in (bench.good, bench.bad):
            read = shown(bench.run(side, probe(program.text, program.name)), program.name)
            reads[side.name] += [float(read.value)] if read and read.kind == "RETURNED" else []
    high, low = max(reads[bench.good.name]), min(reads[bench.bad.name])
    if not low > APART * high:
        raise InseparableError(
            f"the numbers of both sides overlap: at most {high:.4g} under {bench.good},"
            f" at least {low:.4g} under {bench.bad}"
        )
    return float(f"{math.sqrt(high * low) if high > 0 else (high + low) / 2:.3g}")


def _with_head(program: Program, text: str, bench: Bench, right: Shown, wrong: Shown) -> str:
    """Return the file: a docstring with what was expected and measured, then the program."""
    title = one_line(program.title, 110).replace("\\", "/").replace('"""', "'''").rstrip(".")
    lines = [
        f'"""{title}.',
        "",
        f"Expected, as under {bench.good}: {_quoted(right)}",
        f"Measured under {bench.bad}: {_quoted(wrong)}",
        "Exit codes: 0 right, 1 wrong, 125 neither.",
        '"""',
    ]
    return "\n".join(lines) + "\n\n" + text.strip() + "\n"


def _quoted(found: Shown) -> str:
    return one_line(str(found), 100).replace("\\", "/").replace('"""', "'''")
