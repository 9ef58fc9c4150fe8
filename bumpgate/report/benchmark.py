"""Timed rows as the JSON of pytest-benchmark, which its `compare` and conbench's adapter read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bumpgate.core.errors import BumpgateError
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import Record, Row, Verdict, is_finite

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
#: Verdicts of rows that hold a measured value.
MEASURED = (Verdict.PASS, Verdict.WIN, Verdict.REGRESSION, Verdict.INCONCLUSIVE, Verdict.CHANGED)
FORMAT = "5.0.0"  # version of pytest-benchmark's format


def text(found: Record | GateFile) -> str:
    """Return the JSON of a record's rows in seconds, ms, us or ns: name, test and statistics of each.

    A record keeps no single rounds: each row has one, and the ends of its interval as minimum and maximum. Raises
    BumpgateError for a gate, which has two records, and for a record without such a row.
    """
    if isinstance(found, GateFile):
        raise BumpgateError("a gate has two records: pass good.json or bad.json from its folder")
    rows = [j.row for j in found.judgements if j.verdict in MEASURED]
    benchmarks = [_benchmark(row) for row in rows if row.unit in SECONDS and is_finite(row.value)]
    if not benchmarks:
        raise BumpgateError(
            f"the record has no row in {', '.join(SECONDS)}: nothing to write for pytest-benchmark"
        )
    facts = found.provenance
    content = {
        "machine_info": {
            "node": facts.get("host", ""),
            "processor": facts.get("cpu", ""),
            "machine": str(facts.get("platform", "")),
            "python_version": facts.get("python", ""),
            "cpu": {"brand_raw": facts.get("cpu", ""), "count": facts.get("cores")},
            "device": facts.get("device", ""),
            "torch": facts.get("torch", ""),
            "triton": facts.get("triton", ""),
        },
        "commit_info": {
            "id": facts.get("commit", ""),
            "dirty": facts.get("dirty"),
            "time": facts.get("started"),
        },
        "benchmarks": benchmarks,
        "datetime": facts.get("started", ""),
        "version": FORMAT,
    }
    return json.dumps(content, indent=1) + "\n"


def _benchmark(row: Row) -> Mapping[str, Any]:
    scale = SECONDS[row.unit]
    value = scale * float(row.value or 0)
    low, high = (scale * x for x in row.interval) if row.interval else (value, value)
    return {
        "group": row.id.rpartition("/")[0],
        "name": row.id,
        "fullname": f"{row.test.partition('::')[0]}::{row.id}",
        "params": None,
        "param": None,
        "extra_info": {"test": row.test, "rule": row.rule, "work": row.work, "witness": row.witness},
        "options": {},
        "stats": {
            "min": low,
            "max": high,
            "mean": value,
            "median": value,
            "stddev": 0.0,
            "q1": value,
            "q3": value,
            "iqr": 0.0,
            "ld15iqr": low,
            "hd15iqr": high,
            "iqr_outliers": 0,
            "stddev_outliers": 0,
            "outliers": "0;0",
            "rounds": 1,
            "iterations": 1,
            "ops": 1 / value if value else 0.0,
            "total": value,
            "data": [value],
        },
    }
