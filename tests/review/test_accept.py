"""Accept entries: a difference with an owner, a reason and an expiry date, and its effect in a run and a gate."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bumpgate.core import accepted
from bumpgate.core.accepted import Acceptance
from bumpgate.core.baseline import Baseline, BaselineError, Reviewed, judge
from bumpgate.core.findings import Decision, TimedOutcome
from bumpgate.core.rows import Judgement, Record, Row, Verdict
from bumpgate.gate.drift import Drift, apply_to_times
from bumpgate.gate.sequential import Timed
from bumpgate.gate.verdict import Side, judge_gate
from bumpgate.review import accept
from tests.support.lane_files import declare_lanes
from tests.support.project import GOOD, Project, counted
from tests.support.reports import HERE, judged, paired, row

FIXED = settings(derandomize=True, max_examples=60, deadline=None)
DAY = date(2026, 11, 21)
BREAKS = "compile/nam52-regional/graph_breaks"
SECONDS = "throughput/nam52-regional/seconds"


def entry(value: object = 17, expires: date = DAY, **fields: object) -> Acceptance:
    made = {
        "lane": "cpu",
        "row": BREAKS,
        "owner": "ada",
        "reason": "fixed in 2.14.1",
        "since": date(2026, 11, 1),
    }
    return Acceptance(value=value, expires=expires, **made | fields)  # type: ignore[arg-type]


def baseline(value: object = 13, better: str = "exact", tolerance: float = 0.0, id: str = BREAKS) -> Baseline:
    return Baseline("cpu", {}, {id: Reviewed(value, "count", better, tolerance)})  # type: ignore[arg-type]


def apply(measured: Row, reviewed: Baseline, *entries: Acceptance, day: date = DAY) -> Judgement:
    known = accepted.of_lane(entries, "cpu")
    return accepted.apply(judge(measured, reviewed, failed_instruments={}), reviewed, known, day)


def test_accepted_value_is_shown_and_not_red() -> None:
    j = apply(row(value=17), baseline(), entry())
    assert (j.verdict, j.red, j.label) == (Verdict.CHANGED, False, "CHANGED (accepted)")
    assert j.accepted == "ada, until 2026-11-21: fixed in 2.14.1"
    assert j.reason == "reviewed 13, measured 17 count"


def test_expired_entry_is_red_with_owner_and_date() -> None:
    assert not apply(row(value=17), baseline(), entry(), day=DAY).red
    j = apply(row(value=17), baseline(), entry(), day=DAY + timedelta(1))
    assert j.red
    assert j.reason.endswith("; accepted by ada, expired 2026-11-21: fixed in 2.14.1")


def test_matching_entry_with_latest_expiry_applies() -> None:
    entries = (entry(15), entry(17, owner="bob"), entry(19))
    assert apply(row(value=17), baseline(), *entries).accepted.startswith("bob")
    late = entry(17, DAY + timedelta(9), owner="eve")
    j = apply(row(value=17), baseline(), *entries, late, day=DAY + timedelta(1))
    assert j.accepted.startswith("eve")


def test_value_other_than_accepted_is_red_with_reason() -> None:
    j = apply(row(value=18), baseline(), entry())
    assert j.red
    assert j.reason == "reviewed 13, measured 18 count; ada accepted 17 until 2026-11-21, not this"


def test_acceptance_uses_the_tolerance_of_the_row() -> None:
    reviewed = baseline(100.0, "lower", 0.1)
    for value, red in ((105.0, False), (130.0, False), (131.9, False), (132.1, True), (60.0, True)):
        assert apply(row(value=value, better="lower"), reviewed, entry(120.0)).red is red, value


@pytest.mark.parametrize(
    ("value", "measured", "red"),
    [
        (120.0, 110.0, False),
        (120.0, 130.0, True),
        (120.0, 80.0, True),
        (500.0, 500.0, False),
        (500.0, 400.0, True),
        (1e299, 1e5, True),
        (1e299, 110.0, True),
    ],
)
def test_accepted_cost_is_no_limit_for_any_loss(value: float, measured: float, red: bool) -> None:
    """Beyond twice the reviewed value it accepts itself only."""
    j = apply(row(value=measured, better="lower"), baseline(100.0, "lower"), entry(value))
    assert j.red is red


@pytest.mark.parametrize(
    ("measured", "reviewed", "entries"),
    [
        (row(value=17, expected=13, better="derived"), baseline(13, "derived"), (entry(17),)),
        (row(value=17, witness=0), baseline(), (entry(17),)),
        (row(value=None), baseline(), (entry(17),)),
        (row(value=17, unit="breaks"), baseline(), (entry(17),)),
        (row(value=17), baseline(id="a/b/c"), (entry(17),)),
        (row(value=17), baseline(), (entry(17, lane="h200"),)),
        (row(value=17), baseline(), (entry(17, row="a/b/c"),)),
        (row(value=1), baseline(), (entry(True),)),
        (row(value=120.0, better="lower"), baseline(100.0, "lower"), (entry("120"),)),
        (row(value=17), baseline(), (entry(None, ratio=1.3),)),
    ],
    ids=[
        "derived",
        "no witness",
        "nothing read",
        "unit",
        "never reviewed",
        "lane",
        "row",
        "bool for an int",
        "string for a float",
        "ratio without value",
    ],
)
def test_entry_that_does_not_apply_leaves_row_red(
    measured: Row, reviewed: Baseline, entries: tuple[Acceptance, ...]
) -> None:
    assert apply(measured, reviewed, *entries).red


@FIXED
@given(
    st.integers(0, 4),
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 4), st.integers(-2, 2)), max_size=4),
)
def test_row_is_red_iff_changed_and_not_accepted(
    reviewed: int, measured: int, entries: list[tuple[int, int]]
) -> None:
    known = [entry(value, DAY + timedelta(days)) for value, days in entries]
    j = apply(row(value=measured), baseline(reviewed), *known)
    held = any(value == measured and days >= 0 for value, days in entries)
    assert j.red is (measured != reviewed and not held)


def test_acceptance_that_held_when_a_gate_started_has_lapsed_since() -> None:
    entries = (entry(expires=DAY), entry(expires=DAY, lane="h200"))
    line = f"the acceptance of {BREAKS} expired {DAY}"
    after = DAY + timedelta(days=1)
    assert accepted.lapsed(entries, "cpu", f"{DAY}T23:59:00+00:00", after) == [line], "held for a minute"
    assert accepted.lapsed(entries, "cpu", f"{after}T00:01:00+00:00", after) == [], "had expired before"
    assert accepted.lapsed(entries, "cpu", f"{DAY}T00:01:00+00:00", DAY) == [], "its last day"


def test_states_describe_the_effect_of_each_entry() -> None:
    reviewed = Baseline("cpu", {}, {f"a/{n}/n": Reviewed(13, "count", "exact") for n in "bcdef"})
    values = {"b": 17, "c": 13, "d": 18, "e": 17}
    entries = [entry(17, row=f"a/{n}/n") for n in "bcdf"] + [entry(17, DAY - timedelta(1), row="a/e/n")]
    known = accepted.of_lane(entries, "cpu")
    found = [
        accepted.apply(
            judge(row(f"a/{n}/n", v), reviewed, failed_instruments={}),
            reviewed,
            known,
            DAY,
        )
        for n, v in values.items()
    ]
    lines = accepted.states(found, reviewed, known, DAY, whole=True)
    assert lines == [
        "a/b/n 17: accepted by ada, until 2026-11-21: fixed in 2.14.1",
        "a/c/n 17: accepted by ada, but measured 13 (PASS); remove it with: bumpgate accept a/c/n --lane cpu --remove",
        "a/d/n 17: accepted by ada, but measured 18 (CHANGED);"
        " remove it with: bumpgate accept a/d/n --lane cpu --remove",
        "a/e/n 17: EXPIRED 2026-11-20; ada: fixed in 2.14.1",
        "a/f/n 17: accepted by ada, and nothing measures it;"
        " remove it with: bumpgate accept a/f/n --lane cpu --remove",
    ]
    assert len(accepted.states(found, reviewed, known, DAY, whole=False)) == 4, (
        "a partial run does not report unmeasured rows"
    )


def slower(ratio: float, low: float) -> dict[str, Timed]:
    return {SECONDS: replace(paired(TimedOutcome.SLOWER, ratio), interval=(low, ratio + 0.02))}


def test_accepted_slowdown_holds_gate_once_larger_or_expired() -> None:
    known = [entry(None, row=SECONDS, ratio=1.06)]

    def decided(
        timed: dict[str, Timed], drifts: dict[str, list[Drift]], day: date = DAY
    ) -> tuple[Decision, list[str]]:
        times, drifted, lines = apply_to_times(timed, drifts, known, "cpu", day)
        side = Side("torch 2.13.0", Record(HERE, (judged(Verdict.PASS, row()),)))
        return judge_gate("cpu", side, side, times, drifted).decision, lines

    line = f"{SECONDS} ratio 1.06: accepted by ada, until 2026-11-21: fixed in 2.14.1"
    assert decided(slower(1.06, 1.045), {}) == (Decision.ADOPT, [line])
    assert decided(slower(1.075, 1.055), {}) == (Decision.ADOPT, [line]), (
        "its interval holds the accepted ratio"
    )
    assert decided(slower(1.09, 1.07), {}) == (Decision.HOLD, [])
    expired = [f"{SECONDS} ratio 1.06: EXPIRED 2026-11-21; ada: fixed in 2.14.1"]
    assert decided(slower(1.06, 1.045), {}, DAY + timedelta(1)) == (Decision.HOLD, expired)
    drift, larger = Drift(DAY, DAY, 1.05), Drift(DAY, DAY, 1.08)
    assert decided({}, {SECONDS: [drift]}) == (Decision.ADOPT, [line])
    assert decided({}, {SECONDS: [larger]}) == (Decision.HOLD, [])
    assert decided({}, {SECONDS: [drift, larger]}) == (Decision.HOLD, [line]), "a later, larger one"
    assert decided({}, {SECONDS: [drift]}, DAY + timedelta(1)) == (Decision.HOLD, expired)
    assert decided({"a/b/c": slower(1.06, 1.045)[SECONDS]}, {})[0] is Decision.HOLD


GOOD_ENTRY = """[[accepted]]
lane = "cpu"
row = "compile/nam52-regional/graph_breaks"
value = 17
owner = "ada"
reason = "fixed in 2.14.1"
since = 2026-11-01
expires = 2026-11-21
"""


def test_day_of_an_acceptance_is_that_of_utc_on_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any time one of these zones, 25 hours apart, has another day than UTC."""
    with monkeypatch.context() as patch:
        for zone in ("Pacific/Kiritimati", "Pacific/Pago_Pago"):
            patch.setenv("TZ", zone)
            time.tzset()
            assert accepted.today() == datetime.now(timezone.utc).date()
    time.tzset()


