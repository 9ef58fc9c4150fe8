"""Rows, verdicts and record.json: valid rows, and round trip of a record."""

from __future__ import annotations

import json
import lzma
import math
import os
import string
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bumpgate.core.rows import (
    MAX_CURVES,
    MAX_POINTS,
    RECORD_SCHEMA,
    Judgement,
    Problem,
    ProblemKind,
    RecordError,
    Row,
    RowError,
    Value,
    Verdict,
    digest_of,
    read_record,
    same_value,
    write_atomic,
    write_record,
)
from bumpgate.core.text import printable
from suites.support.planted import planted

FIXED = settings(derandomize=True, max_examples=40, deadline=None)

names = st.text(string.ascii_lowercase + "_", min_size=1).map(lambda s: "a" + s)
ids = st.builds("{}/{}-1/{}".format, names, names, names)
texts = st.text(max_size=20).map(printable)
finite = st.floats(-1e6, 1e6)
values = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False) | texts


@st.composite
def rows(draw: st.DrawFn) -> Row:
    value = draw(values)
    interval = None
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if numeric and draw(st.booleans()):
        interval = (draw(st.sampled_from([-math.inf, float(value)])), math.inf)
    return Row(
        id=draw(ids),
        value=value,
        unit=draw(names),
        witness=draw(st.integers(-2, 5)),
        rule=draw(st.sampled_from(["C1", "X14"])),
        expected=draw(st.none() | st.integers() | texts),
        better="lower" if interval else "exact",
        work=draw(texts),
        tolerance=draw(st.floats(0, 1, exclude_max=True)) if interval else 0.0,
        interval=interval,
        evidence=tuple(draw(st.lists(texts, max_size=3))),
        instruments=tuple(draw(st.lists(names, max_size=3))),
        test=draw(texts),
        per_build=not interval and draw(st.booleans()),
        series=draw(st.dictionaries(names, st.lists(finite, min_size=1, max_size=3).map(tuple), max_size=2)),
    )


judgements = st.builds(
    Judgement, rows(), st.sampled_from(list(Verdict)), texts, texts, st.booleans(), st.booleans(), texts
)


def make(**changes: object) -> Row:
    """Return a valid row with some fields changed."""
    fields: dict[str, object] = {"id": "a/b/c", "value": 1, "unit": "n", "witness": 1, "rule": "C1"}
    return Row(**fields | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "a/b"},
        {"id": "a/b/c/d"},
        {"id": "a/b/Graph-Breaks"},
        {"id": "a/b /c"},
        {"id": "a/b/c\n"},
        {"value": [1]},
        {"value": 1 + 2j},
        {"unit": ""},
        {"witness": True},
        {"witness": 1.0},
        {"rule": ""},
        {"rule": "6"},
        {"better": "smaller"},
        {"expected": math.nan},
        {"expected": Fraction(1)},
        {"at_most": math.inf},
        {"at_most": "2"},
        {"at_least": True},
        {"value": "text", "at_most": 2.0},
        {"better": "lower", "value": "text"},
        {"better": "higher", "value": True},
        {"better": "lower", "tolerance": -0.1},
        {"better": "lower", "tolerance": math.nan},
        {"better": "higher", "tolerance": 1.0},
        {"tolerance": 0.1},
        {"interval": (0, 2)},
        {"better": "derived"},
        {"better": "lower", "per_build": True},
        {"better": "lower", "interval": (2, 3)},
        {"better": "lower", "interval": (0, math.nan)},
        {"better": "lower", "interval": (0, 1, 2)},
        {"series": [1.0]},
        {"series": {"": (1.0,)}},
        {"series": {"loss": ()}},
        {"series": {"loss": [1.0]}},
        {"series": {"cost_per_round": (1.0, math.nan)}},
        {"series": {"loss": ("1",)}},
        {"series": {"loss": (0.0,) * (MAX_POINTS + 1)}},
        {"series": {f"loss{i}": (0.0,) for i in range(MAX_CURVES + 1)}},
    ],
    ids=str,
)
def test_invalid_row_is_refused_in_one_line(changes: dict[str, object]) -> None:
    with pytest.raises(RowError) as caught:
        make(**changes)
    assert "\n" not in str(caught.value).replace("\\n", "")


def test_valid_rows_near_the_limits_are_accepted() -> None:
    make(better="lower", tolerance=0.1, interval=(0, 2))
    make(better="lower", value=math.nan, interval=(0, 2))
    make(better="derived", at_least=0)
    make(value="abc", per_build=True)
    make(value=10**400, better="lower", interval=(0, 1))
    make(series={f"loss{i}": (0.0,) * MAX_POINTS for i in range(MAX_CURVES)})
    make(id="kernels/causal_conv1d-cpu-fp32/forward_error_ratio", rule="X14")


def test_green_verdicts_and_order_by_severity() -> None:
    assert [v.value for v in Verdict if not v.red] == ["WIN", "FIXED", "PASS"]
    assert sorted(Verdict, key=lambda v: v.severity)[0] is Verdict.REGRESSION
    assert Judgement(make(), Verdict.CHANGED, "").red
    assert not Judgement(make(), Verdict.CHANGED, "", explains=True).red
    known = Judgement(make(), Verdict.CHANGED, "", accepted="ada, until 2026-12-31: known")
    assert not known.red
    assert known.label == "CHANGED (accepted)"


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [(13, 13.0, True), (1, True, False), (0, False, False), ("1", 1, False), (math.nan, math.nan, False)],
)
def test_same_value_compares_kind_and_value(a: Value, b: Value, same: bool) -> None:
    assert same_value(a, b) is same
    assert same_value(b, a) is same


