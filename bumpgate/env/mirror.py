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
from filelock import FileLock
from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
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
    in_order,
    missing_days,
    tag_ranks,
    versions,
)

FOLDER, NAME = "nightlies", "mirror.json"
FAILED = 125
GB = 10**9
MOST_GB = 10**6


class MirrorError(BumpgateError):
    """A mirror that cannot be read, or a wheel that cannot be copied."""


class AbsentError(MirrorError):
    """A wheel that is listed, or named by a URL, but not served."""


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
            nights = {
                str(key): MirroredNight(
                    date.fromisoformat(n["day"]), tuple(map(str, n["files"])), str(n["missing"])
                )
                for key, n in raw["nights"].items()
            }
            return cls(folder, limit, nights, {str(k): str(v) for k, v in raw["digests"].items()})

    def write(self) -> None:
        nights = {key: vars(n) | {"day": n.day.isoformat()} for key, n in self.nights.items()}
        write_atomic(
            self.folder / NAME, json.dumps({"nights": nights, "digests": self.digests}, indent=1) + "\n"
        )
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


def mirror_root() -> Path:
    """Return the folder of nightlies, below the wheel store."""
    return store_root() / FOLDER


def command(
    keep: Annotated[int, typer.Option(help="How many nights.", min=1)],
    package: Annotated[str, typer.Option(help="Whose nightlies.")] = "torch",
    index: Annotated[
        str | None, typer.Option(help="URL of an index that takes precedence over the host's.")
    ] = None,
    python: Annotated[str, typer.Option(help="The Python whose wheels are copied.")] = RUNNING,
    limit: Annotated[float | None, typer.Option(help="GB that the copies may take.")] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a wheel that the index no longer lists: a night, or what one pins; repeatable."
        ),
    ] = None,
) -> None:
    """Copy the newest nightlies and the wheels that they pin, newest first; drop nights beyond --keep.

    After a kill or an interrupt, the next call continues. A night with a missing wheel is tried again.

    Exit codes: 0 done, 4 bad input, or an index that cannot be reached, 125 a wheel could not be copied.
    """
    check_number("--limit", limit or 0, MOST_GB)
    unlisted = _of_urls(url or (), package, python)
    folder = mirror_root()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        mirror = Mirror.read(folder, None if limit is None else int(limit * GB))

        @cache
        def listed(name: str) -> tuple[FoundVersion, ...]:
            try:
                found = versions(name, index=index, python=python, pre=True)
            except UnreachableError:
                raise
            except VersionsError:
                found = []
            known = {f.version for f in found}
            more = [f for f in unlisted.get(canonicalize_name(name), ()) if f.version not in known]
            return tuple(in_order([*found, *more]) if more else found)

        copied, failed = 0, False
        prefix = f"{package} {python} "
        for night in _newest(listed(package), mirror, prefix, keep):
            key = prefix + night.version
            if (known := mirror.nights.get(key)) and not known.missing:
                continue
            try:
                missing = _copy(mirror, key, night, listed, python)
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
        mine = {key: n.day for key, n in mirror.nights.items() if key.startswith(prefix)}
        days = sorted(set(mine.values()), reverse=True)[:keep]
        for key in [key for key, day in mine.items() if day not in days]:
            mirror.drop(key)
        if not failed:
            for partial in folder.glob(".*.partial"):
                partial.unlink()
        kept = sum(not n.missing for n in mirror.nights.values())
        gaps = missing_days(f for f in listed(package) if build_day(f.version))
    if gaps:
        typer.echo(f"days without a nightly: {', '.join(map(str, gaps))}")
    typer.echo(f"{copied} nights copied, {kept} kept, {mirror.size() / GB:.2f} GB: --find-links {folder}")
    if failed:
        raise typer.Exit(FAILED)


def _of_urls(urls: Iterable[str], package: str, python: str) -> dict[str, list[FoundVersion]]:
    """Return the wheels of direct URLs by package, with the digest if a URL ends in #sha256=. Raises MirrorError."""
    out: dict[str, list[FoundVersion]] = {}
    for url in urls:
        with one_fault(f"--url {url}: not the URL of a wheel", MirrorError):
            parts = urlsplit(url)
            name, version, _, tags = parse_wheel_filename(unquote(parts.path.rsplit("/", 1)[-1]))
        if tags.isdisjoint(tag_ranks(python)):
            raise MirrorError(f"--url {redacted(url)}: not a wheel for Python {python} on this platform")
        if name == canonicalize_name(package) and build_day(str(version)) is None:
            raise MirrorError(f"--url {redacted(url)}: not a nightly: no day in its version")
        digest = parts.fragment.removeprefix("sha256=") if parts.fragment.startswith("sha256=") else ""
        out.setdefault(name, []).append(
            FoundVersion(str(version), build_day(str(version)), None, url, digest.lower())
        )
    return out


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