def test_accepted_file_round_trip_is_sorted(tmp_path: Path) -> None:
    path = tmp_path / "baselines" / "accepted.toml"
    assert accepted.load(path) == ()
    entries = [
        entry(0.1 + 0.2, row="z/b/c"),
        entry(True),
        entry(17),
        entry("a \"b\" \\ \u00e9 \U0001f600 '''", reason="#\t[[accepted]]"),
        entry(None, row=SECONDS, ratio=1.06),
        entry(17, lane="h200"),
    ]
    path.parent.mkdir()
    path.write_text(accept.file_text(entries))
    assert list(accepted.load(path)) == sorted(entries, key=lambda a: a.key)
    first = path.read_bytes()
    path.write_text(accept.file_text(reversed(accepted.load(path))))
    assert path.read_bytes() == first
    assert list(path.parent.iterdir()) == [path]
    path.write_text(GOOD_ENTRY)
    assert accepted.load(path) == (entry(17),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[accepted", "not TOML"),
        ("rows = 1", "holds [[accepted]] entries and nothing else"),
        ("accepted = 1", "holds [[accepted]] entries and nothing else"),
        (GOOD_ENTRY + GOOD_ENTRY, f"entry 2: duplicate entry {BREAKS} 17 of lane cpu"),
        (GOOD_ENTRY.replace('owner = "ada"\n', ""), "an entry has the fields"),
        (GOOD_ENTRY + "note = 1\n", "an entry has the fields"),
        (GOOD_ENTRY.replace('"cpu"', '"gpu"'), "lane must be one of cpu, h100, h200, h200x2, v6e, got 'gpu'"),
        (GOOD_ENTRY.replace("graph_breaks", "Graph Breaks"), "row must read suite/case/metric"),
        (GOOD_ENTRY.replace('"ada"', '" "'), "owner must be one line of text"),
        (GOOD_ENTRY.replace('"ada"', '"a\\nb"'), "owner must be one line of text"),
        (GOOD_ENTRY.replace("2026-11-21", '"soon"'), "expires must be a day such as 2026-12-31, got soon"),
        (GOOD_ENTRY.replace("2026-11-21", "2026-11-21T10:00:00"), "expires must be a day"),
        (GOOD_ENTRY.replace("value = 17", "value = nan"), "value must be a finite number"),
        (GOOD_ENTRY.replace("value = 17", "value = [17]"), "value must be a finite number"),
        *(
            (GOOD_ENTRY.replace("value = 17", f"ratio = {ratio}"), "ratio must be above 1 and at most 2")
            for ratio in (-1.0, 0.99, 1.0, 2.01)
        ),
    ],
)
def test_broken_accepted_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    declare_lanes(tmp_path)
    path = tmp_path / "accepted.toml"
    path.write_text(text)
    with pytest.raises(BaselineError) as caught:
        accepted.load(path)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


