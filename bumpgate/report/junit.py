"""The page as JUnit XML, for the test view of a CI: one case per row, and one per cause or problem without a row.

A case is a failure if the row is a fault of the product, and an error if it could not be measured. The file has at
least one of either exactly if the run or the gate must stop the CI.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from bumpgate.report.page import TONE, Page, RowView

# What XML 1.0 cannot hold, even escaped.
UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
KINDS = {"bad": "failure", "open": "error"}


class Case(NamedTuple):
    """One test case. kind: "failure", "error", or "" if it passed."""

    group: str
    name: str
    kind: str = ""
    message: str = ""
    body: Sequence[str] = ()


def xml(page: Page) -> str:
    """Return one test suite; the row's suite and case are the class, its metric the name."""
    cases = [*map(_of_row, page.rows), *_without_rows(page)]
    if page.failed and not any(case.kind for case in cases):
        cases.append(Case(page.kind, page.word, "error", page.headline))
    kinds = Counter(case.kind for case in cases)
    attributes = {"name": f"bumpgate {page.kind} {page.lane}", "tests": str(len(cases)), "skipped": "0"}
    attributes |= {"failures": str(kinds["failure"]), "errors": str(kinds["error"])}
    attributes |= {"time": f"{0 if math.isnan(page.seconds) else page.seconds:.3f}"}
    attributes |= {"timestamp": page.started[:19]} if page.started else {}
    root = Element("testsuites")
    suite = _add(root, "testsuite", attributes)
    properties = SubElement(suite, "properties")
    for fact in page.facts:
        for side, value in (("adopted ", fact.adopted), ("candidate " * page.paired, fact.candidate)):
            if value:
                _add(properties, "property", {"name": side + fact.name, "value": value})
    for case in cases:
        element = _add(suite, "testcase", {"classname": case.group, "name": case.name, "time": "0"})
        if case.kind:
            fault = {"message": case.message, "type": case.message.split(":")[0]}
            _add(element, case.kind, fault).text = _clean("\n".join(case.body))
    indent(root, " ")
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _of_row(row: RowView) -> Case:
    case, metric = row.id.rsplit("/", 1)
    body = [row.reason, *row.evidence, *([f"-> {row.command}"] if row.command else [])]
    return Case(case.replace("/", "."), metric, KINDS.get(row.tone, ""), f"{row.label}: {row.reason}", body)


def _without_rows(page: Page) -> Iterator[Case]:
    """Yield the causes of a gate that belong to no row, or the problems of a run."""
    for f in page.findings if page.paired else ():
        if not f.rows:
            kind = KINDS.get(TONE[f.decision], "")
            yield Case("gate", f.head or f.label, kind, f.label, (*f.adopted, *f.candidate))
    for problem in () if page.paired else page.problems:
        yield Case("problem", problem.subject, "error", problem.why)


def _add(parent: Element, tag: str, attributes: dict[str, str]) -> Element:
    return SubElement(parent, tag, {name: _clean(value) for name, value in attributes.items()})


def _clean(text: str) -> str:
    return UNPRINTABLE.sub("\ufffd", text)
