"""`bumpgate mirror`: copies of the newest nightlies with the triton and CUDA wheels that they pin.

An index forgets nightlies after about 60 days. The copies are files by name in `nightlies/` of the wheel store, which
`gate`, `bisect` and `versions` take as --find-links. mirror.json lists the complete nights and the digest of each file.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from email.parser import BytesParser
from functools import cache
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import typer
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.version import Version

from bumpgate.core.errors import BumpgateError, check_number, one_fault
from bumpgate.core.rows import write_atomic
from bumpgate.core.text import redacted
from bumpgate.env.request import RUNNING
from bumpgate.env.store import SUMS, sha256_of, store_root
from bumpgate.env.uv import http_options
from bumpgate.env.versions import (
    FoundVersion,
    UnreachableError,
    VersionsError,
    build_day,
    missing_days,
    versions,
)
from bumpgate.process.locks import locked

FOLDER, NAME = "nightlies", "mirror.json"
FAILED = 125
GB = 10**9
MOST_GB = 10**6
# The versions that an index lists of a package.
Listed = Callable[[str], tuple[FoundVersion, ...]]


class MirrorError(BumpgateError):
    """A mirror that cannot be read, or a wheel that cannot be copied."""


class AbsentError(MirrorError):
    """A wheel that is listed, but not served."""


class FullError(MirrorError):
    """The size limit leaves no room for an older night."""


@dataclass(frozen=True)
class MirroredNight:
    """files: the wheels copied so far, by name. missing: what the index lacks of it, "" if the night is complete."""

    day: date
    files: tuple[str, ...]
    missing: str = ""


def copies(stores: Iterable[str]) -> tuple[str, ...]:
    """Return the folders of copies in stores, as find_links takes them. Raises MirrorError on a folder without any."""
    found = []
    for store in map(Path, stores):
        places = [place for place in (store, store / FOLDER) if (place / NAME).is_file()]
        if not places:
            raise MirrorError(f"--store {store}: no copies of nightlies there; bumpgate mirror makes them")
        found.append(str(places[0].absolute()))
    return tuple(found)


def mirror_root() -> Path:
    """Return the folder of nightlies, below the wheel store."""
    return store_root() / FOLDER


@dataclass
class Mirror:
    """The folder of copies. nights: by package, Python and version. digests: by file. limit: bytes, None for none."""

    folder: Path
    limit: int | None = None
    nights: dict[str, MirroredNight] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, limit: int | None = None) -> Mirror:
        path = folder / NAME
        if not path.exists():
            return cls(folder, limit)
        with one_fault(f"{path}: not a mirror's list", MirrorError, "delete it"):
            raw = json.loads(path.read_text(encoding="utf-8"))
            nights = {}
            for key, n in raw["nights"].items():
                day, files = date.fromisoformat(n["day"]), tuple(map(str, n["files"]))
                nights[str(key)] = MirroredNight(day, files, str(n["missing"]))
            return cls(folder, limit, nights, {str(k): str(v) for k, v in raw["digests"].items()})

    def write(self) -> None:
        nights = {key: vars(n) | {"day": n.day.isoformat()} for key, n in self.nights.items()}
        text = json.dumps({"nights": nights, "digests": self.digests}, indent=1) + "\n"
        write_atomic(self.folder / NAME, text)
        lines = (f"{digest}  {name}\n" for name, digest in sorted(self.digests.items()))
        write_atomic(self.folder / SUMS, "".join(lines))

    def has(self, name: str, sha256: str) -> bool:
        """Whether a copy of a file exists. sha256: from the index, "" if it states none."""
        known = self.digests.get(name)
        return bool(known) and (self.folder / name).is_file() and sha256 in ("", known)

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir() if path.is_file())

    def make_room(self, needed: int, day: date) -> None:
        """Drop nights older than `day` until `needed` bytes fit. Raises FullError."""
        while self.limit is not None and self.size() + needed > self.limit:
            oldest = min(self.nights, key=lambda key: self.nights[key].day, default=None)
            if oldest is None or self.nights[oldest].day >= day:
                raise FullError(f"--limit {self.limit / GB:g} GB: no room for the night of {day}")
            self.drop(oldest)

    def drop(self, key: str) -> None:
        """Remove a night, and the files that no other night uses."""
        files = set(self.nights.pop(key).files)
        files -= {name for night in self.nights.values() for name in night.files}
        for name in files:
            self.digests.pop(name, None)
        self.write()
        for name in files:
            (self.folder / name).unlink(missing_ok=True)

    def keep_days(self, prefix: str, keep: int) -> None:
        """Drop the nights of a package and Python beyond the newest `keep` days."""
        mine = {key: night.day for key, night in self.nights.items() if key.startswith(prefix)}
        days = sorted(set(mine.values()), reverse=True)[:keep]
        for key in [key for key, day in mine.items() if day not in days]:
            self.drop(key)

    def copy(self, key: str, night: FoundVersion, listed: Listed, python: str) -> str:
        """Copy a night; return what the index lacks of it, "" if the night is complete."""
        day = night.date or date.min
        names: dict[str, None] = {}
        missing = ""
        todo = [(night, frozenset[str]())]
        seen = set(todo)
        while todo and not missing:
            found, extras = todo.pop()
            name = _file_of(found.url)
            names[name] = None
            # From the start, so that making room keeps the files of this night.
            self.nights[key] = MirroredNight(day, tuple(names), "its copy was interrupted")
            try:
                self.fetch(name, found, day)
            except AbsentError as error:
                missing = str(error)
                break
            for requirement in _pins(self.folder / name, extras, python):
                fits = [f for f in listed(requirement.name) if _is_of(f, requirement)]
                more = (fits[-1], frozenset(requirement.extras)) if fits else None
                if more is None:
                    missing = f"{requirement.name}{requirement.specifier}"
                elif more not in seen:
                    seen.add(more)
                    todo.append(more)
        self.nights[key] = MirroredNight(day, tuple(names), missing)
        self.write()
        return missing

    def fetch(self, name: str, found: FoundVersion, day: date) -> None:
        """Copy one wheel, unless there is a copy. A wheel without a listed digest is checked by its own CRCs."""
        import requests

        if self.has(name, found.sha256):
            return
        partial = self.folder / f".{name}.partial"
        again = "the next call copies it again"
        try:
            headers = {"Accept-Encoding": "identity"}
            with requests.get(found.url, stream=True, headers=headers, **http_options()) as answer:
                # A store of objects answers 403 for a name that it does not have.
                if answer.status_code in (403, 404, 410):
                    raise AbsentError(f"{name} ({answer.status_code})")
                answer.raise_for_status()
                size = int(answer.headers.get("Content-Length") or 0)
                self.make_room(size, day)
                with partial.open("wb") as f:
                    f.writelines(answer.iter_content(1 << 16))
            if size and partial.stat().st_size < size:  # an older urllib3 does not notice
                raise requests.ConnectionError
            digest = sha256_of(partial)
            whole = digest == found.sha256
            if not found.sha256:
                with suppress(BumpgateError), one_fault(name), zipfile.ZipFile(partial) as archive:
                    whole = archive.testzip() is None
            if not whole:
                raise MirrorError(f"{name}: corrupt copy (sha256 {digest[:12]}...), deleted; {again}")
            partial.replace(self.folder / name)
        except requests.RequestException as error:
            reason = getattr(error.response, "status_code", None) or type(error).__name__
            raise MirrorError(f"{redacted(found.url)}: cannot be copied ({reason}); {again}") from None
        except OSError as error:
            raise MirrorError(f"{partial}: {error.strerror}; {again}") from None
        finally:
            partial.unlink(missing_ok=True)
        self.digests[name] = digest
        self.write()


def command(
    keep: Annotated[int, typer.Option(help="How many nights.", min=1)],
    package: Annotated[str, typer.Option(help="Whose nightlies.")] = "torch",
    index: Annotated[
        str | None, typer.Option(help="URL of an index that takes precedence over the host's.")
    ] = None,
    python: Annotated[str, typer.Option(help="The Python whose wheels are copied.")] = RUNNING,
    limit: Annotated[float | None, typer.Option(help="GB that the copies may take.")] = None,
) -> None:
    """Copy the newest nightlies and the wheels that they pin, newest first; drop nights beyond --keep.

    After a kill or an interrupt, the next call copies what is missing. A night with a missing wheel is tried again.

    Exit codes: 0 done, 4 bad input, or an index that cannot be reached, 125 a wheel could not be copied.
    """
    check_number("--limit", limit or 0, MOST_GB)
    folder, prefix = mirror_root(), f"{package} {python} "
    folder.mkdir(parents=True, exist_ok=True)

    @cache
    def listed(name: str) -> tuple[FoundVersion, ...]:
        try:
            return tuple(versions(name, index=index, python=python, pre=True))
        except UnreachableError:
            raise
        except VersionsError:
            return ()

    copied, failed = 0, False
    with locked(folder / ".writer", exclusive=True):
        mirror = Mirror.read(folder, None if limit is None else int(limit * GB))
        for night in _newest(listed(package), mirror, prefix, keep):
            key = prefix + night.version
            if (known := mirror.nights.get(key)) and not known.missing:
                continue
            try:
                missing = mirror.copy(key, night, listed, python)
            except FullError as error:
                mirror.drop(key)
                typer.echo(str(error))
                break
            except MirrorError as error:
                failed = True
                typer.echo(f"bumpgate: {night.version}: {error}", err=True)
                break
            copied += not missing
            typer.echo(f"{night.version}: {f'half-published: no {missing}' if missing else 'copied'}")
        mirror.keep_days(prefix, keep)
        for partial in folder.glob(".*.partial"):  # of a killed call
            partial.unlink()
        kept = sum(not n.missing for n in mirror.nights.values())
    if gaps := missing_days(f for f in listed(package) if build_day(f.version)):
        typer.echo(f"days without a nightly: {', '.join(map(str, gaps))}")
    typer.echo(f"{copied} nights copied, {kept} kept, {mirror.size() / GB:.2f} GB: --find-links {folder}")
    if failed:
        raise typer.Exit(FAILED)


def _newest(found: tuple[FoundVersion, ...], mirror: Mirror, prefix: str, keep: int) -> list[FoundVersion]:
    """Return the nightlies among the newest `keep` days, newest first; yanked ones are printed and left out."""
    nightlies = [f for f in found if build_day(f.version) and f.date]
    known = {n.day for key, n in mirror.nights.items() if key.startswith(prefix)}
    if not nightlies and not known:
        raise VersionsError(f"{prefix.split()[0]}: no nightly found; name their index with --index")
    good = [f for f in nightlies if f.yanked is None]
    days = sorted({f.date for f in good if f.date} | known, reverse=True)[:keep]
    for f in nightlies:
        if f.yanked is not None and days and f.date and f.date >= days[-1]:
            typer.echo(f"{f.version}: yanked{f': {f.yanked}' if f.yanked else ''}")
    return [f for f in reversed(good) if f.date in days]


def _pins(wheel: Path, extras: frozenset[str], python: str) -> Iterator[Requirement]:
    """Yield what a wheel requires in one version (triton, CUDA), by its metadata, on this platform."""
    fix = "delete it, so that the next call copies it again"
    with one_fault(f"{wheel.name}: not a wheel", MirrorError, fix), zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = BytesParser().parsebytes(archive.read(name))
    here: dict[str, Any] = {**default_environment(), "python_version": python}
    for text in metadata.get_all("Requires-Dist") or ():
        with suppress(ValueError):
            required = Requirement(text)
            marker = required.marker
            if any(s.operator in ("==", "===") for s in required.specifier) and (
                marker is None or any(marker.evaluate(here | {"extra": extra}) for extra in (*extras, ""))
            ):
                yield required


def _is_of(found: FoundVersion, requirement: Requirement) -> bool:
    allowed = requirement.specifier.contains(Version(found.version), prereleases=True)
    return allowed and found.yanked is None


def _file_of(url: str) -> str:
    return unquote(urlsplit(url).path.rsplit("/", 1)[-1])
