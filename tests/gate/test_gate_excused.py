"""What excuses a row of the candidate, another build or an acceptance, does not excuse a value that is worse."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

import pytest

from bumpgate.core import accepted, kernel_code
from bumpgate.core.baseline import Baseline, Reviewed, judge
from bumpgate.core.findings import Decision
from bumpgate.core.rows import Judgement, Record, Row, Verdict
from bumpgate.gate.timed import timed_rows
from bumpgate.gate.verdict import Side, judge_gate
from suites.support.planted import planted

TEST = "suites/compile/test_a.py::test_a[cpu]"
KERNELS, CODE = "compile/nam52-regional/generated_kernels", "kernels/attention-codegen/code"
OLD, NEW = {"torch": "2.13.0", "triton": None}, {"torch": "2.15.0", "triton": None}
REVIEWED_CODE = kernel_code.text(registers=200, spills=0, wgmma=64, programs_per_sm=2)
BASELINE = Baseline(
    "cpu",
    OLD,
    {
        KERNELS: Reviewed(100, "kernels", "exact", test=TEST, per_build=True),
        CODE: Reviewed(None, "counts", "code", test=TEST, values={"3.7.1": REVIEWED_CODE}),
    },
)


def record(*judgements: Judgement) -> Record:
    return Record({"lane": "cpu"}, judgements)


def gate(adopted: Judgement, candidate: Judgement) -> tuple[Decision, str]:
    """Return decision and label of the first finding."""
    found = judge_gate("cpu", Side("torch 2.13.0", record(adopted)), Side("torch 2.15.0", record(candidate)))
    return found.decision, found.findings[0].label


def accept(row: str, value: int | str) -> accepted.Acceptance:
    return accepted.Acceptance("cpu", row, value, "ann", "why", date(2026, 11, 1), date(2027, 1, 1))


def kernels(
    value: int, build: dict[str, str | None], entries: Sequence[accepted.Acceptance] = ()
) -> Judgement:
    row = Row(KERNELS, value, "kernels", 1, "C6", per_build=True, test=TEST)
    found = judge(row, BASELINE, failed_instruments={}, build=build)
    return accepted.apply(found, BASELINE, accepted.of_lane(entries, "cpu"), date(2026, 12, 1))


@planted("C39", "a candidate that generates ten times the kernels of the adopted build")
@pytest.mark.parametrize("value", [100, 101])
def test_worse_value_of_another_build_holds(value: int) -> None:
    """With 101 kernels for a reviewed 100, the adopted side is red. Its repair does not explain 1000."""
    adopted, candidate = kernels(value, OLD), kernels(1000, NEW)
    assert (adopted.red, candidate.red) == (value != 100, False)
    assert gate(adopted, candidate) == (Decision.HOLD, "WORSE")


def test_value_of_another_build_repairs_a_red_adopted_side() -> None:
    assert gate(kernels(101, OLD), kernels(99, NEW)) == (Decision.ADOPT, "FIXED")


def test_acceptance_of_the_adopted_value_excuses_no_worse_one() -> None:
    entries = [accept(KERNELS, 120)]
    adopted, candidate = kernels(120, OLD, entries), kernels(1000, NEW, entries)
    assert (bool(adopted.accepted), bool(candidate.accepted)) == (True, False)
    assert gate(adopted, candidate) == (Decision.HOLD, "WORSE")
    entries = [accept(KERNELS, 1000)]
    assert gate(kernels(100, OLD, entries), kernels(1000, NEW, entries))[0] is Decision.ADOPT


def test_acceptance_of_adopted_code_excuses_no_spills() -> None:
    accepts = kernel_code.text(registers=210, spills=8, wgmma=64, programs_per_sm=2)
    worse = kernel_code.text(registers=255, spills=4000, wgmma=0, programs_per_sm=1)

    def made(value: str, triton: str) -> Judgement:
        row = Row(CODE, value, "counts", 1, "C6", better="code", test=TEST)
        found = judge(row, BASELINE, failed_instruments={}, build={"torch": "2.13.0", "triton": triton})
        entries = accepted.of_lane([accept(CODE, accepts)], "cpu")
        return accepted.apply(found, BASELINE, entries, date(2026, 12, 1))

    assert gate(made(accepts, "3.7.1"), made(worse, "3.9.0")) == (Decision.HOLD, "WORSE")


@pytest.mark.parametrize("swap", [False, True])
def test_time_with_an_interval_on_one_side_is_of_another_kind(swap: bool) -> None:
    """The sessions need an interval on both sides, and the comparison of single readings one on neither."""

    def made(value: float, interval: tuple[float, float] | None) -> Judgement:
        row = Row(
            "throughput/a/seconds",
            value,
            "s",
            1,
            "C37",
            better="lower",
            tolerance=10.0,
            interval=interval,
            test=TEST,
        )
        return Judgement(row, Verdict.PASS, "", tolerance=10.0)

    adopted, candidate = (made(1.0, None), made(9.0, (8.9, 9.1)))[:: -1 if swap else 1]
    assert timed_rows(record(adopted), record(candidate)) == {}
    assert gate(adopted, candidate) == (Decision.UNKNOWN, "OTHER KIND")
