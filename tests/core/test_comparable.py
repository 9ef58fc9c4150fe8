"""Rule C37: times are only compared with times of the same host class and the same work."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.core.baseline import Baseline, Reviewed, comparable, judge, load, save
from bumpgate.core.errors import RefusedError
from bumpgate.core.findings import Decision
from bumpgate.core.hosts import on_this_host
from bumpgate.core.rows import Judgement, Record, Row, Verdict
from bumpgate.gate.verdict import Side, judge_gate
from bumpgate.plugin.provenance import versions
from bumpgate.process.host import cores, cpu_model
from bumpgate.review.rebaseline import plan
from suites.support.planted import planted
from tests.support.project import Project

HOST = {"lane": "cpu", "device": "cpu", "cpu": "EPYC", "cores": 16}  # as in a record
TIMED = {"better": "lower", "tolerance": 0.1, "interval": (2.0, 2.0), "work": "pattern AEME, batch 2"}


def test_comparable_reports_differing_host_class() -> None:
    assert comparable(HOST, HOST | {"torch": "2.14"}) is None
    assert comparable({}, HOST) is None
    assert comparable(HOST | {"device": "NVIDIA H200"}, {"cpu": "EPYC", "cores": 32}) is None
    for key in HOST:
        line = comparable(HOST, HOST | {key: "other"})
        assert (
            line
            == f"timed rows are not comparable: baseline made with {key} '{HOST[key]}', this run has 'other'"
        )


@pytest.mark.parametrize(
    ("fields", "judged"),
    [
        pytest.param(TIMED, False, marks=planted("C37", "a time of another class of host")),
        ({"better": "lower", "tolerance": 0.1}, False),
        ({"better": "lower", "tolerance": 0.1, "unit": "n"}, True),
        (TIMED | {"at_most": 1.5}, True),
    ],
    ids=["timed", "read once", "not a time", "above a derived bound"],
)
@pytest.mark.parametrize("host", [HOST, HOST | {"cpu": "Xeon"}], ids=["same", "other"])
def test_time_of_another_host_is_not_judged(
    fields: dict[str, object], judged: bool, host: dict[str, object]
) -> None:
    made = Row("a/b/c", 2.0, **{"unit": "s", "witness": 1, "rule": "C37"} | fields)  # type: ignore[arg-type]
    baseline = Baseline("cpu", HOST, {"a/b/c": Reviewed(1.0, made.unit, "lower", 0.1, work=made.work)})
    found = judge(made, baseline, failed_instruments={})
    assert found.verdict is Verdict.REGRESSION
    shown = on_this_host(found, baseline, host, {})
    assert shown.red is (judged or host == HOST)
    if not shown.red:
        assert shown.label == "INCONCLUSIVE (not judged)"
        assert (
            shown.reason
            == "timed rows are not comparable: baseline made with cpu 'EPYC', this run has 'Xeon'"
        )


@pytest.mark.parametrize(
    ("unit", "here", "shown"),
    [("us", 9.0, True), ("us", 3.0, False), ("bytes/s", 3.0, True), ("bytes/s", 9.0, False)],
)
def test_time_that_meets_its_limit_is_judged_on_a_slower_host_only(
    unit: str, here: float, shown: bool
) -> None:
    """A host is slower with a longer latency, or a lower rate."""
    reviewed = {
        "a/b/c": Reviewed(1.0, "s", "lower", 0.1, bound="launch"),
        "calibration/launch/x": Reviewed(6.0, unit, "derived"),
    }
    baseline = Baseline("cpu", HOST, reviewed)
    made = Row("a/b/c", 1.0, "s", 1, "C37", better="lower", tolerance=0.1, bound="launch")
    found = on_this_host(
        judge(made, baseline, failed_instruments={}), baseline, HOST, {"calibration/launch/x": here}
    )
    assert (found.verdict is Verdict.PASS) is shown, found.reason


@pytest.mark.parametrize(
    ("reviewed_work", "work", "verdict"),
    [
        ("pattern AEME, batch 2", "pattern AEME, batch 2", Verdict.PASS),
        pytest.param("pattern AEME, batch 2", "pattern AEME, batch 4", Verdict.CHANGED,
                     marks=planted("C37", "a time of another batch")),
        pytest.param("pattern AEME, batch 2", "pattern AEMR, batch 2", Verdict.CHANGED,
                     marks=planted("C37", "a time of another pattern")),
        ("pattern AEME, batch 2", "", Verdict.CHANGED),
        ("", "pattern AEME, batch 2", Verdict.PASS),
    ],
)  # fmt: skip
def test_times_of_different_work_do_not_compare(reviewed_work: str, work: str, verdict: Verdict) -> None:
    """A baseline without `work` was written before its row had any."""
    made = Row("a/b/c", 1.0, "s", 1, "C37", better="lower", interval=(1.0, 1.0), tolerance=0.1, work=work)
    baseline = Baseline("cpu", {}, {"a/b/c": Reviewed(1.0, "s", "lower", 0.1, work=reviewed_work)})
    found = judge(made, baseline, failed_instruments={})
    assert found.verdict is verdict
    if verdict is Verdict.CHANGED:
        assert found.reason == f"work was {reviewed_work!r} when reviewed, is {work!r}"


def test_rebaseline_keeps_number_of_cores(tmp_path: Path) -> None:
    """As text, like the other facts in the file. A run of this number of cores remains comparable."""
    made = Row("a/b/c", 2.0, "s", 1, "C37", better="lower", interval=(2.0, 2.0), tolerance=0.1)
    record = Record(HOST | {"full_run": True}, (Judgement(made, Verdict.NEW, ""),))
    save(tmp_path / "cpu.json", plan(record, Baseline("cpu"))[0])
    made_with = load(tmp_path / "cpu.json", "cpu").made_with
    assert made_with["cores"] == "16"
    assert comparable(made_with, HOST) is None
    line = "timed rows are not comparable: baseline made with cores '16', this run has '2'"
    assert comparable(made_with, HOST | {"cores": 2}) == line
    assert comparable({"cpu": "EPYC"}, HOST | {"cores": 2}) is None, "a baseline without this fact"


@pytest.mark.parametrize("whole", [True, False])
def test_rebaseline_refuses_times_of_another_host(whole: bool) -> None:
    """One such time among those of another host is refused; a complete run replaces all of them."""
    made = Row("a/b/c", 2.0, "s", 1, "C37", better="lower", interval=(2.0, 2.0), tolerance=0.1)
    old = Baseline("cpu", HOST, {"a/b/c": Reviewed(1.0, "s", "lower", 0.1)})
    provenance = HOST | {"cpu": "Xeon", "full_run": whole}
    record = Record(provenance, (Judgement(made, Verdict.REGRESSION, ""),))
    if whole:
        assert plan(record, old)[0].made_with["cpu"] == "Xeon"
    else:
        with pytest.raises(
            RefusedError, match=r"timed rows are not comparable: .* from a whole run, without --only"
        ):
            plan(record, old)


@pytest.mark.parametrize(
    ("better", "other", "refused"),
    [
        ("lower", {"cpu": "Xeon"}, True),
        ("exact", {"cpu": "Xeon"}, False),
        ("exact", {"torch": "2.15"}, True),
        ("lower", {}, False),
    ],
)
def test_rebaseline_refuses_to_keep_a_value_of_another_build(
    better: str, other: dict[str, str], refused: bool
) -> None:
    """A whole run in which one test failed: its row would pass for one of the new build or host."""
    made = Row("a/b/c", 2, "n", 1, "C1")
    lost = Row("a/b/lost", None, "s", 0, "", better=better)
    rows = {made.id: Reviewed(1, "n", "exact"), lost.id: Reviewed(1.0, "s", better)}
    old = Baseline("cpu", HOST | {"torch": "2.14"}, rows)
    judgements = Judgement(made, Verdict.CHANGED, ""), Judgement(lost, Verdict.MISSING, "test_lost failed")
    record = Record(HOST | {"torch": "2.14", "full_run": True} | other, judgements)
    if not refused:
        assert plan(record, old)[0].rows[lost.id] == rows[lost.id]
        return
    with pytest.raises(RefusedError, match=r"a/b/lost would keep its value \(.*\): test_lost failed"):
        plan(record, old)


@planted("C37", "a gate whose sides step different batches")
def test_gate_refuses_sides_of_different_work() -> None:
    def side(work: str) -> Side:
        made = Row("a/b/c", 1.0, "s", 1, "C37", better="lower", interval=(1.0, 1.0), work=work)
        return Side(work, Record({"lane": "cpu"}, (Judgement(made, Verdict.PASS, ""),)))

    assert judge_gate("cpu", side("batch 2"), side("batch 2")).findings == ()
    (finding,) = judge_gate("cpu", side("batch 2"), side("batch 4")).findings
    assert (finding.decision, finding.label) == (Decision.UNKNOWN, "OTHER WORK")
    assert finding.head == "a/b/c: work 'batch 2' and 'batch 4'"


TIMED_TEST = """
@lanes("cpu")
def test_time(lane, row):
    row.timed("compile/time/graph_breaks", at(3.0, 2.9, 3.1), work="batch 4", **TIMED)
