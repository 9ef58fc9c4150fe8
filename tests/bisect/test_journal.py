"""The state file: a bisect killed at any byte resumes as if it had not been interrupted."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bumpgate.bisect.attribution import Attribution
from bumpgate.bisect.journal import JournalError, begin, resume
from bumpgate.bisect.search import ProbeOutcome, Search, SearchError
from tests.support.bisects import DAYS, PLAN, drive_journal, read_candidate
from tests.support.tree import ROOT

Whole = tuple[bytes, Search, Attribution]


@pytest.fixture
def whole(tmp_path: Path) -> Whole:
    """Return an uninterrupted run: its file, its search and its attribution."""
    with begin(tmp_path / "whole.jsonl", PLAN) as state:
        found = drive_journal(state)
    return (tmp_path / "whole.jsonl").read_bytes(), state.search, found


def test_complete_run_contains_every_kind_of_entry(whole: Whole) -> None:
    """It has a skip, misreads, a repeat, a range as answer, and mixtures: the tests below truncate all of them."""
    text, searched, found = whole
    result = searched.result()
    assert result is not None
    assert result.suspects == (6, 7)
    assert result.misreads >= 1
    assert Counter(i for i, _ in searched.history).most_common(1)[0][1] > 1
    assert [change.name for change in found.changes] == ["triton"]
    keys = {tuple(json.loads(line)) for line in text.splitlines()[1:]}
    assert keys == {("probe",), ("index", "outcome"), ("mixture",), ("mixture", "outcome")}


def test_second_end_needs_no_further_decision(tmp_path: Path) -> None:
    """Both ends are one decision: after the first reading the file gets no other one."""
    with begin(tmp_path / "bisect.jsonl", PLAN) as state:
        first, second = state.decide()
        state.record(first, read_candidate(state.search, first))
        assert state.decide() == [second]
    lines = [json.loads(line) for line in (tmp_path / "bisect.jsonl").read_text().splitlines()[1:]]
    assert [[*line] for line in lines] == [["probe"], ["index", "outcome"]], "journal.py forgot a probe"


def test_resume_after_truncation_at_any_byte_is_identical(
    tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file truncated after any byte is resumed to the same posterior, and ends with the same bytes."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # of a thousand files
    text, searched, found = whole
    header = text.index(b"\n")
    path = tmp_path / "cut.jsonl"
    for cut in range(len(text) + 1):
        # Overwritten in place, ext4 would write each file to disk at once.
        path.unlink(missing_ok=True)
        path.write_bytes(text[:cut])
        if cut <= header:
            with pytest.raises(JournalError, match="start again"):
                resume(path)
            state = begin(path, PLAN)
        else:
            state = resume(path)
        replayed = PLAN.search()
        for line in map(json.loads, text[:cut].split(b"\n")[1:-1]):
            if "index" in line:
                replayed.record(line["index"], ProbeOutcome(line["outcome"]))
        assert state.search.history == replayed.history, cut
        assert state.search.posterior() == replayed.posterior(), cut
        with state:
            again = drive_journal(state)
        assert path.read_bytes() == text, cut
        assert state.search.posterior() == searched.posterior()
        assert state.search.result() == searched.result()
        assert again.changes == found.changes
    assert len(text) > 1000


def test_entries_are_synced_before_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decision is on disk before its probe starts, each outcome before the search uses it."""
    path, synced = tmp_path / "state.jsonl", b""
    acted = []

    def fsync(descriptor: int) -> None:
        nonlocal synced
        real_fsync(descriptor)
        synced = path.read_bytes()

    def record(searched: Search, index: int, outcome: ProbeOutcome) -> None:
        entry = json.dumps({"index": index, "outcome": outcome.value}).encode() + b"\n"
        assert synced.endswith(entry), "used before it was synced"
        acted.append(index)
        real_record(searched, index, outcome)

    real_fsync, real_record = os.fsync, Search.record
    with monkeypatch.context() as patch, begin(path, PLAN) as state:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(Search, "record", record)
        while state.search.result() is None:
            due = state.decide()
            decisions = [json.loads(line) for line in synced.splitlines() if b'"probe"' in line]
            assert decisions, "no decision was synced"
            assert due[0] in decisions[-1]["probe"], "returned before it was synced"
            state.record(due[0], read_candidate(state.search, due[0]))
        patch.setattr(Search, "record", real_record)
        state.decide_mixture(frozenset({"triton"}))
        assert synced.endswith(b'{"mixture": ["triton"]}\n')
        state.record_mixture(frozenset({"triton"}), ProbeOutcome.BAD)
        assert synced.endswith(b'{"mixture": ["triton"], "outcome": "BAD"}\n')
    assert len(acted) > 5


