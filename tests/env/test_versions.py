"""The versions of a package: in build order, from any index or folder, and from recorded pages of a real index."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, datetime, timezone
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bumpgate.env import store, versions
from bumpgate.env.locks import Wheel
from bumpgate.env.versions import (
    FoundVersion,
    Offer,
    UnreachableError,
    VersionsError,
    build_day,
    missing_days,
    offers,
)
from tests.env.conftest import Run
from tests.support.local_index import JSON_TYPE, LocalIndex, fake_wheel, isolated
from tests.support.tree import ROOT

HERE = f"cp{sys.version_info[0]}{sys.version_info[1]}"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIndex]:
    with LocalIndex() as served:
        isolated(monkeypatch, tmp_path, served.url)
        yield served


def serve(
    index: LocalIndex, folder: Path, *found: str, name: str = "torch", tag: str = "py3-none-any"
) -> None:
    for version in found:
        index.add(fake_wheel(folder / "wheels", name, version, tag=tag))


def at(day: int, hour: int = 3) -> datetime:
    return datetime(2026, 3, day, hour, tzinfo=timezone.utc)


def listed(*args: object, **kwargs: object) -> list[str]:
    return [f.version for f in versions.versions(*args, **kwargs)]  # type: ignore[arg-type]


def test_versions_are_sorted_by_pep_440(index: LocalIndex, tmp_path: Path) -> None:
    serve(index, tmp_path, "2.10.0", "2.9.1", "2.9.0", "2.11.0rc1", "2.9.1+cpu", "2.12.0.dev20260301")
    assert listed("torch") == ["2.9.0", "2.9.1", "2.9.1+cpu", "2.10.0"]
    assert listed("Torch", pre=True)[-2:] == ["2.11.0rc1", "2.12.0.dev20260301"]


REFUSED = {
    "torch==2.99.0": "torch==2.99.0: no such version for Python 3.11; the newest are 2.9.1, 2.9.1+cpu, 2.10.0 ",
    "pytorch==2.9.1": "pytorch==2.9.1: no such package here: did you mean torch==2.9.1?",
    "tritn": "tritn: no such package here: did you mean triton?",
    "other==1": "other: none found: check the name",
}


def test_version_that_no_index_has_is_refused(index: LocalIndex, tmp_path: Path) -> None:
    serve(index, tmp_path, "2.9.1+cpu", "2.9.1", "2.10.0", "2.11.0.dev20260301")
    for text, refusal in REFUSED.items():
        with pytest.raises(VersionsError) as error:
            versions.require(Requirement(text), ["triton"], "3.11")
        assert refusal in str(error.value)
        versions.require(Requirement(text), (), "3.11", index="http://127.0.0.1:1")  # the build says so
    for text in ("torch==2.9.1", "torch>=2.10"):
        versions.require(Requirement(text), (), "3.11")


def test_nightlies_have_dates_and_missing_days(index: LocalIndex, tmp_path: Path) -> None:
    one, two, three, four, five, six, seven = (date(2026, 3, day) for day in range(1, 8))
    serve(index, tmp_path, *(f"2.14.0.dev202603{day:02}+cpu" for day in (1, 2, 4, 7)))
    found = versions.versions("torch", pre=True)
    assert [f.date for f in found] == [one, two, four, seven]
    assert missing_days(found) == [three, five, six]
    assert missing_days([]) == []
    assert [f.date for f in versions.versions("torch", pre=True, since=two, until=four)] == [two, four]


def test_builds_by_commit_are_sorted_by_day(index: LocalIndex, tmp_path: Path) -> None:
    """By PEP 440 the hashes sort as text, and the release comes first."""
    built = {"3.6.0+git1111111": 5, "3.6.0+gitaaaaaaa": 3, "3.6.0+gitfffffff": 4, "3.6.0": 20, "3.5.0": 1}
    index.dates = {version: at(day) for version, day in built.items()}
    serve(index, tmp_path, *built, name="triton")
    assert listed("triton") == ["3.5.0", "3.6.0+gitaaaaaaa", "3.6.0+gitfffffff", "3.6.0+git1111111", "3.6.0"]
    index.dates = {}
    assert {f.note for f in versions.versions("triton") if "git" in f.version} == {
        "no date: its place among the builds by commit is not known"
    }
    (alone,) = versions.in_order(versions.versions("triton")[1:2])
    assert ("git" in alone.version, alone.note) == (True, ""), "one build has only one place"


def test_two_builds_of_one_day_are_flagged(index: LocalIndex, tmp_path: Path) -> None:
    index.dates = {"3.6.0+git1111111": at(5), "3.6.0+gitaaaaaaa": at(5, 20), "3.6.0+gitbbbbbbb": at(6)}
    serve(index, tmp_path, *index.dates, name="triton")
    notes = [f.note for f in versions.versions("triton")]
    assert notes == ["one of 2 builds of 2026-03-05", "one of 2 builds of 2026-03-05", ""]


@pytest.mark.parametrize(
    ("version", "day"),
    [
        ("2.14.0.dev20260301", date(2026, 3, 1)),
        ("2.14.0.dev20260301+cu130", date(2026, 3, 1)),
        ("3.6.0+dev.20260301.g1b2c3d4", date(2026, 3, 1)),
        ("3.6.0+git20260301", None),
        ("2.14.0.dev20260231", None),
        ("2.14.0.dev7", None),
        ("2.13.0", None),
    ],
)
def test_build_day_reads_dates_in_versions(version: str, day: date | None) -> None:
    assert build_day(version) == day


def test_yanked_versions_are_marked_with_their_reason(index: LocalIndex, tmp_path: Path) -> None:
    serve(index, tmp_path, "1.0", "1.1", "1.2")
    index.yank("torch", "1.1", "broken on Tuesdays")
    index.yank("torch", "1.2")
    assert [f.yanked for f in versions.versions("torch")] == [None, "broken on Tuesdays", ""]


PLAIN, AGAIN = "torch-1.0-py3-none-any.whl", "torch-1.0-1-py3-none-any.whl"
OF_TAG = f"torch-1.0-{HERE}-{HERE}-manylinux_2_17_x86_64.whl"


@pytest.mark.parametrize(
    ("yanked", "other"), [(PLAIN, AGAIN), (AGAIN, AGAIN), ("", AGAIN), (PLAIN, OF_TAG), (OF_TAG, OF_TAG)]
)
@pytest.mark.parametrize("order", [1, -1])
def test_wheel_replaced_by_another_one_is_not_yanked(yanked: str, other: str, order: int) -> None:
    names = [PLAIN, other]
    page = "".join(
        f'<a href="{name}"{" data-yanked" * (name == yanked)}>{name}</a>' for name in names[::order]
    )
    files = versions._linked(page.encode(), "https://example.org/", "torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "_listed", lambda *_: files)
        (found,) = versions.versions("torch")
    assert (found.yanked, found.url) == (None, f"https://example.org/{names[yanked != names[1]]}")


def test_page_may_shorten_names_and_write_digests_in_capitals() -> None:
    page = b'<a href="../w/torch-2.15.0%2Bcpu-py3-none-any.whl?key=1#sha256=ABC">torch-2.15.0+cpu-p..&gt;</a>'
    (file,) = versions._linked(page, "https://example.org/index/torch/", "torch")
    assert (file.filename, file.digests) == ("torch-2.15.0+cpu-py3-none-any.whl", {"sha256": "abc"})
    assert file.url == "https://example.org/index/w/torch-2.15.0%2Bcpu-py3-none-any.whl?key=1"


def test_sdists_of_an_html_page_are_found(tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    page = '<a href="fast-1.0.tar.gz#sha256=AB">fast-1.0.tar.gz</a><a href="fast-1.0-py3-none-any.whl">w</a>'
    (tmp_path / "fast/index.html").write_text(page)
    (file,) = versions.source_distributions("fast", str(tmp_path))
    assert (file.filename, file.digests) == ("fast-1.0.tar.gz", {"sha256": "ab"})


def test_best_wheel_for_the_interpreter_is_selected(index: LocalIndex, tmp_path: Path) -> None:
    serve(index, tmp_path, "1.0")
    serve(index, tmp_path, "1.0", tag=f"{HERE}-{HERE}-manylinux_2_17_x86_64")
    serve(index, tmp_path, "1.1", tag="cp39-cp39-manylinux_2_17_x86_64")
    found = versions.versions("torch")
    assert [(f.version, HERE in f.url) for f in found] == [("1.0", True)]
    assert listed("torch", python="3.9") == ["1.0", "1.1"]
    serve(index, tmp_path, "1.0", name="old", tag="cp27-cp27mu-linux_x86_64")
    with pytest.raises(VersionsError, match=r"old: no wheel for Python 3\.\d+ here; 1 for others"):
        versions.versions("old")


def test_versions_reads_folders_store_and_file_index(index: LocalIndex, tmp_path: Path) -> None:
    wheel = fake_wheel(tmp_path / "mine", "torch", "8.0")
    serve(index, tmp_path, "1.0")
    assert listed("torch", find_links=[str(tmp_path / "mine")]) == ["1.0", "8.0"]
    store.put(Wheel(wheel.name, store.sha256_of(wheel)), [wheel.read_bytes()])
    (stored,) = versions.versions("torch", from_store=True)
    assert (stored.version, stored.sha256) == ("8.0", store.sha256_of(wheel))
    page = tmp_path / "simple" / "torch" / "index.html"
    page.parent.mkdir(parents=True)
    name = "torch-9.0-py3-none-any.whl"
    page.write_text(f'<a href="{name}" data-upload-time="2026-03-09T01:02:03Z">{name}</a>')
    (linked,) = versions.versions("torch", index=(tmp_path / "simple").as_uri())
    assert (linked.version, linked.date) == ("9.0", date(2026, 3, 9))


def test_first_index_with_the_package_is_used(
    index: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(index, tmp_path, "1.0")
    with LocalIndex([fake_wheel(tmp_path / "other", "torch", "2.0")]) as nightly:
        assert listed("torch", index=nightly.url) == ["2.0"]
        assert listed("torch", index=f"{index.url}/") == ["1.0"]
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", nightly.url)
        assert listed("torch") == ["2.0"]
        serve(index, tmp_path, "3.0", name="helper")
        assert listed("helper") == ["3.0"]
    monkeypatch.setenv("UV_NO_INDEX", "1")
    with pytest.raises(VersionsError, match="none found"):
        versions.versions("torch")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("500", "500 Internal Server Error"),
        ("403", "403 Forbidden"),
        ("refused", "refused"),
        ("folder", "no such"),
    ],
)
def test_unreachable_index_is_not_empty(fault: str, words: str, index: LocalIndex) -> None:
    where: dict[str, object] = {"index": "http://me:secret@127.0.0.1:9/index"} if fault == "refused" else {}
    if fault.isdigit():
        index.fail(int(fault))
    elif fault == "folder":
        where = {"find_links": ["/none"]}
    with pytest.raises(UnreachableError, match=words) as caught:
        versions.versions("torch", **where)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_versions_command_prints_one_line_per_version(index: LocalIndex, tmp_path: Path, run: Run) -> None:
    serve(index, tmp_path, "2.13.0", *(f"2.14.0.dev202603{day:02}" for day in (1, 3)))
    index.yank("torch", "2.13.0", "bad")
    assert run("versions", "torch", "--pre") == (
        0,
        "2.13.0              (no date)   yanked: bad\n"
        "2.14.0.dev20260301  2026-03-01\n"
        "2.14.0.dev20260303  2026-03-03\n"
        "days without a nightly: 2026-03-02\n",
        "",
    )
    for args, words in (
        (("nothing",), "nothing: none found"),
        (("torch", "--since", "yesterday"), "invalid day"),
        (("torch", "--python", "three"), "invalid Python version"),
    ):
        code, out, err = run("versions", *args)
        assert (code, out, len(err.splitlines()), words in err) == (4, "", 1, True), err
    index.fail(500)
    assert run("versions", "torch")[0] == 4


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return fake_wheel(tmp_path / "my wheels", "fast", "1.0+torch2.13")


@pytest.mark.parametrize("url", [False, True], ids=["path", "file URL"])
def test_folder_offers_its_files_as_they_are(url: bool, index: LocalIndex, wheel: Path) -> None:
    place = wheel.parent.as_uri() if url else str(wheel.parent)
    (offer,) = offers([place])
    assert (offer.file, offer.sha256, offer.path()) == (wheel.name, "", wheel)
    assert listed("fast", find_links=[place]) == ["1.0+torch2.13"]
    for digest in ("0" * 64, "A" * 64):
        (wheel.parent / store.SUMS).write_text(f"{digest}  {wheel.name}\n")
        assert [offer.sha256 for offer in offers([place])] == [digest.lower()]


def test_wheel_of_a_page_is_fetched_into_the_store_once(index: LocalIndex, wheel: Path) -> None:
    index.add(wheel)
    (offer,) = offers([f"{index.url}/fast"])
    digest = store.sha256_of(wheel)
    assert (offer.file, offer.sha256) == (wheel.name, digest)
    assert index.fetched == []
    assert offer.path() == offer.path() == store.verify(Wheel(wheel.name, digest))
    assert index.fetched == [wheel.name]


def test_wheel_of_a_page_is_stored_by_its_own_hash(index: LocalIndex, wheel: Path) -> None:
    """A page may state another hash: the audit of the wheel then refuses it."""
    index.add(wheel)
    (offer,) = offers([f"{index.url}/fast"])
    path = Offer(offer.file, offer.url, "0" * 64).path()
    assert (path.parent.name, path.read_bytes()) == (store.sha256_of(wheel), wheel.read_bytes())


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("none/at all", "no such folder of wheels: name a folder, or the URL"),
        ("file:///none/at%20all", "no such folder of wheels: name a folder, or the URL"),
        ("{index}/none", "404 Not Found"),
    ],
)
def test_place_that_does_not_exist_is_refused(place: str, words: str, index: LocalIndex) -> None:
    with pytest.raises(UnreachableError, match=words) as caught:
        offers([place.format(index=index.url)])
    assert "\n" not in str(caught.value)


class Recorded(LocalIndex):
    """Serves the recorded page of a project (fixtures/index) in one form, whatever the client accepts."""

    form = "html"

    def _page(self, path: str, accepts: str) -> tuple[int, str, bytes]:
        assert accepts.startswith(JSON_TYPE)
        page = ROOT / "fixtures" / "index" / f"{path.strip('/').rpartition('/')[2]}.{self.form}"
        kind = {"html": "text/html", "json": JSON_TYPE}[self.form]
        return (200, kind, page.read_bytes()) if page.exists() else (404, kind, b"")


def read(form: str, package: str, folder: Path, **options: object) -> list[FoundVersion]:
    with Recorded() as index, pytest.MonkeyPatch.context() as patch:
        index.form = form
        isolated(patch, folder, index.url)
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setattr(versions, "platform_tags", lambda: ["manylinux_2_28_x86_64", "linux_x86_64"])
        found = versions.versions(package, **options)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("form", ["html", "json"])
def test_recorded_page_lists_wheels_of_each_python(form: str, tmp_path: Path) -> None:
    found = read(form, "torch-xla", tmp_path, python="3.11")
    assert [f.version for f in found] == [
        *("2.1.0", "2.2.0", "2.3.0", "2.4.0", "2.5.0", "2.5.1"),
        *("2.6.0", "2.6.1", "2.7.0", "2.8.0", "2.8.1", "2.9.0"),
    ]
    assert all("-cp311-cp311-manylinux_2_28_x86_64.whl" in f.url and len(f.sha256) == 64 for f in found)
    newer = read(form, "torch-xla", tmp_path, python="3.13")
    assert [f.version for f in newer] == ["2.8.0", "2.8.1", "2.9.0"]
    older = read(form, "sympy", tmp_path, python="3.7")
    assert [f.version for f in older][-2:] == ["1.10", "1.10.1"], "its releases state the Python they require"


@pytest.mark.parametrize("package", ["torch-xla", "sympy"])
def test_recorded_forms_differ_in_dates_only(package: str, tmp_path: Path) -> None:
    html, json = (read(form, package, tmp_path, python="3.11", pre=True) for form in ("html", "json"))
    assert html == [replace(f, date=None) for f in json]
    assert all(f.date for f in json)


def test_recorded_yanked_release_keeps_its_reason(tmp_path: Path) -> None:
    found = {f.version: f for f in read("json", "sympy", tmp_path, python="3.11", pre=True)}
    assert found["1.12.1a1"].yanked == "Release was a temporary fix"
    assert found["1.14.0"].yanked is None
    assert found["1.14.0"].date == date(2025, 4, 27)
