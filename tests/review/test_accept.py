"""`bumpgate accept`: a difference with an owner, a reason and a last day, and its effect in a run and a gate."""

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
from bumpgate.core.baseline import Baseline, BaselineError, Reviewed, judge, save
from bumpgate.core.errors import RefusedError
from bumpgate.core.findings import Decision, TimedOutcome
from bumpgate.core.gate_file import Paired
from bumpgate.core.rows import Judgement, Record, Row, Verdict, write_record
from bumpgate.gate.drift import Drift, apply_to_times
from bumpgate.gate.sequential import Timed
from bumpgate.gate.verdict import Side, judge_gate
from bumpgate.process.tree_digest import bind, measured_tree
from bumpgate.review import accept
from tests.review.conftest import Call
from tests.support.gate_files import gate_of
from tests.support.lane_files import declare_lanes
from tests.support.project import GOOD, Project, counted
from tests.support.reports import HERE, judged, paired, row, write_gate

FIXED = settings(derandomize=True, max_examples=60, deadline=None)
DAY, TODAY = date(2026, 11, 21), accepted.today()
BREAKS = "compile/nam52-regional/graph_breaks"
SECONDS = "throughput/nam52-regional/seconds"
WHY = "fixed in 2.14.1"


def entry(value: object = 17, late: int = 0, **fields: object) -> Acceptance:
    """Return an entry whose last day is `late` days after DAY."""
    made = {"lane": "cpu", "row": BREAKS, "owner": "ada", "reason": WHY, "since": date(2026, 11, 1)}
    return Acceptance(value=value, expires=DAY + timedelta(late), **made | fields)  # type: ignore[arg-type]


def baseline(value: object = 13, better: str = "exact", tolerance: float = 0.0, id: str = BREAKS) -> Baseline:
    return Baseline("cpu", {}, {id: Reviewed(value, "count", better, tolerance)})  # type: ignore[arg-type]


def apply(measured: Row, reviewed: Baseline, *entries: Acceptance, late: int = 0) -> Judgement:
    known = accepted.of_lane(entries, "cpu")
    found = judge(measured, reviewed, failed_instruments={})
    return accepted.apply(found, reviewed, known, DAY + timedelta(late))


BOTH = (entry(15), entry(17, owner="bob"), entry(19))
NOT_THIS = "reviewed 13, measured 18 count; ada accepted 17 until 2026-11-21, not this"


@pytest.mark.parametrize(
    ("value", "entries", "late", "red", "words"),
    [
        (17, [entry()], 0, False, f"ada, until 2026-11-21: {WHY}"),
        (17, [entry()], 1, True, f"; accepted by ada, expired 2026-11-21: {WHY}"),
        (17, BOTH, 0, False, f"bob, until 2026-11-21: {WHY}"),
        (17, [*BOTH, entry(17, 9, owner="eve")], 1, False, f"eve, until 2026-11-30: {WHY}"),
        (18, [entry()], 0, True, NOT_THIS),
    ],
    ids=["accepted", "expired", "of several values", "latest last day", "another value"],
)
def test_accepted_value_is_shown_and_not_red(
    value: int, entries: list[Acceptance], late: int, red: bool, words: str
) -> None:
    j = apply(row(value=value), baseline(), *entries, late=late)
    assert (j.verdict, j.red, j.label) == (Verdict.CHANGED, red, "CHANGED" + " (accepted)" * (not red))
    assert j.reason.endswith(words) if red else (j.accepted, j.reason[:11]) == (words, "reviewed 13")


@pytest.mark.parametrize(
    ("tolerance", "value", "green", "red"),
    [
        (0.1, 120.0, (105.0, 130.0, 131.9), (132.1, 60.0)),
        (0.0, 120.0, (110.0,), (130.0, 80.0)),
        (0.0, 500.0, (500.0,), (400.0,)),
        (0.0, 1e299, (), (1e5, 110.0)),
    ],
)
def test_accepted_cost_uses_the_tolerance_and_is_no_limit_for_any_loss(
    tolerance: float, value: float, green: tuple[float, ...], red: tuple[float, ...]
) -> None:
    """Beyond twice the reviewed value it accepts itself only."""
    reviewed = baseline(100.0, "lower", tolerance)
    for measured in (*green, *red):
        j = apply(row(value=measured, better="lower"), reviewed, entry(value))
        assert j.red is (measured in red), measured


