"""Families of causes (families.toml) and known upstream issues (issues.toml), read and checked."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bumpgate.core.errors import BumpgateError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FAMILIES = Path(__file__).with_name("families.toml")
ISSUES = Path(__file__).with_name("issues.toml")
ACTIONS = ("ignore", "count", "alert", "correlate")


class LogsError(BumpgateError):
    """An invalid file of families, or an input that is not a log. The message is one line."""


@dataclass(frozen=True)
class Family:
    """One table of families.toml. Raises LogsError, one line, on an invalid field.

    name: as in reports and `--bound`.
    patterns: texts of a message, as families.toml describes them.
    action: one of ACTIONS.
    rule: of suites/rules.toml.
    meaning, look, tested: what it means, what to look at first, what tests it.
    bound: largest number of events per rank of a "count" family.
    companions, within: a "correlate" family alerts if an event of a companion is at most `within` lines of its rank aw
    follows: printed after a failure by other ranks or the launcher; never the first cause if there is another one.
    facts: regular expressions with named groups, applied to an event's lines.
    """

    name: str
    patterns: tuple[str, ...]
    action: str
    rule: str
    meaning: str
    look: str
    tested: str
    bound: int | None = None
    companions: tuple[str, ...] = ()
    within: int | None = None
    follows: bool = False
    facts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        faults = {
            "action": self.action not in ACTIONS,
            "patterns": not self.patterns or any(re.search("[1-9]", p) for p in self.patterns),
            "rule": not re.fullmatch(r"[CX]\d+", self.rule),
            "meaning": not self.meaning,
            "look": not self.look,
            "bound": (self.action == "count") != (type(self.bound) is int and self.bound >= 0),
            "with": (self.action == "correlate") != bool(self.companions),
            "within": (self.action == "correlate") != (type(self.within) is int and self.within > 0),
            "facts": not all(map(_is_fact, self.facts)),
        }
        for name, wrong in faults.items():
            if wrong:
                raise LogsError(f"families.toml: [{self.name}] has a wrong or missing {name!r}")

    @cached_property
    def fact_patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(map(re.compile, self.facts))


@dataclass(frozen=True)
class Issue:
    """A known upstream issue.

    family: name of the family of its events.
    signature: texts, patterns as in families.toml, that must all occur in the event.
    versions: the packages and releases that have it.
    link: the upstream thread.
    workaround: what to do until it is fixed.
    """

    name: str
    family: str
    signature: tuple[str, ...]
    versions: str
    link: str
    workaround: str

    @cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(compile_pattern(text)[1] for text in self.signature)

    def matches(self, lines: Iterable[str]) -> bool:
        """Return whether every text of the signature occurs in these lines, with digits read as 0."""
        text = "\n".join(lines).translate(ZERO)
        return all(pattern.search(text) for pattern in self.patterns)


# Lines are compared with digits replaced by 0: step numbers, times and sizes then cost nothing after the first line.
ZERO = str.maketrans("123456789", "000000000")


def _is_fact(text: str) -> bool:
    try:
        return bool(re.compile(text).groupindex)
    except re.error:
        return False


def _tables(path: Path) -> dict[str, Any]:
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise LogsError(f"{path.name}: {error}") from None
    return tables


def load_families(path: Path = FAMILIES, bounds: Mapping[str, int] | None = None) -> tuple[Family, ...]:
    """Load the families in their order.

    bounds: replaces bounds of counted families, by name.
    Raises LogsError.
    """
    families = []
    for name, table in _tables(path).items():
        try:
            table |= {key: tuple(table.get(key, ())) for key in ("patterns", "facts")}
            families.append(Family(name, companions=tuple(table.pop("with", ())), **table))
        except (TypeError, AttributeError) as error:
            raise LogsError(f"{path.name}: [{name}] is misshapen ({error})") from None
    bounds = bounds or {}
    absent = {c for family in families for c in family.companions} - {f.name for f in families}
    counted = {f.name for f in families if f.action == "count"}
    if not families or absent:
        raise LogsError(f"{path.name}: no family {sorted(absent) or 'at all'}")
    if wrong := sorted(set(bounds) - counted):
        raise LogsError(f"no counted family {wrong[0]!r}; counted are {', '.join(sorted(counted))}")
    return tuple(replace(f, bound=bounds[f.name]) if f.name in bounds else f for f in families)


def load_issues(path: Path = ISSUES) -> tuple[Issue, ...]:
    """Load the known issues. Raises LogsError."""
    try:
        return tuple(
            Issue(name, signature=tuple(table.pop("signature")), **table)
            for name, table in _tables(path).items()
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise LogsError(f"{path.name}: a misshapen table ({error})") from None


def compile_pattern(pattern: str) -> tuple[str, re.Pattern[str]]:
    """Return a literal that every match contains, and the regex; a pattern that ends in a word ends at its boundary."""
    pieces = re.split(r"(\*|\{[^}]*\})", pattern)
    out = []
    for piece in pieces:
        if piece.startswith("{"):
            out.append("(?:" + "|".join(map(_escape, piece[1:-1].split("|"))) + ")")
        else:
            out.append(".*?" if piece == "*" else re.escape(piece))
    # Words at either end are whole words: "loss nan" does not match "loss nancy". "_" separates words: "train_loss".
    firsts, lasts = (pieces[k] or pieces[k + 1 if k == 0 else k - 1] for k in (0, -1))
    start = r"(?<![^\W_])" if all(re.match(r"\w", a) for a in firsts.strip("{}").split("|")) else ""
    end = r"\b" if all(re.search(r"\w$", a) for a in lasts.strip("{}").split("|")) else ""
    literal = max((p for p in pieces if p != "*" and not p.startswith("{")), key=len)
    return literal, re.compile(start + "".join(out) + end)


def _escape(alternative: str) -> str:
    return ".*?".join(map(re.escape, alternative.split("*")))
