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

    def side(stored: str, name: str) -> Any:
        """Return the column of a side. stored: its name in the database, from earlier versions."""
        return sql.Column(stored, sql.ForeignKey(f"{PREFIX}runs.id"), key=name)

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
            side("good", "adopted"),
            side("bad", "candidate"),
            *(sql.Column(name, text) for name in ("package", "moved")),
            sql.Column("whole", sql.Boolean),
        ],
        "ratios": [
            key("gate", "gates"),
            sql.Column("row", sql.String(255), primary_key=True),
            sql.Column("outcome", text),
            *(sql.Column(name, real) for name in ("ratio", "low", "high", "drift")),
            sql.Column("sessions", sql.Integer),
        ],
        "findings": [
            sql.Column("key", sql.String(16), primary_key=True),
            *(sql.Column(name, text) for name in ("lane", "package", "label", "metric")),
            *(sql.Column(name, text) for name in ("issue", "owner", "topic")),
        ],
        "topics": [
            sql.Column("topic", sql.String(255), primary_key=True),
            sql.Column("answer", text),
        ],
        "posts": [
            sql.Column("topic", sql.String(255), primary_key=True),
            sql.Column("channel", sql.String(255), primary_key=True),
            *(sql.Column(name, text) for name in ("state", "digest", "url")),
            sql.Column("number", sql.Integer),
        ],
        "sightings": [
            key("gate", "gates"),
            sql.Column("finding", sql.ForeignKey(f"{PREFIX}findings.key"), primary_key=True),
            sql.Column("detail", text),
        ],
    }
    return {name: sql.Table(PREFIX + name, metadata, *parts) for name, parts in columns.items()}


def carry_over(connection: Any, version: int) -> None:
    """Add what a store of an earlier version lacks."""
    for last, table, column, kind in LATER:
        if version <= last:
            connection.exec_driver_sql(f"ALTER TABLE {PREFIX}{table} ADD COLUMN {column} {kind}")