@pytest.mark.parametrize(
    ("measured", "reviewed", "known"),
    [
        pytest.param(row(value=17, expected=13, better="derived"), baseline(13, "derived"), entry(), id="derived"),
        pytest.param(row(value=17, witness=0), baseline(), entry(), id="no witness"),
        pytest.param(row(value=None), baseline(), entry(), id="nothing read"),
        pytest.param(row(value=17, unit="breaks"), baseline(), entry(), id="unit"),
        pytest.param(row(value=17), baseline(id="a/b/c"), entry(), id="never reviewed"),
        pytest.param(row(value=17), baseline(), entry(lane="h200"), id="lane"),
        pytest.param(row(value=17), baseline(), entry(row="a/b/c"), id="row"),
        pytest.param(row(value=1), baseline(), entry(True), id="bool for an int"),
        pytest.param(row(value=120.0, better="lower"), baseline(100.0, "lower"), entry("120"), id="text for a float"),
        pytest.param(row(value=17), baseline(), entry(None, ratio=1.3), id="ratio without value"),
    ],
)  # fmt: skip
def test_entry_that_does_not_apply_leaves_row_red(
    measured: Row, reviewed: Baseline, known: Acceptance
) -> None:
    assert apply(measured, reviewed, known).red


@FIXED
@given(
    st.integers(0, 4),
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 4), st.integers(-2, 2)), max_size=4),
)
def test_row_is_red_iff_changed_and_not_accepted(
    reviewed: int, measured: int, entries: list[tuple[int, int]]
) -> None:
    j = apply(row(value=measured), baseline(reviewed), *(entry(*each) for each in entries))
    held = any(value == measured and days >= 0 for value, days in entries)
    assert j.red is (measured != reviewed and not held)


def test_acceptance_that_held_when_a_gate_started_has_lapsed_since() -> None:
    entries = (entry(), entry(lane="h200"))
    line = f"the acceptance of {BREAKS} expired {DAY}"
    after = DAY + timedelta(days=1)
    assert accepted.lapsed(entries, "cpu", f"{DAY}T23:59:00+00:00", after) == [line], "held for a minute"
    assert accepted.lapsed(entries, "cpu", f"{after}T00:01:00+00:00", after) == [], "had expired before"
    assert accepted.lapsed(entries, "cpu", f"{DAY}T00:01:00+00:00", DAY) == [], "its last day"


def test_states_describe_the_effect_of_each_entry() -> None:
    reviewed = Baseline("cpu", {}, {f"a/{n}/n": Reviewed(13, "count", "exact") for n in "bcdef"})
    entries = [entry(17, row=f"a/{n}/n") for n in "bcdf"] + [entry(17, -1, row="a/e/n")]
    known = accepted.of_lane(entries, "cpu")
    values = {"b": 17, "c": 13, "d": 18, "e": 17}
    judgements = [judge(row(f"a/{n}/n", v), reviewed, failed_instruments={}) for n, v in values.items()]
    found = [accepted.apply(j, reviewed, known, DAY) for j in judgements]
    lines = accepted.states(found, reviewed, known, DAY, whole=True)
    remove = "remove it with: bumpgate accept a/{}/n --lane cpu --remove"
    assert lines == [
        f"a/b/n 17: accepted by ada, until 2026-11-21: {WHY}",
        f"a/c/n 17: accepted by ada, but measured 13 (PASS); {remove.format('c')}",
        f"a/d/n 17: accepted by ada, but measured 18 (CHANGED); {remove.format('d')}",
        f"a/e/n 17: EXPIRED 2026-11-20; ada: {WHY}",
        f"a/f/n 17: accepted by ada, and nothing measures it; {remove.format('f')}",
    ]
    part = accepted.states(found, reviewed, known, DAY, whole=False)
    assert len(part) == 4, "a partial run does not report unmeasured rows"


def slower(ratio: float, low: float) -> dict[str, Timed]:
    return {SECONDS: replace(paired(TimedOutcome.SLOWER, ratio), interval=(low, ratio + 0.02))}


SMALL, LARGE = Drift(DAY, DAY, 1.05), Drift(DAY, DAY, 1.08)


