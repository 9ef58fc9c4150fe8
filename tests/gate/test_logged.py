"""What only the candidate's tests logged is listed by class, and holds nothing."""

from __future__ import annotations

import json

import pytest

from bumpgate.core.findings import Decision
from bumpgate.core.rows import Record, Verdict
from bumpgate.gate.verdict import Side, judge_gate
from tests.support.project import Project, counted
from tests.support.reports import HERE, THERE, judged, row

TEST = """
@lanes("cpu")
def test_good(lane, row):
    import sys, warnings
    head = "W1128 10:00:00.123456 12 torch/_dynamo/convert_frame.py:1016] "
    print(head + "[0/8] torch._dynamo hit config.recompile_limit (8)", file=sys.stderr)
    warnings.warn("torch.foo(7) is deprecated", FutureWarning)
    row.count("compile/good/graph_breaks", 13, expected=13, **COUNT)
"""
LIMIT = [2, "[0/8] torch._dynamo hit config.recompile_limit (8)"]
WARNING = [1, "FutureWarning: torch.foo(7) is deprecated"]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_record_states_what_tests_logged(project: Project, workers: str) -> None:
    project.tests(TEST)
    project.baseline(good=counted("test_good"))
    done = project.pytest("-m", "cpu", "-n", workers)
    assert done.code == 0, done.out + done.err
    logged = json.loads((project.root / "record.json").read_text())["provenance"]["logged"]
    assert logged["warning: FutureWarning: torch.foo(0) is deprecated"] == WARNING
    assert logged["recompile_limit"][1] == LIMIT[1]


@pytest.mark.parametrize(
    ("adopted", "candidate", "shown"),
    [
        ({"recompile_limit": LIMIT}, {"recompile_limit": [9, "another"]}, []),
        ({"recompile_limit": LIMIT}, {}, []),
        ({}, {"recompile_limit": LIMIT}, ["LOGS only the candidate logs recompile_limit"]),
        ({}, {"warning: a": WARNING, "unknown: b": LIMIT}, ["LOGS warnings of the candidate alone"]),
    ],
    ids=["both", "gone", "a known class", "warnings"],
)
def test_classes_of_the_candidate_alone_are_listed(adopted, candidate, shown) -> None:
    right = (judged(Verdict.PASS, row()),)
    sides = [
        Side("torch", Record({**facts, "logged": logged}, right, tests={"t": "passed"}))
        for facts, logged in ((HERE, adopted), (THERE, candidate))
    ]
    verdict = judge_gate("cpu", *sides)
    assert verdict.decision is Decision.ADOPT
    assert [finding.cause for finding in verdict.findings] == shown
    assert sum(len(f.candidate) for f in verdict.findings) == len(candidate) * bool(shown)
