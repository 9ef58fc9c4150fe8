"""Numbers of a mixed fleet do not compare (rule C37): each field that must be equal, planted unequal."""

from __future__ import annotations

import pytest

from bumpgate.baseline import HOST, SOFTWARE, WORK, comparable
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

RECORD = {
    "lane": "h200",
    "device": "NVIDIA H200",
    "cpu": "Xeon",
    "cores": 16,
    "torch": "2.11.0+cu130",
    "torch_git": "70d99e9",
    "triton": "3.6.0",
    "pattern": "AEMEAEMEAEMR",
    "dtype": "bfloat16",
    "batch": 8,
    "tokens": 4096,
}


def refuses(field: str, value: object) -> bool:
    line = comparable(RECORD, RECORD | {field: value}, bump=())
    assert line is None or line == (
        f"timed rows do not compare: baseline made with {field} {RECORD[field]!r}, this run has {value!r}"
    )
    return line is not None


@lanes("cpu")
def test_each_field_refuses(lane: Lane, row) -> None:
    fields = (*HOST, *SOFTWARE, *WORK)
    assert set(fields) == set(RECORD)
    refused = [field for field in fields if refuses(field, "another")]
    row(
        "wheels/mixed-fleet/refusals",
        len(refused),
        unit="fields",
        witness=len(fields),
        rule="C37",
        expected=11,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param(field, value, marks=planted("C37", f"two records of another {what}"))
        for field, value, what in (
            ("device", "NVIDIA H100", "host class (device)"),
            ("cpu", "EPYC", "host class (processor)"),
            ("torch", "2.9.0+cu130", "torch"),
            ("triton", "3.7.1", "triton"),
            ("pattern", "AEME", "layer pattern"),
            ("dtype", "float32", "dtype"),
            ("batch", 4, "batch"),
            ("tokens", 2048, "sequence length"),
        )
    ],
)
@lanes("cpu")
def test_a_planted_difference_is_refused(lane: Lane, field: str, value: object) -> None:
    assert refuses(field, value)
    assert not refuses(field, RECORD[field])


@lanes("cpu")
def test_the_bump_itself_and_what_nobody_states_are_no_reason(lane: Lane) -> None:
    bumped = RECORD | {"torch": "2.12.0+cu130", "torch_git": "0d99e9a", "triton": "3.7.1"}
    assert comparable(RECORD, bumped) is None
    assert comparable(RECORD, bumped, bump=("torch", "torch_git")) is not None
    silent = {name: value for name, value in RECORD.items() if name not in WORK}
    assert comparable(silent, silent, bump=()) is None
    assert comparable(silent, RECORD, bump=()) is not None, "one side says what it ran, the other does not"
    assert comparable({}, silent, bump=()) is None
