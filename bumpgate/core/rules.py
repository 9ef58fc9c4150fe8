"""Texts of the rules that rows check, from suites/rules.toml, and the source locations of rows."""

from __future__ import annotations

import re
from pathlib import Path

from bumpgate.core.rows import Judgement, Record
from bumpgate.core.toml import tomllib

FILE = Path("suites/rules.toml")
# The rule of a row in a repository without rules.
NO_RULE = "R0"
PRODUCT = re.compile(r"\b(?:kernels|model|launch|bumpgate)/[\w/.-]+\.py:\d+")


def sentences(root: Path) -> dict[str, str]:
    """Return rule id -> its text; empty if the tree has no such file."""
    try:
        raw = tomllib.loads((root / FILE).read_text(encoding="utf-8"))
        return {rule: str(table["says"]) for rule, table in raw.items() if "says" in table}
    except (OSError, ValueError, TypeError):
        return {}


def sentence(record: Record | None, rule: str) -> str:
    """Return "C6: graph breaks are where ..." from the record of a run; only the id if the record has no text.

    "" for a row of a repository without rules.
    """
    texts = record.provenance.get("rules") if record else None
    text = texts.get(rule) if isinstance(texts, dict) else None
    return f"{rule}: {text}" if text else "" if rule == NO_RULE else rule


def places(j: Judgement) -> str:
    """Return where a row is reported and which product locations its evidence names: "a.py:1, model/b.py:2"."""
    found = [m[0] for line in j.row.evidence if (m := PRODUCT.search(line))]
    return ", ".join(dict.fromkeys(p for p in (j.row.place, *found[:1]) if p))