problems = st.builds(Problem, texts, st.sampled_from(list(ProblemKind)), texts)


@FIXED
@given(
    st.lists(judgements, unique_by=lambda j: j.row.id, max_size=4),
    st.booleans(),
    st.lists(problems, max_size=2),
)
def test_record_round_trips(
    tmp_path_factory: pytest.TempPathFactory, found: list[Judgement], complete: bool, problems: list[Problem]
) -> None:
    path = tmp_path_factory.getbasetemp() / "record.json"
    provenance = {"lane": "cpu", "cores": 2, "triton": None}
    wrote = write_record(path, provenance, found, complete=complete, problems=problems)
    read = read_record(path)
    assert read == wrote
    assert [j.row.id for j in read.judgements] == sorted(j.row.id for j in found)
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["schema"] == RECORD_SCHEMA


def test_what_a_verdict_displays_does_not_distinguish_judgements() -> None:
    """A record without these fields, of an older bumpgate, equals one with them."""
    one = Judgement(make(), Verdict.PASS, "")
    other = Judgement(make(), Verdict.PASS, "", reviewed=1, limit="<= 2", tolerance=0.5)
    assert one == other
    assert one != Judgement(make(), Verdict.WIN, "")


def test_row_json_omits_unset_optional_fields() -> None:
    plain = Judgement(make(), Verdict.PASS, "").to_json()
    assert "accepted" not in plain
    assert "series" not in plain["row"]
    curve = make(series={"loss": (2.0, 1.0)})
    assert curve.to_json()["series"] == {"loss": [2.0, 1.0]}
    assert hash(curve) == hash(make()), "a row can still be a key"
    for value in (math.inf, -math.inf, math.nan):
        assert repr(Row.from_json(make(value=value).to_json()).value) == repr(value)


def test_invalid_series_is_refused_in_one_line() -> None:
    for series in ([1.0], {"loss": 1.0}, {"loss": ["x"]}, {"loss": None}, "loss"):
        with pytest.raises(RowError) as caught:
            Row.from_json(make().to_json() | {"series": series})
        assert len(str(caught.value).splitlines()) == 1


@FIXED
@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.integers() | texts, st.lists).map(json.dumps).map(str.encode)
)
def test_read_record_of_any_other_file_raises_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "bad.json"
    path.write_bytes(content)
    with pytest.raises(RecordError) as caught:
        read_record(path)
    assert len(str(caught.value).splitlines()) == 1


def test_record_compressed_by_xz_is_read(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(path, {"lane": "cpu"}, [Judgement(make(), Verdict.PASS, "")])
    packed = tmp_path / "packed.json.xz"
    packed.write_bytes(lzma.compress(path.read_bytes()))
    assert read_record(packed) == read_record(path)
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(RecordError, match=r"packed\.json\.xz: not a record \(Compressed data ended"):
        read_record(packed)


def test_write_follows_links_and_refuses_a_device(tmp_path: Path) -> None:
    """Root may replace /dev/null, which is a link's target here, as a pipe is."""
    (tmp_path / "shared").mkdir()
    link, pipe = tmp_path / "cpu.json", tmp_path / "pipe"
    link.symlink_to("shared/cpu.json")
    write_atomic(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "shared/cpu.json").read_text() == "text"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        write_atomic(pipe, "text")
    assert pipe.is_fifo()


def test_record_without_a_required_part_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(path, {"lane": "cpu"}, [Judgement(make(), Verdict.PASS, "")])
    raw = json.loads(path.read_text())
    for lost in ("provenance", "rows", "complete", "problems"):
        path.write_text(json.dumps({k: v for k, v in raw.items() if k != lost}))
        with pytest.raises(RecordError):
            read_record(path)
    raw["rows"][0]["row"]["witness"] = "many"
    path.write_text(json.dumps(raw))
    with pytest.raises(RecordError, match="witness must be an int"):
        read_record(path)
    with pytest.raises(RecordError, match="cannot be read"):
        read_record(tmp_path / "none.json")


EDITED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a value": (lambda raw: raw["rows"][0]["row"].update(value=99), ""),
    "provenance": (lambda raw: raw["provenance"].update(torch="2.0"), ""),
    "no problems": (lambda raw: raw.update(problems=[]), ""),
    "complete": (lambda raw: raw.update(complete="no"), "complete must be true or false, got 'no'"),
    "twice": (lambda raw: raw.update(rows=raw["rows"] * 2), "has the row .* more than once"),
}


@planted("C39", "a record is edited after its run")
@pytest.mark.parametrize("name", EDITED)
def test_edited_record_is_refused(tmp_path: Path, name: str) -> None:
    """What no run writes is refused with any digest, and without one."""
    path = tmp_path / "record.json"
    problem = Problem("t.py::a", ProblemKind.FAILED, "boom")
    write_record(path, {"lane": "cpu"}, [Judgement(make(), Verdict.PASS, "")], problems=[problem])
    assert read_record(path).sealed
    edit, invalid = EDITED[name]
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(RecordError, match="was edited after the run wrote it"):
        read_record(path)
    del raw["digest"]
    for made in (raw, {**raw, "digest": digest_of(raw)}) if invalid else ():
        path.write_text(json.dumps(made))
        with pytest.raises(RecordError, match=invalid):
            read_record(path)


def test_failed_write_leaves_the_old_record_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    write_record(path, {"lane": "cpu"}, [Judgement(make(), Verdict.PASS, "")])
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_record(path, {"lane": "cpu"}, [])
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["record.json"]
