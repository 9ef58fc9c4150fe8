"""Prefixes that launchers put before every line: learned from a sample of the log, then stripped.

Some formats are unmistakable and stripped wherever they are: torchrun's `[rank3]:`, Ray's `(Name pid=1, ip=10.0.0.2)`,
the time stamps of Kubernetes and Docker, MPI's `[1,3]<stdout>:`, syslog. Others could begin a message (`3: `,
`web-1  | `, `[x] `, `node1: `); they count as a prefix only if most lines share that column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bumpgate.logs.families import ZERO

# Share of the lines that must have a column for it to be a prefix; a log of two or three lines must have it in all.
SHARE, FEW = 0.6, 3
DEPTH = 6  # columns

_STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)"
ALWAYS = re.compile(
    r"\[(?:rank|default|trainer|Rank )(?P<rank>\d+)\]:? ?"
    r"|\[run\]: "
    r"|\((?P<name>[\w.:-]+(?:\[(?:rank=(?P<named>\d+))?[^\]]*\])?) pid=\d+(?:, ip=(?P<ip>[\w.:]+))?[^()]{0,80}\) ?"
    rf"|(?P<time>{_STAMP}) (?:(?:stdout|stderr) [FP] )?"
    r"|\[\d+,(?P<task>\d+)\]<std(?:out|err)>:? ?"
    r"|(?P<syslog>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) (?P<host>[\w.-]+) [\w./@-]+(?:\[\d+\])?: "
)
_CLOCK = r"(?:\d{4}[-/]\d\d[-/]\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
# Columns that are learned. One whose text varies must have few different texts, digits aside.
COLUMNS = {
    "label": re.compile(r" {0,4}(?P<rank>\d{1,5}): ?"),
    "time": re.compile(rf"\[?(?P<time>{_CLOCK})\]? (?=\S)"),
    "pipe": re.compile(r"(?P<name>[\w./:@-]{1,64}) *\|{1,2}(?: |$)"),
    "group": re.compile(r"[\[(<](?!\d+/\d)[^\])>]{1,60}[\])>](?::? |:)"),
    "host": re.compile(
        r"(?P<name>(?=[\w.-]*[\d.-])[A-Za-z][\w.-]{0,63})(?<!Error)(?<!Exception)(?<!Warning): "
    ),
    "token": re.compile(r"(?!step|iter|epoch)(?=\S*[A-Za-z])(?=\S*\d)[^\s:=]{2,40} "),
}


@dataclass(frozen=True)
class Origin:
    """What a line's prefixes state.

    end: number of characters to strip.
    rank: None if no prefix names one.
    rank_at: where the rank's digits are, None without one.
    host: name or address of the process or host, "" if unknown.
    time: "" if unknown.
    """

    end: int
    rank: int | None
    rank_at: tuple[int, int] | None
    host: str
    time: str


class Prefixes:
    """The prefixes of one log. Learn them from its first lines, then call `strip` for each line."""

    def __init__(self, sample: Sequence[str], is_message: Callable[[str], bool]) -> None:
        """Learn the columns.

        sample: the first lines of the log.
        is_message: whether a logger's own header begins a text, where the prefixes end.
        """
        self.columns: list[re.Pattern[str]] = []
        rests = [line[_always(line, 0)[0] :].rstrip("\n") for line in sample if line.strip()]
        for _ in range(DEPTH):
            if not rests or sum(map(is_message, rests)) * 2 > len(rests):
                return
            column = next((c for name, c in COLUMNS.items() if _shared(name, c, rests)), None)
            if column is None:
                return
            self.columns.append(column)
            rests = [rest[_after(column, rest) :] for rest in rests]

    def strip(self, line: str) -> Origin:
        """Return what the prefixes of a line state, and where its text begins."""
        at, found = _always(line, 0)
        for column in self.columns:
            match = column.match(line, at)
            if match is None or (match.end() == len(line.rstrip("\n")) and match.re is COLUMNS["host"]):
                continue
            at, more = _always(line, match.end())
            found += [match, *more]
        fields: dict[str, str] = {}
        span = None
        for match in found:
            fields |= {name: text for name, text in match.groupdict().items() if text is not None}
            span = next((match.span(name) for name in RANKS if match.groupdict().get(name)), span)
        host = fields.get("ip") or fields.get("host") or fields.get("name") or ""
        time = fields.get("time") or fields.get("syslog") or ""
        return Origin(at, int(line[span[0] : span[1]]) if span else None, span, host, time)


RANKS = ("rank", "named", "task")


def _always(line: str, at: int) -> tuple[int, list[re.Match[str]]]:
    found = []
    while match := ALWAYS.match(line, at):
        found.append(match)
        at = match.end()
    return at, found


def _after(column: re.Pattern[str], rest: str) -> int:
    match = column.match(rest)
    return _always(rest, match.end())[0] if match else 0


def _shared(name: str, column: re.Pattern[str], rests: Sequence[str]) -> bool:
    """Whether so many lines begin with a column that it is a prefix of the log."""
    found = [match[0] for rest in rests if (match := column.match(rest))]
    if len(found) < 2 or len(found) < (len(rests) if len(rests) <= FEW else SHARE * len(rests)):
        return False
    kinds = {text.translate(ZERO).strip() for text in found}
    if name in ("label", "time"):
        return True
    if name == "token":
        return len(kinds) == 1
    return len(kinds) <= max(1, min(16, len(found) // 3))
