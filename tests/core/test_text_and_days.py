"""Lines of a failed program's output; variables named BUMPGATE_*; the days of an acceptance."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

from bumpgate.core import accepted
from bumpgate.core.baseline import BaselineError
from bumpgate.core.errors import text_lines
from bumpgate.core.variables import RUNS, USERS

ROOT = Path(__file__).parents[2]

LEAKS = """Traceback (most recent call last):
ValueError: P is 9

nanobind: leaked 326 functions!
 - leaked function "create_for_op"
 - ... skipped remainder
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


def test_last_line_is_the_error_and_not_a_leak_report() -> None:
    assert text_lines(LEAKS) == ["Traceback (most recent call last):", "ValueError: P is 9"]
    assert text_lines(" - an item\nSee https://example.org\n") == [" - an item", "See https://example.org"]
    assert text_lines("\n \n") == []


def test_each_variable_has_a_line() -> None:
    """In bumpgate.core.variables, if bumpgate or the suites' support reads it."""
    files = [*(ROOT / "bumpgate").rglob("*.py"), *(ROOT / "suites/support").rglob("*.py")]
    files += ROOT.glob("suites/**/conftest.py")
    files = [file for file in files if file.name != "variables.py" and "launch" not in file.parts]
    used = {name for file in files for name in re.findall(r"\bBUMPGATE_[A-Z]\w*", file.read_text())}
    assert used == RUNS.keys() | USERS.keys()


@pytest.mark.parametrize(("since", "expires"), [(0, 400), (0, -1), (300, 300)])
def test_acceptance_of_impossible_days_is_refused(tmp_path: Path, since: int, expires: int) -> None:
    """Edited by hand: it holds for too long, has ended before it began, or begins in the future."""
    first, last = (accepted.today() + timedelta(days=days) for days in (since, expires))
    entry = 'lane = "cpu"\nrow = "a/b/c"\nvalue = 14\nowner = "ada"\nreason = "why"\n'
    path = tmp_path / accepted.FILE
    path.write_text(f"[[accepted]]\n{entry}since = {first}\nexpires = {last}\n")
    with pytest.raises(
        BaselineError, match="since must not be in the future, and expires at most 366 days later"
    ):
        accepted.load(path)
