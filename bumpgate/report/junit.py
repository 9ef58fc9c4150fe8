"""The page as JUnit XML, for the test view of a CI: one case per row, and one per cause or problem without a row.

A case is a failure if the row is a fault of the product, and an error if it could not be measured. The file has at
least one of either exactly if the run or the gate must stop the CI.
"""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from bumpgate.report.page import Page, RowView

# What XML 1.0 cannot hold, even escaped.
UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def xml(page: Page) -> str:
    """Return one test suite; the row's suite and case are the class, its metric the name."""
    suite = ElementTree.Element("testsuite", {"name": f"bumpgate {page.kind} {page.lane}"})
    properties = ElementTree.SubElement(suite, "properties")
    for fact in page.facts:
        for side, value in (
            ("adopted ", fact.adopted),
            ("" if not page.paired else "candidate ", fact.candidate),
        ):
            if value:
                attributes = {"name": _clean(side + fact.name), "value": _clean(value)}
                ElementTree.SubElement(properties, "property", attributes)
    for row in page.rows:
        _row(suite, row)
    if page.paired:
        for finding in page.findings:
            if not finding.rows:
                kind = {"bad": "failure", "open": "error"}.get(_tone(finding.decision.name), "")
                _case(
                    suite,
                    "gate",
                    finding.head or finding.label,
                    kind,
                    finding.label,
                    (*finding.adopted, *finding.candidate),
                )
    else:
        for problem in page.problems:
            _case(suite, "problem", problem.subject, "error", problem.why, ())
    failures = suite.findall("testcase/failure") + suite.findall("testcase/error")
    if page.failed and not failures:
        _case(suite, page.kind, page.word, "error", page.headline, ())
    cases = suite.findall("testcase")
    suite.attrib |= {
        "tests": str(len(cases)),
        "failures": str(len(suite.findall("testcase/failure"))),
        "errors": str(len(suite.findall("testcase/error"))),
        "skipped": "0",
        "time": f"{0 if math.isnan(page.seconds) else page.seconds:.3f}",
    }
    if page.started:
        suite.set("timestamp", page.started[:19])
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root, " ")
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _tone(decision: str) -> str:
    return {"HOLD": "bad", "UNKNOWN": "open"}.get(decision, "good")


def _row(suite: ElementTree.Element, row: RowView) -> None:
    case, metric = row.id.rsplit("/", 1)
    kind = {"bad": "failure", "open": "error"}.get(row.tone, "")
    body = [row.reason, *row.evidence, *([f"-> {row.command}"] if row.command else [])]
    _case(suite, case.replace("/", "."), metric, kind, f"{row.label}: {row.reason}", body if kind else [])


def _case(
    suite: ElementTree.Element,
    group: str,
    name: str,
    kind: str,
    message: str,
    body: list[str] | tuple[str, ...],
) -> None:
    case = ElementTree.SubElement(
        suite, "testcase", {"classname": _clean(group), "name": _clean(name), "time": "0"}
    )
    if kind:
        element = ElementTree.SubElement(
            case, kind, {"message": _clean(message), "type": _clean(message.split(":")[0])}
        )
        element.text = _clean("\n".join(body))


def _clean(text: str) -> str:
    return UNPRINTABLE.sub("\ufffd", text)
