"""Database of the history: every record and gate, in SQLite or any other SQLAlchemy database.

Records are identified by content, so adding one twice, or as a side of its gate, stores it once. Each file is one
transaction: writers wait for each other, and a killed one stores nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from bumpgate.core import gate_file
from bumpgate.core.accepted import today
from bumpgate.core.errors import BumpgateError, loads, need, one_line
from bumpgate.core.findings import Decision, DriftReading
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import Judgement, Record, Value, is_finite
from bumpgate.core.text import redacted
from bumpgate.history import known_findings, schema
from bumpgate.history.known_findings import FindingError, Known
from bumpgate.history.schema import PREFIX, TEXTS, VERSION
from bumpgate.process.home import home

WAIT_SECONDS = 60  # for another writer
MOST_DAYS = 36500  # of a history that is shown: a calendar has an end
POSTGRESQL_LOCK = 0x62756D70  # any number that other programs on the same database do not use


class ArchiveError(BumpgateError):
    """A store that cannot be opened, or that is not a history."""


class Added(NamedTuple):
    """new: whether the file was not stored before. findings: of a gate, those open or newly gone in it."""

    new: bool
    findings: list[Known]


@dataclass(frozen=True)
class Point:
    """One reading of a row.

    when: the start of its run, ISO 8601 in UTC. commit: of the work tree. timed: with an interval.
    host_class: device, processor and cores; None if the record lacks them.
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
        return date.fromisoformat(self.when[:10])


def default_store() -> str:
    """Return the URL of this user's history; create its folder."""
    folder = home()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'history.sqlite'}"


