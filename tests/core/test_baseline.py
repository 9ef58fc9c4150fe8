"""Judging a row against the reviewed one, by rule and by properties; baseline files."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bumpgate.core.baseline import Baseline, BaselineError, Reviewed, judge, load, save
from bumpgate.core.rows import Row, RowError, Verdict

FIXED = settings(derandomize=True, max_examples=200, deadline=None)

# Powers of two times small integers: their sums and products are exact, so no property fails by rounding.
numbers = st.builds(lambda m, e: m * 2.0**e, st.integers(-100, 100), st.integers(-4, 4))
tolerances = st.sampled_from([0.0, 0.125, 0.5, 2.0])
directions = st.sampled_from(["lower", "higher"])


BUILD = {"torch": "2.13.0", "triton": None}


def measured(value: object, better: str = "lower", **changes: object) -> Row:
    fields: dict[str, object] = {"unit": "s", "witness": 1, "rule": "C37", "better": better}
    return Row("a/b/c", value, **fields | changes)  # type: ignore[arg-type]


def reviewed(value: object, better: str = "lower", tolerance: float = 0.0, **changes: object) -> Baseline:
    row = Reviewed(value, "s", better, tolerance, **changes)  # type: ignore[arg-type]
    return Baseline("cpu", BUILD, {"a/b/c": row})


def verdict(row: Row, baseline: Baseline) -> Verdict:
    return judge(row, baseline, failed_instruments={}).verdict


@FIXED
@given(numbers | st.integers(2**53, 2**80), tolerances | st.floats(0, 1), directions)
def test_reviewed_value_passes(value: float, tolerance: float, better: str) -> None:
    """Also an integer that no float holds."""
    assert verdict(measured(value, better), reviewed(value, better, tolerance)) is Verdict.PASS


@FIXED
@given(numbers, numbers, tolerances)
def test_higher_mirrors_lower(value: float, base: float, tolerance: float) -> None:
    lower = verdict(measured(value, "lower"), reviewed(base, "lower", tolerance))
    assert verdict(measured(-value, "higher"), reviewed(-base, "higher", tolerance)) is lower


@FIXED
@given(numbers, numbers, tolerances, directions, st.sampled_from([0.25, 2.0, 64.0]))
def test_verdict_is_independent_of_the_unit(
    value: float, base: float, tolerance: float, better: str, factor: float
) -> None:
    here = verdict(measured(value, better), reviewed(base, better, tolerance))
    assert verdict(measured(value * factor, better), reviewed(base * factor, better, tolerance)) is here


@FIXED
@given(numbers, numbers, numbers, tolerances)
def test_worse_value_never_gets_a_better_verdict(a: float, b: float, base: float, tolerance: float) -> None:
    rank = [Verdict.WIN, Verdict.PASS, Verdict.REGRESSION]
    better, worse = (
        rank.index(verdict(measured(x), reviewed(base, "lower", tolerance))) for x in sorted((a, b))
    )
    assert better <= worse


@FIXED
@given(numbers, numbers, tolerances, directions)
def test_point_interval_is_judged_like_the_value(
    value: float, base: float, tolerance: float, better: str
) -> None:
    point = verdict(measured(value, better), reviewed(base, better, tolerance))
    assert (
        verdict(measured(value, better, interval=(value, value)), reviewed(base, better, tolerance)) is point
    )


@FIXED
@given(numbers, numbers, tolerances, directions, st.lists(st.integers(0, 50), min_size=4, max_size=4))
def test_wider_interval_is_never_more_certain(
    value: float, base: float, tolerance: float, better: str, reach: list[int]
) -> None:
    """REGRESSION and WIN are certain: both require that the value itself exceeds its limit."""
    baseline = reviewed(base, better, tolerance)
    inner = (value - reach[0], value + reach[1])
    outer = (inner[0] - reach[2], inner[1] + reach[3])
    narrow, wide = (verdict(measured(value, better, interval=i), baseline) for i in (inner, outer))
    point = verdict(measured(value, better), baseline)
    for sure in (Verdict.REGRESSION, Verdict.WIN):
        if wide is sure:
            assert narrow is sure
        if narrow is sure:
            assert point is sure
    if point is Verdict.REGRESSION:
        assert narrow in (Verdict.REGRESSION, Verdict.INCONCLUSIVE), "noise must not make a worse value pass"


# Tolerance 10 %: of 100 the limit is 110, and an interval wider than 20 is inconclusive.
@pytest.mark.parametrize(
    ("value", "interval", "expected", "base"),
    [
        (110, None, Verdict.PASS, 100),
        (110.5, None, Verdict.REGRESSION, 100),
        (90, None, Verdict.PASS, 100),
        (89.5, None, Verdict.WIN, 100),
        (115, (111, 119), Verdict.REGRESSION, 100),
        (112, (108, 116), Verdict.INCONCLUSIVE, 100),
        (108, (104, 112), Verdict.PASS, 100),
        (108, (95, 121), Verdict.INCONCLUSIVE, 100),
        (100, (70, 110), Verdict.PASS, 100),
        (85, (80, 89), Verdict.WIN, 100),
        (85, (80, 95), Verdict.PASS, 100),
        (100, (-math.inf, math.inf), Verdict.INCONCLUSIVE, 100),
        (0, None, Verdict.PASS, 0),
        (1, None, Verdict.REGRESSION, 0),
        (-1, None, Verdict.WIN, 0),
        (-95, None, Verdict.PASS, -100),
        (-85, None, Verdict.REGRESSION, -100),
        (-115, None, Verdict.WIN, -100),
    ],
)
def test_verdict_of_ordered_rows(
    value: float, interval: tuple[float, float] | None, expected: Verdict, base: float
) -> None:
    assert verdict(measured(value, interval=interval), reviewed(base, tolerance=0.1)) is expected


def test_reason_of_a_timed_row_names_limit_and_interval() -> None:
    row = measured(115.0, interval=(111, 119.5))
    found = judge(row, reviewed(100, tolerance=0.1), failed_instruments={})
    assert found.reason.startswith("reviewed 100, limit 110, measured 115.0 ")
    assert found.reason.endswith(" in [111, 119.5]")


VALUES = [0, 1, 13, 13.5, -1, True, False, "", "1", "abc", "13"]


@pytest.mark.parametrize("old", VALUES, ids=repr)
def test_exact_row_passes_only_on_equal_value_and_type(old: object) -> None:
    passing = [
        v for v in VALUES if verdict(measured(v, "exact"), reviewed(old, "exact")) is not Verdict.CHANGED
    ]
    assert [(type(v), v) for v in passing] == [(type(old), old)]


def test_per_build_value_is_judged_only_under_its_build() -> None:
    row = measured("abc", "exact", per_build=True)
    baseline = reviewed("xyz", "exact", per_build=True)
    other = {"torch": "2.14.0", "triton": None}
    for build, red in ((BUILD, True), (other, False), (BUILD | {"triton": "3.7"}, False), (None, True)):
        judgement = judge(row, baseline, failed_instruments={}, build=build)
        assert (judgement.verdict, judgement.red) == (Verdict.CHANGED, red)
    plain = replace(row, per_build=False)
    assert judge(plain, reviewed("xyz", "exact"), failed_instruments={}, build=other).red


@pytest.mark.parametrize(
    ("row", "expected", "words"),
    [
        ({"value": 4, "witness": 0}, Verdict.INSTRUMENT, "saw nothing"),
        ({"value": 4, "witness": -1}, Verdict.INSTRUMENT, "saw nothing"),
        ({"value": None}, Verdict.INSTRUMENT, "returned no value"),
        ({"value": 4, "instruments": ("ok", "dead")}, Verdict.INSTRUMENT, "dead: read 0, known 1"),
        ({"value": 9, "expected": 4, "instruments": ("dead",)}, Verdict.INSTRUMENT, "dead"),
        ({"value": math.nan}, Verdict.REGRESSION, "not a finite number"),
        ({"value": math.inf}, Verdict.REGRESSION, "not a finite number"),
        ({"value": -math.inf, "better": "lower"}, Verdict.REGRESSION, "not a finite number"),
        ({"value": math.nan, "better": "lower", "interval": (0, 1)}, Verdict.REGRESSION, "not a finite"),
        ({"value": 10**400, "better": "lower"}, Verdict.REGRESSION, "not a finite number"),
        ({"value": 0, "expected": 13}, Verdict.REGRESSION, "expected 13 (derived), measured 0"),
        ({"value": 4, "expected": True}, Verdict.REGRESSION, "expected True"),
        ({"value": 4, "at_most": 3.5}, Verdict.REGRESSION, "at most 3.5"),
        ({"value": 4, "at_least": 5}, Verdict.REGRESSION, "at least 5"),
        ({"value": 4, "at_least": 4, "at_most": 4, "expected": 4}, Verdict.PASS, ""),
        ({"value": 4, "unit": "ms"}, Verdict.CHANGED, "unit was 's' when reviewed, is 'ms'"),
        ({"value": 4, "better": "lower"}, Verdict.CHANGED, "better was 'exact'"),
        ({"value": 4, "better": "derived", "expected": 4}, Verdict.CHANGED, "better was 'exact'"),
        ({"value": 4, "per_build": True}, Verdict.CHANGED, "per_build was False"),
        ({"value": 4, "id": "a/b/renamed"}, Verdict.NEW, "not reviewed"),
    ],
    ids=str,
)
def test_first_applicable_rule_decides(row: dict[str, object], expected: Verdict, words: str) -> None:
    fields: dict[str, object] = {
        "id": "a/b/c",
        "unit": "s",
        "witness": 1,
        "rule": "C1",
        "test": "t.py::test_t",
    }
    made = Row(**fields | row)  # type: ignore[arg-type]
    judgement = judge(made, reviewed(4, "exact"), failed_instruments={"dead": "read 0,\n known 1"})
    assert (judgement.verdict, words in judgement.reason) == (expected, True), judgement.reason
    assert "\n" not in judgement.reason
    assert (
        judgement.command.startswith(("bumpgate rebaseline --lane cpu", "pytest -m cpu")) or not judgement.red
    )


@pytest.mark.parametrize(
    ("value", "interval", "bounds", "expected"),
    [
        (0.97, (0.90, 1.07), {"at_least": 1.0}, Verdict.INCONCLUSIVE),
        (0.97, (0.95, 0.99), {"at_least": 1.0}, Verdict.REGRESSION),
        (1.02, (0.95, 1.07), {"at_least": 1.0}, Verdict.PASS),
        (1.02, (0.99, 1.07), {"at_most": 1.0}, Verdict.INCONCLUSIVE),
        (1.02, (1.01, 1.07), {"at_most": 1.0}, Verdict.REGRESSION),
        (1.02, (1.01, 1.07), {"at_least": 0.5, "at_most": 1.0}, Verdict.REGRESSION),
        (math.nan, (0.9, 1.1), {"at_least": 1.0}, Verdict.REGRESSION),
        (math.inf, (0.9, 1.1), {"at_most": 1.0}, Verdict.REGRESSION),
    ],
)
def test_bound_within_the_interval_does_not_decide(
    value: float, interval: tuple[float, float], bounds: dict[str, float], expected: Verdict
) -> None:
    row = measured(value, "higher", interval=interval, tolerance=0.3, **bounds)
    judgement = judge(row, reviewed(1.0, "higher", tolerance=0.3), failed_instruments={})
    assert judgement.verdict is expected, judgement.reason
    assert (f"in [{interval[0]:g}, {interval[1]:g}]" in judgement.reason) is (
        expected is Verdict.INCONCLUSIVE
    )


def test_tolerance_comes_from_the_review_and_not_a_derived_bound() -> None:
    assert verdict(measured(12, "derived", expected=12), reviewed(13, "derived")) is Verdict.PASS
    assert verdict(measured(2.0, tolerance=9.0), reviewed(1.0, tolerance=0.1)) is Verdict.REGRESSION
    assert verdict(measured(1.05, tolerance=0.0), reviewed(1.0, tolerance=0.1)) is Verdict.PASS


reviewed_rows = st.one_of(
    st.builds(
        Reviewed,
        st.floats(allow_nan=False, allow_infinity=False, min_value=-1e299, max_value=1e299)
        | st.integers(-99, 99),
        st.text(min_size=1),
        directions,
        st.floats(0, 0.99),
        st.text(),
        st.text(),
        work=st.text(),
        bound=st.text(),
    ),
    st.builds(
        Reviewed,
        st.text() | st.booleans() | st.integers(),
        st.text(min_size=1),
        st.just("exact"),
        note=st.text(),
        per_build=st.booleans(),
    ),
)


ids = st.builds("{}/{}-{}/{}".format, *[st.sampled_from(["a", "b_1", "zz"])] * 4)


@settings(FIXED, max_examples=30)
@given(st.dictionaries(ids, reviewed_rows, max_size=4))
def test_baseline_round_trip(tmp_path_factory: pytest.TempPathFactory, rows: dict[str, Reviewed]) -> None:
    path = tmp_path_factory.getbasetemp() / "baselines" / "cpu.json"
    baseline = Baseline("cpu", {"torch": "2.13.0", "triton": None}, rows)
    save(path, baseline)
    text = path.read_text()
    assert load(path, "cpu") == baseline
    save(path, Baseline("cpu", {"triton": None, "torch": "2.13.0"}, dict(reversed(rows.items()))))
    assert path.read_text() == text, "the file does not depend on the order"
    assert len(text.splitlines()) == (7 + len(rows) if rows else 6), "one row per line"


GOOD = Reviewed(1, "n", "exact").to_json()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"unit": "count"}, Verdict.CHANGED),
        ({"unit": "FLOP"}, Verdict.CHANGED),
        ({"unit": "bytes"}, Verdict.CHANGED),
        ({"unit": "count", "better": "higher", "value": 853}, Verdict.WIN),
        ({"unit": "s"}, Verdict.WIN),
        ({"unit": "ms", "interval": (283.0, 285.0)}, Verdict.WIN),
    ],
    ids=str,
)
def test_exact_cost_that_falls_is_not_silently_green(fields: dict[str, object], expected: Verdict) -> None:
    """A count of the first graph alone, or FLOPs without the backward, reads as a gain."""
    row = measured(**{"value": 284, **fields})  # type: ignore[arg-type]
    old = 284 if row.better == "higher" else 853
    made = replace(reviewed(old, row.better, 0.1).rows["a/b/c"], unit=row.unit)
    judgement = judge(row, Baseline("cpu", {}, {"a/b/c": made}), failed_instruments={})
    assert judgement.verdict is expected
    assert judgement.red is (expected is Verdict.CHANGED)


def test_curve_that_is_not_finite_is_a_regression() -> None:
    row = measured(1.0, series={"loss": (2.0, math.nan, 1.0)})
    assert Row.from_json(row.to_json()).to_json() == row.to_json()
    judgement = judge(row, reviewed(1.0), failed_instruments={})
    assert judgement.verdict is Verdict.REGRESSION
    assert judgement.reason == "curve 'loss': point 1 is nan, not a finite number"


def written(tmp_path: Path, **row: object) -> Path:
    path = tmp_path / "baselines" / "cpu.json"
    path.parent.mkdir(exist_ok=True)
    rows = {"a/b/c": {k: v for k, v in (GOOD | row).items() if v is not Ellipsis}}
    path.write_text(json.dumps({"schema": 1, "lane": "cpu", "made_with": {}, "rows": rows}, indent=1))
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"value": None},
        {"value": [1]},
        {"value": {"float": "nan"}},
        {"value": 10**400},
        {"better": "smaller"},
        {"better": "lower", "value": "text"},
        {"better": "lower", "tolerance": -1},
        {"better": "lower", "tolerance": "5%"},
        {"better": "lower", "tolerance": True},
        {"better": "lower", "tolerance": 1e299},
        {"better": "higher", "tolerance": 1.0},
        {"tolerance": 0.1},
        {"note": 3},
        {"unit": ...},
        {"owner": "me"},
        {"per_build": 0},
    ],
    ids=str,
)
def test_invalid_baseline_row_is_refused(tmp_path: Path, row: dict[str, object]) -> None:
    with pytest.raises(BaselineError) as caught:
        load(written(tmp_path, **row), "cpu")
    message = str(caught.value)
    assert message.startswith("baselines/cpu.json: row 'a/b/c': ")
    assert message.endswith("restore it with: git checkout baselines/cpu.json")
    assert len(message.splitlines()) == 1


def test_baseline_that_never_ends_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cpu.json")
    (tmp_path / "h200.json").symlink_to("/dev/zero")
    for lane in ("cpu", "h200"):
        with pytest.raises(BaselineError, match="not a regular file"):
            load(tmp_path / f"{lane}.json", lane)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"unit": "n",', '"unit": "n"', "line 9 column 4: not JSON (Expecting ',' delimiter)"),
        ('"rows": {', '"rows": {\n<<<<<<< HEAD', "line 6 column 1: not JSON"),
        ('"value": 1,', '"value": 1, "value": 1,', "duplicate key 'value'"),
        ('"rows": {', f'"rows": {{"a/b/c": {json.dumps(GOOD)},', "duplicate key 'a/b/c'"),
        ('"value": 1,', '"value": NaN,', "NaN is not a valid baseline value"),
        ('"schema": 1', '"schema": 2', "not a baseline of schema 1"),
        ('"lane": "cpu"', '"lane": "h200"', "holds lane 'h200', not 'cpu'"),
        ('"a/b/c"', '"a/b"', "row 'a/b': the id"),
        ('"made_with": {}', '"made_with": {"torch": 2}', "made_with must map"),
    ],
)
def test_broken_baseline_error_has_place_and_fix(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = written(tmp_path)
    assert load(path, "cpu").rows["a/b/c"].value == 1
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(BaselineError) as caught:
        load(path, "cpu")
    assert words in str(caught.value)
    assert "git checkout baselines/cpu.json" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@FIXED
@given(st.binary(max_size=60) | st.just(b"[" * 100_000) | st.just(b'{"schema": 1, "lane": "cpu"}'))
def test_arbitrary_file_is_a_one_line_baseline_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.json"
    path.write_bytes(content)
    with pytest.raises(BaselineError) as caught:
        load(path, "cpu")
    assert len(str(caught.value).splitlines()) == 1


def test_absent_baseline_is_an_error_unless_allowed(tmp_path: Path) -> None:
    with pytest.raises(BaselineError, match=r"no such file; .* bumpgate rebaseline --lane cpu"):
        load(tmp_path / "baselines/cpu.json", "cpu")
    assert load(tmp_path / "cpu.json", "cpu", missing_ok=True) == Baseline("cpu")
    (tmp_path / "cpu.json").mkdir()
    with pytest.raises(BaselineError, match="cannot be read"):
        load(tmp_path / "cpu.json", "cpu", missing_ok=True)


@pytest.mark.parametrize(
    ("value", "inside", "expected"),
    [
        (1, True, Verdict.PASS),
        (0, False, Verdict.PASS),
        (0, True, Verdict.FIXED),
        (1, False, Verdict.REGRESSION),
    ],
)
def test_defect_row_is_judged_by_its_range(value: int, inside: bool, expected: Verdict) -> None:
    row = measured(
        value, "defect", at_most=int(inside), evidence=("known in torch==2.13.*, installed 2.14.1",)
    )
    judgement = judge(row, reviewed(1, "defect"), failed_instruments={})
    assert judgement.verdict is expected
    assert judgement.red is (expected is Verdict.REGRESSION)
    assert expected is Verdict.PASS or "known in torch==2.13.*, installed 2.14.1" in judgement.reason
    assert expected is Verdict.REGRESSION or verdict(row, Baseline("cpu")) is Verdict.NEW


@pytest.mark.parametrize("fields", [{}, {"at_most": 1}, {"at_most": 2, "evidence": ("x",)}])
def test_defect_row_requires_its_range(fields: dict[str, object]) -> None:
    with pytest.raises(RowError, match="a defect row has"):
        measured(1, "defect", **fields)
