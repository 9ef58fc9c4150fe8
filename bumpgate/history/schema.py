"""Tables of the history."""

from __future__ import annotations

from typing import Any

# Stores of an earlier version are refused: the files that they were made from can be added again.
VERSION = 4
PREFIX = "bumpgate_"
# Provenance fields that are stored with each run.
TEXTS = ("lane", "device", "host", "torch", "torch_git", "triton", "wheel_set", "commit")


def tables(sql: Any) -> dict[str, Any]:
    """Return the tables by name. sql: the module sqlalchemy."""
    text, real, topic = sql.Text, sql.Float(53), sql.String(255)

    def key(name: str, target: str) -> Any:
        return sql.Column(name, sql.ForeignKey(PREFIX + target), primary_key=True)

    def columns(kind: Any, *names: str) -> list[Any]:
        return [sql.Column(name, kind) for name in names]

    def head() -> list[Any]:
        return [
            sql.Column("id", sql.Integer, primary_key=True),
            sql.Column("digest", sql.String(64), unique=True, nullable=False),
            sql.Column("started", sql.String(32), index=True, nullable=False),
        ]

    parts = {
        "meta": [sql.Column("version", sql.Integer, primary_key=True)],
        "runs": [*head(), *columns(text, *TEXTS, "host_class"), sql.Column("red", sql.Boolean)],
        "readings": [
            key("run", "runs.id"),
            sql.Column("row", topic, primary_key=True, index=True),
            *columns(text, "value", "unit", "verdict"),
            *columns(real, "number", "low", "high"),
            sql.Column("row_red", sql.Boolean),
        ],
        "gates": [
            *head(),
            *columns(text, "lane", "decision", "package", "moved"),
            *(sql.Column(side, sql.ForeignKey(f"{PREFIX}runs.id")) for side in ("adopted", "candidate")),
            sql.Column("whole", sql.Boolean),
        ],
        "ratios": [
            key("gate", "gates.id"),
            sql.Column("row", topic, primary_key=True),
            sql.Column("outcome", text),
            *columns(real, "ratio", "low", "high", "drift"),
            sql.Column("sessions", sql.Integer),
        ],
        "findings": [
            sql.Column("key", sql.String(16), primary_key=True),
            *columns(text, "lane", "package", "label", "metric", "issue", "owner", "topic"),
        ],
        "sightings": [key("gate", "gates.id"), key("finding", "findings.key"), sql.Column("detail", text)],
        "topics": [sql.Column("topic", topic, primary_key=True), sql.Column("answer", text)],
        "posts": [
            sql.Column("topic", topic, primary_key=True),
            sql.Column("channel", topic, primary_key=True),
            *columns(text, "state", "digest", "url"),
            sql.Column("number", sql.Integer),
        ],
    }
    metadata = sql.MetaData()
    return {name: sql.Table(PREFIX + name, metadata, *found) for name, found in parts.items()}
