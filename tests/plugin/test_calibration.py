"""A time is judged on the hosts whose calibrations agree with the reviewed ones, measured before it, once a process."""

from __future__ import annotations

from bumpgate.core.baseline import Baseline, Reviewed, load, save
from suites.support.planted import planted
from tests.support.project import Project

RATE, TIME = "calibration/memory/rate", "compile/copy/seconds"
CONFTEST = """
import os

def rate():
    assert not os.path.exists("timed"), "measured after the first test that runs alone"
    open("measured", "a").write("once ")
    return float(os.environ["RATE"])

def pytest_bumpgate_calibrations(lane):
    return {"calibration/memory/rate": rate}
"""
BODY = """
@lanes("cpu")
def test_copy(lane, row, exclusive_machine):
    open("timed", "w").close()
    fields = dict(tolerance=0.1, bound="memory", rule="C37", seen=3)
    row.cost("compile/copy/seconds", float(os.environ["SECONDS"]), "s", **fields)

@lanes("cpu")
def test_host(lane, row, exclusive_machine):
    row.calibration("calibration/memory/rate", float(os.environ["RATE"]), "bytes/s", rule="C37", seen=1)
"""
FILE = "suites/compile/test_a.py"


def run(
    project: Project, rate: float, seconds: float, reviewed: float | None = 100e9
) -> tuple[int, str, str]:
    """Run both tests against a reviewed time of 1 s on a host of some rate -> exit code, label and reason."""
    project.tests(BODY)
    project.write("suites/conftest.py", CONFTEST)
    rows = {TIME: Reviewed(1.0, "s", "lower", 0.1, test=f"{FILE}::test_copy[cpu]", bound="memory")}
    if reviewed:
        rows[RATE] = Reviewed(reviewed, "bytes/s", "derived", test=f"{FILE}::test_host[cpu]")
    save(project.root / "baselines/cpu.json", Baseline("cpu", {"torch": "9.9.0", "triton": None}, rows))
    for name in ("timed", "measured"):
        (project.root / name).unlink(missing_ok=True)
    done = project.pytest("-m", "cpu", "-n", "0", RATE=str(rate), SECONDS=str(seconds))
    assert project.verdicts()["memory"] == "PASS", done.out
    assert (project.root / "measured").read_text() == "once "
    return done.code, project.verdicts()["copy"], project.reason("copy")


@planted("C37", "a host whose memory is slower than the reviewed one's")
def test_time_is_judged_where_the_calibration_agrees(project: Project) -> None:
    assert run(project, 95e9, 1.5)[:2] == (1, "REGRESSION")
    assert run(project, 95e9, 1.05)[:2] == (0, "PASS")
    shown = "this host's memory/rate: 70 GB/s, reviewed 100 GB/s"
    assert run(project, 70e9, 1.5) == (0, "INCONCLUSIVE (not judged)", shown)  # not blamed on the build
    assert run(project, 70e9, 1.05)[:2] == (0, "PASS")  # met on a slower host
    for seconds in (1.5, 1.0, 0.5):  # a faster host neither excuses the build nor is its merit
        assert run(project, 130e9, seconds)[1] == "INCONCLUSIVE (not judged)"
    code, label, reason = run(project, 70e9, 1.5, reviewed=None)
    assert (code, label) == (0, "INCONCLUSIVE (not judged)")
    assert reason.startswith("its reviewed host has no calibration of memory: review this one with: ")


def test_times_of_another_machine_are_reviewed_with_its_calibrations(project: Project) -> None:
    """And never one without the other."""
    run(project, 70e9, 1.5)
    path = project.root / "baselines/cpu.json"
    kept = project.bumpgate("rebaseline", "--lane", "cpu", "--record", "record.json")
    rows = load(path, "cpu").rows
    assert (kept.code, rows[RATE].value, rows[TIME].value) == (0, 100e9, 1.0), kept.out + kept.err
    done = project.bumpgate("rebaseline", "--lane", "cpu", "--times")
    assert done.code == 0, done.out + done.err
    rows = load(path, "cpu").rows
    assert (rows[RATE].value, rows[TIME].value, rows[TIME].bound) == (70e9, 1.5, "memory")
    (project.root / "timed").unlink()
    project.pytest("-m", "cpu", "-n", "0", f"{FILE}::test_copy", RATE="70e9", SECONDS="1.2")
    part = project.bumpgate("rebaseline", "--lane", "cpu", "--times")
    assert (part.code, "this run lacks calibration/memory/rate" in part.err) == (1, True), part.err
