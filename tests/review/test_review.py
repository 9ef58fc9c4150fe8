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
CATEGORY = '[[reviewed]]\nrows = ["x/y/z", "release/facts/category"]\nreason = "future ones"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "review.toml"


def reasons(file: Path, *options: str) -> dict[str, str]:
    rows, why = options[::2], options[1::2]
    return {r.row: r.reason for r in reviewed(GATE, rows, why, file)}


def test_file_reviews_rows_by_globs(file: Path) -> None:
    file.write_text(GUARDS + CATEGORY.replace('"x/y/z", ', ""))
    found = reviewed(GATE, (), (), file)
    assert [(r.row, r.finding, r.reason) for r in found] == [
        ("compile/a/guards", "REGRESSION guard_count", "more guards upstream"),
        ("compile/b/guards", "REGRESSION guard_count", "more guards upstream"),
        ("release/facts/category", "CHANGED category", "future ones"),
    ]


def test_options_and_file_complete_each_other(file: Path) -> None:
    """The first reason of a row is kept: an option's before the file's."""
    file.write_text(GUARDS)
    assert reasons(file, "release/*", "future", "compile/a/guards", "mine") == {
        "release/facts/category": "future",
        "compile/a/guards": "mine",
        "compile/b/guards": "more guards upstream",
    }


FAULTS = {
    "not all": (GUARDS, "not reviewed (1): CHANGED release/facts/category; name each with --reviewed ROW "),
    "no such row": (CATEGORY, " entry 1: 'x/y/z': no finding that holds this gate has such a row"),
    "does not hold": (
        '[[reviewed]]\nrows = ["release/facts/new"]\nreason = "x"\n',
        "'release/facts/new': no finding that holds this gate has such a row",
    ),
    "not toml": ("rows", ": not TOML ("),
    "empty": ("", "expected [[reviewed]] entries, and nothing else"),
    "no list": ("reviewed = 1\n", "expected [[reviewed]] entries, and nothing else"),
    "empty list": ("reviewed = []\n", "expected [[reviewed]] entries, and nothing else"),
    "more": (GUARDS + "[other]\n", "expected [[reviewed]] entries, and nothing else"),
    "no table": ("reviewed = [1]\n", ' entry 1: expected rows = ["ROW", ...] and reason = "TEXT"'),
    "row": (GUARDS + GUARDS.replace("rows", "row"), " entry 2: expected rows = "),
    "no reason": ('[[reviewed]]\nrows = ["a"]\n', " entry 1: expected rows = "),
    "text": (GUARDS.replace("[", "").replace("]", "").replace("reviewed", "[[reviewed]]"), "got 'compile"),
    "no rows": ('[[reviewed]]\nrows = []\nreason = "x"\n', "rows must be a list of row ids or globs, got []"),
    "number": (
        '[[reviewed]]\nrows = [1]\nreason = "x"\n',
        "rows must be a list of row ids or globs, got [1]",
    ),
    "empty reason": (
        GUARDS.replace("more guards upstream", " "),
        " entry 1: reason must be one line of text",
    ),
    "two lines": (GUARDS.replace("more ", "more\\n"), " entry 1: reason must be one line of text"),
    "reason": (GUARDS.replace('"more guards upstream"', "1"), " entry 1: reason must be one line of text"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_review_file_is_one_line(file: Path, name: str) -> None:
    text, words = FAULTS[name]
    file.write_text(text)
    with pytest.raises(AdoptionError) as caught:
        reasons(file)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def undecided(sessions: int, high: float = 1.414, *more: Finding, timed: bool = True) -> GateFile:
    """Return a gate that is UNKNOWN because of one time: +26 % in [+10 %, `high`]."""
    finding = Finding(Decision.UNKNOWN, "INCONCLUSIVE", "cold_seconds", "", ("start/cold_seconds",))
    paired = Paired("INCONCLUSIVE", 1.26, (1.10, high), sessions)
    return gate_of(finding, *more, timed={"start/cold_seconds": paired} if timed else {})


def test_undecided_time_is_reviewed_with_its_bound() -> None:
    (found,) = reviewed(undecided(16), ["start/*"], ["a slower AOTAutograd, once a start"])
    assert (found.row, found.finding) == ("start/cold_seconds", "INCONCLUSIVE cold_seconds, up to +41.4 %")
    with pytest.raises(AdoptionError, match=r"not reviewed .1.: INCONCLUSIVE start/cold_seconds; name each"):
        reviewed(undecided(16), (), ())


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
    with pytest.raises(
        AdoptionError, match=r"a review does not close gaps in the evidence|has such a row"
    ) as caught:
        reviewed(gate, ["*"], ["noise"])
    assert len(str(caught.value).splitlines()) == 1


def test_message_for_too_few_sessions_names_the_way_out() -> None:
    gate = undecided(8, 1.4, Finding(Decision.HOLD, "SLOWER", "x", "", ("a/b/x",)))
    with pytest.raises(AdoptionError) as caught:
        reviewed(gate, ["a/b/x"], ["noise"])
    assert str(caught.value) == (
        "a review does not close gaps in the evidence: INCONCLUSIVE cold_seconds"
        " (start/cold_seconds: fewer than 16 sessions, continue with --resume)"
    )


@pytest.mark.parametrize("reason", ["", " ", "two\nlines", b"caf\xe9".decode("utf-8", "surrogateescape")])
def test_faulty_reason_is_one_line(reason: str) -> None:
    with pytest.raises(AdoptionError) as caught:
        reviewed(GATE, ["release/*", "compile/*"], ["fine", reason])
    assert str(caught.value) == f"--reason must be one line of text in UTF-8, got {reason!r}"


def test_missing_review_file_is_one_line(file: Path) -> None:
    with pytest.raises(AdoptionError, match=r"review.toml: cannot be read .No such file"):
        reasons(file)


def test_review_of_an_undecided_time_names_its_slow_processes() -> None:
    """Its interval ends at +0.5 %, and 3 of 20 starts took three times as long."""
    gate = undecided(20, 1.005)
    slow = replace(gate.timed["start/cold_seconds"], slow=(3, 0))
    (found,) = reviewed(replace(gate, timed={"start/cold_seconds": slow}), ["start/*"], ["rare"])
    assert found.finding == "INCONCLUSIVE cold_seconds, up to +0.5 %, slow processes: 3 of 20"


def test_review_names_every_finding_of_a_row() -> None:
    gate = gate_of(
        Finding(Decision.HOLD, "SLOWER", "seconds", "", ("a/b/seconds",)),
        Finding(Decision.HOLD, "LOST", "", "timed processes without a reading", ("a/b/seconds",)),
    )
    (found,) = reviewed(gate, ["a/b/seconds"], ["slower on purpose"])
    assert found.finding == "SLOWER seconds; LOST timed processes without a reading"
