"""Which rows are times: their readings vary with the machine, so that one reading does not decide."""

from __future__ import annotations

import re

from bumpgate.core.rows import Row

# Values that depend on rounding and on the order of a sum, by name and by unit.
ERROR = re.compile(r"error|residual|leak|difference")
# Ratios that are not of times, errors aside: of losses, and of counts.
UNTIMED = re.compile(r"loss_growth|operators")
# Units of times and rates, and how much worse a single reading must look to be measured again: beyond what two H200s
# read under one build (ms 2.5 %, fraction 3.4 %, ratios 5.5 %, seconds of a compile next to other tests 31 %, of a
# kernel's first call 62 %).
TIMES = {"ms": 1.05, "us": 1.05, "ns": 1.05, "s": 1.4, "fraction": 1.07, "ratio": 1.1}
RATE = re.compile(r".+/s|tokens")


def metric(row: Row) -> str:
    """Return the last part of the row's id."""
    return row.id.rsplit("/", 1)[1]


def is_time(row: Row) -> bool:
    """Whether readings of this row vary with the machine: a time, a rate, or a ratio of times."""
    if row.unit == "ratio":
        return not (ERROR.search(metric(row)) or UNTIMED.search(metric(row)))
    return row.unit in TIMES or RATE.fullmatch(row.unit) is not None
