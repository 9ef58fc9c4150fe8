"""Shows the rows of a run without a lane: measured, and not judged."""

from __future__ import annotations

import json

import pytest

from bumpgate.core.rows import Judgement
from bumpgate.plugin.lanes import lanes_of
from bumpgate.plugin.rows import ROW_PROPERTY
from bumpgate.table import show


class UnjudgedRows:
    """Hooks of a run that names no lane, in the controller. It prints nothing if no test reports a row."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.rows: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == ROW_PROPERTY:
                row = Judgement.from_json(json.loads(str(value))).row
                self.rows[row.id] = f"{row.id}: {show(row.value)} {row.unit}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.rows and terminalreporter.verbosity >= 0:
            lane = next(iter(lanes_of(self.config)))
            terminalreporter.section(f"rows, not judged: no lane; pytest -m {lane} judges", sep="-")
            for line in self.rows.values():
                terminalreporter.write_line(line)
