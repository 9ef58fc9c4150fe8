"""The outcome of a suite's reading: rows that decide, endpoints, crashes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bumpgate.bisect import probe
from bumpgate.bisect.probe import RECORD, Cause, ProbeError, Reading, Signals, SuiteTest, fresh_caches
from bumpgate.bisect.search import ProbeOutcome
from bumpgate.core import kernel_code
from bumpgate.core.baseline import Baseline, judge
from bumpgate.core.rows import Judgement, Problem, Row, Verdict, write_record
from bumpgate.process import runner


def test_caches_of_a_probe_are_empty_and_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "caches").mkdir()
    (tmp_path / "caches/old").touch()
    with fresh_caches(tmp_path) as variables:
        assert [*(tmp_path / "caches").rglob("old")] == []
        assert variables
    assert [*tmp_path.iterdir()] == []
    with fresh_caches(tmp_path):
        (tmp_path / "caches").rmdir()  # the lane deleted them itself


def row(case: str, verdict: Verdict, *, better: str = "exact", gone: bool = False) -> Judgement:
    row_id = f"compile/{case}/graph_breaks"
    if gone:
        return Judgement(Row(row_id, None, "n", 0, "", test=f"t.py::{case}"), verdict, "not reported")
    expected = {"expected": 1} if better == "derived" else {}
    made = Row(row_id, 1, "n", 1, "C6", better=better, test=f"t.py::{case}", **expected)  # type: ignore[arg-type]
    return Judgement(made, verdict, "")


Readings = Callable[..., Reading]


@pytest.fixture
def reading(tmp_path: Path) -> Readings:
    """Return a function that creates readings of suites."""
    places = itertools.count()

    def make(
        *rows: Judgement,
        problems: Iterable[Any] = (),
        complete: bool = True,
        failure: str = "",
        code: int = 1,
        tests: Mapping[str, str] | None = None,
        cause: str = "RAN",
    ) -> Reading:
        place = tmp_path / str(next(places))
        place.mkdir()
        found = [*map(Problem.from_json, problems)]
        write_record(place / RECORD, {"lane": "cpu"}, rows, complete=complete, problems=found, tests=tests)
        return Reading(place, Cause[cause], code, failure)

    return make


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (runner.USAGE, "pytest rejects the selection: no such option --x (log: "),
        (probe.NOTHING_SELECTED, "-k nothing selects no test of lane cpu"),
    ],
)
def test_selection_that_cannot_run_ends_the_bisect(code: int, words: str, tmp_path: Path) -> None:
    def run_lane(*arguments: object, **options: object) -> Any:
        return runner.LaneRun(code, None, "no such option --x", 1.0, "")

    environment: Any = SimpleNamespace(python=Path(), lock=None, packages={})
    test = SuiteTest(Path(), "cpu", ("-k", "nothing"), "torch", run_lane=run_lane)
    with pytest.raises(ProbeError) as caught:
        test.run(environment, tmp_path)
    assert str(caught.value).startswith(words)


GREEN, RED = Verdict.PASS, Verdict.REGRESSION


def suite(reading: Readings) -> SuiteTest:
    """A suite of two endpoints: `model` is red at the bad one, `old` at both, `fixed` at the good one."""
    made = SuiteTest(Path(), "cpu", (), "torch")
    good = reading(row("model", GREEN), row("old", RED), row("fixed", RED))
    bad = reading(
        row("model", Verdict.CHANGED), row("old", RED), row("fixed", GREEN), problems=["t.py::x: raised"]
    )
    made.learn([good], [bad])
    return made


def test_probe_decides_by_rows_red_only_at_bad_end(reading: Readings) -> None:
    test = suite(reading)
    assert test.deciding == ("compile/model/graph_breaks", "t.py::x")
    lost, raised = row("model", Verdict.MISSING, gone=True), "t.py::x: raised"
    green = row("model", GREEN)
    no_memory = {"test": "t.py::x", "kind": "infra", "why": "no memory"}
    cut = {"complete": False}
    cases = [
        ("all green", "GOOD", [green, row("old", RED)], {}),
        ("another fault", "GOOD", [green, row("old", GREEN), row("new", RED)], {}),
        ("the row", "BAD", [row("model", RED)], {}),
        ("the test", "BAD", [green], {"problems": ["t.py::x: raised otherwise"]}),
        ("the row is lost", "OTHER", [lost], {}),
        ("the row is lost, the test is red", "BAD", [lost], {"problems": [raised]}),
        (
            "another type",
            "OTHER",
            [green],
            {"problems": ["t.py::x: ImportError: libcudart.so.13 (at a.py:3)"]},
        ),
        ("skipped", "SKIP", [lost], {"problems": ["t.py::model: skipped under --gate: old torch"]}),
        ("its machine failed", "UNKNOWN", [green], {"problems": [no_memory]}),
        ("too noisy", "UNKNOWN", [row("model", Verdict.INCONCLUSIVE)], {}),
        ("its instrument broke", "SKIP", [row("model", Verdict.INSTRUMENT)], {}),
        ("cut short", "UNKNOWN", [green], cut | {"problems": ["the run was cut short: 1 of 2"]}),
        ("cut short and red", "BAD", [row("model", RED)], cut),
        ("cut short before the row", "UNKNOWN", [lost], cut),
        ("not collected", "SKIP", [], cut | {"problems": ["t.py: could not be collected: AttributeError"]}),
        ("no import", "SKIP", [], {"cause": "BROKEN", "failure": "import torch: killed by SIGSEGV"}),
    ]
    for name, outcome, rows, fields in cases:
        assert test.judge(reading(*rows, **fields)).outcome.value == outcome, name


CENSUS = {"t.py::a": "passed", "t.py::b": "passed", "t.py::c": "skipped"}


@pytest.mark.parametrize(
    ("tests", "outcome"),
    [
        (CENSUS, "GOOD"),
        ({}, "GOOD"),  # a record of an earlier version has no census
        ({"t.py::a": "passed"}, "BAD"),
        (CENSUS | {"t.py::b": "deselected"}, "OTHER"),
        (CENSUS | {"t.py::b": "xfailed"}, "OTHER"),
        ({"t.py::a": "passed", "t.py::b": "passed"}, "GOOD"),  # it was skipped at the good end
    ],
)
def test_test_that_a_candidate_has_lost_is_a_fault(
    reading: Readings, tests: dict[str, str], outcome: str
) -> None:
    """No row shows it: the test of the good end is not collected at the bad one, and the run is green."""
    test = SuiteTest(Path(), "cpu", (), "torch")
    good, bad = (reading(row("model", GREEN), tests=each) for each in (CENSUS, {"t.py::a": "passed"}))
    test.learn([good], [bad])
    assert (test.deciding, test.differs) == (("t.py::b",), True)
    assert [test.judge(end).outcome.value for end in (good, bad)] == ["GOOD", "BAD"]
    assert test.judge(reading(row("model", GREEN), tests=tests)).outcome.value == outcome
    cut_short = reading(row("model", GREEN), tests={"t.py::a": "passed"}, complete=False)
    assert test.judge(cut_short).outcome is ProbeOutcome.UNKNOWN


@pytest.mark.parametrize("judged", [GREEN, RED, Verdict.FIXED])
@pytest.mark.parametrize("present", [0, 1])
def test_defect_is_read_by_its_presence(reading: Readings, present: int, judged: Verdict) -> None:
    """Its range is keyed by version, which a bisect varies."""
    id = "features/cond/defect"
    made = Row(
        id, present, "present", 1, "R1", better="defect", at_most=1, evidence=("known",), test="t.py::d"
    )
    assert Signals(reading(Judgement(made, judged, ""))).verdicts[id] is (RED if present else GREEN)


def test_endpoints_without_difference_are_judged_alike(reading: Readings) -> None:
    for good, bad, expected in (
        ([row("a", GREEN)], [row("a", GREEN)], ("GOOD", "GOOD")),
        ([row("a", RED)], [row("a", RED)], ("BAD", "BAD")),
        ([row("a", RED), row("b", RED)], [row("a", GREEN), row("b", RED)], ("BAD", "GOOD")),
    ):
        test = SuiteTest(Path(), "cpu", (), "torch")
        ends = reading(*good), reading(*bad)
        test.learn([ends[0]], [ends[1]])
        assert tuple(test.judge(end).outcome.value for end in ends) == expected


def test_unreviewed_row_is_green_and_compared_with_the_good_end(reading: Readings) -> None:
    """What its test derives has judged it."""
    seen = reading(row("a", Verdict.NEW, better="derived"), row("b", Verdict.NEW))
    assert {*Signals(seen).verdicts.values()} == {Verdict.PASS}


def test_crashed_run_is_a_fault_and_killed_run_is_not(reading: Readings) -> None:
    crashed = reading(complete=False, failure="died of SIGSEGV", code=-11)
    assert Signals(crashed).verdicts == {"the run": Verdict.REGRESSION}
    assert Signals(reading(complete=False, failure="died of SIGKILL", code=-9)).verdicts == {}
    test = SuiteTest(Path(), "cpu", (), "torch")
    test.learn([reading(row("a", GREEN))], [crashed])
    assert test.deciding == ("the run",)
    assert test.judge(reading(row("a", GREEN))).outcome is ProbeOutcome.GOOD


@pytest.mark.parametrize(
    ("value", "witness"),
    [(None, 1), (kernel_code.text(registers=1, spills=900), 0)],
    ids=["no value", "no witness"],
)
def test_code_that_was_not_read_decides_nothing(tmp_path: Path, value: str | None, witness: int) -> None:
    def compiled(name: str, counts: str | None, witness: int = 1) -> Reading:
        (tmp_path / name).mkdir()
        made = Row("kernels/a/code", counts, "counts", witness, "C6", better="code", test="t.py::code")
        judgement = judge(made, Baseline("cpu"), failed_instruments={})
        write_record(tmp_path / name / RECORD, {"lane": "cpu"}, [judgement])
        return Reading(tmp_path / name, Cause.RAN, 1)

    test = SuiteTest(tmp_path, "cpu", ("t.py::code",), "triton")
    good, bad = (compiled(f"spills {n}", kernel_code.text(registers=200, spills=n)) for n in (0, 800))
    test.learn([good], [bad])
    assert test.deciding == ("kernels/a/code",)
    found = test.judge(compiled("middle", value, witness))
    assert found.outcome not in (ProbeOutcome.GOOD, ProbeOutcome.BAD)
