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


PLAN = journal.BisectPlan(("1", "2", "3"), "1", "3", ("x",))
WHO = {"lane": "cpu", "row": BREAKS, "value": 1, "owner": "a", "reason": "b"}
TOML: dict[str, tuple[dict[str, Any], Callable[[Path], object]]] = {
    "baselines/accepted.toml": (
        {"accepted": [WHO | {"since": "2026-11-01", "expires": "2026-11-01"}]},
        accepted.load,
    ),
    adoptions.FILE: (
        {
            "adoption": [
                dict.fromkeys(("lane", "candidate", "from", "to", "decision", "gate", "commit"), "x")
                | {"day": "2026-11-01", "before": {"a": ""}, "after": {"a": ""}}
            ]
        },
        lambda path: adoptions.load(path.parents[1]),
    ),
    "review.toml": (
        {"reviewed": [{"rows": ["a/b/c"], "reason": "x"}]},
        lambda path: [*reviewed_findings._of_file(path)],
    ),
}


def refuses_or_reads(read: Callable[[], object]) -> None:
    try:
        read()
    except BumpgateError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017


@pytest.mark.parametrize("name", TOML)
@given(data=st.data())
@FIXED
def test_any_toml_is_read_or_refused(tmp_path: Path, name: str, data: st.DataObject) -> None:
    document, read = TOML[name]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(days(as_toml(spoiled(data, json.dumps(document)))), errors="surrogateescape")
    refuses_or_reads(lambda: read(path))


def written(folder: Path, name: str) -> Path:
    """Write a valid file of the kind, and return its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name == "gate.json":
        return held(folder)
    if name == "baselines/cpu.json":
        baseline.save(path, Baseline("cpu", {"torch": "1"}, {BREAKS: Reviewed(1, "n", "exact")}))
    elif name == "state.jsonl":
        journal.begin(path, PLAN).close()
    elif name == probe.READING:
        probe.keep(probe.Reading(folder, probe.Cause.RAN, 1, "x", 1.0, {"torch": "1"}))
    else:
        (folder / "bumpgate.toml").write_text("[lanes.cpu]\n")
        path = file_transaction.journal(folder)
        path.parent.mkdir(parents=True)
        files = {"baselines/cpu.json": {"before": None, "after": "x"}}
        path.write_text(json.dumps({"kind": "adoption", "lane": "cpu", "files": files}))
    return path


# Name of a file and what reads it, from its folder and its path.
JSON: dict[str, Callable[[Path, Path], object]] = {
    "gate.json": lambda folder, path: gate_file.read(path),
    "gate.json as finding": lambda folder, path: gate_finding.load(path),
    "baselines/cpu.json": lambda folder, path: baseline.load(path, "cpu"),
    "state.jsonl": lambda folder, path: journal.resume(path).close(),
    probe.READING: lambda folder, path: probe.load(folder),
    "journal": lambda folder, path: file_transaction.recover(folder),
}


@pytest.mark.parametrize("name", JSON)
@given(data=st.data())
@FIXED
def test_any_json_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("reader") / "tree"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUMPGATE_HOME", str(folder.parent / "home"))
        path = written(folder, name.split(" ")[0])
        path.write_text(spoiled(data, path.read_text()) + "\n", errors="surrogateescape")
        refuses_or_reads(lambda: JSON[name](folder, path))


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
