"""Rows of tests that a machine failure stopped on one side: they are not measured, but not lost by the build."""

from __future__ import annotations

from dataclasses import replace

from bumpgate.core.rows import Judgement, ProblemKind, Record, Row, Verdict


def with_disturbed(record: Record, other: Record) -> Record:
    """Return the record with an INFRA row for each row of `other` whose test the machine stopped here.

    A lane run lists such a test as a problem if none of its rows is reviewed; the rows take the problem's place.
    """
    stopped = {p.test: p.why for p in record.problems if p.kind is ProblemKind.INFRA}
    known = {j.row.id for j in record.judgements}
    missing = [j.row for j in other.judgements if j.row.test in stopped and j.row.id not in known]
    added = [Judgement(_unmeasured(row), Verdict.INFRA, stopped[row.test]) for row in missing]
    named = {row.test for row in missing}
    left = [p for p in record.problems if p.kind is not ProblemKind.INFRA or p.test not in named]
    return replace(record, judgements=(*record.judgements, *added), problems=tuple(left))


def _unmeasured(row: Row) -> Row:
    return Row(row.id, None, row.unit, 0, "", better=row.better, test=row.test, per_build=row.per_build)
