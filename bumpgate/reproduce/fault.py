"""How a reduction recognises its own fault in a smaller program, so that it does not drift to a neighbouring one.

The bad side must show a fault of an equal signature, and the good side none:

* a list of faults: its first line up to the size of the difference, with `#` for every number. It names which value is
  wrong and how; nan and inf are no numbers.
* an exception: its type, its message without addresses and paths, and the file and function of torch that raised it.
* a number: its side of the limit between the values of both sides.
* a script: its exit code and its last line, and for an uncaught exception the file and function that raised it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from bumpgate.core.errors import one_line
from bumpgate.reproduce.proof import NEITHER, Outcome
from bumpgate.reproduce.standalone import PROBED

MARK = re.compile(r"^(RETURNED|RAISED) (.*)$", re.MULTILINE)
FRAME = re.compile(r'^ *File "(.*)", line \d+, in (\S+)$', re.MULTILINE)
ADDRESS = re.compile(r"0x[0-9a-f]+|/\w")
NUMBER = re.compile(r"0x[0-9a-f]+|-?\b\d+(\.\d*)?(e[+-]?\d+)?")
# torch.testing's message after the largest absolute difference: its index, tolerances and the relative one.
AFTER_SIZE = re.compile(r" at index .*| \(up to .*| Relative difference.*")
WIDTH = 60


@dataclass(frozen=True)
class Shown:
    """What one run of a program showed.

    kind: RETURNED, RAISED, or SCRIPT for a program with its own exit codes.
    value: what it returned; of an exception its type and message; of a script its exit code.
    place: file and function that raised. line: the last line that it printed.
    """

    kind: str
    value: Any
    place: str = ""
    line: str = ""

    @property
    def faults(self) -> bool:
        """Whether this is wrong whatever the other side shows."""
        if self.kind == "SCRIPT":
            return self.value not in (0, NEITHER)
        return self.kind == "RAISED" or (isinstance(self.value, list) and bool(self.value))

    @property
    def words(self) -> str:
        """The words of an exception that stay equal on other machines, after its type."""
        lines = [x for x in self.value.splitlines() if x.strip() and not x.rstrip().endswith(":")]
        words = one_line((lines or [self.value])[0], WIDTH)
        return ADDRESS.split(words)[0].strip().removesuffix("...")

    @property
    def signature(self) -> tuple[str, ...]:
        """What stays equal when the program shrinks."""
        if self.kind == "RAISED":
            return self.kind, NUMBER.sub("#", self.words), self.place
        if self.kind == "SCRIPT":
            return self.kind, str(self.value), _plain(self.line), self.place
        return self.kind, _plain(self.value[0]) if isinstance(self.value, list) and self.value else ""

    def __str__(self) -> str:
        if self.kind == "SCRIPT":
            return self.line or f"exit code {self.value}"
        if self.kind == "RAISED":
            return one_line(self.words, 100)
        first = (self.value or ["right"])[0] if isinstance(self.value, list) else self.value
        return one_line(str(first), 200)


def shown(outcome: Outcome, name: str) -> Shown | None:
    """Read what a run of `probe` showed; None if the program itself could not end, as after a crash of the process."""
    if not name:
        return Shown("SCRIPT", outcome.code, _raised_at(outcome), outcome.last)
    marks = MARK.findall(outcome.text)
    if not marks or outcome.code:
        return None
    kind, value = marks[-1][0], json.loads(marks[-1][1])
    return Shown(kind, *value) if kind == "RAISED" else Shown(kind, value)


def probe(text: str, name: str) -> str:
    """Return a program that prints what the function `name` returns or raises; a script as it is."""
    return text + PROBED.format(name=name) if name else text


def better(one: Shown, other: Shown) -> bool:
    """Whether a result is right where the other is wrong, or is the smaller number."""
    if one.faults or other.faults:
        return other.faults and not one.faults and one.value != NEITHER
    numbers = isinstance(one.value, int | float) and isinstance(other.value, int | float)
    return numbers and one.kind != "SCRIPT" and bool(one.value < other.value)


def _plain(line: str) -> str:
    """A line without numbers: shapes of any rank and counts of any size read the same."""
    line = NUMBER.sub("#", AFTER_SIZE.sub("", one_line(line, 400)))
    line = re.sub(r"#(, ?#)*,?", "#", line)
    return re.sub(r"Mismatched elements: # / # \(#%\) ", "", line).strip()


def _raised_at(outcome: Outcome) -> str:
    """File and function of the last frame of the traceback that ends the text, "" without one."""
    frames = FRAME.findall(outcome.text.rpartition("Traceback (most recent call last)")[2])
    file, function = frames[-1] if frames else ("", "")
    return f"{file.rpartition('/site-packages/')[2] if '/site-packages/' in file else 'program'}:{function}"
