"""Tests that report a red row and fail in another way too: the failure is a problem of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bumpgate.core.rows import Record, Verdict
from bumpgate.gate.verdict import Side, judge_gate
from bumpgate.process.file_transaction import AdoptionError
from bumpgate.review.reviewed_findings import reviewed
from tests.support.gate_files import gate_of
from tests.support.project import GOOD, Project, counted

RED_THEN = """
@pytest.fixture
def ending():
    yield
    {teardown}

@lanes("cpu")
def test_red(lane, row, ending):
    row.count("compile/red/graph_breaks", 5, **COUNT)
    {call}
    row.count("compile/new/graph_breaks", 5, paired=True, **COUNT)
"""
RED = "compile/red/graph_breaks"
TEST_RED = "suites/compile/test_a.py::test_red[cpu]"
SEGFAULT = "os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.mark.parametrize(
    ("call", "teardown", "workers", "why"),
    [
        ("pass", "pass", "1", ""),
        ("raise ValueError('lost')", "pass", "0", "ValueError: lost"),
        ("raise ValueError('lost')", "pass", "1", "ValueError: lost"),
        ("raise InfraError('no clock')", "pass", "1", "InfraError: no clock"),
        ("pass", "raise ValueError('late')", "1", "ValueError: late"),
        ("pass", SEGFAULT, "1", "crashed while running"),
    ],
    ids=["no failure", "in this process", "in a worker", "machine", "teardown", "segfault"],
)
def test_failure_after_a_red_row_is_a_problem(
    project: Project, call: str, teardown: str, workers: str, why: str
) -> None:
    """It may have lost rows that no review has yet, so that a review of the red row alone does not cover it."""
    project.tests(RED_THEN.format(call=call, teardown=teardown) + GOOD)
    project.baseline(red=counted("test_red", 4, "exact"), good=counted("test_good"))
    assert project.pytest("-m", "cpu", "-n", workers).code == 1
    assert project.verdicts()["red"] == "CHANGED"
    record = project.record()
    assert [(p.test, why in p.why) for p in record.problems] == [(TEST_RED, True)] * bool(why)
    judgements = [replace(j, verdict=Verdict.PASS) if j.row.id == RED else j for j in record.judgements]
    good, bad = Side("good", Record(record.provenance, tuple(judgements))), Side("bad", record)
    gate = gate_of(*judge_gate("cpu", good, bad).findings)
    if not why:
        assert [r.row for r in reviewed(gate, [RED], ["upstream"])] == [RED]
        return
    with pytest.raises(AdoptionError, match=r"a failed test cannot be reviewed|gaps in the evidence: INFRA"):
        reviewed(gate, [RED], ["upstream"])


def test_failure_that_a_missing_row_shows_is_no_problem(project: Project) -> None:
    project.tests(RED_THEN.format(call="raise ValueError('lost')", teardown="pass"))
    project.baseline(red=counted("test_red", 4, "exact"), new=counted("test_red"))
    assert project.pytest("-m", "cpu", "-n", "0").code == 1
    assert project.verdicts() == {"red": "CHANGED", "new": "MISSING"}
    assert "ValueError: lost" in project.reason("new")
    assert not project.record().problems
