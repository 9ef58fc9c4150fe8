"""The history: stored data of records and gates, level changes of a row, and invalid stores."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest

from bumpgate.core.findings import DriftReading, TimedOutcome
from bumpgate.core.rows import Record, Verdict, write_record
from bumpgate.gate.drift import anchor, find_drift
from bumpgate.gate.verdict import Side
from bumpgate.history import adoptions
from bumpgate.history import archive as archive_module
from bumpgate.history.archive import Archive
from bumpgate.report import dashboard, history
from bumpgate.report.dashboard import NightReading, Series, spans
from suites.support.planted import planted
from tests.support.project import REPO, Result, in_process
from tests.support.reports import HERE, judged, paired, row, write_gate

P = Verdict.PASS
ROW = "throughput/nam52-regional/seconds"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path / "home"))


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(f"sqlite:///{tmp_path / 'a.sqlite'}")


def a_record(folder: Path, day: str, value: object = 1.0, **provenance: object) -> Path:
    path = folder / f"{day}-{len(list(folder.iterdir()))}.json"
    made = judged(P, row(ROW, value, unit="s"))  # type: ignore[arg-type]
    write_record(path, HERE | {"started": f"2026-{day}T02:00:00+00:00"} | provenance, [made])
    return path


def a_gate(
    folder: Path,
    day: str,
    *,
    drift: float | None = None,
    held: bool = False,
    selection: str = "",
    started: str = "",
) -> Path:
    """Write a gate of that day with ADOPT for torch 2.14.<day>, or HOLD. selection: the part that it measured."""
    folder = folder / day
    folder.mkdir()
    here = HERE | {"started": f"2026-{day}T02:00:00+00:00"}
    seen = judged(Verdict.REGRESSION, row(ROW, 1.1, unit="s")) if held else judged(P, row(ROW, 1.0, unit="s"))
    good = Side("torch 2.13.0", Record(here, (judged(P, row(ROW, 1.0, unit="s")),)))
    bad = Side("torch 2.14.0", Record(here | {"torch": f"2.14.{day}"}, (seen,)))
    timed = {"throughput/nam52-eager/seconds": paired(TimedOutcome.SAME, 1.003)}
    path, _ = write_gate(folder, good, bad, timed, started=started or f"2026-{day}T03:00:00+00:00")
    raw = json.loads(path.read_text())
    raw |= {} if drift is None else {"anchor": {"readings": {ROW: drift}}}
    raw |= {"config": {"selection": [selection]}} if selection else {}
    path.write_text(json.dumps(raw))
    return path


def test_archive_adds_a_renamed_record_once(tmp_path: Path, archive: Archive) -> None:
    path = a_record(tmp_path, "11-01")
    assert archive.add(path).new
    assert not archive.add(path.rename(tmp_path / "other.json")).new
    (point,) = archive.points(ROW)
    assert (point.value, point.torch, point.commit, point.verdict) == (1.0, "2.13.0+cpu", "f" * 40, "PASS")
    assert point.day == date(2026, 11, 1)


@pytest.mark.parametrize("value", [3, 0.1 + 0.2, True, "2f1c", float("nan"), float("-inf"), 10**17 + 1])
def test_archive_round_trips_values(tmp_path: Path, archive: Archive, value: object) -> None:
    archive.add(a_record(tmp_path, "11-01", value))
    (point,) = archive.points(ROW)
    assert repr(point.value) == repr(value)


def test_archive_adds_both_sides_of_a_gate_once(tmp_path: Path, archive: Archive) -> None:
    path = a_gate(tmp_path, "11-01")
    assert archive.add(path).new
    assert not archive.add(path).new
    assert not archive.add(path.with_name("candidate.json")).new
    assert [(p.value, p.torch) for p in archive.points(ROW)] == [(1.0, "2.13.0+cpu"), (1.0, "2.14.11-01")]
    assert archive.points(ROW, lane="h200") == []


# Start times around midnight, and the same in UTC. A record of a program that states no zone is in UTC.
STARTED = {
    "2026-11-02T01:30:00+02:00": "2026-11-01T23:30:00",
    "2026-11-01T22:30:00-02:00": "2026-11-02T00:30:00",
    "2026-11-01T23:59:59.900+00:00": "2026-11-01T23:59:59",
    "2026-11-01T23:40:00": "2026-11-01T23:40:00",
    "2026-11-02T00:00:00+00:00": "2026-11-02T00:00:00",
}


@planted("C39", "a day that depends on the time zone of a host")
@pytest.mark.parametrize("zone", ["UTC", "America/Los_Angeles", "Pacific/Kiritimati"])
def test_days_are_in_utc_on_every_host(
    tmp_path: Path, archive: Archive, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    """The order of readings, the nights of the dashboard, the limit of days and the days of gates."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        for i, started in enumerate(STARTED):
            archive.add(a_record(tmp_path, f"10-0{i + 1}", float(i), started=started))
        points = archive.points(ROW)
        assert [p.when for p in points] == sorted(f"{utc}+00:00" for utc in STARTED.values())
        assert [p.day.day for p in points] == [1, 1, 1, 2, 2]
        (series,) = dashboard.read(archive, date(2026, 11, 2))
        assert [(night.day, night.value) for night in series.nights] == [(0, 1.0)], "the last of its night"
        patch.setattr("bumpgate.history.archive.today", lambda: date(2026, 11, 3))
        assert [p.value for p in archive.points(ROW, days=1)] == [4.0, 1.0]
        (tmp_path / "gate").mkdir()
        gate = a_gate(tmp_path / "gate", "11-02", drift=0.1, started="2026-11-02T01:00:00+02:00")
        archive.add(gate)
        assert archive.adopted("cpu") == [(date(2026, 11, 1), "2.14.11-02")]
        assert archive.drifted("cpu", [ROW], 1, date(2026, 11, 3))[ROW] == ()
        assert archive.drifted("cpu", [ROW], 2, date(2026, 11, 3))[ROW] == (
            DriftReading(date(2026, 11, 1), 0.1),
        )
    time.tzset()


