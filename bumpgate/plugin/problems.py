"""Problems of a run that no red row shows: failed tests, gaps under --gate, a run that was cut short."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from bumpgate.core import census, outcomes
from bumpgate.core.baseline import accept, in_tier
from bumpgate.core.errors import one_line
from bumpgate.core.rows import Judgement, Problem, ProblemKind
from bumpgate.core.rules import NO_RULE, sentences
from bumpgate.plugin.devices import PJRT_CPU
from bumpgate.plugin.lane_run import LaneRun, file_of


def problems(run: LaneRun, judgements: list[Judgement], part: str) -> list[Problem]:
    """Return the problems that no red row shows. A measured row shows no failure but that of its value."""
    red = {j.row.test for j in judgements if j.red}
    silent = {j.row.test for j in judgements if j.red and j.row.unmeasured}
    found = [
        Problem(test, ProblemKind.INFRA, run.reports.infra[test])
        if test in run.reports.infra
        else Problem(test, ProblemKind.FAILED, f"{why}{_rules(run, test)}")
        for test, why in (run.reports.failed | run.reports.broken).items()
        if test not in (silent if test in run.reports.broken else red)
    ]
    found += [
        Problem(path, ProblemKind.UNCOLLECTED, f"could not be collected: {why}")
        for path, why in run.reports.uncollected.items()
    ]
    found += run.duplicates
    found += _lost(run, red)
    if not run.selection.collected:
        found.append(Problem("", ProblemKind.NOTHING, _nothing_collected(run)))
    elif not run.complete:
        selected, unfinished = run.selection.selected, run.selection.selected - run.reports.finished
        # Files that could not be collected are problems of their own.
        if unfinished or not run.reports.uncollected:
            number = f"{len(unfinished)} of {len(selected)} tests did not finish"
            why = f"the run was cut short: {number}{run.deaths('; ')}"
            found.append(Problem("", ProblemKind.CUT_SHORT, why))
    compared = {j.row.test: j.row.value for j in judgements if outcomes.is_outcome(j.row)}
    if compared and all(compared.get(j.row.test) == outcomes.SKIPPED for j in judgements):
        why = f"all {len(compared)} tests were skipped: nothing was checked"
        found.append(Problem("", ProblemKind.NOTHING, why))
    if run.config.option.gate:
        if run.full and run.complete and run.selection.selected and not (judgements or run.reports.not_run):
            why = "no test of the lane reports a row: nothing was checked"
            found.append(Problem("", ProblemKind.NOTHING, why))
        found += [Problem(test, ProblemKind.GAP, why) for test, why in _gaps(run, part, compared.keys())]
    return sorted(found, key=str)


def _lost(run: LaneRun, red: Collection[str]) -> Iterator[Problem]:
    """Yield the tests that the run has lost, those of one file with one outcome together."""
    files = defaultdict(list)
    for test, outcome in run.lost().items():
        if test not in red and test not in run.reports.failed:
            files[file_of(test), outcome].append(test)
    dropped = "a plugin or conftest left it out without pytest_deselected, or --setup-only was given"
    for (file, outcome), tests in files.items():
        why = run.reports.skipped.get(file, "")
        accepted = f"if that is intended: {accept(run.baseline.lane)} --prune"
        fix = dropped if outcome == census.NOT_REACHED else accepted
        names = one_line(", ".join(test.removeprefix(f"{file}::") for test in tests), 160)
        lost = f"{len(tests)} test{'s' * (len(tests) != 1)} {census.LOST[outcome]}: {names}"
        skipped = f" (the file was skipped: {why})" if why else ""
        yield Problem(file if len(tests) > 1 else tests[0], ProblemKind.LOST, f"{lost}{skipped}; {fix}")


def _gaps(run: LaneRun, part: str, compared: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (test, why) of what a run under --gate left out. compared: tests whose outcomes are rows."""
    happened = run.reports
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
    if not run.config.option.part:
        left_out = run.selection.deselected - run.lost().keys()
        yield from ((test, "deselected under --gate") for test in left_out)
        if part:
            yield "", f"{part}; add --part if that is intended"
    # A stand-in device need not report the rows of the real one; a machine with that device must.
    not_run = happened.not_run if run.device != PJRT_CPU else {}
    for test, rows in not_run.items():
        if test not in happened.excused:
            yield from ((test, f"not run under --gate: {why}") for why in rows)


def _nothing_collected(run: LaneRun) -> str:
    why = run.deaths("") or "the run ended before it collected a test"
    required = sum(not in_tier(r.test) for r in run.baseline.rows.values()) if run.full else 0
    return f"all {required} rows missing: {why}" if required else f"no row measured: {why}"


def _rules(run: LaneRun, test: str) -> str:
    """Return the rules of the rows that a failed test has reported, in brackets; "" if none."""
    texts = sentences(run.config.rootpath)
    own = {j.row.rule for j in run.judgements.values() if j.row.test == test}
    rules = sorted(own - {"", NO_RULE})
    return (
        f" [{'; '.join(f'{rule}: {texts[rule]}' if rule in texts else rule for rule in rules)}]"
        if rules
        else ""
    )
