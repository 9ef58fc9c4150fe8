"""Database of the history: every record and gate, in SQLite or behind any other SQLAlchemy URL.

Records are identified by content, so adding one twice, or as a side of its gate, stores it once. Each file is one
transaction: writers wait for each other, and a killed one leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from bumpgate.accepted import today
from bumpgate.environments.store import home
from bumpgate.gate.drift import Reading
from bumpgate.gate.verdict import Decision
from bumpgate.report import gate_file
from bumpgate.report.extra import need
from bumpgate.report.gate_file import GateFile
from bumpgate.rows import BumpgateError, Judgement, Record, Value, is_finite, one_line

VERSION = 2
WAIT_SECONDS = 60  # for another writer
PREFIX = "bumpgate_"


class ArchiveError(BumpgateError):
    """A store that cannot be opened, or that holds something else."""


@dataclass(frozen=True)
class Point:
    """One reading of a row. when: the start of its run, ISO 8601 in UTC. commit: of the work tree.

    timed: with an interval. host_class: device, processor and cores; None where the record does not say.
    """

    when: str
    lane: str
    value: Value
    unit: str
    verdict: str
    red: bool
    torch: str | None
    torch_git: str | None
    commit: str | None
    device: str | None
    timed: bool = False
    host_class: str | None = None

    @property
    def day(self) -> date:
        return datetime.fromisoformat(self.when).date()


def default_store() -> str:
    """The URL of this user's history; makes its folder."""
    folder = home()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'history.sqlite'}"