MOVED = GOOD.replace("expected=13, ", "").replace("13", "17")
RUN = ("-m", "cpu", "-n", "0")


SOON, LONG_AGO = accepted.today() + timedelta(days=30), date(2020, 1, 1)


def entries_of(*entries: tuple[int, date]) -> str:
    """Return the TOML of entries (value, expiry date), each valid for a month."""
    text = re.sub("(since|expires) = .*", r"\1 = \1-day", GOOD_ENTRY.replace("nam52-regional", "good"))
    return "".join(
        text.replace("17", str(value))
        .replace("since-day", f"{last - timedelta(days=30)}")
        .replace("expires-day", f"{last}")
        for value, last in entries
    )


def test_lane_run_is_green_and_lists_accepted_rows(project: Project) -> None:
    project.tests(MOVED)
    project.baseline(good=counted("test_good", 13, "exact"))
    assert project.pytest(*RUN).code == 1
    project.write("baselines/accepted.toml", entries_of((17, SOON)))
    done = project.pytest(*RUN, "--gate")
    assert done.code == 0, done.out
    assert project.verdicts() == {"good": "CHANGED (accepted)"}
    line = f"compile/good/graph_breaks 17: accepted by ada, until {SOON}: fixed in 2.14.1"
    assert f"acceptance: {line}" in done.out
    assert project.record().provenance["acceptances"] == [line]


