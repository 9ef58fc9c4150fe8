"""Turns test reports into record.json: collects the rows of a run, finds the missing ones, and judges the run.

LaneSession lives in the controller, which imports no torch and survives every crash of a worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time

import pytest

from bumpgate.core import accepted, census
from bumpgate.core.baseline import Baseline, comparable
from bumpgate.core.lanes import unused_margins
from bumpgate.core.rows import Judgement, Problem, ProblemKind, Record, write_record
from bumpgate.core.rules import sentences
from bumpgate.plugin import provenance
from bumpgate.plugin.devices import find
from bumpgate.plugin.ended_run import EndedRun
from bumpgate.plugin.judge import record_path
from bumpgate.plugin.lanes import GREEN, lanes_of
from bumpgate.plugin.problems import problems
from bumpgate.plugin.reports import Reports
from bumpgate.plugin.rows import ROW_PROPERTY, baseline_path, lane_acceptances
from bumpgate.plugin.selection import Selection, default_paths, selects_all
from bumpgate.table import part_of_lane, verdict_table

# Seconds between two saves of the rows, and how much of the run's time they may take: 10,000 rows take half a second.
KEEP_SECONDS, KEEP_SHARE = 5.0, 0.05


class LaneSession:
    """One run of one lane, in the controller: judgements by row id, outcomes by node id."""

    def __init__(self, config: pytest.Config, baseline: Baseline, selection: Selection) -> None:
        self.config = config
        self.baseline = baseline
        self.reviewed = census.load(census.path(baseline_path(config, baseline.lane)))
        self.selection = selection
        self.record_path = record_path(config)
        self.testpaths = default_paths(config)
        self.full = selects_all(config, baseline.lane, self.testpaths)
        of_outcomes = lanes_of(config)[baseline.lane].tests
        self.all_outcomes = not of_outcomes or selects_all(config, baseline.lane, of_outcomes)
        self.judgements: dict[str, Judgement] = {}
        self.reports = Reports(config.rootpath)
        self.duplicates: set[Problem] = set()
        self.closing = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Write an incomplete record: if this run is killed, an older record is not mistaken for its result."""
        self.started = time.monotonic()
        self.next_save = self.started + KEEP_SECONDS
        self.process = os.getpid()
        lane, root = lanes_of(self.config)[self.baseline.lane], self.config.rootpath
        self.provenance = provenance.collect(
            lane, find(lane).device, root, self.record_path, full_run=self.full
        )
        try:
            write_record(self.record_path, self.provenance, (), complete=False)
        except OSError as error:
            raise pytest.UsageError(f"--record {self.record_path}: {error.strerror}") from None

    def pytest_report_header(self) -> list[str]:
        made_with = self.baseline.made_with
        head = (
            f"lane: {self.baseline.lane} on {self.provenance['device']}, torch {self.provenance['torch']}; "
        )
        head += f"baseline: {len(self.baseline.rows)} rows, made with torch {made_with.get('torch')}"
        lines = (head, comparable(made_with, self.provenance), provenance.missing_bytecode())
        return [line for line in lines if line]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.reports.take_collection(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == ROW_PROPERTY:
                self._file(Judgement.from_json(json.loads(str(value))), report.nodeid)
        self.reports.take(report)
        if report.nodeid in self.reports.finished:
            self._keep()

    def _keep(self) -> None:
        """Save the rows measured so far, every few seconds, so that a killed run loses none of them."""
        started = time.monotonic()
        if started < self.next_save or os.getpid() != self.process:
            return
        with contextlib.suppress(OSError):  # a full disk is reported at the end
            write_record(self.record_path, self.provenance, self.judgements.values(), complete=False)
        ended = time.monotonic()
        self.next_save = ended + max(KEEP_SECONDS, (ended - started) / KEEP_SHARE)

    def _file(self, judgement: Judgement, nodeid: str) -> None:
        """File a judgement. Each report of a test repeats the rows of its earlier phases."""
        known = self.judgements.setdefault(judgement.row.id, judgement)
        if known.row.test != nodeid:
            why = f"row {known.row.id!r} was already reported by {known.row.test}"
            self.duplicates.add(Problem(nodeid, ProblemKind.FAILED, why))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Judge and write the record before xdist waits for its workers, which a second ctrl-C may interrupt."""
        # A test's id in a file that cannot be imported is a usage error for pytest.
        usage = exitstatus == pytest.ExitCode.USAGE_ERROR and not self.reports.uncollected
        if usage or self.selection.refusal:
            return
        if os.getpid() != self.process:
            return  # a child that a test forked continues the run
        ended = exitstatus in (0, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        selection = self.selection
        self.reports.skipped |= selection.skipped
        collected = selection.collected and not self.reports.uncollected
        complete = ended and collected and selection.selected <= self.reports.finished
        run = EndedRun(
            config=self.config,
            baseline=self.baseline,
            reviewed=self.reviewed,
            selection=self.selection,
            reports=self.reports,
            judgements=self.judgements,
            testpaths=self.testpaths,
            full=self.full,
            all_outcomes=self.all_outcomes,
            duplicates=self.duplicates,
            complete=complete,
            device=self.provenance["device"],
        )
        judgements = [*self.judgements.values(), *run.missing(), *run.outcomes()]
        part = run.part(len(judgements))
        found = problems(run, judgements, part_of_lane(part))
        provenance = self.provenance | {"wall_seconds": round(time.monotonic() - self.started, 3)}
        provenance |= {"part": part} if part else {}
        paths = self.config.option.file_or_dir
        provenance |= {"paths": list(paths)} if paths else {}
        notes = self._acceptances(judgements, complete)
        provenance |= {"acceptances": notes} if notes else {}
        margins = self._unused_margins(judgements, complete)
        provenance |= {"margins": margins} if margins else {}
        not_run = sorted([*self.reports.not_run_lines, *run.not_launched()])
        provenance |= {"not_run": not_run} if not_run else {}
        texts, used = sentences(self.config.rootpath), {j.row.rule for j in judgements}
        rules = {rule: texts[rule] for rule in sorted(used) if rule in texts}
        provenance |= {"rules": rules} if rules else {}
        try:
            record = write_record(
                self.record_path,
                provenance,
                judgements,
                complete=complete,
                problems=found,
                tests=run.tests(),
            )
            where = str(self.record_path)
        except OSError as error:
            record = Record(provenance, tuple(judgements), False, tuple(found))
            where = f"not written: {self.record_path}: {error.strerror}"
        self.config.stash[GREEN] = not record.red
        if record.red and exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        width = shutil.get_terminal_size().columns if reporter and reporter.hasmarkup else None
        verbose = bool(reporter) and self.config.option.verbose > 0
        table = verdict_table(record, where, verbose=verbose, terminal=width)
        lines = [*(f"acceptance: {note}\n" for note in notes), *(f"margin: {line}\n" for line in margins)]
        self.closing = "".join(lines) + table

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.ensure_newline()
        terminalreporter.write(self.closing + "\n" if self.closing else "")

    def _acceptances(self, judgements: list[Judgement], complete: bool) -> list[str]:
        """Return the effect of each entry of accepted.toml in this run, one line each."""
        acceptances = lane_acceptances(baseline_path(self.config, self.baseline.lane), self.baseline.lane)
        whole = self.full and complete
        return accepted.states(judgements, self.baseline, acceptances, accepted.today(), whole=whole)

    def _unused_margins(self, judgements: list[Judgement], complete: bool) -> list[str]:
        """Return one line per margin of the lane that matches no row, paired ones without a review included."""
        if not (self.full and complete) or self.reports.infra:
            return []
        rows = {j.row.id for j in judgements} | self.baseline.rows.keys() | self.reports.not_run_rows
        return unused_margins(lanes_of(self.config)[self.baseline.lane], rows)
