"""Tables of the history, and the columns that stores of earlier versions lack."""

from __future__ import annotations

from typing import Any

VERSION = 3
PREFIX = "bumpgate_"
# Provenance fields that are stored with each run.
TEXTS = ("lane", "device", "host", "torch", "torch_git", "triton", "wheel_set", "commit")
# (last version without it, table, column, type): 2 brought the class of the host, 3 the findings.
LATER = (
    (1, "runs", "host_class", "TEXT"),
    (2, "gates", "package", "TEXT"),
    (2, "gates", "moved", "TEXT"),
    (2, "gates", "whole", "BOOLEAN"),
)


def tables(sql: Any) -> dict[str, Any]:
    """Return the tables by name. sql: the module sqlalchemy."""
    columns = (
        {"meta": [sql.Column("version", sql.Integer, primary_key=True)]} | _measured(sql) | _findings(sql)
    )
    metadata = sql.MetaData()
    return {name: sql.Table(PREFIX + name, metadata, *parts) for name, parts in columns.items()}


def _measured(sql: Any) -> dict[str, list[Any]]:
    """Return the columns of what was measured: runs with their readings, gates with their ratios of times."""

    def head() -> list[Any]:
        return [
            sql.Column("id", sql.Integer, primary_key=True),
            sql.Column("digest", sql.String(64), unique=True, nullable=False),
            sql.Column("started", sql.String(32), index=True, nullable=False),
        ]

    def side(stored: str, name: str) -> Any:
        """Return the column of a side. stored: its name in the database, from earlier versions."""
        return sql.Column(stored, sql.ForeignKey(f"{PREFIX}runs.id"), key=name)

    text, real = sql.Text, sql.Float(53)
    return {
        "runs": [*head(), *_columns(sql, text, *TEXTS, "host_class"), sql.Column("red", sql.Boolean)],
        "readings": [
            _key(sql, "run", "runs.id"),
            sql.Column("row", sql.String(255), primary_key=True, index=True),
            *_columns(sql, text, "value", "unit", "verdict"),
            *_columns(sql, real, "number", "low", "high"),
            sql.Column("row_red", sql.Boolean),
        ],
        "gates": [
            *head(),
            *_columns(sql, text, "lane", "decision"),
            side("good", "adopted"),
            side("bad", "candidate"),
            *_columns(sql, text, "package", "moved"),
            sql.Column("whole", sql.Boolean),
        ],
        "ratios": [
            _key(sql, "gate", "gates.id"),
            sql.Column("row", sql.String(255), primary_key=True),
            sql.Column("outcome", text),
            *_columns(sql, real, "ratio", "low", "high", "drift"),
            sql.Column("sessions", sql.Integer),
        ],
    }


def _findings(sql: Any) -> dict[str, list[Any]]:
    """Return the columns of findings, the gates that showed them, and the messages about them."""
    text, topic = sql.Text, sql.String(255)
    return {
        "findings": [
            sql.Column("key", sql.String(16), primary_key=True),
            *_columns(sql, text, "lane", "package", "label", "metric", "issue", "owner", "topic"),
        ],
        "sightings": [
            _key(sql, "gate", "gates.id"),
            _key(sql, "finding", "findings.key"),
            sql.Column("detail", text),
        ],
        "topics": [sql.Column("topic", topic, primary_key=True), sql.Column("answer", text)],
        "posts": [
            sql.Column("topic", topic, primary_key=True),
            sql.Column("channel", topic, primary_key=True),
            *_columns(sql, text, "state", "digest", "url"),
            sql.Column("number", sql.Integer),
        ],
    }


def _columns(sql: Any, kind: Any, *names: str) -> list[Any]:
    return [sql.Column(name, kind) for name in names]


def _key(sql: Any, name: str, target: str) -> Any:
    return sql.Column(name, sql.ForeignKey(PREFIX + target), primary_key=True)


def carry_over(connection: Any, version: int) -> None:
    """Add what a store of an earlier version lacks."""
    for last, table, column, kind in LATER:
        if version <= last:
            connection.exec_driver_sql(f"ALTER TABLE {PREFIX}{table} ADD COLUMN {column} {kind}")
