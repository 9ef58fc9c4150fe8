"""The corpus of torch's regressions: what its cases state, and the signature of a case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from suites.features.corpus import CASES
from suites.features.corpus.case import Case


def edge() -> list[str]:
    """Title."""
    return []


EDGE = Case("area", 1, ("2.9.0", "2.10.0"), ("2.8.0", "2.13.0"), "", edge)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stated_releases_agree_with_the_range(case: Case) -> None:
    known = Requirement(case.known_in).specifier
    assert case.bad
    assert case.good or case.issue, "a defect that no release is without has an open thread"
    for stated in (case.bad, case.good):
        assert list(stated) == sorted(set(stated), key=Version)
    assert [v for v in (*case.bad, *case.good) if known.contains(v)] == list(case.bad)


def test_names_of_cases_are_unique() -> None:
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize(
    ("bad", "good", "range"),
    [
        ("2.9.0", "2.8.0 2.13.0", "torch>=2.9.0,<2.13.0"),
        ("2.15.0", "2.13.0 2.14.1", "torch>=2.15.0,<2.16"),
        ("2.9.0 2.12.0", "2.10.0 2.13.0", "torch>=2.9.0,<2.13.0,!=2.10.0"),
    ],
)
def test_range_of_bad_releases(bad: str, good: str, range: str) -> None:
    assert replace(EDGE, bad=tuple(bad.split()), good=tuple(good.split())).known_in == range


def test_another_failure_is_not_the_signature() -> None:
    def fails() -> list[str]:
        raise RuntimeError("the named error, and more")

    assert replace(EDGE, error="named error", find=fails).signature() == ["RuntimeError: named error"]
    for words in ("", "another error"):
        with pytest.raises(RuntimeError, match="named error"):
            replace(EDGE, error=words, find=fails).signature()