@pytest.mark.parametrize(
    ("timed", "drifts", "late", "decision", "listed"),
    [
        (slower(1.06, 1.045), [], 0, Decision.ADOPT, True),
        (slower(1.075, 1.055), [], 0, Decision.ADOPT, True),  # its interval holds the accepted ratio
        (slower(1.09, 1.07), [], 0, Decision.HOLD, False),
        (slower(1.06, 1.045), [], 1, Decision.HOLD, True),
        ({}, [SMALL], 0, Decision.ADOPT, True),
        ({}, [LARGE], 0, Decision.HOLD, False),
        ({}, [SMALL, LARGE], 0, Decision.HOLD, True),  # a later, larger one
        ({}, [SMALL], 1, Decision.HOLD, True),
        ({"a/b/c": slower(1.06, 1.045)[SECONDS]}, [], 0, Decision.HOLD, False),
    ],
)
def test_accepted_slowdown_holds_gate_once_larger_or_expired(
    timed: dict[str, Timed], drifts: list[Drift], late: int, decision: Decision, listed: bool
) -> None:
    known = [entry(None, row=SECONDS, ratio=1.06)]
    drifted = {SECONDS: drifts} if drifts else {}
    times, left, lines = apply_to_times(timed, drifted, known, "cpu", DAY + timedelta(late))
    side = Side("torch 2.13.0", Record(HERE, (judged(Verdict.PASS, row()),)))
    assert judge_gate("cpu", side, side, times, left).decision is decision
    what = f"EXPIRED 2026-11-21; ada: {WHY}" if late else f"accepted by ada, until 2026-11-21: {WHY}"
    assert lines == ([f"{SECONDS} ratio 1.06: {what}"] if listed else [])


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
    hostile = entry("a \"b\" \\ \u00e9 \U0001f600 '''", reason="#\t[[accepted]]")
    entries = [entry(0.1 + 0.2, row="z/b/c"), entry(True), entry(17), hostile, entry(17, lane="h200")]
    entries.append(entry(None, row=SECONDS, ratio=1.06))
    path.parent.mkdir()
    path.write_text(accept.file_text(entries))
    assert list(accepted.load(path)) == sorted(entries, key=lambda a: a.key)
    first = path.read_bytes()
    path.write_text(accept.file_text(reversed(accepted.load(path))))
    assert path.read_bytes() == first
    path.write_text(GOOD_ENTRY)
    assert accepted.load(path) == (entry(17),)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (GOOD_ENTRY, "[[accepted", "not TOML"),
        (GOOD_ENTRY, "rows = 1", "holds [[accepted]] entries and nothing else"),
        (GOOD_ENTRY, "accepted = 1", "holds [[accepted]] entries and nothing else"),
        (GOOD_ENTRY, GOOD_ENTRY * 2, f"entry 2: duplicate entry {BREAKS} 17 of lane cpu"),
        ('owner = "ada"\n', "", "an entry has the fields"),
        ("[[accepted]]", "[[accepted]]\nnote = 1", "an entry has the fields"),
        ('"cpu"', '"gpu"', "lane must be one of cpu, h100, h100x4"),
        ("graph_breaks", "Graph Breaks", "row must read suite/case/metric"),
        ('"ada"', '" "', "owner must be one line of text"),
        ('"ada"', '"a\\nb"', "owner must be one line of text"),
        ("2026-11-21", '"soon"', "expires must be a day such as 2026-12-31, got soon"),
        ("2026-11-21", "2026-11-21T10:00:00", "expires must be a day"),
        ("value = 17", "value = nan", "value must be a finite number"),
        ("value = 17", "value = [17]", "value must be a finite number"),
        *(("value = 17", f"ratio = {x}", "ratio must be above 1 and at most 2") for x in (-1.0, 0.99, 1.0, 2.01)),
    ],
)  # fmt: skip
def test_broken_accepted_file_is_one_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    declare_lanes(tmp_path)
    path = tmp_path / "accepted.toml"
    path.write_text(GOOD_ENTRY.replace(old, new))
    with pytest.raises(BaselineError) as caught:
        accepted.load(path)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def entry_until(last: date, value: int = 17) -> str:
    """Return the TOML of an entry of the row `good` that holds for a month."""
    text = GOOD_ENTRY.replace("nam52-regional", "good").replace("17", str(value))
    text = re.sub("since = .*", f"since = {last - timedelta(days=30)}", text)
    return re.sub("expires = .*", f"expires = {last}", text)


