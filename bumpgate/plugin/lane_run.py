"""The facts of a run of a lane, and what it lacks once it has ended: rows and tests that it did not report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import pytest

from bumpgate.core import census, outcomes
from bumpgate.core.baseline import Baseline, Reviewed, accept, in_tier, investigate
from bumpgate.core.rows import Judgement, Problem, ProblemKind, Row, Verdict
from bumpgate.core.rules import NO_RULE
from bumpgate.plugin.devices import find
from bumpgate.plugin.lanes import lanes_of
from bumpgate.plugin.provenance import versions
from bumpgate.plugin.reports import Reports
from bumpgate.plugin.rows import baseline_path
from bumpgate.plugin.selection import Selection, collects, default_paths, leaves_out, selects_all


class LaneRun:
    """One run of one lane, in the controller. Raises BaselineError if the lane's census is damaged.

    reviewed: the tests of the lane's census.
    judgements: of the rows that it reported, by id.
    full: the run selects every test of the lane. all_outcomes: the same, of the tests whose outcomes are rows.
    complete: set at the end: every selected test ran to its end.
    duplicates: problems of rows that two tests report.
    """

    def __init__(self, config: pytest.Config, baseline: Baseline, selection: Selection) -> None:
        self.config, self.baseline, self.selection = config, baseline, selection
        self.lane = lanes_of(config)[baseline.lane]
        self.device = find(self.lane).device
        self.reviewed = census.load(census.path(baseline_path(config, baseline.lane)))
        self.testpaths = default_paths(config)
        self.full = selects_all(config, baseline.lane, self.testpaths)
        self.all_outcomes = not self.lane.tests or selects_all(config, baseline.lane, self.lane.tests)
        self.judgements: dict[str, Judgement] = {}
        self.reports = Reports(config.rootpath)
        self.duplicates: set[Problem] = set()
        self.complete = False

    def missing(self) -> list[Judgement]:
        """Return reviewed rows that this run should have reported.

        They are those of its tests, and of tests that are gone from what it collects; on a full run all but the tiers'.
        Empty if no test was collected: that has one cause, and is reported as one problem.
        """
        if not self.selection.collected:
            return []
        rows = self.baseline.rows.items()
        optional = self.reports.not_run_rows | self.baseline.unexpected(versions()["triton"])
        silent = {id: r for id, r in rows if id not in self.judgements and id not in optional}
        gone = self._gone({r.test for r in silent.values()}) if self.complete else set()
        return [
            self._explain_missing(id, r)
            for id, r in silent.items()
            if (self.full and not in_tier(r.test))
            or r.test in self.selection.selected
            or r.test in gone
            or file_of(r.test) in self.reports.uncollected
        ]

    def _gone(self, tests: Collection[str]) -> set[str]:
        """Return those of the tests that a part of the lane would have collected, and neither selected nor deselected.

        Which parameters and files of a tier exist depends on its environment: there, a test without any parameter is
        gone, in a file that was collected or is deleted.
        """
        seen = self.selection.selected | self.selection.deselected
        functions, files = {function_of(test) for test in seen}, {file_of(test) for test in seen}
        return {
            test
            for test in tests
            if (function_of(test) not in functions if in_tier(test) else test not in seen)
            and collects(self.config, file_of(test))
            and (
                not in_tier(test)
                or file_of(test) in files
                or not (self.config.rootpath / file_of(test)).exists()
            )
        }

    def tests(self) -> dict[str, str]:
        """Return the census: how each test ended that was collected for the lane."""
        selected = self.selection.selected
        happened = self.reports
        found = dict.fromkeys(self.selection.deselected - selected, census.DESELECTED)
        found |= dict.fromkeys(self.selection.dropped, census.NOT_REACHED)
        ends = (
            (census.RERUN, happened.rerun),
            (census.FAILED, happened.failed.keys() | happened.infra.keys()),
            # A test that its set-up skips, with its rows listed as NOT RUN, was reached.
            (census.SKIPPED, happened.skipped.keys() | (happened.not_run.keys() - happened.called)),
            (census.XFAILED, happened.xfailed),
            (census.XPASSED, happened.xpassed),
            (census.PASSED, happened.ended),
        )
        for test in selected:
            found[test] = next((outcome for outcome, tests in ends if test in tests), census.NOT_REACHED)
        return found

    def lost(self) -> dict[str, str]:
        """Return the tests that this run should have run and did not: node id -> a key of census.LOST.

        They are those of the reviewed set on a run of the whole lane, without the options of a part those that this
        command collects, and any that a plugin removed from the selection without declaring it.
        """
        judged = self.full or self.config.option.gate
        if not judged or not self.selection.collected:
            return {}
        ended = self.tests()
        found = census.lost(self.reviewed, ended) | dict.fromkeys(self.selection.dropped, census.NOT_REACHED)
        absent = {test for test, outcome in found.items() if outcome == census.ABSENT}
        gone = absent if self.full else self._gone(absent)
        return {
            test: outcome
            for test, outcome in found.items()
            if (outcome != census.ABSENT or test in gone)
            and (outcome != census.DESELECTED or self.full)
            and (outcome != census.NOT_REACHED or self.complete)
            and outcome != census.RERUN  # failed, which is a problem of its own
            and file_of(test) not in self.reports.uncollected
        }

    def outcomes(self) -> list[Judgement]:
        """Return a row for each test, and each skipped module, below the lane's `tests` that reports none."""
        reporting = {j.row.test for j in self.judgements.values()}
        reporting |= {reviewed.test for reviewed in self.baseline.rows.values()}
        silent = {*self.selection.selected, *self.reports.skipped} - reporting
        found = [self._outcome(test) for test in sorted(silent) if outcomes.contains(self.lane, test)]
        tests = {id: j.row.test for id, j in self.judgements.items()}
        for row in (j.row for j in found):
            if (other := tests.setdefault(row.id, row.test)) != row.test:
                why = f"its row {row.id!r} is also that of {other}: rename one of them"
                self.duplicates.add(Problem(row.test, ProblemKind.FAILED, why))
        return [j for j in found if tests[j.row.id] == j.row.test]

    def _outcome(self, test: str) -> Judgement:
        happened = self.reports
        if test in happened.failed or test in happened.infra or test not in happened.ended:
            unreported = Reviewed(None, outcomes.UNIT, "exact", test=test)
            return self._explain_missing(outcomes.row_id(test), unreported)
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

    def _explain_missing(self, row_id: str, old: Reviewed) -> Judgement:
        """Return a placeholder for a row that was not reported, with the first cause below that applies."""
        happened, test, file = self.reports, old.test, file_of(old.test)
        ran = test in self.selection.selected
        causes = {  # name -> the reason, None if the cause does not apply; and the sentence
            "infra": (happened.infra.get(test), "{why}"),
            # A test that failed for its red rows alone had ended: it fails at the end of its call.
            "failed": (happened.broken.get(test), "not reported by {test}: {why}"),
            "skipped": (happened.skipped.get(test), "not reported by {test}: skipped: {why}"),
            "file": (happened.skipped.get(file), "not reported by {test}: {file} was skipped: {why}"),
            "uncollected": (happened.uncollected.get(file), "{file} could not be collected: {why}"),
            "deselected": (_if(test in self.selection.deselected), "{test} was deselected"),
            "unreached": (
                self.deaths(": ") if ran and test not in happened.finished else None,
                "the run ended before {test} did{why}",
            ),
            "xfailed": (
                _if(test in happened.xfailed),
                "not reported by {test}, which fails as its mark xfail expects",
            ),
            "not called": (_if(ran and test not in happened.called), "{test} was set up and not run"),
            "unreported": (_if(ran), "{test} no longer reports it"),
            "gone": ("", "its test is gone: {test}"),
        }
        cause, why, sentence = next(
            (name, why, text) for name, (why, text) in causes.items() if why is not None
        )
        gone = cause in ("unreported", "gone") and self.complete and (self.full or (ran and in_tier(test)))
        # A part does not know whether the test moved: the whole lane does, and then prints how to accept the loss.
        rerun = "" if cause == "gone" and not in_tier(test) else test
        lane = self.baseline.lane
        command = accept(lane, row_id, prune=True) if gone else investigate(lane, rerun)
        verdict = Verdict.INFRA if cause == "infra" else Verdict.MISSING
        row = Row(row_id, None, old.unit, 0, "", better=old.better, test=test, per_build=old.per_build)
        reason = sentence.format(test=test, file=file, why=why)
        return Judgement(row, verdict, reason, command, gone=gone, unreached=cause == "unreached")

    def not_launched(self) -> list[str]:
        """Return `row: reason` of each kernel of the selected tests that this version of triton does not launch."""
        triton = versions()["triton"]
        rows = self.baseline.rows
        return [
            f"{id}: triton {triton} does not launch this kernel"
            for id in self.baseline.unexpected(triton) - self.judgements.keys()
            if rows[id].test in self.selection.selected
        ]

    def part(self, measured: int) -> list[int | None] | None:
        """Return [n, m] if this run leaves out tests of the lane, by whatever option, with n of its m reviewed rows.

        None for a run of the whole lane: its lost rows are MISSING. m is None if outcomes of tests are left out, which
        no review counts; n is then the number of measured rows. n is m if only tests without a reviewed row are left
        out.
        """
        if self.full:
            return None
        tests = self.selection.selected
        absent = self.baseline.unexpected(versions()["triton"])
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

    def deaths(self, before: str) -> str:
        """Describe the worker deaths, with the message of the last one; "" if none died."""
        deaths = self.selection.worker_deaths
        return f"{before}{len(deaths)} workers died: {deaths[-1]}" if deaths else ""


def _if(condition: bool) -> str | None:
    return "" if condition else None


def file_of(nodeid: str) -> str:
    return nodeid.split("::")[0]


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]
