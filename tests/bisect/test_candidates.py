"""The range of a bisect: versions between two endpoints."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import pytest

from bumpgate.bisect.candidates import Range, RangeError, between, needs_prereleases
from bumpgate.env.versions import FoundVersion, in_order

DAY = date(2026, 10, 1)


def found(*versions: str, day: date | None = DAY, **fields: Any) -> list[FoundVersion]:
    """Return one build per day."""
    days = [day and day + timedelta(n) for n in range(len(versions))]
    return [
        FoundVersion(v, d, fields.get("yanked"), "", "", fields.get("note", ""))
        for v, d in zip(versions, days)
    ]


NIGHTS = found(
    *(f"2.14.0.dev2026100{n}+cpu" for n in (1, 2, 3)), *(f"2.14.0.dev2026100{n}+cpu" for n in (5, 7))
)
NIGHTS[3:] = [FoundVersion(f.version, DAY + timedelta(n), None, "") for f, n in zip(NIGHTS[3:], (4, 6))]


@pytest.mark.parametrize(
    ("good", "bad", "expected"),
    [
        ("2026-10-02", "2026-10-05", ["02", "03", "05"]),
        ("2026-10-04", "2026-10-06", ["03", "05", "07"]),
        ("2.14.0.dev20261001", "2026-10-03", ["01", "02", "03"]),
        ("2.14.0.dev20261001+cpu", "2.14.0.dev20261007+cpu", ["01", "02", "03", "05", "07"]),
    ],
    ids=str,
)
def test_date_endpoint_never_narrows_the_range(good: str, bad: str, expected: list[str]) -> None:
    """For a night without a build, the range is never narrower than requested."""
    span = between("torch", NIGHTS, good, bad)
    assert [v.removesuffix("+cpu")[-2:] for v in span.versions] == expected
    assert (span.good, span.bad) == (span.versions[0], span.versions[-1])


def test_range_summary_counts_excluded_versions() -> None:
    listed = [*NIGHTS]
    listed[1] = FoundVersion(listed[1].version, listed[1].date, "broken", "")
    assert between("torch", listed, "2026-10-01", "2026-10-07").summary(6) == (
        "torch: 2 versions between 2.14.0.dev20261001+cpu (good) and 2.14.0.dev20261007+cpu (bad),"
        " about 6 probes if all install and none misreads;"
        " left out: 1 yanked (2.14.0.dev20261002+cpu), 3 days without a build"
    )


def test_yanked_endpoint_is_kept() -> None:
    listed = found("2.0.0", "2.1.0", "2.2.0", yanked="all of them")
    assert between("torch", listed, "2.0.0", "2.2.0").versions == ("2.0.0", "2.2.0")


@pytest.mark.parametrize(
    ("listed", "good", "bad", "words"),
    [
        (
            found("2.0.0", "2.1.0", day=None),
            "2026-10-01",
            "2.1.0",
            "no version here has a date: name versions",
        ),
        (
            NIGHTS,
            "2026-10-01",
            "2026-10-08",
            "no build of 2026-10-08 or later; the newest is 2.14.0.dev20261007",
        ),
        (found("2.0.0+cpu", "2.0.0+cu126"), "2.0.0", "2.0.0+cpu", "are one version"),
        (
            found("2.0.0+cu126", "2.0.0+xpu", "2.1.0+cu126"),
            "2.0.0",
            "2.1.0",
            "comes as 2.0.0+cu126, 2.0.0+xpu",
        ),
        (
            found("2.0.0", "2.1.0+a1", "2.1.0+a2", "2.2.0"),
            "2.0.0",
            "2.2.0",
            "comes in variants (2.1.0+a1, 2.1.0+a2)",
        ),
        (found("2.0.0+cpu", "2.1.0+xpu"), "2.0.0+cpu", "2.1.0+xpu", "two variants, cpu and xpu"),
        (
            found("3.6.0+git1111111", "3.6.0+git2222222", note="its place is not known"),
            "3.6.0+git1111111",
            "3.6.0+git2222222",
            "name an index that gives upload times",
        ),
        (
            found("2.0.0", "2.2.0"),
            "2.0.0",
            "2.1.0",
            "2.1.0 is not among the 2 versions here; next to it: 2.0.0, 2.2.0",
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_invalid_endpoints_are_refused_in_one_line(
    listed: list[FoundVersion], good: str, bad: str, words: str
) -> None:
    with pytest.raises(RangeError) as caught:
        between("torch", listed, good, bad)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_variants_of_a_version_are_excluded() -> None:
    listed = found("2.0.0", "2.1.0+cpu", "2.1.0", "2.2.0+cpu", "2.3.0")
    plain = between("torch", [listed[0], listed[2], listed[1], listed[4]], "2.0.0", "2.3.0")
    assert plain.versions == ("2.0.0", "2.1.0", "2.3.0")
    assert between("torch", listed, "2.0.0", "2.2.0+cpu").versions == ("2.0.0", "2.1.0+cpu", "2.2.0+cpu")


def test_commit_builds_are_ordered_by_date() -> None:
    listed = found("3.6.0+gitf000000", "3.6.0+git1111111", "3.6.0+git0000000")
    span = between("triton", listed, "3.6.0+gitf000000", "3.6.0+git0000000")
    assert span.versions == tuple(f.version for f in listed)


def test_release_range_needs_no_prereleases() -> None:
    assert not needs_prereleases("2.9.0", "2.13.0")
    assert needs_prereleases("2.9.0", "2026-10-01")
    assert needs_prereleases("2.9.0", "2.14.0.dev20261001")


def test_adjacent_versions_have_none_between() -> None:
    span = Range("torch", ("2.0.0", "2.1.0"), "2.0.0", "2.1.0", {})
    assert "0 versions between" in span.summary(4)


def test_date_does_not_name_a_yanked_build() -> None:
    days = (DAY + timedelta(n) for n in range(6))
    listed = [
        FoundVersion(f"2.14.0.dev2026100{n}", day, "broken" if n in (2, 5) else None, "")
        for n, day in enumerate(days, 1)
    ]
    span = between("torch", listed, "2026-10-02", "2026-10-05")
    assert [version[-1] for version in span.versions] == ["1", "3", "4", "6"]


def test_builds_by_commit_are_kept_next_to_their_release() -> None:
    listed = in_order(found("3.6.0+git1111111", "3.6.0+git2222222", "3.6.0+git3333333", "3.6.0"))
    span = between("triton", listed, "3.6.0+git1111111", "3.6.0+git3333333")
    assert len(span.versions) == 3