class Archive:
    """url: of SQLAlchemy. Nothing is opened before the first use; every fault is an ArchiveError of one line."""

    def __init__(self, url: str) -> None:
        self._sql = need("sqlalchemy", command="bumpgate history")
        try:
            self._url = self._sql.engine.make_url(url)
        except self._sql.exc.ArgumentError:
            raise ArchiveError(
                f"--store {url!r}: not a database URL such as sqlite:///history.sqlite"
            ) from None
        self.name = (
            self._url.database or "" if self._is_file else self._url.render_as_string(hide_password=True)
        )

    def add(self, path: Path) -> bool:
        """Store a record, or a gate with both of its records; return False if it was stored already."""
        found = gate_file.read(path)
        with self._in_one_line(), self._engine.begin() as connection:
            if isinstance(found, GateFile):
                return self._add_gate(connection, found)
            return self._add_record(connection, found, path.name)[1]

    def points(self, row: str, lane: str = "", days: int = 0) -> list[Point]:
        """Every reading of a row, oldest first. lane: only this one's. days: only the last ones, 0 for all."""
        runs, readings = self._tables["runs"], self._tables["readings"]
        query = self._select().where(readings.c.row == row)
        if lane:
            query = query.where(runs.c.lane == lane)
        if days:
            query = query.where(runs.c.started >= _utc(today() - timedelta(days)))
        with self._in_one_line(), self._engine.connect() as connection:
            return [_point(found) for found in connection.execute(query)]

    def drifted(self, lane: str, rows: Sequence[str], days: int, day: date) -> dict[str, tuple[Reading, ...]]:
        """Return row id -> readings against the build of a month before, one per day, in order.

        Only candidates that were adopted within the last `days` count: a rejected one is not in use.
        """
        gates, ratios = self._tables["gates"], self._tables["ratios"]
        query = (
            self._sql.select(gates.c.started, ratios.c.row, ratios.c.drift)
            .select_from(ratios.join(gates, ratios.c.gate == gates.c.id))
            .where(gates.c.lane == lane, gates.c.decision == Decision.ADOPT.name)
            .where(gates.c.started >= _utc(day - timedelta(days)), ratios.c.drift.is_not(None))
            .order_by(gates.c.started, gates.c.id)
        )
        by_day: dict[str, dict[date, float]] = {row: {} for row in rows}
        with self._in_one_line(), self._engine.connect() as connection:
            for started, row, reading in connection.execute(query):
                if row in by_day:
                    by_day[row][datetime.fromisoformat(started).date()] = reading
        return {row: tuple(Reading(*pair) for pair in sorted(found.items())) for row, found in by_day.items()}

    def adopted(self, lane: str) -> list[tuple[date, str]]:
        """(day, torch) of every candidate that a gate of the lane adopted, oldest first."""
        gates, runs = self._tables["gates"], self._tables["runs"]
        query = (
            self._sql.select(gates.c.started, runs.c.torch)
            .select_from(gates.join(runs, gates.c.bad == runs.c.id))
            .where(gates.c.lane == lane, gates.c.decision == Decision.ADOPT.name)
            .order_by(gates.c.started, gates.c.id)
        )
        with self._in_one_line(), self._engine.connect() as connection:
            return [
                (datetime.fromisoformat(day).date(), torch or "") for day, torch in connection.execute(query)
            ]

    def _select(self) -> Any:
        runs, readings = self._tables["runs"], self._tables["readings"]
        joined = readings.join(runs, readings.c.run == runs.c.id)
        return self._sql.select(runs, readings).select_from(joined).order_by(runs.c.started, runs.c.id)

    def _add_gate(self, connection: Any, gate: GateFile) -> bool:
        gates = self._tables["gates"]
        if not gate.finished:
            raise ArchiveError("gate.json: the gate was cut short: finish it with --resume")
        good, bad = (
            self._add_record(connection, side.record, "gate.json")[0] if side.record else None
            for side in (gate.good, gate.bad)
        )
        digest = _digest([gate.lane, gate.decision.name, gate.started, good, bad, sorted(gate.timed)])
        if connection.execute(self._sql.select(gates.c.id).where(gates.c.digest == digest)).first():
            return False
        fields: dict[str, Any] = {"digest": digest, "lane": gate.lane, "decision": gate.decision.name}
        fields |= {"started": _started(gate.started, "gate.json"), "good": good, "bad": bad}
        made = connection.execute(self._sql.insert(gates).values(**fields)).inserted_primary_key[0]
        ratios = [_ratio(made, row, gate) for row in dict.fromkeys((*gate.timed, *gate.readings))]
        if ratios:
            connection.execute(self._sql.insert(self._tables["ratios"]), ratios)
        return True

    def _add_record(self, connection: Any, record: Record, name: str) -> tuple[int, bool]:
        """The run's number, and whether it is new."""
        runs = self._tables["runs"]
        p = record.provenance
        digest = _digest([dict(p), [j.to_json() for j in record.judgements]])
        known = connection.execute(self._sql.select(runs.c.id).where(runs.c.digest == digest)).first()
        if known:
            return int(known[0]), False
        fields: dict[str, Any] = {column: _text(p.get(column)) for column in TEXTS}
        fields |= {"digest": digest, "started": _started(p.get("started"), name), "red": record.red}
        fields["host_class"] = _host_class(p)
        made = int(connection.execute(self._sql.insert(runs).values(**fields)).inserted_primary_key[0])
        readings = [_reading(made, j) for j in record.judgements if not j.row.unmeasured]
        if readings:
            connection.execute(self._sql.insert(self._tables["readings"]), readings)
        return made, True

    @contextmanager
    def _in_one_line(self) -> Iterator[None]:
        """Convert SQLAlchemy's exceptions to ArchiveError."""
        try:
            yield
        except self._sql.exc.SQLAlchemyError as error:
            why = one_line(getattr(error, "orig", None) or error)
            raise ArchiveError(f"{self.name}: {why}; name another one with --store") from None

    @property
    def _is_file(self) -> bool:
        return bool(self._url.get_backend_name() == "sqlite")

    @cached_property
    def _tables(self) -> dict[str, Any]:
        sql = self._sql
        metadata = sql.MetaData()

        def head() -> list[Any]:
            """Return the columns that runs and gates share."""
            return [
                sql.Column("id", sql.Integer, primary_key=True),
                sql.Column("digest", sql.String(64), unique=True, nullable=False),
                sql.Column("started", sql.String(32), index=True, nullable=False),
            ]

        def key(name: str, target: str) -> Any:
            return sql.Column(name, sql.ForeignKey(f"{PREFIX}{target}.id"), primary_key=True)

        def side(name: str) -> Any:
            return sql.Column(name, sql.ForeignKey(f"{PREFIX}runs.id"))

        text, real = sql.Text, sql.Float(53)
        columns = {
            "meta": [sql.Column("version", sql.Integer, primary_key=True)],
            "runs": [
                *head(),
                *(sql.Column(name, text) for name in (*TEXTS, "host_class")),
                sql.Column("red", sql.Boolean),
            ],
            "readings": [
                key("run", "runs"),
                sql.Column("row", sql.String(255), primary_key=True, index=True),
                *(sql.Column(name, text) for name in ("value", "unit", "verdict")),
                *(sql.Column(name, real) for name in ("number", "low", "high")),
                sql.Column("row_red", sql.Boolean),
            ],
            "gates": [
                *head(),
                sql.Column("lane", text),
                sql.Column("decision", text),
                side("good"),
                side("bad"),
            ],
            "ratios": [
                key("gate", "gates"),
                sql.Column("row", sql.String(255), primary_key=True),
                sql.Column("outcome", text),
                *(sql.Column(name, real) for name in ("ratio", "low", "high", "drift")),
                sql.Column("sessions", sql.Integer),
            ],
        }
        return {name: sql.Table(PREFIX + name, metadata, *parts) for name, parts in columns.items()}

    @cached_property
    def _engine(self) -> Any:
        """Connect and check the tables; the first of several writers creates them."""
        sql = self._sql
        options: dict[str, Any] = {"connect_args": {"timeout": WAIT_SECONDS}} if self._is_file else {}
        try:
            engine = sql.create_engine(self._url, **options)
        except (sql.exc.NoSuchModuleError, ModuleNotFoundError) as error:
            raise ArchiveError(f"{self.name}: no driver for it here ({one_line(error)})") from None
        if self._is_file:
            _lock_at_begin(sql, engine)
        meta = self._tables["meta"]
        with self._in_one_line(), engine.begin() as connection:
            names = sql.inspect(connection).get_table_names()
            ours = [name for name in names if name.startswith(PREFIX)]
            if names and not ours and self._is_file:
                raise ArchiveError(f"{self.name}: a database of something else, with the table {names[0]!r}")
            meta.metadata.create_all(connection)
            versions = [found[0] for found in connection.execute(sql.select(meta.c.version))]
            if not versions:
                connection.execute(sql.insert(meta).values(version=VERSION))
            elif versions == [1]:  # the class of the host came with 2
                connection.exec_driver_sql(f"ALTER TABLE {PREFIX}runs ADD COLUMN host_class TEXT")
                connection.execute(sql.update(meta).values(version=VERSION))
            elif versions != [VERSION]:
                raise ArchiveError(f"{self.name}: a history of version {versions[0]}, this is {VERSION}")
        return engine


