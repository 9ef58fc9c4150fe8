"""Differences of two sides: evidence line by line, and generated code by its structure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest

from bumpgate.core.findings import ADDRESS
from bumpgate.core.rows import Judgement, Record

# Evidence on what the compiler did. Other lines (seconds, counts of rounds) differ in any two runs.
REASON = re.compile(r"(break|recompile|failure|guard|kernel) ")
TOKEN = re.compile(r"\w+|\s+|.")
CONTEXT = 2
# A name that a compiler numbers: mul_3, buf12, in_ptr0, %r7. Types and instructions are no names.
NUMBERED = re.compile(
    r"(?<![\w.])(?:(?<=%)|(?!(?:[iufbc]|bf|u?int|b?float|complex)(?:1|4|8|16|32|64|128)(?:_t)?\b))"
    r"(%|[A-Za-z_]\w*?)(?<!\d)(\d+)?(_\d+)?(?![\w.])"
)
ASSIGNED = re.compile(r"\s*(?::\s*\"[^\"]*\"\s*)?=(?!=)")
MAX_LINES, MAX_DIFFS = 300, 40
LARGE = 3000  # lines of both sides, above which frequent ones do not align the others


@dataclass(frozen=True)
class Line:
    """kind: " " both, "-" adopted only, "+" candidate only. parts: (text, whether it is what differs)."""

    kind: str
    parts: tuple[tuple[str, bool], ...]

    def __str__(self) -> str:
        return f"{self.kind} {''.join(text for text, _ in self.parts)}"


@dataclass(frozen=True)
class Diff:
    """One difference, and every row that shows it."""

    rows: tuple[str, ...]
    lines: tuple[Line, ...]


def of_records(
    adopted: Record | None, candidate: Record | None, suspects: Iterable[str]
) -> tuple[list[Diff], int]:
    """Return the differences in evidence, and how many more there are.

    suspects: rows whose complete evidence is compared; of all others only the lines on what the compiler did.
    """
    if adopted is None or candidate is None:
        return [], 0
    suspected = set(suspects)
    after = {j.row.id: j for j in candidate.judgements}
    found: dict[tuple[Line, ...], list[str]] = {}
    for before in adopted.judgements:
        row = before.row.id
        if row not in after:
            continue
        sides = [_lines(j, whole=row in suspected) for j in (before, after[row])]
        if sides[0] != sides[1]:
            found.setdefault(tuple(compare(*sides)), []).append(row)
    diffs = [Diff(tuple(rows), lines) for lines, rows in found.items()]
    diffs.sort(key=lambda d: not suspected.intersection(d.rows))
    return diffs[:MAX_DIFFS], len(diffs[MAX_DIFFS:])


def compare(before: Sequence[str], after: Sequence[str]) -> list[Line]:
    """Return the lines of both in order, with CONTEXT equal ones around a difference; changed words are marked."""
    before, after = before[:MAX_LINES], after[:MAX_LINES]
    out: list[Line] = []
    for group in SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(CONTEXT):
        for tag, i, j, k, m in group:
            if tag == "equal":
                out += [Line(" ", ((line, False),)) for line in before[i:j]]
            else:
                out += _replaced(before[i:j], after[k:m])
    return out


def aligned(before: Sequence[str], after: Sequence[str]) -> list[Line]:
    """Return the lines of both sides of generated code that differ by more than the numbers in names, with CONTEXT.

    Lines that are equal without these numbers must also use them alike: a name of one side always means the same name
    of the other, until a line assigns it again.
    """
    a, b = ([_masked(line) for line in side] for side in (before, after))
    large = len(a) + len(b) > LARGE
    renamed: tuple[dict[str, str], dict[str, str]] = ({}, {})
    out: list[Line] = []
    for tag, i, j, k, m in SequenceMatcher(None, a, b, autojunk=large).get_opcodes():
        if tag != "equal":
            out += _replaced(before[i:j], after[k:m])
            continue
        for old, new in zip(before[i:j], after[k:m]):
            alike = _used_alike(old, new, renamed)
            out += [Line(" ", ((new, False),))] if alike else _replaced([old], [new])
    changed = [n for n, line in enumerate(out) if line.kind != " "]
    near = {n + d for n in changed for d in range(-CONTEXT, CONTEXT + 1)}
    return [line for n, line in enumerate(out) if n in near]


def _masked(line: str) -> str:
    return NUMBERED.sub(lambda found: found[1] + "#" * bool(found[2]), line).strip()


def _used_alike(a: str, b: str, renamed: tuple[dict[str, str], dict[str, str]]) -> bool:
    """Whether two lines that are equal without numbers name the same things; remember what they assign."""
    there, back = renamed
    alike = True
    for mine, other in zip(NUMBERED.finditer(a), NUMBERED.finditer(b)):
        one, two = mine[0], other[0]
        if ASSIGNED.match(a, mine.end()):
            back.pop(there.pop(one, ""), None)
            there.pop(back.pop(two, ""), None)
        alike &= there.setdefault(one, two) == two and back.setdefault(two, one) == one
    return alike


def _lines(j: Judgement, *, whole: bool) -> list[str]:
    lines = [ADDRESS.sub("0x_", line) for line in j.row.evidence]
    return [line for line in lines if whole or REASON.match(line)]


def _replaced(before: Sequence[str], after: Sequence[str]) -> list[Line]:
    """Return old lines, then new ones; in lines with a counterpart the differing words are marked."""
    old: list[Line] = []
    new: list[Line] = []
    for a, b in zip_longest(before, after):
        if a is None or b is None:
            side, kind, text = (new, "+", b) if a is None else (old, "-", a)
            side.append(Line(kind, ((text, False),)))
            continue
        mine, theirs = TOKEN.findall(a), TOKEN.findall(b)
        steps = SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes()
        was = (("".join(mine[i:j]), tag != "equal") for tag, i, j, _, _ in steps)
        now = (("".join(theirs[k:m]), tag != "equal") for tag, _, _, k, m in steps)
        old.append(Line("-", tuple(part for part in was if part[0])))
        new.append(Line("+", tuple(part for part in now if part[0])))
    return old + new
