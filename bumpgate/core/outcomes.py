"""Rows of tests that report none: in a lane with `tests`, the outcome of each test is a row.

These rows have no reviewed value; a gate compares them between its sides. A test that fails does not report its row.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from bumpgate.core.lanes import Lane
from bumpgate.core.rows import Judgement, Row, Verdict

UNIT = "outcome"
PASSED, SKIPPED, XFAILED, XPASSED = "passed", "skipped", "xfailed", "xpassed"
UNSAFE = re.compile(r"[^A-Za-z0-9._+=-]+")


def contains(lane: Lane, nodeid: str) -> bool:
    """Return whether a test, or a test module, is below the `tests` of a lane."""
    path = PurePosixPath(nodeid.partition("::")[0])
    return any(path.is_relative_to(folder) for folder in lane.tests)


def case(nodeid: str) -> str:
    """Return the middle part of a test's row ids: "a/test_b.py::test_c[3]" -> "a-test_b-test_c-3".

    Characters that a row id cannot hold, or end with, are replaced, and a digest of the node id added: "[a b]" and
    "[(a b)]" differ, and so do "[+]" and "[-]".
    """
    name, _, parameters = nodeid.partition("[")
    names = [*name.replace("::", "/").split("/"), parameters.removesuffix("]")]
    text = UNSAFE.sub("-", nodeid.replace(".py::", "-"))
    text = text.removesuffix("-") if nodeid.endswith("]") else text
    case = text.strip("-._+=")
    lossy = case != text or any(map(UNSAFE.search, names))
    digest = hashlib.sha256(nodeid.encode()).hexdigest()[:8] if lossy else ""
    return "-".join(filter(None, [case, digest]))


def row_id(nodeid: str) -> str:
    """Return the row id of a test's outcome."""
    return f"tests/{case(nodeid)}/outcome"


def is_outcome(row: Row) -> bool:
    """Return whether a row is the outcome of a test."""
    return row.unit == UNIT and row.id == row_id(row.test)


def is_skipped(row: Row) -> bool:
    """Return whether a row belongs to a skipped test, in which nothing was checked."""
    return row.value == SKIPPED and is_outcome(row)


def measured(nodeid: str, outcome: str, why: str, rule: str) -> Judgement:
    """Return the row of a test that did not fail. why: the reason of a skip, or ""."""
    row = Row(
        row_id(nodeid),
        outcome,
        UNIT,
        1,
        rule,
        evidence=(why,) if why else (),
        test=nodeid,
        paired=True,
        place=nodeid.partition("::")[0],
    )
    return Judgement(row, Verdict.PASS, "")


def skipped_in_both(good: Mapping[str, Judgement], bad: Mapping[str, Judgement]) -> dict[str, str]:
    """Return row id -> the reason, for tests that both sides skip: nothing was compared there."""
    return {
        row: next(iter(bad[row].row.evidence), SKIPPED)
        for row in sorted(good.keys() & bad.keys())
        if is_skipped(good[row].row) and is_skipped(bad[row].row)
    }
