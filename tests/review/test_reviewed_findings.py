"""The review of a gate that holds, by options and by a file."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from bumpgate.core.findings import Decision, Finding
from bumpgate.core.gate_file import GateFile, Paired
from bumpgate.process.file_transaction import AdoptionError
from bumpgate.review.reviewed_findings import reviewed
from tests.support.gate_files import gate_of

GATE = gate_of(
    Finding(Decision.HOLD, "REGRESSION", "guard_count", "", ("compile/a/guards", "compile/b/guards")),
    Finding(Decision.HOLD, "CHANGED", "category", "", ("release/facts/category",)),
    Finding(Decision.ADOPT, "NEW", "", "", ("release/facts/new",)),
)
GUARDS = '[[reviewed]]\nrows = ["compile/*/guards"]\nreason = "more guards upstream"\n'
ONE = "[[reviewed]]\nrows = {}\nreason = {}\n"
START = "start/cold_seconds"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "review.toml"


def refusal(gate: GateFile, rows: list[str], why: list[str], file: Path | None = None) -> str:
    with pytest.raises(AdoptionError) as caught:
        reviewed(gate, rows, why, file)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_file_reviews_rows_by_globs(file: Path) -> None:
    file.write_text(GUARDS + ONE.format('["release/facts/category"]', '"future ones"'))
    found = reviewed(GATE, (), (), file)
    assert [(r.row, r.finding, r.reason) for r in found] == [
        ("compile/a/guards", "REGRESSION guard_count", "more guards upstream"),
        ("compile/b/guards", "REGRESSION guard_count", "more guards upstream"),
        ("release/facts/category", "CHANGED category", "future ones"),
    ]


def test_options_and_file_complete_each_other(file: Path) -> None:
    """The first reason of a row is kept: an option's before the file's."""
    file.write_text(GUARDS)
    found = reviewed(GATE, ["release/*", "compile/a/guards"], ["future", "mine"], file)
    assert {r.row: r.reason for r in found} == {
        "release/facts/category": "future",
        "compile/a/guards": "mine",
        "compile/b/guards": "more guards upstream",
    }


FIELDS = 'expected rows = ["ROW", ...] and reason = "TEXT"'
ENTRIES = "expected [[reviewed]] entries, and nothing else"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GUARDS, "not reviewed (1): CHANGED release/facts/category; name each with --reviewed ROW "),
        (ONE.format('["x/y/z"]', '"x"'), " entry 1: 'x/y/z': no finding that holds this gate has such a row"),
        (ONE.format('["release/facts/new"]', '"x"'), "'release/facts/new': no finding that holds this gate has such a"),
        ("rows", ": not TOML ("),
        ("", ENTRIES),
        ("reviewed = 1\n", ENTRIES),
        ("reviewed = []\n", ENTRIES),
        (GUARDS + "[other]\n", ENTRIES),
        ("reviewed = [1]\n", f" entry 1: {FIELDS}"),
        (GUARDS + GUARDS.replace("rows", "row"), f" entry 2: {FIELDS}"),
        ('[[reviewed]]\nrows = ["a"]\n', f" entry 1: {FIELDS}"),
        (ONE.format('"compile"', '"x"'), "rows must be a list of row ids or globs, got 'compile'"),
        (ONE.format("[]", '"x"'), "rows must be a list of row ids or globs, got []"),
        (ONE.format("[1]", '"x"'), "rows must be a list of row ids or globs, got [1]"),
        (ONE.format('["a"]', '" "'), " entry 1: reason must be one line of text"),
        (ONE.format('["a"]', '"two\\nlines"'), " entry 1: reason must be one line of text"),
        (ONE.format('["a"]', "1"), " entry 1: reason must be one line of text"),
    ],
)  # fmt: skip
def test_faulty_review_file_is_one_line(file: Path, text: str, words: str) -> None:
    assert "review.toml: cannot be read (No such file" in refusal(GATE, [], [], file)
    file.write_text(text)
    assert words in refusal(GATE, [], [], file)


@pytest.mark.parametrize("reason", ["", " ", "two\nlines", b"caf\xe9".decode("utf-8", "surrogateescape")])
def test_faulty_options_are_one_line(reason: str) -> None:
    words = f"--reason must be one line of text in UTF-8, got {reason!r}"
    assert refusal(GATE, ["release/*", "compile/*"], ["fine", reason]) == words
    assert refusal(GATE, ["release/*"], []).startswith(
        "1 --reviewed and 0 --reason: pass one reason for each"
    )
    assert refusal(GATE, [], ["x"]) == "--reason requires --reviewed: name the rows"


def test_failed_test_cannot_be_reviewed_away() -> None:
    gate = gate_of(*GATE.findings, Finding(Decision.HOLD, "PROBLEM", "", "boom", ()))
    assert refusal(gate, ["*"], ["x"]).startswith("a failed test cannot be reviewed away: PROBLEM")


def undecided(sessions: int, high: float = 1.414, *more: Finding, timed: bool = True) -> GateFile:
    """Return a gate that is UNKNOWN because of one time: +26 % in [+10 %, `high`]."""
    finding = Finding(Decision.UNKNOWN, "INCONCLUSIVE", "cold_seconds", "", (START,))
    paired = Paired("INCONCLUSIVE", 1.26, (1.10, high), sessions)
    return gate_of(finding, *more, timed={START: paired} if timed else {})


def test_undecided_time_is_reviewed_with_its_bound_and_slow_processes() -> None:
    (found,) = reviewed(undecided(16), ["start/*"], ["a slower AOTAutograd, once a start"])
    assert (found.row, found.finding) == (START, "INCONCLUSIVE cold_seconds, up to +41.4 %")
    assert refusal(undecided(16), [], []).startswith(f"not reviewed (1): INCONCLUSIVE {START}; name each")
    gate = undecided(20, 1.005)  # 3 of 20 starts took three times as long
    gate = replace(gate, timed={START: replace(gate.timed[START], slow=(3, 0))})
    (found,) = reviewed(gate, ["start/*"], ["rare"])
    assert found.finding == "INCONCLUSIVE cold_seconds, up to +0.5 %, slow processes: 3 of 20"


@pytest.mark.parametrize(
    "gate",
    [
        undecided(15),
        undecided(72, math.inf),
        undecided(72, math.nan),
        undecided(72, timed=False),
        undecided(72, 1.4, Finding(Decision.UNKNOWN, "INFRA", "", "no disk")),
        undecided(72, 1.4, Finding(Decision.UNKNOWN, "RED IN BOTH", "guards", "", ("compile/a/guards",))),
    ],
    ids=["few sessions", "no bound", "no number", "no session", "another gap", "another label"],
)
def test_other_gaps_cannot_be_reviewed(gate: GateFile) -> None:
    words = ("a review does not close gaps in the evidence", "has such a row")
    assert any(each in refusal(gate, ["*"], ["noise"]) for each in words)


def test_message_for_too_few_sessions_names_the_way_out() -> None:
    gate = undecided(8, 1.4, Finding(Decision.HOLD, "SLOWER", "x", "", ("a/b/x",)))
    assert refusal(gate, ["a/b/x"], ["noise"]) == (
        "a review does not close gaps in the evidence: INCONCLUSIVE cold_seconds"
        " (start/cold_seconds: fewer than 16 sessions, continue with --resume)"
    )


def test_review_names_every_finding_of_a_row() -> None:
    gate = gate_of(
        Finding(Decision.HOLD, "SLOWER", "seconds", "", ("a/b/seconds",)),
        Finding(Decision.HOLD, "LOST", "", "timed processes without a reading", ("a/b/seconds",)),
    )
    (found,) = reviewed(gate, ["a/b/seconds"], ["slower on purpose"])
    assert found.finding == "SLOWER seconds; LOST timed processes without a reading"
