"""What the tests of a run logged, by class: the gate shows what the candidate logs that the adopted side does not."""

from __future__ import annotations

import re
import warnings
from functools import cache

import pytest

from bumpgate.core.errors import one_line
from bumpgate.logs import Family, classify, load_families

# A run states at most so many classes, the most frequent ones.
MOST = 200
LONGEST = 160
NUMBER = r"0x[0-9a-f]+|\d+"

Logged = dict[str, tuple[int, str]]


@cache
def families() -> tuple[Family, ...]:
    return load_families()


class LoggedClasses:
    """The families of bumpgate.logs, and the texts of none, that tests have logged: class -> (events, the first)."""

    def __init__(self) -> None:
        self.found: Logged = {}

    def take(self, report: pytest.TestReport) -> None:
        """Take what a test printed and logged, from its last report."""
        if report.when == "teardown":
            self._read([line for _, text in report.sections for line in text.splitlines()])

    def take_warning(self, message: warnings.WarningMessage) -> None:
        """Take a warning that Python raised, without its place, which names the environment."""
        text = f"{message.category.__name__}: {one_line(str(message.message))}"
        self._add(f"warning: {re.sub(NUMBER, '0', text)[:LONGEST]}", 1, text)

    def facts(self) -> dict[str, list[object]]:
        """Return class -> [events, the first], for the record."""
        most = sorted(self.found, key=lambda name: -self.found[name][0])[:MOST]
        return {name: [*self.found[name]] for name in sorted(most)}

    def _read(self, lines: list[str]) -> None:
        if not lines:
            return
        report = classify(lines, families())
        found = {
            f.family.name: (f.count, f.first.text) for f in report.findings if f.family.action != "ignore"
        }
        found |= {f"unknown: {key[:LONGEST]}": (n, first.text) for key, (n, first) in report.unknown.items()}
        for name, (count, first) in found.items():
            self._add(name, count, first)

    def _add(self, name: str, count: int, first: str) -> None:
        before, text = self.found.get(name, (0, first[:LONGEST].strip()))
        self.found[name] = (before + count, text)
