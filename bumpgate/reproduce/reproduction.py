"""Makes a file out of a program: which side is wrong, the smallest program that shows it, and its proof."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.core.rows import write_atomic
from bumpgate.reproduce.proof import NEITHER, Bench, Environment, Proof, holds, prove
from bumpgate.reproduce.reducer import Journal, reduce
from bumpgate.reproduce.standalone import COUNTED, HEAD, JUDGED, PROBED, TRIED, TRIED_PLAIN, Program

MARK = re.compile(r"^(RETURNED|RAISED) (.*)$", re.MULTILINE)
WIDTH = 60
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
    text: the file. lines: of it.
    good, bad: the environments in which it is right and wrong.
    proof: its runs in fresh processes.
    runs, seconds: what finding it took. whole: False if the time limit ended the reduction.
    """

    program: Program
    text: str
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
    seconds: limit of the reduction. times: proving runs in each environment.
    """
    started = time.monotonic()
    frame = _frame(program, bench) if program.name else ""
    start = program.text + frame
    bad = bench.run(bench.bad, start)
    good = bench.run(bench.good, start)
    if not program.name and bad.code == 0 != good.code:
        bench.swapped()
        good, bad = bad, good
    if good.code or not bad.code or bad.code == NEITHER:
        raise InseparableError(
            f"both environments give the same result: {bench.good} ends with {good.code} ({good.last}),"
            f" {bench.bad} with {bad.code} ({bad.last})"
        )
    say(f"{bench.good}: {good.last}\n{bench.bad}: {bad.last}")

    def still(text: str) -> bool:
        if not holds(bench, text + frame, bad):
            return False
        write_atomic(kept, text + frame)
        return True

    until = started + seconds
    keep = frozenset({program.name} if program.name else ())
    text = reduce(program.text, still, Journal(kept.with_suffix(".journal")), until, keep)
    whole = time.monotonic() < until
    write_atomic(kept, text + frame)
    body = _with_head(program, text + frame, bench, good.last, bad.last)
    proof = prove(bench, body, times)
    found = Reproduction(
        program, body, bench.good, bench.bad, proof, bench.runs, time.monotonic() - started, whole
    )
    if proof.fault:
        raise InseparableError(f"{proof.fault}; the smallest program so far is {kept}")
    return found


def _frame(program: Program, bench: Bench) -> str:
    """Return what calls the program and ends with 0 or 1; put the side that is wrong into `bench.bad`.

    A list has a line for each fault. A number is compared with a limit between the values of both sides.
    """
    first = program.text + HEAD
    sides = {}
    for side in (bench.good, bench.bad):
        outcome = bench.run(side, first + PROBED.format(name=program.name))
        marks = MARK.findall(outcome.text)
        if not marks:
            raise InseparableError(
                f"{program.name} returned neither a list nor a number under {side}: {outcome.last}"
            )
        sides[side.name] = marks[-1][0], json.loads(marks[-1][1])
    (ended, right), (raised, wrong) = sides[bench.good.name], sides[bench.bad.name]
    if ended == "RAISED" or (raised == "RETURNED" and _better(wrong, right)):
        bench.swapped()
        (ended, right), (raised, wrong) = (raised, wrong), (ended, right)
    if ended == "RAISED" or (raised == "RETURNED" and right == wrong):
        raise InseparableError(
            f"both environments give the same result: {bench.good} {one_line(right)}, {bench.bad} {one_line(wrong)}"
        )
    if raised == "RAISED":
        call = TRIED.format(name=program.name, words=_words(wrong))
        ends = JUDGED if isinstance(right, list) else "\nprint(found)\nsys.exit(isinstance(found, list))\n"
    else:
        call = TRIED_PLAIN.format(name=program.name)
        ends = JUDGED
        if not isinstance(right, list):
            ends = COUNTED.format(what=program.title, limit=_limit(program, bench, right, wrong))
    return HEAD + call + ends


def _words(error: str) -> str:
    """Return the words of an exception that stay equal on other machines: without addresses and paths."""
    lines = [line for line in error.splitlines() if line.strip() and not line.rstrip().endswith(":")]
    words = one_line((lines or [error])[0], WIDTH)
    return re.split(r"0x[0-9a-f]+|/\w", words)[0].strip().removesuffix("...")


def _better(one: object, other: object) -> bool:
    """Whether a result has fewer faults, or is the smaller number."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == 0 < len(other)
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return numbers and one < other  # type: ignore[operator]


def _limit(program: Program, bench: Bench, right: float, wrong: float) -> float:
    """Return a limit between the numbers of both sides; above it lies the wrong one.

    A whole number repeats, so that the right one is the limit. Others are read again, until their ranges are known.
    """
    if isinstance(right, int) and isinstance(wrong, int):
        return right
    first = program.text + HEAD
    reads: dict[str, list[float]] = {bench.good.name: [right], bench.bad.name: [wrong]}
    for _ in range(READINGS - 1):
        for side in (bench.good, bench.bad):
            marks = MARK.findall(bench.run(side, first + PROBED.format(name=program.name)).text)
            reads[side.name] += [float(json.loads(value)) for kind, value in marks if kind == "RETURNED"]
    high, low = max(reads[bench.good.name]), min(reads[bench.bad.name])
    if not low > APART * high:
        raise InseparableError(
            f"the numbers of both sides overlap: at most {high:.4g} under {bench.good},"
            f" at least {low:.4g} under {bench.bad}"
        )
    return float(f"{math.sqrt(high * low) if high > 0 else (high + low) / 2:.3g}")


def _with_head(program: Program, text: str, bench: Bench, right: str, wrong: str) -> str:
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


def _quoted(line: str) -> str:
    return one_line(line, 100).replace("\\", "/").replace('"""', "'''")