class Archive:
    """The history. url: of SQLAlchemy; opened at the first use. Every fault is an ArchiveError of one line."""

    def __init__(self, url: str) -> None:
        self.sql = need("sqlalchemy", command="bumpgate history")
        try:
            self._url = self.sql.engine.make_url(url)
        except (self.sql.exc.ArgumentError, ValueError):
            why = "not a database URL such as sqlite:///history.sqlite"
            raise ArchiveError(f"--store {one_line(url)!r}: {why}") from None
        self._is_file = self._url.get_backend_name() == "sqlite"
        self.name = str(self._url.database or "")
        if not self._is_file:
            self.name = redacted(self._url.render_as_string(hide_password=True))
        self.tables = schema.tables(self.sql)

    def add(self, path: Path, found: Record | GateFile | None = None) -> Added:
        """Store a record, or a gate with both of its records. found: what the file holds, if it was read already."""
        found = found or gate_file.read(path)
        with self.transaction() as connection:
            if isinstance(found, GateFile):
                made, new = self._add_gate(connection, found)
                return Added(new, known_findings.read(self.sql, self.tables, connection, until=made))
            return Added(self._add_record(connection, found, path.name)[1], [])

    def findings(self, lane: str = "") -> list[Known]:
        """Return every remembered finding, open ones first. lane: only this one's."""
        with self.reading() as connection:
            return known_findings.read(self.sql, self.tables, connection, lane)

    def mark(self, key: str, **values: str | None) -> Known:
        """Set the issue or the owner of a finding, named by the start of its key. Raises FindingError."""
        found = self.tables["findings"]
        with self.transaction() as connection:
            query = self.sql.select(found.c.key).where(found.c.key.startswith(key, autoescape=True))
            keys = [row.key for row in connection.execute(query)]
            if len(keys) != 1 or not key:
                what = f"the start of {len(keys)} findings" if keys and key else "not a finding"
                fix = "list them with: bumpgate findings list"
                raise FindingError(f"{key!r} is {what} in {self.name}; {fix}")
            connection.execute(self.sql.update(found).where(found.c.key == keys[0]).values(**values))
            known = known_findings.read(self.sql, self.tables, connection)
        return next(k for k in known if k.key == keys[0])

    def points(self, row: str, lane: str = "", days: int = 0) -> list[Point]:
        """Return every reading of a row, oldest first. lane: only this one's. days: only the last ones, 0 for all."""
        query = self._readings(lane, today() - timedelta(days) if days else None)
        with self.reading() as connection:
            return list(map(_point, connection.execute(query.where(self.tables["readings"].c.row == row))))

    def nights(self, start: date, lane: str = "") -> Iterator[Any]:
        """Yield the readings since a day, oldest first, but those of adopted sides of gates. lane: only this one's."""
        adopted = self.tables["gates"].c.adopted
        sides = self.sql.select(adopted).where(adopted.is_not(None))
        with self.reading() as connection:
            query = self._readings(lane, start).where(self.tables["runs"].c.id.not_in(sides))
            yield from connection.execute(query)

    def drifted(
        self, lane: str, rows: Sequence[str], days: int, day: date
    ) -> dict[str, tuple[DriftReading, ...]]:
        """Return row id -> readings against the build of a month before, one per day, in order.

        Only candidates that could be adopted within the last `days` count: a rejected one is not in use.
        """
        gates, ratios = self.tables["gates"], self.tables["ratios"]
        query = self._adoptable(lane, ratios, ratios.c.gate == gates.c.id, ratios.c.row, ratios.c.drift)
        query = query.where(gates.c.started >= _utc(day - timedelta(days)), ratios.c.drift.is_not(None))
        by_day: dict[str, dict[date, float]] = {row: {} for row in rows}
        with self.reading() as connection:
            for started, row, reading in connection.execute(query):
                if row in by_day:
                    by_day[row][datetime.fromisoformat(started).date()] = reading
        return {
            r: tuple(DriftReading(*pair) for pair in sorted(found.items())) for r, found in by_day.items()
        }

    def adopted(self, lane: str) -> list[tuple[date, str]]:
        """Return (day, torch) of every candidate that passed a gate of the whole lane, oldest first."""
        runs = self.tables["runs"]
        query = self._adoptable(lane, runs, self.tables["gates"].c.candidate == runs.c.id, runs.c.torch)
        with self.reading() as connection:
            return [
                (datetime.fromisoformat(day).date(), torch or "") for day, torch in connection.execute(query)
            ]

    def _adoptable(self, lane: str, table: Any, join: Any, *columns: Any) -> Any:
        """Select from gates whose candidate could be adopted; a gate of a part of a lane is not one."""
        gates = self.tables["gates"]
        found = self.sql.select(gates.c.started, *columns).select_from(gates.join(table, join))
        passed = gates.c.lane == lane, gates.c.decision == Decision.ADOPT.name, gates.c.whole.is_(True)
        return found.where(*passed).order_by(gates.c.started, gates.c.id)

    def _readings(self, lane: str, start: date | None) -> Any:
        """Select the readings of a lane, "" for all, since a day, oldest first."""
        runs, readings = self.tables["runs"], self.tables["readings"]
        joined = readings.join(runs, readings.c.run == runs.c.id)
        query = self.sql.select(runs, readings).select_from(joined).order_by(runs.c.started, runs.c.id)
        query = query.where(runs.c.lane == lane) if lane else query
        return query.where(runs.c.started >= _utc(start)) if start else query

    def _add_gate(self, connection: Any, gate: GateFile) -> tuple[int, bool]:
        """Return the gate's number, and whether it is new."""
        if not gate.finished:
            raise ArchiveError("gate.json: the gate was cut short: finish it with --resume")
        adopted, candidate = (
            self._add_record(connection, side.record, "gate.json")[0] if side.record else None
            for side in (gate.adopted, gate.candidate)
        )
        ratios = [_ratio(row, gate) for row in dict.fromkeys((*gate.timed, *gate.readings))]
        # A gate that was resumed has more sessions, and so another digest: it is a later state of the same gate.
        digest = _digest([gate.lane, gate.decision.name, gate.started, adopted, candidate, ratios])
        fields: dict[str, Any] = {"lane": gate.lane, "decision": gate.decision.name}
        fields |= {"started": gate.started, "adopted": adopted, "candidate": candidate}
        fields |= known_findings.gate_fields(gate)
        made, new = self._insert(connection, "gates", digest, fields, "gate.json")
        if new and ratios:
            connection.execute(self.sql.insert(self.tables["ratios"]), [r | {"gate": made} for r in ratios])
        if new:
            known_findings.write(self.sql, self.tables, connection, made, gate)
        return made, new

    def _add_record(self, connection: Any, record: Record, name: str) -> tuple[int, bool]:
        """Return the run's number, and whether it is new."""
        p = record.provenance
        digest = _digest([dict(p), [j.to_json() for j in record.judgements]])
        fields = {column: None if p.get(column) is None else str(p[column]) for column in TEXTS}
        cores = None if p.get("cores") is None else f"{p['cores']} cores"
        host_class = ", ".join(map(str, filter(None, (p.get("device"), p.get("cpu"), cores)))) or None
        more = {"started": p.get("started"), "red": record.red, "host_class": host_class}
        made, new = self._insert(connection, "runs", digest, fields | more, name)
        readings = [_reading(made, j) for j in record.judgements if not j.row.unmeasured]
        if new and readings:
            connection.execute(self.sql.insert(self.tables["readings"]), readings)
        return made, new

    def _insert(
        self, connection: Any, table: str, digest: str, fields: dict[str, Any], name: str
    ) -> tuple[int, bool]:
        """Return the number of a run or gate, and whether it is new. name: of its file."""
        found = self.tables[table]
        known = connection.execute(self.sql.select(found.c.id).where(found.c.digest == digest)).first()
        if known:
            return int(known.id), False
        fields = fields | {"digest": digest, "started": _started(fields["started"], name)}
        return int(connection.execute(self.sql.insert(found).values(**fields)).inserted_primary_key[0]), True

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """Yield a connection whose changes are committed if the block ends without an exception."""
        with self._in_one_line(), self._engine.begin() as connection:
            _one_writer(connection)
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """Yield a connection whose queries all see one state; in PostgreSQL no writer waits for it."""
        with self._in_one_line(), self._engine.connect() as connection:
            if not self._is_file:
                connection.execution_options(isolation_level="REPEATABLE READ")
            yield connection

    @contextmanager
    def _in_one_line(self) -> Iterator[None]:
        """Convert SQLAlchemy's exceptions, and a driver's for an option that is not UTF-8, to ArchiveError."""
        try:
            yield
        except self.sql.exc.SQLAlchemyError as error:
            why = one_line(getattr(error, "orig", None) or error)
            raise ArchiveError(f"{self.name}: {why}; name another one with --store") from None
        except UnicodeEncodeError as error:
            why = "is not UTF-8, so no history has it: correct the option"
            raise ArchiveError(f"{error.object!r} {why}") from None

    @cached_property
    def _engine(self) -> Any:
        """Connect and check the tables; the first of several writers creates them."""
        sql = self.sql
        options: dict[str, Any] = {"connect_args": {"timeout": WAIT_SECONDS}} if self._is_file else {}
        try:
            engine = sql.create_engine(self._url, **options)
        except (sql.exc.NoSuchModuleError, ModuleNotFoundError) as error:
            why = f"its database driver is not installed ({one_line(error)})"
            raise ArchiveError(f"{self.name}: {why}") from None
        if self._is_file:
            # Take SQLite's lock at the start: transactions that read first and write later would fail.
            sql.event.listen(engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
            sql.event.listen(
                engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE")
            )
        meta = self.tables["meta"]
        with self._in_one_line(), engine.begin() as connection:
            _one_writer(connection)
            names = sql.inspect(connection).get_table_names()
            ours = [name for name in names if name.startswith(PREFIX)]
            if names and not ours and self._is_file:
                raise ArchiveError(f"{self.name}: not a history: it has the table {names[0]!r}")
            meta.metadata.create_all(connection)
            versions = [found[0] for found in connection.execute(sql.select(meta.c.version))]
            if not versions:
                connection.execute(sql.insert(meta).values(version=VERSION))
            elif versions != [VERSION]:
                why = f"a history of version {versions[0]}, this bumpgate reads {VERSION}"
                fix = "name a new --store, and add its records and gates again"
                raise ArchiveError(f"{self.name}: {why}: {fix}")
        return engine


def _one_writer(connection: Any) -> None:
    """Wait for other writers, as SQLite does: in PostgreSQL two may create the same table, or store the same gate."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({POSTGRESQL_LOCK})")


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


def _ratio(row: str, found: GateFile) -> dict[str, Any]:
    t = found.timed.get(row)
    return {
        "row": row,
        "outcome": t.outcome if t else None,
        "ratio": _finite(t.ratio) if t else None,
        "low": _finite(t.interval[0]) if t else None,
        "high": _finite(t.interval[1]) if t else None,
        "drift": _finite(found.readings.get(row)),
        "sessions": t.sessions if t else None,
    }


def _point(found: Any) -> Point:
    raw = loads(found.value)
    value = float(raw["float"]) if isinstance(raw, dict) else raw
    same = ("lane", "unit", "verdict", "torch", "torch_git", "commit", "device", "host_class")
    fields = {name: getattr(found, name) for name in same}
    return Point(found.started, value=value, red=bool(found.row_red), timed=found.low is not None, **fields)


def _started(raw: object, name: str) -> str:
    """Return a start time in UTC, whatever zone it states; one that states none is in UTC."""
    try:
        stated = datetime.fromisoformat(str(raw))
        if stated.tzinfo is None:
            stated = stated.replace(tzinfo=timezone.utc)
        return stated.astimezone(timezone.utc).isoformat(timespec="seconds")
    except (ValueError, OverflowError):
        raise ArchiveError(f"{name}: states no start time, so it cannot be added to a history") from None


def _utc(day: date) -> str:
    return f"{day.isoformat()}T00:00:00+00:00"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _finite(value: object) -> float | None:
    return float(value) if is_finite(value) else None