def log_of(root: Path, *entries: adoptions.Adoption) -> None:
    (root / "baselines").mkdir()
    (root / adoptions.FILE).write_text(adoptions.text(adoptions.Log(entries)))
    assert adoptions.load(root).entries == entries


def test_adopted_lists_open_adoptions_of_the_lane(tmp_path: Path) -> None:
    """A build that was adopted again after its rollback is one of them."""

    def entry(day: int, new: str, lane: str = "cpu", undone: bool = False) -> adoptions.Adoption:
        closed = date(2026, 3, 9) if undone else None
        return adoptions.Adoption(lane, date(2026, 3, day), "", "", new, "HOLD", "", "", {}, {}, (), closed)

    entries = entry(1, "2.14.0"), entry(2, "2.15.0", undone=True), entry(3, "2.16.0", lane="h200")
    for name, more, last in (("once", (), (1, "2.14.0")), ("again", (entry(4, "2.15.0"),), (4, "2.15.0"))):
        (tmp_path / name).mkdir()
        log_of(tmp_path / name, *entries, *more)
        found = adoptions.adopted("cpu", store=f"sqlite:///{tmp_path / 'h.sqlite'}", root=tmp_path / name)
        assert found[0] == (date(2026, 3, 1), "2.14.0")
        assert found[-1] == (date(2026, 3, last[0]), last[1]), name


def test_gate_of_a_part_of_a_lane_adopts_nothing(tmp_path: Path, archive: Archive) -> None:
    archive.add(a_gate(tmp_path, "10-01", drift=0.5, selection="suites/compile"))
    archive.add(a_gate(tmp_path, "10-02", drift=0.1))
    assert archive.adopted("cpu") == [(date(2026, 10, 2), "2.14.10-02")]
    readings = archive.drifted("cpu", [ROW], 60, date(2026, 10, 3))[ROW]
    assert readings == (DriftReading(date(2026, 10, 2), 0.1),)


def test_log_of_adoptions_decides_from_its_first_entry_on(tmp_path: Path, archive: Archive) -> None:
    """A gate alone adopts nothing. Of the days before the log's first, only the gates show what was adopted."""
    for day in ("10-01", "10-05", "10-09"):
        archive.add(a_gate(tmp_path, day))
    log_of(tmp_path, adoptions.Adoption("cpu", date(2026, 10, 5), "", "", "2.15.0", "ADOPT", "", "", {}, {}))
    found = adoptions.adopted("cpu", store=archive._url.render_as_string(), root=tmp_path)
    assert found == [(date(2026, 10, 1), "2.14.10-01"), (date(2026, 10, 5), "2.15.0")]


