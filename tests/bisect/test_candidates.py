"""The range of a bisect: versions between two endpoints."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import pytest

from bumpgate.bisect.candidates import Range, RangeError, between, needs_prereleases
from bumpgate.env.versions import FoundVersion, in_order

DAY = date(2026, 10, 1)


def found(*versions: str, day: date | None = DAY, **fields: Any) -> list[FoundVersion]:
    days = [day and day + timedelta(n) for n in range(len(versions))]
    yanked, note = fields.get("yanked"), fields.get("note", "")
    return [FoundVersion(v, d, yanked, "", "", note) for v, d in zip(versions, days)]


def night(n: int, variant: str = "+cpu", yanked: str | None = None) -> FoundVersion:
    return FoundVersion(f"2.14.0.dev2026100{n}{variant}", DAY + timedelta(n - 1), yanked, "")


NIGHTS = [night(n) for n in (1, 2, 3, 5, 7)]


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
    listed = [NIGHTS[0], night(2, yanked="broken"), *NIGHTS[2:]]
    assert between("torch", listed, "2026-10-01", "2026-10-07").summary(6) == (
        "torch: 2 versions between 2.14.0.dev20261001+cpu (good) and 2.14.0.dev20261007+cpu (bad),"
        " about 6 probes if all install and none misreads;"
        " left out: 1 yanked (2.14.0.dev20261002+cpu), 3 days without a build"
    )
    adjacent = Range("torch", ("2.0.0", "2.1.0"), "2.0.0", "2.1.0", {})
    assert "0 versions between" in adjacent.summary(4)


BUILDS = ("3.6.0+git1111111", "3.6.0+git2222222")


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
            "in variants (2.1.0+a1, 2.1.0+a2)",
        ),
        (found("2.0.0+cpu", "2.1.0+xpu"), "2.0.0+cpu", "2.1.0+xpu", "two variants, cpu and xpu"),
        (found(*BUILDS, note="its place is not known"), *BUILDS, "name an index that gives upload times"),
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


PLAIN = found("2.0.0", "2.1.0", "2.1.0+cpu", "2.3.0")
MIXED = found("2.0.0", "2.1.0+cpu", "2.1.0", "2.2.0+cpu", "2.3.0")
YANKED = [night(n, "", "broken" if n in (2, 5) else None) for n in range(1, 7)]
COMMITS = found("3.6.0+gitf000000", "3.6.0+git1111111", "3.6.0+git0000000")
RELEASED = in_order(found("3.6.0+git1111111", "3.6.0+git2222222", "3.6.0+git3333333", "3.6.0"))


@pytest.mark.parametrize(
    ("listed", "good", "bad", "kept"),
    [
        (found("2.0.0", "2.1.0", "2.2.0", yanked="all"), "2.0.0", "2.2.0", "2.0.0 2.2.0"),
        (PLAIN, "2.0.0", "2.3.0", "2.0.0 2.1.0 2.3.0"),
        (MIXED, "2.0.0", "2.2.0+cpu", "2.0.0 2.1.0+cpu 2.2.0+cpu"),
        (YANKED, "2026-10-02", "2026-10-05", " ".join(YANKED[n].version for n in (0, 2, 3, 5))),
        (COMMITS, "3.6.0+gitf000000", "3.6.0+git0000000", " ".join(f.version for f in COMMITS)),
        (
            RELEASED,
            BUILDS[0],
            "3.6.0+git3333333",
            " ".join(f.version for f in RELEASED if "+git" in f.version),
        ),
    ],
    ids=[
        "a yanked endpoint is kept",
        "other variants are left out",
        "the named variant is kept",
        "a date names no yanked build",
        "commits are ordered by date",
        "commits next to their release",
    ],
)
def test_versions_between_the_endpoints(listed: list[FoundVersion], good: str, bad: str, kept: str) -> None:
    assert " ".join(between("triton", listed, good, bad).versions) == kept


def test_release_range_needs_no_prereleases() -> None:
    assert not needs_prereleases("2.9.0", "2.13.0")
    assert needs_prereleases("2.9.0", "2026-10-01")
    assert needs_prereleases("2.9.0", "2.14.0.dev20261001")
