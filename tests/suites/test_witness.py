"""A row that expects nothing needs a witness that was counted: a constant one also passes if nothing was seen."""

from __future__ import annotations

import ast

from tests.support.tree import ROOT


def constant_witnesses(source: str) -> list[int]:
    """Return the lines of rows that expect 0, or at most 0, and state their witness as a number."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
            nothing = any(
                type(given.get(name)) in (int, float) and given[name] == 0 for name in ("expected", "at_most")
            )
            if nothing and {"seen", "witness"} & given.keys():
                found.append(node.lineno)
    return found


def test_no_row_that_expects_nothing_has_a_constant_witness() -> None:
    assert constant_witnesses(
        "row.count(id, found, expected=0, seen=1)\nrow.count(id, found, expected=0, seen=x)"
    ) == [1]
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in (ROOT / "suites").rglob("*.py")
        for line in constant_witnesses(path.read_text(encoding="utf-8"))
    }
    assert not found