def test_lane_run_applies_and_lists_accepted_rows(project: Project) -> None:
    project.tests(GOOD.replace("expected=13, ", "").replace("13", "17"))
    project.baseline(good=counted("test_good", 13, "exact"))
    soon = TODAY + timedelta(days=30)
    row_id = "compile/good/graph_breaks"
    line = f"{row_id} 17: accepted by ada, until {soon}: {WHY}"
    for text, code, words in (
        ("", 1, "reviewed 13, measured 17"),
        (entry_until(soon), 0, f"acceptance: {line}"),
        (entry_until(date(2020, 1, 1)), 1, "accepted by ada, expired 2020-01-01"),
        (entry_until(soon, 16), 1, f"{row_id} 16: accepted by ada, but measured 17 (CHANGED)"),
        ("[[accepted", 4, "baselines/accepted.toml: not TOML"),
    ):
        project.write("baselines/accepted.toml", text)
        done = project.pytest("-m", "cpu", "-n", "0", *["--gate"] * (not code))
        assert (done.code, words in done.out + done.err) == (code, True), done.out + done.err
        if not code:
            assert project.verdicts() == {"good": "CHANGED (accepted)"}
            assert project.record().provenance["acceptances"] == [line]
    assert not project.record().complete


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose record has a changed count, a correct row, a broken instrument and an unreviewed row."""
    declare_lanes(tmp_path)
    monkeypatch.chdir(tmp_path)
    rows = {f"a/{n}/n": Reviewed(13, "count", "derived" if n == "e" else "exact") for n in "bcde"}
    reviewed = Baseline("cpu", {}, rows)
    save(tmp_path / "baselines" / "cpu.json", reviewed)
    measured = [
        row("a/b/n", 17),
        row("a/c/n", 13),
        row("a/d/n", 17, instruments=("graphs",)),
        row("a/f/n", 17),
    ]
    measured.append(row("a/e/n", 17, expected=13, better="derived"))
    failed = {"graphs": "read 2, knows 1"}
    found = [judge(each, reviewed, failed_instruments=failed) for each in measured]
    here = HERE | {"tree": measured_tree(tmp_path, tmp_path / "record.json")}
    write_record(tmp_path / "record.json", here, found)
    return tmp_path


WHO = ("--lane", "cpu", "--owner", "ada", "--reason", WHY)
SOON = ("--expires", str(TODAY + timedelta(30)))
FILE = Path("baselines/accepted.toml")


def test_accept_writes_one_entry_per_row_and_value(repository: Path, call: Call) -> None:
    code, out, _ = call("accept", "a/b/n", *WHO, *SOON)
    wrote = f"wrote {FILE}; review it with: git diff {FILE}\n"
    assert (code, out) == (0, f"accepted a/b/n 17 for ada, until {SOON[1]}: {WHY}\n{wrote}")
    (made,) = accepted.load(FILE)
    assert (made.value, made.since) == (17, TODAY)
    assert call("accept", "a/b/n", *WHO[:3], "bob", *WHO[4:], *SOON)[0] == 0
    (again,) = accepted.load(FILE)
    assert again.owner == "bob", "a later entry for the same row and value replaces the earlier one"
    assert call("accept", "a/b/n", *WHO, "--expires", str(accepted.today()))[0] == 0, "valid for today alone"
    FILE.write_text(accept.file_text([again, replace(again, lane="h200")]))
    remove = ("accept", "a/b/n", "--lane", "cpu", "--remove")
    assert call(*remove)[0] == 0
    assert [a.lane for a in accepted.load(FILE)] == ["h200"], "--remove is for one lane"
    assert call(*remove) == (4, "", f"bumpgate: no acceptance of a/b/n on lane cpu; {FILE} lists them\n")


def test_accept_takes_candidate_values_and_ratios_of_a_gate(repository: Path, call: Call) -> None:
    folder = repository / "gate"
    folder.mkdir()
    reviewed = Baseline("cpu", {}, {"a/b/n": Reviewed(13, "count", "exact")})
    records = [Record(HERE, (judge(row("a/b/n", v), reviewed, failed_instruments={}),)) for v in (13, 19)]
    sides = [Side(f"torch 2.{n}.0", record) for n, record in zip((13, 14), records)]
    timed = {SECONDS: paired(TimedOutcome.SLOWER, 1.061), "t/b/s": paired(TimedOutcome.SAME, 1.0)}
    path, _ = write_gate(folder, *sides, timed, binding=bind(repository, folder))

    def run(row_id: str, *more: str) -> tuple[int, str]:
        code, _, err = call("accept", row_id, *WHO, *SOON, "--record", str(path), *more)
        return code, err

    assert (run("a/b/n"), run(SECONDS)) == ((0, ""), (0, ""))
    first, second = accepted.load(FILE)
    assert (first.value, second.row, second.ratio) == (19, SECONDS, pytest.approx(1.061))
    assert run("t/b/s") == (1, "refused: t/b/s: the paired sessions read SAME: nothing to accept\n")
    (repository / "docs").mkdir()
    (repository / "docs" / "notes.txt").write_text("a document is not measured")
    assert run("a/b/n")[0] == 0
    (repository / "helper.py").write_text("X = 1\n")
    refusal = f"refused: {path} was measured from other sources (tree: helper.py) than these: gate again, or take it as"
    assert run("a/b/n") == (1, f"{refusal} it is with --other-tree\n")
    assert run("a/b/n", "--other-tree")[0] == 0
    raw = json.loads(path.read_text())
    raw["timed"][SECONDS]["ratio"] = 1.9
    path.write_text(json.dumps(raw))
    code, err = run(SECONDS, "--other-tree")
    assert (code, len(err.splitlines()), "(other timed): gate again" in err) == (4, 1, True), err


@pytest.mark.parametrize(
    ("outcome", "drift", "ratio"),
    [("SLOWER", None, 1.06), ("SLOWER", 1.08, 1.08), ("SLOWER", 1.02, 1.06), ("SAME", 1.08, 1.08)],
)
def test_larger_of_slowdown_and_drift_is_accepted(outcome: str, drift: float | None, ratio: float) -> None:
    timed = Paired(outcome, 1.06, (1.05, 1.07), 16)
    assert accept._timed_entry(entry(None, row=SECONDS), timed, drift).ratio == ratio


def test_accept_refuses_a_record_of_other_sources(repository: Path, call: Call) -> None:
    (repository / "helper.py").write_text("X = 1\n")
    code, _, err = call("accept", "a/b/n", *WHO, *SOON)
    refusal = f"refused: the record was measured from other sources (commit {'f' * 12}) than these: run pytest -m cpu"
    assert (code, err) == (1, f"{refusal} again, or take it as it is with --other-tree\n")
    assert not FILE.exists()
    assert call("accept", "a/b/n", *WHO, *SOON, "--other-tree")[0] == 0


LANES = "cpu, h100, h100x4, h100x8, h200, h200x2, h200x4, h200x8, v6e"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("a/c/n", *WHO, *SOON), 1, "refused: a/c/n: PASS: nothing to accept"),
        (("a/d/n", *WHO, *SOON), 1, "INSTRUMENT: instrument graphs: read 2, knows 1; only a measured difference"),
        (("a/f/n", *WHO, *SOON), 1, "NEW: not reviewed: measured 17 count; only a measured difference"),
        (("a/e/n", *WHO, *SOON), 1, "REGRESSION whatever is accepted: expected 13 (derived), measured 17"),
        (("a/x/n", *WHO, *SOON), 4, "record.json holds no row 'a/x/n'"),
        (("a/b/n", "--lane", "gpu", *WHO[2:], *SOON), 4, f"unknown lane 'gpu'; lanes: {LANES}"),
        (("a/b/n", "--lane", "h200", *WHO[2:], *SOON), 1, "record.json is of lane 'cpu', not 'h200'"),
        (("a/b/n", *WHO), 4, "--expires '': not a day such as 2026-12-31"),
        (("a/b/n", *WHO, "--expires", "soon"), 4, "--expires 'soon': not a day"),
        (("a/b/n", *WHO, "--expires", "2020-01-01"), 4, "from today on, and at most 366 days away"),
        (("a/b/n", *WHO, "--expires", "2999-01-01"), 4, "from today on, and at most 366 days away"),
        (("a/b/n", *WHO[:4], *SOON), 4, "--reason must be one line of text in UTF-8, got ''"),
        (("a/b/n", *WHO[:2], *WHO[4:], *SOON), 4, "--owner must be one line of text"),
        (("a/b/n", *WHO, *SOON, "--record", "none.json"), 4, "none.json: cannot be read"),
    ],
)  # fmt: skip
def test_refused_accept_is_one_line_and_writes_nothing(
    repository: Path, call: Call, args: tuple[str, ...], code: int, words: str
) -> None:
    got, _, err = call("accept", *args)
    (line,) = err.splitlines()
    assert (got, words in line, FILE.exists()) == (code, True, False), line


def test_accept_refuses_to_run_inside_a_gate(
    repository: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUMPGATE_GATE", "1")
    refusal = "bumpgate: accept never runs inside a gate (BUMPGATE_GATE=1)\n"
    assert call("accept", "a/b/n", *WHO, *SOON) == (4, "", refusal)


def test_gate_of_another_lane_without_its_records_is_refused(tmp_path: Path) -> None:
    """Only gate.json was copied, so that no record states the lane."""
    gate = replace(gate_of(), timed={SECONDS: Paired("SLOWER", 1.4, (1.3, 1.5), 16)})
    with pytest.raises(RefusedError, match=r"gate.json is of lane 'h200', not 'cpu'"):
        accept._entry(tmp_path, tmp_path / "gate.json", gate, entry(None, row=SECONDS))