def test_lane_run_is_red_if_entry_expired_or_value_differs(project: Project) -> None:
    project.tests(MOVED)
    project.baseline(good=counted("test_good", 13, "exact"))
    project.write("baselines/accepted.toml", entries_of((17, LONG_AGO)))
    assert project.pytest(*RUN).code == 1
    assert "accepted by ada, expired 2020-01-01" in project.reason("good")
    project.write("baselines/accepted.toml", entries_of((16, SOON)))
    done = project.pytest(*RUN)
    assert done.code == 1
    assert f"ada accepted 16 until {SOON}, not this" in project.reason("good")
    assert "graph_breaks 16: accepted by ada, but measured 17 (CHANGED)" in done.out


def test_lane_run_refuses_broken_accepted_file(project: Project) -> None:
    project.tests(MOVED)
    project.baseline(good=counted("test_good", 13, "exact"))
    project.write("baselines/accepted.toml", "[[accepted")
    done = project.pytest(*RUN)
    assert done.code == 4
    assert "baselines/accepted.toml: not TOML" in done.err
    assert not project.record().complete


def test_shipped_accepted_file_loads() -> None:
    root = Path(__file__).parents[2]
    assert isinstance(accepted.load(root / "baselines" / accepted.FILE), tuple)
    assert json.dumps([a.key for a in accepted.load(root / "baselines" / accepted.FILE)])
