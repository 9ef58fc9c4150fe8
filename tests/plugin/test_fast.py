"""`pytest -m LANE --fast`: the tests that take seconds, a declared or undeclared part of the lane."""

from __future__ import annotations

import pytest

from bumpgate.core.baseline import Reviewed
from tests.support.project import GOOD, Project, counted

SLOW = {
    "long": '@pytest.mark.long(40)\n@lanes("cpu")',
    "cold": '@pytest.mark.cold\n@lanes("cpu")',
    "alone": '@pytest.mark.usefixtures("exclusive_machine")\n@lanes("cpu")',
}


@pytest.mark.parametrize("slow", SLOW)
def test_fast_part_leaves_slow_tests_out(project: Project, slow: str) -> None:
    project.tests(GOOD)
    project.tests(
        GOOD.replace("good", "other").replace('@lanes("cpu")', SLOW[slow]), "suites/model/test_b.py"
    )
    other = Reviewed(13, "breaks", "derived", test="suites/model/test_b.py::test_other[cpu]")
    project.baseline(good=counted("test_good"), other=other)
    part = project.pytest("-m", "cpu", "-n", "0", "--fast")
    assert part.code == 0, part.out + part.err
    assert "cpu: 1 row: 1 PASS; part of the lane: 1 of 2 rows; device cpu" in part.out
    undeclared = project.pytest("-m", "cpu", "-n", "0", "--fast", "--gate")
    assert undeclared.code == 1, undeclared.out + undeclared.err
    assert "part of the lane: 1 of 2 rows; add --part" in undeclared.out


def test_fast_without_a_lane_is_refused_in_one_line(project: Project) -> None:
    project.tests(GOOD)
    done = project.pytest("-n", "0", "--fast")
    assert done.code == 4, done.out + done.err
    assert "ERROR: --fast is a part of a lane: add -m cpu | h100 | h200" in done.err
    assert "Traceback" not in done.out + done.err
