"""Doctor, end to end, on the machine that runs this lane (rule C28).

In a gate each side is compared with its own lock; `bumpgate doctor` always compares with the adopted set.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bumpgate.doctor.checks import CHECKS
from bumpgate.doctor.examination import Status, examine, make_site
from suites.support.child import ENVIRONMENT, ROOT
from suites.support.lanes import Lane, lanes


@lanes("cpu", "h200")
@pytest.mark.long(80)
def test_doctor_finds_no_defect(lane: Lane, row) -> None:
    findings = examine(make_site(ROOT, lane.name, Path(sys.executable), ENVIRONMENT, own_lock=True), CHECKS)
    defects = [f"{f.code} {f.check}: {f.reason}" for f in findings if f.status is Status.DEFECT]
    passed = sum(f.status is Status.OK for f in findings)
    row.count("wheels/doctor/defects", defects, unit="defects", expected=0, rule="C28", seen=passed)