CHILD = """
import os, signal, sys
from pathlib import Path
from bumpgate.bisect.journal import begin, resume
from tests.support import bisects as t

path, kill_at = Path(sys.argv[1]), int(sys.argv[2])
left, real = iter(range(kill_at - 1, -1, -1)), t.read_candidate
t.read_candidate = lambda *a: real(*a) if next(left) else os.kill(os.getpid(), signal.SIGKILL)
t.drive_journal(resume(path) if path.exists() else begin(path, t.PLAN))
"""


def test_sigkill_loses_only_the_probe_in_progress(tmp_path: Path, whole: Whole) -> None:
    path = tmp_path / "state.jsonl"
    for kill_at, code in ((4, -signal.SIGKILL), (3, -signal.SIGKILL), (1000, 0)):
        command = [sys.executable, "-c", CHILD, str(path), str(kill_at)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert whole[0].startswith(path.read_bytes())
    assert path.read_bytes() == whole[0]


def test_resume_repeats_only_the_pending_probe(tmp_path: Path) -> None:
    path, probed = tmp_path / "state.jsonl", []
    with begin(path, PLAN) as state:
        due = state.decide()
        state.record(due[0], ProbeOutcome.GOOD)
        assert state.decide() == due[1:]
    with resume(path) as state:
        assert state.decide() == due[1:]
        drive_journal(state, probed)
    assert probed[0] == due[1]
    before = path.read_bytes()
    with resume(path) as state:
        assert state.decide() == []
        again: list[object] = []
        drive_journal(state, again)
    assert again == []
    assert path.read_bytes() == before


def test_full_disk_leaves_search_and_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.jsonl"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with begin(path, PLAN) as state:
        due = state.decide()
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space"):
                state.record(due[0], ProbeOutcome.GOOD)
        assert state.search.history == []
        assert path.read_bytes() == before
        state.record(due[0], ProbeOutcome.GOOD)
    with resume(path) as state:
        assert state.search.history == [(due[0], ProbeOutcome.GOOD)]


HEADER = b'{"bumpgate": "bisect", "schema": '


@pytest.mark.parametrize(
    "text",
    [b"", b"# Notes\n", b"[]\n", HEADER + b"2}\n", HEADER + b'1, "candidates": ["a"]}\n', b"\xff\xfe\n"],
    ids=str,
)
def test_resume_refuses_foreign_files_and_keeps_them(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_bytes(text)
    with pytest.raises(JournalError, match="not a state file" if text else "start again"):
        resume(path)
    if text:
        with pytest.raises(JournalError, match="exists"):
            begin(path, PLAN)
    assert path.read_bytes() == text


INDEX = b'{"index": 99, "outcome": "GOOD"}'


@pytest.mark.parametrize(
    "line", [b"{}", INDEX, b'{"index": 1, "outcome": "FINE"}', b"\0\0", b"3", b'{"probe": 1}'], ids=str
)
def test_resume_names_a_damaged_line(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    with begin(path, PLAN) as state:
        state.decide()
    path.write_bytes(path.read_bytes() + line + b"\n")
    before = path.read_bytes()
    with pytest.raises(JournalError, match="line 3 is damaged"):
        resume(path)
    assert path.read_bytes() == before


def test_second_bisect_on_the_same_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    with begin(path, PLAN):
        for attempt in (lambda: begin(path, PLAN), lambda: resume(path)):
            with pytest.raises(JournalError, match="in use by another bisect"):
                attempt()
    resume(path).close()


def test_unopenable_state_file_is_reported_in_one_line(tmp_path: Path) -> None:
    for attempt in (lambda: resume(tmp_path / "none"), lambda: begin(tmp_path / "no" / "x", PLAN)):
        with pytest.raises(JournalError, match="cannot be opened") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    with pytest.raises(JournalError, match="cannot be opened"):
        begin(tmp_path, PLAN)


def test_invalid_plan_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(SearchError):
        begin(tmp_path / "state.jsonl", replace(PLAN, good="2.0"))
    assert not list(tmp_path.iterdir())


def test_plan_passes_every_field_to_its_search() -> None:
    """A plan's fields are the arguments of a search, so that no argument is lost after a kill."""
    plan = replace(PLAN, good=DAYS[-1], bad=DAYS[0], find_fix=True, budget=9, confidence=0.9)
    searched = plan.search()
    assert (searched.find_fix, searched.budget, searched.confidence) == (True, 9, 0.9)
    assert (searched.old, searched.new) == (ProbeOutcome.BAD, ProbeOutcome.GOOD)