def _copy(
    mirror: Mirror,
    key: str,
    night: FoundVersion,
    listed: Callable[[str], tuple[FoundVersion, ...]],
    python: str,
) -> str:
    """Copy a night; return what the index lacks of it, "" if the night is complete."""
    assert night.date is not None
    names: list[str] = []
    missing = ""
    todo = [(night, frozenset[str]())]
    seen = set(todo)
    while todo and not missing:
        found, extras = todo.pop()
        name = unquote(urlsplit(found.url).path.rsplit("/", 1)[-1])
        names += [name] if name not in names else []
        # From the start, so that making room keeps the files of this night.
        mirror.nights[key] = MirroredNight(night.date, tuple(names), "its copy was interrupted")
        if not mirror.has(name, found.sha256):
            try:
                _fetch(mirror, name, found, night.date)
            except AbsentError as error:
                missing = str(error)
                break
        for requirement in _pins(mirror.folder / name, extras, python):
            fits = [
                f
                for f in listed(requirement.name)
                if f.yanked is None and requirement.specifier.contains(Version(f.version), prereleases=True)
            ]
            more = (fits[-1], frozenset(requirement.extras)) if fits else None
            if more is None:
                missing = f"{requirement.name}{requirement.specifier}"
            elif more not in seen:
                seen.add(more)
                todo.append(more)
    mirror.nights[key] = MirroredNight(night.date, tuple(names), missing)
    mirror.write()
    return missing


def _pins(wheel: Path, extras: frozenset[str], python: str) -> Iterator[Requirement]:
    """Yield what a wheel requires in one version (triton, CUDA), by its metadata, on this platform."""
    fix = "delete it, so that the next call copies it again"
    with one_fault(f"{wheel.name}: not a wheel", MirrorError, fix), zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = BytesParser().parsebytes(archive.read(name))
    environment: dict[str, Any] = {**default_environment(), "python_version": python}
    for text in metadata.get_all("Requires-Dist") or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if any(s.operator in ("==", "===") for s in requirement.specifier) and (
            requirement.marker is None
            or any(requirement.marker.evaluate(environment | {"extra": extra}) for extra in (*extras, ""))
        ):
            yield requirement


def _fetch(mirror: Mirror, name: str, found: FoundVersion, day: date) -> None:
    """Copy one wheel. A part that an earlier call left is continued if the index states the digest."""
    import requests

    partial = mirror.folder / f".{name}.partial"
    if not found.sha256:
        partial.unlink(missing_ok=True)
    offset = partial.stat().st_size if partial.is_file() else 0
    try:
        with requests.get(
            found.url,
            stream=True,
            headers={"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {}),
            **http_options(),
        ) as answer:
            if answer.status_code == 416:  # the part is complete, or longer than the file
                _finish(mirror, partial, name, found.sha256)
                return
            # A store of objects answers 403 for a name that it does not have.
            if answer.status_code in (403, 404, 410):
                raise AbsentError(f"{name} ({answer.status_code})")
            answer.raise_for_status()
            size = int(answer.headers.get("Content-Length") or 0)
            mirror.make_room(size, day)
            # A server may ignore the range and send the complete file.
            with partial.open("ab" if answer.status_code == 206 else "wb") as f:
                whole = f.tell() + size
                for block in answer.iter_content(1 << 16):
                    f.write(block)
            if size and partial.stat().st_size < whole:  # an older urllib3 does not notice
                raise requests.ConnectionError
    except requests.RequestException as error:
        reason = getattr(error.response, "status_code", None) or type(error).__name__
        raise MirrorError(
            f"{redacted(found.url)}: cannot be copied ({reason}); the next call continues"
        ) from None
    except OSError as error:
        raise MirrorError(f"{partial}: {error.strerror}; the next call continues") from None
    _finish(mirror, partial, name, found.sha256)


def _finish(mirror: Mirror, partial: Path, name: str, sha256: str) -> None:
    """Check a copy and give it its name. A wheel without a stated digest is checked by its own CRCs."""
    digest = sha256_of(partial)
    whole = digest == sha256
    if not sha256:
        with suppress(BumpgateError), one_fault(name), zipfile.ZipFile(partial) as archive:
            whole = archive.testzip() is None
    if not whole:
        partial.unlink()
        raise MirrorError(
            f"{name}: corrupt copy (sha256 {digest[:12]}...), deleted; the next call copies it again"
        )
    partial.replace(mirror.folder / name)
    mirror.digests[name] = digest
    mirror.write()
