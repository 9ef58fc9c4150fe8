"""The lines of evidence that Dynamo's instrument puts into a row."""

from __future__ import annotations

from bumpgate.plugin.instruments.dynamo import DynamoReport


def test_evidence_is_the_three_most_frequent_events_of_each_kind() -> None:
    events = ["a", "b", "b", "c", "c", "c", "d"]
    report = DynamoReport(failures=events)
    assert report.evidence() == ("failure x3: c", "failure x2: b", "failure x1: a")
    assert report.evidence(1) == ("failure x3: c",)
    assert len(report.evidence(9)) == 4


def test_evidence_names_no_address() -> None:
    report = DynamoReport(failures=["guard on <object at 0x7f12ab> failed"])
    assert report.evidence() == ("failure x1: guard on <object> failed",)
