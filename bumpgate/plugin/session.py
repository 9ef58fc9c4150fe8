"""Turns test reports into record.json: collects the rows of a run, finds the missing ones, and judges the run.

LaneSession lives in the controller, which imports no torch and survives every crash of a worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterator

import pytest

from bumpgate.core import accepted, outcomes
from bumpgate.core.baseline import Baseline, Reviewed, accept, comparable, in_tier, investigate
from bumpgate.core.lanes import unused_margins
from bumpgate.core.rows import Judgement, Problem, ProblemKind, Record, Row, Verdict, write_record
from bumpgate.core.rules import sentences
from bumpgate.plugin import provenance
from bumpgate.plugin.devices import PJRT_CPU, find
from bumpgate.plugin.lanes import GREEN, lanes_of
from bumpgate.plugin.reports import Reports
from bumpgate.plugin.rows import NO_RULE, ROW_PROPERTY, baseline_path, lane_acceptances
from bumpgate.plugin.selection import Selection, collects, default_paths, leaves_out, selects_all
from bumpgate.table import part_of_lane, verdict_table

# Seconds between two saves of the rows, and how much of the run's time they may take: 10,000 rows take half a second.
KEEP_SECONDS, KEEP_SHARE = 5.0, 0.05


class LaneSession:
    """One run of one lane, in the controller: judgements by row id, outcomes by node id."""

    def __init__(self, config: pytest.Config, baseline: Baseline, selection: Selection) -> None:
        self.config = config
        self.baseline = baseline
        self.selection = selection
        self.record_path = config.invocation_params.dir / (
            config.option.record or config.rootpath / "record.json"
        )
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
        judgements = [*self.judgements.values(), *self._missing(complete), *self._outcomes(complete)]
        part = self._part(len(judgements))
        problems = self._problems(judgements, complete, part_of_lane(part))
        provenance = self.provenance | {"wall_seconds": round(time.monotonic() - self.started, 3)}
        provenance |= {"part": part} if part else {}
        paths = self.config.option.file_or_dir
        provenance |= {"paths": list(paths)} if paths else {}
        notes = self._acceptances(judgements, complete)
        provenance |= {"acceptances": notes} if notes else {}
        margins = self._unused_margins(judgements, complete)
        provenance |= {"margins": margins} if margins else {}
        not_run = sorted([*self.reports.not_run_lines, *self._not_launched()])
        provenance |= {"not_run": not_run} if not_run else {}
        texts, used = sentences(self.config.rootpath), {j.row.rule for j in judgements}
        rules = {rule: texts[rule] for rule in sorted(used) if rule in texts}
        provenance |= {"rules": rules} if rules else {}
        try:
            record = write_record(
                self.record_path, provenance, judgements, complete=complete, problems=problems
            )
            where = str(self.record_path)
        except OSError as error:
            record = Record(provenance, tuple(judgements), False, tuple(problems))
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

    def _missing(self, complete: bool) -> list[Judgement]:
        """Return reviewed rows that this run should have reported.

        They are those of its tests, and of tests that are gone from what it collects; on a full run all but the tiers'.
        Empty if no test was collected: that has one cause, and is reported as one problem.
        """
        if not self.selection.collected:
            return []
        rows = self.baseline.rows.items()
        optional = self.reports.not_run_rows | self.baseline.unexpected(provenance.versions()["triton"])
        silent = {id: r for id, r in rows if id not in self.judgements and id not in optional}
        gone = self._gone({r.test for r in silent.values()}) if complete else set()
        return [
            self._explain_missing(id, r, complete)
            for id, r in silent.items()
            if (self.full and not in_tier(r.test))
            or r.test in self.selection.selected
            or r.test in gone
            or _file_of(r.test) in self.reports.uncollected
        ]

    def _not_launched(self) -> list[str]:
        """Return `row: reason` of each kernel of the selected tests that this version of triton does not launch."""
        triton = provenance.versions()["triton"]
        rows = self.baseline.rows
        return [
            f"{id}: triton {triton} does not launch this kernel"
            for id in self.baseline.unexpected(triton) - self.judgements.keys()
            if rows[id].test in self.selection.selected
        ]

    def _gone(self, tests: Collection[str]) -> set[str]:
        """Return those of the tests that a part of the lane would have collected, and neither selected nor deselected.

        Which parameters and files of a tier exist depends on its environment: there, a test without any parameter is
        gone, in a file that was collected or is deleted.
        """
        seen = self.selection.selected | self.selection.deselected
        functions, files = {_function_of(test) for test in seen}, {_file_of(test) for test in seen}
        return {
            test
            for test in tests
            if (_function_of(test) not in functions if in_tier(test) else test not in seen)
            and collects(self.config, _file_of(test))
            and (
                not in_tier(test)
                or _file_of(test) in files
                or not (self.config.rootpath / _file_of(test)).exists()
            )
        }

    def _outcomes(self, complete: bool) -> list[Judgement]:
        """Return a row for each test, and each skipped module, below the lane's `tests` that reports none."""
        lane = lanes_of(self.config)[self.baseline.lane]
        reporting = {j.row.test for j in self.judgements.values()}
        reporting |= {reviewed.test for reviewed in self.baseline.rows.values()}
        silent = {*self.selection.selected, *self.reports.skipped} - reporting
        found = [self._outcome(test, complete) for test in sorted(silent) if outcomes.contains(lane, test)]
        tests = {id: j.row.test for id, j in self.judgements.items()}
        for row in (j.row for j in found):
            if (other := tests.setdefault(row.id, row.test)) != row.test:
                why = f"its row {row.id!r} is also that of {other}: rename one of them"
                self.duplicates.add(Problem(row.test, ProblemKind.FAILED, why))
        return found

    def _outcome(self, test: str, complete: bool) -> Judgement:
        happened = self.reports
        if test in happened.failed or test in happened.infra or test not in happened.ended:
            unreported = Reviewed(None, outcomes.UNIT, "exact", test=test)
            return self._explain_missing(outcomes.row_id(test), unreported, complete)
        found = [(outcomes.SKIPPED, self.reports.skipped), (outcomes.XFAILED, self.reports.xfailed)]
        found += [(outcomes.XPASSED, self.reports.xpassed), (outcomes.PASSED, [test])]
        outcome = next(name for name, tests in found if test in tests)
        why = self.reports.skipped.get(test, "")
        if outcome != outcomes.SKIPPED:
            subtests = self.reports.subtests.get(test, [])
            why = "; ".join(dict.fromkeys(why for _, why in subtests))
            counts = Counter(what for what, _ in subtests)
            outcome += "".join(f", {n} subtest{'s' * (n != 1)} {what}" for what, n in sorted(counts.items()))
        return outcomes.measured(test, outcome, why, NO_RULE)

    def _explain_missing(self, row_id: str, reviewed: Reviewed, complete: bool) -> Judgement:
        happened, test, file = self.reports, reviewed.test, _file_of(reviewed.test)
        ran = test in self.selection.selected
        gone = unreached = lost = False
        if test in happened.infra:
            reason = happened.infra[test]
        elif test in happened.failed:
            reason = f"not reported by {test}: {happened.failed[test]}"
        elif test in happened.skipped:
            reason = f"not reported by {test}: skipped: {happened.skipped[test]}"
        elif file in happened.skipped:
            reason = f"not reported by {test}: {file} was skipped: {happened.skipped[file]}"
        elif file in happened.uncollected:
            reason = f"{file} could not be collected: {happened.uncollected[file]}"
        elif test in self.selection.deselected:
            reason = f"{test} was deselected"
        elif ran and test not in happened.finished:
            reason = f"the run ended before {test} did{self._deaths(': ')}"
            unreached = True
        elif test in happened.xfailed:
            reason = f"not reported by {test}, which fails as its mark xfail expects"
        elif ran and test not in happened.called:
            reason = f"{test} was set up and not run"
        else:
            reason = f"{test} no longer reports it" if ran else f"its test is gone: {test}"
            lost, gone = not ran, complete and (self.full or (ran and in_tier(test)))
        lane = self.baseline.lane
        # A part does not know whether the test moved: the whole lane does, and then prints how to accept the loss.
        rerun = "" if lost and not in_tier(test) else test
        command = accept(lane, row_id, prune=True) if gone else investigate(lane, rerun)
        verdict = Verdict.INFRA if test in happened.infra else Verdict.MISSING
        row = Row(
            row_id,
            None,
            reviewed.unit,
            0,
            "",
            better=reviewed.better,
            test=test,
            per_build=reviewed.per_build,
        )
        return Judgement(row, verdict, reason, command, gone=gone, unreached=unreached)

    def _part(self, measured: int) -> list[int | None] | None:
        """Return [n, m] if this run leaves out tests of the lane, by whatever option, with n of its m reviewed rows.

        None for a run of the whole lane: its lost rows are MISSING. m is None if outcomes of tests are left out, which
        no review counts; n is then the number of measured rows. n is m if only tests without a reviewed row are left
        out.
        """
        if self.full:
            return None
        tests = self.selection.selected
        absent = self.baseline.unexpected(provenance.versions()["triton"])
        rows = [
            (id, r)
            for id, r in self.baseline.rows.items()
            if (not in_tier(r.test) or r.test in tests) and id not in absent
        ]
        n = sum(id in self.judgements or r.test in tests for id, r in rows)
        if n < len(rows):
            return [n, len(rows)]
        if not self.all_outcomes:
            return [measured, None]
        return [n, n] if leaves_out(self.config, self.baseline.lane, self.testpaths) else None

    def _nothing_collected(self) -> str:
        why = self._deaths("") or "the run ended before it collected a test"
        required = sum(not in_tier(r.test) for r in self.baseline.rows.values()) if self.full else 0
        return f"all {required} rows missing: {why}" if required else f"no row measured: {why}"

    def _deaths(self, before: str) -> str:
        """Describe the worker deaths, with the message of the last one; "" if none died."""
        deaths = self.selection.worker_deaths
        return f"{before}{len(deaths)} workers died: {deaths[-1]}" if deaths else ""

    def _rules(self, test: str) -> str:
        """Return the rules of the rows that a failed test has reported, in brackets; "" if none."""
        texts = sentences(self.config.rootpath)
        rules = sorted({j.row.rule for j in self.judgements.values() if j.row.test == test and j.row.rule})
        return (
            f" [{'; '.join(f'{rule}: {texts[rule]}' if rule in texts else rule for rule in rules)}]"
            if rules
            else ""
        )

    def _problems(self, judgements: list[Judgement], complete: bool, part: str) -> list[Problem]:
        """Return the problems that no red row shows. A measured row shows no failure but that of its value."""
        red = {j.row.test for j in judgements if j.red}
        silent = {j.row.test for j in judgements if j.red and j.row.unmeasured}
        found = [
            Problem(test, ProblemKind.INFRA, self.reports.infra[test])
            if test in self.reports.infra
            else Problem(test, ProblemKind.FAILED, f"{why}{self._rules(test)}")
            for test, why in (self.reports.failed | self.reports.broken).items()
            if test not in (silent if test in self.reports.broken else red)
        ]
        found += [
            Problem(path, ProblemKind.UNCOLLECTED, f"could not be collected: {why}")
            for path, why in self.reports.uncollected.items()
        ]
        found += self.duplicates
        if not self.selection.collected:
            found.append(Problem("", ProblemKind.NOTHING, self._nothing_collected()))
        elif not complete:
            selected, unfinished = self.selection.selected, self.selection.selected - self.reports.finished
            # Files that could not be collected are problems of their own.
            if unfinished or not self.reports.uncollected:
                number = f"{len(unfinished)} of {len(selected)} tests did not finish"
                why = f"the run was cut short: {number}{self._deaths('; ')}"
                found.append(Problem("", ProblemKind.CUT_SHORT, why))
        compared = {j.row.test: j.row.value for j in judgements if outcomes.is_outcome(j.row)}
        if compared and all(compared.get(j.row.test) == outcomes.SKIPPED for j in judgements):
            why = f"all {len(compared)} tests were skipped: nothing was checked"
            found.append(Problem("", ProblemKind.NOTHING, why))
        if self.config.option.gate:
            if (
                self.full
                and complete
                and self.selection.selected
                and not (judgements or self.reports.not_run)
            ):
                why = "no test of the lane reports a row: nothing was checked"
                found.append(Problem("", ProblemKind.NOTHING, why))
            found += [Problem(test, ProblemKind.GAP, why) for test, why in self._gaps(part, compared.keys())]
        return sorted(found, key=str)

    def _gaps(self, part: str, compared: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield (test, why) of what a run under --gate left out. compared: tests whose outcomes are rows."""
        happened = self.reports
        for test, why in happened.skipped.items():
            if test not in compared:
                yield test, f"skipped under --gate: {why}"
        for test, subtests in happened.subtests.items():
            for what, why in subtests:
                if test not in compared and what == outcomes.SKIPPED:
                    yield test, f"a subtest was skipped under --gate: {why}"
        for test in happened.xpassed:
            if test not in compared:
                yield test, "passed where a failure is expected, under --gate"
        if not self.config.option.part:
            yield from ((test, "deselected under --gate") for test in self.selection.deselected)
            if part:
                yield "", f"{part}; add --part if that is intended"
        # A stand-in device need not report the rows of the real one; a machine with that device must.
        not_run = happened.not_run if self.provenance["device"] != PJRT_CPU else {}
        for test, rows in not_run.items():
            if test not in happened.excused:
                yield from ((test, f"not run under --gate: {why}") for why in rows)


def _file_of(nodeid: str) -> str:
    return nodeid.split("::")[0]


def _function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]
