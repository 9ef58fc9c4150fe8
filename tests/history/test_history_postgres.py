"""A history that hosts share: a real PostgreSQL server, and several writers at once. `tox -e fleet`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from bumpgate.history.archive import Archive, ArchiveError
from bumpgate.report import dashboard
from tests.support.postgres import server
from tests.support.reports import BREAKS, gate_of_day
from tests.support.tree import ROOT

pytestmark = pytest.mark.fleet

HOSTS, DAYS = 4, 5


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    # The path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="history", dir="/tmp") as folder, server(Path(folder)) as url:
        yield url


@pytest.fixture
def url(cluster: str, request: pytest.FixtureRequest) -> str:
    """An empty database of this test."""
    import psycopg

    name = request.node.name.lower()[:60]
    with psycopg.connect(cluster.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return cluster.replace("/postgres?", f"/{name}?")


def writers(url: str, folder: Path, *files: list[Path]) -> list[subprocess.Popen[str]]:
    """Start `bumpgate history add` once per list, all at the same time."""
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-c", "from bumpgate.cli import main; main()", "history", "add"),
                *(*map(str, paths), "--store", url),
            ],
            env=os.environ | {"PYTHONPATH": str(ROOT), "BUMPGATE_HOME": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for paths in files
    ]


def test_hosts_that_write_at_once_share_one_history(url: str, tmp_path: Path) -> None:
    """Each adds its own gates and, in another order, those of all: no one fails, and each gate is there once."""
    own = []
    for host in range(HOSTS):
        (tmp_path / f"host{host}").mkdir()
        own.append([gate_of_day(tmp_path / f"host{host}", 1 + host * DAYS + day) for day in range(DAYS)])
    every = [path for paths in own for path in paths]
    started = writers(url, tmp_path, *([*paths, *reversed(every)] for paths in own))
    for process in started:
        out, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, ""), err
        assert out.count("added") + out.count("already stored") == DAYS + len(every)
    archive = Archive(url)
    days = [point.day for point in archive.points(BREAKS)]
    assert days == sorted(days)
    assert len(days) == 2 * len(every), "both sides of each gate, once"
    (known,) = archive.findings()
    assert (known.gates, known.first[:10], known.last[:10]) == (len(every), "2026-11-01", "2026-11-20")
    archive.mark(known.key, owner="ada")
    assert Archive(url).findings()[0].owner == "ada"
    shown = dashboard.read(archive, date(2026, 11, 30) - timedelta(364))
    assert {series.row: len(series.nights) for series in shown}[BREAKS] == len(every)


def blocked(connection: Any) -> bool:
    """Whether another session waits for a table that this one has locked."""
    waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND locktype = 'relation'"
    return bool(connection.execute(waits).fetchall())


def test_killed_writer_leaves_no_part_of_a_gate(url: str, tmp_path: Path) -> None:
    import psycopg

    path = gate_of_day(tmp_path, 1)
    Archive(url).add(path)
    other = gate_of_day(tmp_path, 2)
    # Another host holds a row that the writer needs, so that the kill is in the middle of its transaction.
    with psycopg.connect(url.replace("+psycopg", "")) as holder:
        holder.execute("LOCK TABLE bumpgate_sightings")
        (process,) = writers(url, tmp_path, [other])
        while not blocked(holder):
            assert process.poll() is None
            time.sleep(0.1)
        process.kill()
        process.communicate()
    assert len(Archive(url).points(BREAKS)) == 2
    assert Archive(url).add(other).new
    assert len(Archive(url).points(BREAKS)) == 4


def test_reader_sees_one_state_and_delays_no_writer(url: str, tmp_path: Path) -> None:
    archive = Archive(url)
    archive.add(gate_of_day(tmp_path, 1))
    gates = archive.sql.select(archive.tables["gates"].c.id)
    with archive.reading() as connection:
        assert len(connection.execute(gates).all()) == 1
        (process,) = writers(url, tmp_path, [gate_of_day(tmp_path, 2)])
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, ""), err
        assert len(connection.execute(gates).all()) == 1, "a gate of later"
    assert len(Archive(url).points(BREAKS)) == 4


def test_server_that_is_gone_is_one_line_without_password(tmp_path: Path) -> None:
    archive = Archive(f"postgresql+psycopg://bumpgate:secret@/postgres?host={tmp_path}")
    with pytest.raises(ArchiveError) as error:
        archive.points(BREAKS)
    assert "secret" not in str(error.value)
    assert len(str(error.value).splitlines()) == 1
