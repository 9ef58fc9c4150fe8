"""Lines of a failed program's output."""

from __future__ import annotations

from bumpgate.core.errors import text_lines

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
