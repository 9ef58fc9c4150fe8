"""No file or option that a person can edit ends in a traceback: any content is read, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bumpgate.bisect import gate_finding, journal, probe
from bumpgate.core import accepted, baseline, census, gate_file
from bumpgate.core.baseline import Baseline, Reviewed
from bumpgate.core.errors import BumpgateError
from bumpgate.history import adoptions
from bumpgate.history.archive import Archive
from bumpgate.process import file_transaction
from bumpgate.report import findings
from bumpgate.review import accept, reviewed_findings
from tests.support.reports import BREAKS, held

INPUTS = 150  # for each reader
FIXED = settings(
    derandomize=True,
    max_examples=INPUTS,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
JUNK = st.sampled_from(
    [None, True, -1, 10**400, 1e300, 0.5, "", "x", "no", "../x", "2026-13-40", "[", [], [[]], [None], {}]
) | st.text(max_size=5)


def places(raw: Any) -> list[tuple[Any, Any]]:
    """Return container and key of each value in a document."""
    keys = list(raw) if isinstance(raw, dict) else range(len(raw)) if isinstance(raw, list) else ()
    return [(raw, key) for key in keys] + [place for key in keys for place in places(raw[key])]


def spoiled(data: st.DataObject, document: str) -> str:
    """Return a JSON document in which one value is another one or missing; or any part of it."""
    raw = json.loads(document)
    where = places(raw)
    choice = data.draw(st.integers(0, 9))
    if choice == 0 or not where:
        start = data.draw(st.integers(0, len(document)))
        return document[:start] + data.draw(st.sampled_from(["", "\0", "}", '"', "\ufeff", "[" * 5000]))
    container, key = where[data.draw(st.integers(0, len(where) - 1))]
    if choice < 3:
        del container[key]
    else:
        container[key] = data.draw(JUNK)
    return json.dumps(raw)


def as_toml(document: str) -> str:
    """Return a document that TOML can hold as TOML; any other as it is."""
    try:
        return tomli_w.dumps(json.loads(document, parse_float=float))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return document


def days(text: str) -> str:
    """Let a TOML file have days where the document has their text."""
    return text.replace('"2026-11-01"', "2026-11-01")


WHO = {"lane": "cpu", "row": BREAKS, "value": 1, "owner": "a", "reason": "b"}
ADOPTION = dict.fromkeys(("lane", "candidate", "from", "to", "decision", "gate", "commit"), "x")
ADOPTION |= {"day": "2026-11-01", "before": {"a": ""}, "after": {"a": ""}}
CUT_SHORT = {
    "kind": "adoption",
    "lane": "cpu",
    "files": {"baselines/cpu.json": {"before": None, "after": "x"}},
}


def of_plan(path: Path) -> None:
    journal.begin(path, journal.BisectPlan(("1", "2", "3"), "1", "3", ("x",))).close()


def of_baseline(path: Path) -> None:
    baseline.save(path, Baseline("cpu", {"torch": "1"}, {BREAKS: Reviewed(1, "n", "exact")}))


def of_reading(path: Path) -> None:
    probe.keep(probe.Reading(path.parent, probe.Cause.RAN, 1, "x", 1.0, {"torch": "1"}))


def of_journal(path: Path) -> None:
    (path.parents[1] / "bumpgate.toml").write_text("[lanes.cpu]\n")
    journal_of(path).write_text(json.dumps(CUT_SHORT))


def journal_of(path: Path) -> Path:
    """Return the place of the journal of an adoption in the tree of a path."""
    place = file_transaction.journal(path.parents[1])
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


# Name of a file -> what writes a valid one, or its document; and what reads it.
KINDS: dict[str, tuple[Any, Callable[[Path], object]]] = {
    "baselines/accepted.toml": (
        {"accepted": [WHO | {"since": "2026-11-01", "expires": "2026-11-01"}]},
        accepted.load,
    ),
    adoptions.FILE: ({"adoption": [ADOPTION]}, lambda path: adoptions.load(path.parents[1])),
    "a/review.toml": (
        {"reviewed": [{"rows": ["a/b/c"], "reason": "x"}]},
        lambda path: [*reviewed_findings._of_file(path)],
    ),
    "a/gate.json": (lambda path: held(path.parent), gate_file.read),
    "finding/gate.json": (lambda path: held(path.parent), gate_finding.load),
    "baselines/cpu.json": (of_baseline, lambda path: baseline.load(path, "cpu")),
    "a/state.jsonl": (of_plan, lambda path: journal.resume(path).close()),
    f"a/{probe.READING}": (of_reading, lambda path: probe.load(path.parent)),
    "a/journal": (of_journal, lambda path: file_transaction.recover(path.parents[1])),
}


def refuses_or_reads(read: Callable[[], object]) -> None:
    try:
        read()
    except BumpgateError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@FIXED
def test_any_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    make, read = KINDS[name]
    path = tmp_path_factory.mktemp("reader") / "tree" / name
    path.parent.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUMPGATE_HOME", str(path.parents[2] / "home"))
        written = journal_of(path) if name.endswith("journal") else path
        if callable(make):
            make(path)
            text = spoiled(data, written.read_text()) + "\n"
        else:
            text = days(as_toml(spoiled(data, json.dumps(make))))
        written.write_text(text, errors="surrogateescape")
        refuses_or_reads(lambda: read(path))


@given(text=st.text(max_size=20) | st.sampled_from(["9999-12-31", "0001-01-01", "2026-11-01T00", "1e9"]))
@FIXED
def test_any_text_of_an_option_is_read_or_refused(text: str) -> None:
    for read in (
        accept._day,
        Archive,
        lambda url: Archive(f"postgresql://u:p@{url}/x"),
        lambda issue: findings.link_command("beef", f"https://{issue}", "sqlite://"),
    ):
        refuses_or_reads(lambda: read(text))  # noqa: B023


@given(text=st.text(max_size=40))
@FIXED
def test_any_set_of_tests_is_read_or_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cpu.tests"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    refuses_or_reads(lambda: census.load(path))
