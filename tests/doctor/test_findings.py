"""What a check of doctor reports of what it yields: every defect, whatever it yields before."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from bumpgate.doctor import abi, checks
from bumpgate.doctor.examination import Check, Defect, NotRun, Part, Status

BAD, OLD = Defect("it is bad", "fix it"), Defect("it is old", "renew it", "old", warning=True)


def results(*yielded: Defect | NotRun | str) -> list[tuple[str, Status, str]]:
    def examine(site: Any) -> Iterator[Defect | NotRun | str]:
        yield from yielded

    site: Any = None
    check = Check("own", next(iter(Part)), "a title", examine)
    return [(found.code, found.status, found.reason) for found in check.run(site)]


@pytest.mark.parametrize("first", ["fine", NotRun("no compiler")], ids=["text", "not run"])
def test_defects_after_another_result_are_reported(first: str | NotRun) -> None:
    found = results(first, BAD, OLD, BAD)
    assert found[-3:] == [
        ("own", Status.DEFECT, "it is bad"),
        ("old", Status.WARNING, "it is old"),
        ("own", Status.DEFECT, "it is bad"),
    ]
    assert found[:-3] == ([] if isinstance(first, str) else [("own", Status.NOT_RUN, "no compiler")])


def test_check_is_ok_only_if_it_ran_and_found_nothing() -> None:
    assert results() == [("own", Status.OK, "")]
    assert results("one", "two") == [("own", Status.OK, "two")]
    assert results("one", NotRun("no compiler")) == [("own", Status.NOT_RUN, "no compiler")]


def test_packages_that_no_tool_can_read_are_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel wheel, other packages that link torch are left unaudited."""
    monkeypatch.setattr(abi, "missing_tool", lambda: "nm")
    nothing = SimpleNamespace(wheels=(), installed=lambda name: None)
    site: Any = SimpleNamespace(inventory=nothing, smoke={}, row=nothing)
    (check,) = (check for check in checks.CHECKS if check.code == "BG207")
    (found,) = check.run(site)
    assert found.status is Status.NOT_RUN
    assert found.reason.startswith("nm is not on PATH: no package is audited")