"""


@pytest.mark.parametrize(
    ("made_on", "reason"),
    [
        ({"cores": None}, "reviewed 1.0, limit 1.1"),
        ({"cpu": "EPYC 9"}, "baseline made with cpu 'EPYC 9'"),
        ({"cores": "4096"}, "baseline made with cores '4096'"),
    ],
    ids=["unknown cores", "other processor", "other cores"],
)
def test_lane_run_does_not_judge_incomparable_times(
    project: Project, made_on: dict[str, str | None], reason: str
) -> None:
    """A lane run and, if it is of another host, a rebaseline of only that row."""
    project.tests(TIMED_TEST)
    test, judged = "suites/compile/test_a.py::test_time[cpu]", made_on == {"cores": None}
    host = {"triton": versions()["triton"], "cpu": cpu_model(), "cores": str(cores())}
    rows = {"compile/time/graph_breaks": Reviewed(1.0, "s", "lower", 0.1, test=test, work="batch 4")}
    save(project.root / "baselines/cpu.json", Baseline("cpu", {"torch": "9.9.0"} | host | made_on, rows))
    done = project.pytest("-m", "cpu", "-n", "0")
    label = "REGRESSION" if judged else "INCONCLUSIVE (not judged)"
    assert (done.code, project.verdicts()) == (int(judged), {"time": label}), done.out
    assert reason in project.reason("time")
    if not judged:
        assert reason in done.out
        again = project.bumpgate("rebaseline", "--lane", "cpu", "--only", "compile/time/graph_breaks")
        assert (again.code, reason in again.err) == (1, True)
