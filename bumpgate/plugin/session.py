"""Turns test reports into record.json: collects the rows of a run, finds the missing ones, and judges the run.

LaneSession lives in the controller, which imports no torch and survives every crash of a worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from typing import Any

import pytest

from bumpgate.core import accepted
from bumpgate.core.baseline import Baseline, comparable
from bumpgate.core.lanes import unused_margins
from bumpgate.core.rows import Judgement, Problem, ProblemKind, Record, write_record
from bumpgate.core.rules import sentences
from bumpgate.plugin import provenance
from bumpgate.plugin.judge import record_path
from bumpgate.plugin.lane_run import LaneRun
from bumpgate.plugin.lanes import GREEN
from bumpgate.plugin.logged import LoggedClasses
from bumpgate.plugin.problems import problems
from bumpgate.plugin.rows import ROW_PROPERTY, baseline_path, lane_acceptances
from bumpgate.plugin.selection import Selection
from bumpgate.table import part_of_lane, verdict_table

# Seconds between two saves of the rows, and how much of the run's time they may take: 10,000 rows take half a second.
KEEP_SECONDS, KEEP_SHARE = 5.0, 0.05


class LaneSession:
    """Hooks of one run of one lane, in the controller."""

    def __init__(self, config: pytest.Config, baseline: Baseline, selection: Selection) -> None:
        self.config = config
        self.run = LaneRun(config, baseline, selection)
        self.record_path = record_path(config)
        self.logged = LoggedClasses()
        self.closing = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Write an incomplete record: if this run is killed, an older record is not mistaken for its result."""
        self.started = time.monotonic()
        self.next_save = self.started + KEEP_SECONDS
        self.process = os.getpid()
        run, root = self.run, self.config.rootpath
        self.provenance = provenance.collect(run.lane, run.device, root, self.record_path, full_run=run.full)
        try:
            write_record(self.record_path, self.provenance, (), complete=False)
        except OSError as error:
            raise pytest.UsageError(f"--record {self.record_path}: {error.strerror}") from None

    def pytest_report_header(self) -> list[str]:
        baseline, here = self.run.baseline, self.provenance
        head = f"lane: {baseline.lane} on {here['device']}, torch {here['torch']}; baseline: "
        head += f"{len(baseline.rows)} rows, made with torch {baseline.made_with.get('torch')}"
        lines = (head, comparable(baseline.made_with, here), provenance.missing_bytecode())
        return [line for line in lines if line]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.run.reports.take_collection(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == ROW_PROPERTY:
                self._file(Judgement.from_json(json.loads(str(value))), report.nodeid)
        self.run.reports.take(report)
        self.logged.take(report)
        if report.nodeid in self.run.reports.finished:
            self._keep()

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        self.logged.take_warning(warning_message)

    def _file(self, judgement: Judgement, nodeid: str) -> None:
        """File a judgement. Each report of a test repeats the rows of its earlier phases."""
        known = self.run.judgements.setdefault(judgement.row.id, judgement)
        if known.row.test != nodeid:
            why = f"row {known.row.id!r} was already reported by {known.row.test}"
            self.run.duplicates.add(Problem(nodeid, ProblemKind.FAILED, why))

    def _keep(self) -> None:
        """Save the rows and failures so far, every few seconds, so that a killed run loses none of them."""
        started = time.monotonic()
        if started < self.next_save or os.getpid() != self.process:
            return
        rows = [*self.run.judgements.values()]
        with contextlib.suppress(OSError):  # a full disk is reported at the end
            write_record(
                self.record_path,
                self.provenance,
                rows,
                complete=False,
                problems=problems(self.run, rows, ""),
                tests=self.run.tests(),
            )
        ended = time.monotonic()
        self.next_save = ended + max(KEEP_SECONDS, (ended - started) / KEEP_SHARE)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Judge and write the record before xdist waits for its workers, which a second ctrl-C may interrupt."""
        run, selection, reports = self.run, self.run.selection, self.run.reports
        # A test's id in a file that cannot be imported is a usage error for pytest.
        usage = exitstatus == pytest.ExitCode.USAGE_ERROR and not reports.uncollected
        if usage or selection.refusal or os.getpid() != self.process:
            return  # a child that a test forked continues the run
        reports.skipped |= selection.skipped
        ended = exitstatus in (0, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        collected = selection.collected and not reports.uncollected
        run.complete = ended and collected and selection.selected <= reports.finished
        judgements = [*run.judgements.values(), *run.missing(), *run.outcomes()]
        facts = self._facts(judgements)
        record = Record(
            self.provenance | {name: fact for name, fact in facts.items() if fact},
            tuple(judgements),
            run.complete,
            tuple(problems(run, judgements, part_of_lane(facts["part"]))),
        )
        where = str(self.record_path)
        try:
            record = write_record(
                self.record_path,
                record.provenance,
                judgements,
                complete=run.complete,
                problems=record.problems,
                tests=run.tests(),
            )
        except OSError as error:
            record = Record(record.provenance, record.judgements, False, record.problems)
            where = f"not written: {where}: {error.strerror}"
        self.config.stash[GREEN] = not record.red
        if record.red and exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        terminal = bool(reporter and reporter.hasmarkup)
        verbose = bool(reporter) and self.config.option.verbose > 0
        lines = [f"acceptance: {note}\n" for note in facts["acceptances"]]
        lines += [f"margin: {line}\n" for line in facts["margins"]]
        self.closing = "".join(lines) + verdict_table(record, where, verbose=verbose, terminal=terminal)

    def _facts(self, judgements: list[Judgement]) -> dict[str, Any]:
        """Return what the provenance of a run that has ended also states; empty facts are left out of the record."""
        run, root = self.run, self.config.rootpath
        lane, whole = run.baseline.lane, run.full and run.complete
        acceptances = lane_acceptances(baseline_path(self.config, lane), lane)
        rows = {j.row.id for j in judgements} | run.baseline.rows.keys() | run.reports.not_run_rows
        texts, used = sentences(root), {j.row.rule for j in judgements}
        return {
            "wall_seconds": round(time.monotonic() - self.started, 3),
            "part": run.part(len(judgements)),
            "paths": list(self.config.option.file_or_dir or ()),
            "acceptances": accepted.states(
                judgements, run.baseline, acceptances, accepted.today(), whole=whole
            ),
            # A machine that fails may have lost the only rows that a pattern matches.
            "margins": unused_margins(run.lane, rows) if whole and not run.reports.infra else [],
            "logged": self.logged.facts(),
            "not_run": sorted([*run.reports.not_run_lines, *run.not_launched()]),
            "rules": {rule: texts[rule] for rule in sorted(used) if rule in texts},
        }

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.ensure_newline()
        terminalreporter.write(self.closing + "\n" if self.closing else "")