# Provenance fields that are stored with each run.
TEXTS = ("lane", "device", "host", "torch", "torch_git", "triton", "wheel_set", "commit")


def _lock_at_begin(sql: Any, engine: Any) -> None:
    """A transaction of SQLite that reads first and writes later fails where two meet: take the lock at once."""

    def manual(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    sql.event.listen(engine, "connect", manual)
    sql.event.listen(engine, "begin", begin)


def _reading(run: int, j: Judgement) -> dict[str, Any]:
    r, interval = j.row, j.row.interval or (None, None)
    return {
        "run": run,
        "row": r.id,
        "value": json.dumps(r.to_json()["value"]),
        "number": _finite(r.value),
        "low": _finite(interval[0]),
        "high": _finite(interval[1]),
        "unit": r.unit,
        "verdict": j.label,
        "row_red": j.red,
    }


def _ratio(gate: int, row: str, found: GateFile) -> dict[str, Any]:
    t = found.timed.get(row)
    return {
        "gate": gate,
        "row": row,
        "outcome": t.outcome if t else None,
        "ratio": _finite(t.ratio) if t else None,
        "low": _finite(t.interval[0]) if t else None,
        "high": _finite(t.interval[1]) if t else None,
        "drift": _finite(found.readings.get(row)),
        "sessions": t.sessions if t else None,
    }


def _point(found: Any) -> Point:
    raw = json.loads(found.value)
    value = float(raw["float"]) if isinstance(raw, dict) else raw
    return Point(
        found.started,
        found.lane,
        value,
        found.unit,
        found.verdict,
        bool(found.row_red),
        found.torch,
        found.torch_git,
        found.commit,
        found.device,
        found.low is not None,
        found.host_class,
    )


def _host_class(provenance: Mapping[str, Any]) -> str | None:
    cores = provenance.get("cores")
    stated = [provenance.get("device"), provenance.get("cpu"), None if cores is None else f"{cores} cores"]
    return ", ".join(map(str, filter(None, stated))) or None


def _started(raw: object, name: str) -> str:
    try:
        return datetime.fromisoformat(str(raw)).astimezone(timezone.utc).isoformat(timespec="seconds")
    except ValueError:
        raise ArchiveError(
            f"{name}: says no time at which it started, so it has no place in a history"
        ) from None


def _utc(day: date) -> str:
    return f"{day.isoformat()}T00:00:00+00:00"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _finite(value: object) -> float | None:
    return float(value) if is_finite(value) else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)
