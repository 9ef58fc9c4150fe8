"""The findings that `bumpgate gate` prints."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from bumpgate.core.findings import Decision, Finding
from bumpgate.gate.view import View, findings_text

FINDING = Finding(
    Decision.HOLD, "CHANGED", "graph_breaks", "GB0007", tuple(f"compile/{i}/graph_breaks" for i in range(9)),
    ("compile/0/graph_breaks: 13 breaks",), ("compile/0/graph_breaks: 14 breaks", "GB0007 at model.py:3"),
    "pytest -m cpu -n 0 t.py",
)  # fmt: skip


def test_narrow_terminal_folds_all_columns_but_the_decision() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=30, no_color=True)
    findings_text([replace(FINDING, adopted=("x" * 60,), candidate=("y" * 60,))], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "HOLD" in text
    assert (text.count("x"), text.count("y")) == (60, 60 + FINDING.repro.count("y"))


@pytest.mark.parametrize("width", [None, 160])
def test_finding_text_shows_both_sides_and_the_repro(width: int | None) -> None:
    """Width None is a log: lines are not wrapped, so that it can be searched."""
    console = Console(file=io.StringIO(), force_terminal=width is not None, width=width or 40, no_color=True)
    findings_text([FINDING], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    squeezed = "".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
    for part in ("HOLD", "... and 3 more in gate.json", FINDING.repro, "GB0007"):
        assert "".join(part.split()) in squeezed
    if width is None:
        assert f"candidate: {FINDING.candidate[1]}\n" in text
        assert f"-> {FINDING.repro}\n" in text


def test_finished_step_is_one_line_of_a_log() -> None:
    console = Console(file=io.StringIO(), width=20)
    View(console).say("[bold] " + "step " * 10)
    assert console.file.getvalue() == "[bold] " + "step " * 10 + "\n"  # type: ignore[attr-defined]
