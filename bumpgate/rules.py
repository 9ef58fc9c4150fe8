"""The sentences of the rules that rows check, from suites/rules.toml, and the places in the source that rows name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from bumpgate.rows import Judgement, Record

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path("suites/rules.toml")
PRODUCT = re.compile(r"\b(?:kernels|model|launch|bumpgate)/[\w/.-]+\.py:\d+")


def sentences(root: Path) -> dict[str, str]:
    """Rule id -> its sentence; nothing where the tree has no such file."""
    try:
        raw = tomllib.loads((root / FILE).read_text(encoding="utf-8"))
        return {rule: str(table["says"]) for rule, table in raw.items() if "says" in table}
    except (OSError, ValueError, TypeError):
        return {}


def sentence(record: Record | None, rule: str) -> str:
    """ "C6: graph breaks are where ...", from what the run wrote down; the id alone where it did not."""
    said = record.provenance.get("rules") if record else None
    text = said.get(rule) if isinstance(said, dict) else None
    return f"{rule}: {text}" if text else rule


def places(j: Judgement) -> str:
    """Where a row is reported, and where its evidence points in the product: "a.py:1, model/b.py:2"."""
    found = [m[0] for line in j.row.evidence if (m := PRODUCT.search(line))]
    return ", ".join(dict.fromkeys(p for p in (j.row.place, *found[:1]) if p))
