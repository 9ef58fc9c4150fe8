"""The classes of a log line: the tables [logs.*] of contract.toml (rule C26), read and checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launch.contract import PATH, ContractError, read

ACTIONS = ("ignore", "count", "alert", "correlate")


@dataclass(frozen=True)
class LogClass:
    """One table of [logs.*]. Raises ContractError, one line, on an invalid field.

    bound: maximum number of records per rank of a "count" class. companions, within: a "correlate" class alerts if a
    record of a companion is at most `within` lines of the same rank away.
    """

    name: str
    patterns: tuple[str, ...]
    action: str
    rule: str
    reason: str
    bound: int | None = None
    companions: tuple[str, ...] = ()
    within: int | None = None

    def __post_init__(self) -> None:
        faults = {
            "action": self.action not in ACTIONS,
            "patterns": not self.patterns or any(re.search("[1-9]", p) for p in self.patterns),
            "rule": not re.fullmatch(r"[CX]\d+", self.rule),
            "reason": not self.reason,
            "bound": (self.action == "count") != (type(self.bound) is int and self.bound >= 0),
            "with": (self.action == "correlate") != bool(self.companions),
            "within": (self.action == "correlate") != (type(self.within) is int and self.within > 0),
        }
        for name, wrong in faults.items():
            if wrong:
                raise ContractError(f"contract.toml: [logs.{self.name}] has a wrong or missing {name!r}")


def load_classes(path: Path = PATH, bounds: Mapping[str, int] | None = None) -> tuple[LogClass, ...]:
    """Load the contract's classes in order; `bounds` overrides its bounds. Raises ContractError."""
    tables = read(path).get("logs", {})
    classes = []
    for name, table in tables.items():
        try:
            companions, patterns = tuple(table.pop("with", ())), tuple(table.pop("patterns"))
            classes.append(LogClass(name, patterns, companions=companions, **table))
        except (TypeError, KeyError) as error:
            raise ContractError(f"{path.name}: [logs.{name}] is misshapen ({error})") from None
    absent = {c for log_class in classes for c in log_class.companions} - set(tables)
    wrong = set(bounds or ()) - {c.name for c in classes if c.action == "count"}
    if not classes or absent or wrong:
        raise ContractError(f"{path.name}: [logs]: no counted class or companion {sorted(absent | wrong)}")
    return tuple(replace(c, bound=bounds[c.name]) if c.name in (bounds or ()) else c for c in classes)


def compile_pattern(pattern: str) -> tuple[str, re.Pattern[str]]:
    """Return a literal that every match contains, and the regex; a pattern that ends in a word ends at its boundary."""
    pieces = re.split(r"(\*|\{[^}]*\})", pattern)
    out = []
    for piece in pieces:
        if piece.startswith("{"):
            out.append("(?:" + "|".join(map(re.escape, piece[1:-1].split("|"))) + ")")
        else:
            out.append(".*?" if piece == "*" else re.escape(piece))
    # Words at either end are whole words: "loss nan" does not match "loss nancy". "_" separates words: "train_loss".
    firsts, lasts = (pieces[k] or pieces[k + 1 if k == 0 else k - 1] for k in (0, -1))
    start = r"(?<![^\W_])" if all(re.match(r"\w", a) for a in firsts.strip("{}").split("|")) else ""
    end = r"\b" if all(re.search(r"\w$", a) for a in lasts.strip("{}").split("|")) else ""
    literal = max((p for p in pieces if p != "*" and not p.startswith("{")), key=len)
    return literal, re.compile(start + "".join(out) + end)
