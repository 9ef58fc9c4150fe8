"""The wheels of `--find-links`: of a folder, of a file URL and of a page."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from bumpgate.env import store
from bumpgate.env.locks import Wheel
from bumpgate.env.versions import Offer, UnreachableError, offers, versions
from tests.support.local_index import LocalIndex, fake_wheel


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return fake_wheel(tmp_path / "my wheels", "fast", "1.0+torch2.13")


@pytest.mark.parametrize("url", [False, True], ids=["path", "file URL"])
def test_folder_offers_its_files_as_they_are(url: bool, index: LocalIndex, wheel: Path) -> None:
    place = wheel.parent.as_uri() if url else str(wheel.parent)
    (offer,) = offers([place])
    assert (offer.file, offer.sha256, offer.path()) == (wheel.name, "", wheel)
    assert [found.version for found in versions("fast", find_links=[place])] == ["1.0+torch2.13"]
    for digest in ("0" * 64, "A" * 64):
        (wheel.parent / store.SUMS).write_text(f"{digest}  {wheel.name}\n")
        assert [offer.sha256 for offer in offers([place])] == [digest.lower()]


def test_wheel_of_a_page_is_fetched_into_the_store_once(index: LocalIndex, wheel: Path) -> None:
    index.add(wheel)
    (offer,) = offers([f"{index.url}/fast"])
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert (offer.file, offer.sha256) == (wheel.name, digest)
    assert not any(path.startswith("/files/") for path in index.requests)
    assert offer.path() == offer.path() == store.verify(Wheel(wheel.name, digest))
    assert len([path for path in index.requests if path.startswith("/files/")]) == 1


def test_wheel_of_a_page_is_stored_by_its_own_hash(index: LocalIndex, wheel: Path) -> None:
    """A page may state another hash: the audit of the wheel then refuses it."""
    index.add(wheel)
    (offer,) = offers([f"{index.url}/fast"])
    path = Offer(offer.file, offer.url, "0" * 64).path()
    assert (path.parent.name, path.read_bytes()) == (store.sha256_of(wheel), wheel.read_bytes())


@pytest.mark.parametrize("place", ["none/at all", "file:///none/at%20all", "{index}/none"])
def test_place_that_does_not_exist_is_refused(place: str, index: LocalIndex) -> None:
    words = (
        "404 Not Found" if place.startswith("{") else "no such folder of wheels: name a folder, or the URL"
    )
    with pytest.raises(UnreachableError, match=words) as caught:
        offers([place.format(index=index.url)])
    assert "\n" not in str(caught.value)
