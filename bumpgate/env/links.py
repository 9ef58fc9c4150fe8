"""Wheel files at the places of `--find-links`: in folders, and on pages that link to them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bumpgate.env import store
from bumpgate.env.freeze import blocks
from bumpgate.env.locks import Wheel
from bumpgate.env.store import SUMS
from bumpgate.env.uv import local_path
from bumpgate.env.versions import links
from bumpgate.process.home import home


@dataclass(frozen=True)
class Offer:
    """One wheel of a place. sha256: as the page or the folder's SHA256SUMS states it, "" if neither does."""

    file: str
    url: str
    sha256: str

    def path(self) -> Path:
        """Return the file; one of a page is fetched into the wheel store. Raises BumpgateError, OSError."""
        if path := local_path(self.url):
            return path
        if self.sha256 and (kept := store.find(Wheel(self.file, self.sha256))):
            return kept
        home().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home()) as folder:
            partial = Path(folder) / self.file
            with partial.open("wb") as f:
                f.writelines(blocks(self.url))
            # By what it is, not by what the page states: the audit of a wheel compares the two.
            return store.keep(partial)


def offers(places: Iterable[str]) -> list[Offer]:
    """Return the wheels of folders and pages, in order. Raises UnreachableError (one line) if one cannot be read."""
    found = []
    for place in places:
        folder = local_path(place)
        sums = _sums(folder / SUMS) if folder else {}
        for link in links(place):
            name = Path(link.filename).name
            found.append(Offer(name, link.url, link.digests.get("sha256") or sums.get(name, "")))
    return found


def _sums(path: Path) -> dict[str, str]:
    """Return file name -> sha256, from the format of sha256sum."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    return {
        m[2].rsplit("/", 1)[-1]: m[1].lower()
        for line in lines
        if (m := re.fullmatch(r"([0-9a-fA-F]{64}) [ *](.+)", line))
    }