def test_drift_is_read_from_adopted_builds_only(
    tmp_path: Path, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drift of 1 % a week, read by gates on Sundays; the build with HOLD in between is excluded."""
    days = ["09-20", "09-27", "10-04", "10-11", "10-18", "10-25"]
    for day, drift in zip(days, (0.01, 0.02, 0.03, 0.04, 0.04, 0.04)):
        archive.add(a_gate(tmp_path, day, drift=drift))
    archive.add(a_gate(tmp_path, "10-20", drift=0.5, held=True))
    archive.add(a_gate(tmp_path, "10-21"))
    found = archive.drifted("cpu", [ROW, "a/b/c"], 60, date(2026, 10, 26))
    assert found["a/b/c"] == ()
    assert found[ROW][0] == DriftReading(date(2026, 9, 20), 0.01)
    assert [r.log_ratio for r in found[ROW]] == [0.01, 0.02, 0.03, 0.04, 0.04, 0.04]
    called = find_drift(found[ROW])
    assert called is not None
    assert called.called == date(2026, 10, 18)
    assert len(archive.drifted("cpu", [ROW], 10, date(2026, 10, 26))[ROW]) == 2
    adopted = archive.adopted("cpu")
    assert [torch for _, torch in adopted] == [f"2.14.{d}" for d in (*days[:5], "10-21", "10-25")]
    assert anchor([day for day, _ in adopted], date(2026, 10, 26)) == date(2026, 9, 27)
    monkeypatch.setattr(adoptions, "default_store", lambda: archive._url.render_as_string())
    assert adoptions.recent("cpu", [ROW], 60, day=date(2026, 10, 26)) == {ROW: found[ROW]}
    assert adoptions.adopted("cpu") == adopted


NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([13, 13, 13, 17, 17, 13], [3, 5]),
        (["a", "a", "b"], [2]),
        ([13], []),
        ([], []),
        ([13, 13], []),
        ([1.0, NAN, 1.0], [1, 2]),
        ([2.5, 2.5, NAN, NAN, NAN, 2.5], [2, 5]),
    ],
    ids=str,
)
def test_changes_finds_each_change_of_a_count(values: list[object], found: list[int]) -> None:
    assert history.changes(values) == found
    nights = [NightReading(day, value, "CHANGED", True) for day, value in enumerate(values)]
    shown = spans(Series("cpu", "a/b/loss", "", "nats", nights, found), date(2026, 11, 1)) if nights else []
    edges = [0, *found, len(values)]
    assert [span.nights for span in reversed(shown)] == [b - a for a, b in pairwise(edges) if b > a]


def test_changes_finds_a_jump_in_noise_but_none_in_noise_alone() -> None:
    draw = random.Random(6)
    placed = false = 0
    for _ in range(50):
        noise = [draw.gauss(0, 1) for _ in range(60)]
        false += bool(history.changes(noise))
        found = history.changes([x + 3 * (i >= 30) for i, x in enumerate(noise)])
        placed += len(found) == 1 and abs(found[0] - 30) <= 2
    assert placed >= 45
    assert false <= 2
    odd = [*noise[:30], 40.0, *noise[30:]]
    assert 30 not in history.changes(odd), "one outlier is not a new level"


def run(*args: object) -> Result:
    return in_process(Path(), "history", *map(str, args))


def error(*args: object) -> str:
    """Run `bumpgate history`, which must refuse, and return its line."""
    ran = run(*args)
    assert ran.code == 4, ran
    (line,) = ran.err.splitlines()
    return line


def test_history_command_lists_readings_and_marks_the_change(tmp_path: Path) -> None:
    files = [a_record(tmp_path, f"11-0{day}", 1.0 if day < 5 else 1.25) for day in range(1, 9)]
    assert run("add", *files).out.count(": added\n") == 8
    assert run("add", files[0]).out == f"{files[0]}: already stored\n"
    lines = run(ROW).out.splitlines()
    assert lines[4] == ">  2026-11-05 02:00  1.25  s  PASS  torch 2.13.0+cpu  ffffffffffff"
    assert lines[3] == "   2026-11-04 02:00  1     s  PASS  torch 2.13.0+cpu  ffffffffffff"
    assert lines[8] == "8 readings, 1 change of level"


ADD = "import sys; from bumpgate.cli import main; sys.argv = ['bumpgate', 'history', 'add', *sys.argv[1:]]; main()"


def test_concurrent_writers_lose_no_record(tmp_path: Path) -> None:
    """Four processes that also create the database concurrently, with one record in common."""
    files = [str(a_record(tmp_path, f"11-{i:02d}")) for i in range(1, 26)]
    lists = [[files[0], *files[1 + 6 * n : 7 + 6 * n]] for n in range(4)]
    started = [subprocess.Popen([sys.executable, "-c", ADD, *each], cwd=REPO) for each in lists]
    assert [p.wait(timeout=60) for p in started] == [0] * 4
    assert len(Archive(history.default_store()).points(ROW)) == 25


HELD_WRITER = """
import pathlib, sys, time
from bumpgate.core import gate_file
from bumpgate.history.archive import Archive
archive = Archive(sys.argv[1])
with archive._engine.begin() as connection:
    archive._add_record(connection, gate_file.read(pathlib.Path(sys.argv[2])), "x")
    print("written", flush=True)
    time.sleep(60)
"""


def test_killed_writer_leaves_the_archive_unchanged(
    tmp_path: Path, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed inside its transaction, with rows written: the next writer finds the store unchanged and its lock free."""
    archive.add(a_record(tmp_path, "11-01"))
    path = a_record(tmp_path, "11-02")
    command = [sys.executable, "-c", HELD_WRITER, archive._url.render_as_string(), str(path)]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout
        assert writer.stdout.readline() == "written\n"
        os.kill(writer.pid, signal.SIGKILL)
    assert len(archive.points(ROW)) == 1
    monkeypatch.setattr(archive_module, "WAIT_SECONDS", 0)
    assert Archive(archive._url.render_as_string()).add(path).new


@pytest.mark.parametrize(
    "timed", [pytest.param(True, marks=planted("C37", "a history of two classes of host")), False]
)
def test_history_does_not_mix_timed_rows_of_two_host_classes(tmp_path: Path, timed: bool) -> None:
    kind = {"better": "lower", "tolerance": 0.1, "interval": (0.9, 1.1)} if timed else {}
    for day, cpu in (("11-01", "Xeon"), ("11-02", "EPYC"), ("11-03", "Xeon")):
        path = tmp_path / f"{day}.json"
        here = HERE | {"started": f"2026-{day}T02:00:00+00:00", "cpu": cpu}
        write_record(path, here, [judged(P, row(ROW, 1.0, unit="s", **kind))])
        assert run("add", path).code == 0
    if timed:
        line = error(ROW)
        assert "its readings of 2 classes of host are not comparable: name one with --host " in line
        assert "EPYC" in line
    else:
        assert run(ROW).code == 0
    assert "2 readings" in run(ROW, "--host", "Xeon").out


def spoil(kind: str, path: Path) -> str:
    """Make a store of a kind that cannot be used, and return the words that report it."""
    if kind == "a folder":
        path.mkdir()
        return "unable to open database file"
    if kind == "corrupt":
        path.write_bytes(b"no database at all" * 100)
        return "file is not a database"
    if kind == "cut off":
        for i in range(40):
            Archive(f"sqlite:///{path}").add(a_record(path.parent, f"11-{1 + i % 28:02d}", float(i)))
        path.write_bytes(path.read_bytes()[:5000])
        return "malformed"
    change = "create table recipes (name)"
    if kind != "foreign":
        Archive(f"sqlite:///{path}").points(ROW)
        change = f"update bumpgate_meta set version = {kind}"
    with sqlite3.connect(path) as connection:
        connection.execute(change)
    if kind == "foreign":
        return "not a history: it has the table 'recipes'"
    return f"a history of version {kind}, this bumpgate reads 4: name a new --store"


@pytest.mark.parametrize("kind", ["foreign", "99", "3", "corrupt", "cut off", "a folder"])
def test_invalid_store_is_reported_and_left_unchanged(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "store.sqlite"
    words = spoil(kind, path)
    before = path.read_bytes() if path.is_file() else None
    for args in ((ROW,), ("add", a_record(tmp_path, "10-01"))):
        line = error(*args, "--store", f"sqlite:///{path}")
        assert words in line
        assert str(path) in line
    assert (path.read_bytes() if path.is_file() else None) == before


NO_PORT, NO_DRIVER = "postgresql://u:p@h:port/x", "oracle+nothing://u:secret@h/x"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("add",), "name record.json or gate.json files"),
        (("add", "/nowhere.json"), "/nowhere.json: cannot be read (No such file or directory)"),
        ((ROW,), f"no reading of {ROW} in "),
        ((ROW, "b/c/d"), "history shows one row, got 2"),
        ((ROW, "--store", "nonsense"), "--store 'nonsense': not a database URL"),
        ((ROW, "--store", NO_PORT), "--store 'postgresql://h:port/x': not a database URL"),
        ((ROW, "--days", "99999999999"), "Invalid value for '--days'"),
        (("add", "/"), "/: cannot be read (Is a directory)"),
        ((ROW, "--store", NO_DRIVER), "oracle+nothing://h/x: its database driver is not installed"),
    ],
)
def test_history_bad_input_prints_one_line_and_exits_4(args: tuple[str, ...], words: str) -> None:
    assert words in error(*args)


def test_history_refuses_mixed_lanes_and_incomplete_files(tmp_path: Path) -> None:
    files = [a_record(tmp_path, "11-01"), a_record(tmp_path, "11-02", lane="h200")]
    assert run("add", *files).code == 0
    assert "name one with --lane cpu | h200" in error(ROW)
    assert run(ROW, "--lane", "cpu").code == 0
    assert "states no start time" in error("add", a_record(tmp_path, "11-03", started=""))
    unfinished = a_gate(tmp_path, "11-04")
    unfinished.write_text(unfinished.read_text().replace('"finished": true', '"finished": false'))
    assert "the gate was cut short" in error("add", unfinished)


def test_history_without_sqlalchemy_prints_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    line = "bumpgate: bumpgate history needs sqlalchemy; install it with: pip install 'bumpgate[report]'"
    assert error(ROW) == line
