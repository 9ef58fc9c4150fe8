"""Lists the versions of a package that an interpreter could install, oldest first: from an index, folders, our store.

An index is read by pypi-simple (PEP 503 and 691, upload times of PEP 700). As in uv, only the first index that has
the package is used; folders are added to it.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime, timedelta, timezone
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote, urlsplit

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags, platform_tags, sys_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from bumpgate.core.errors import BumpgateError, one_fault, one_line
from bumpgate.core.text import redacted
from bumpgate.env import store
from bumpgate.env.locks import Wheel
from bumpgate.env.request import RUNNING
from bumpgate.env.uv import blocks, host_settings, http_options, local_path
from bumpgate.process.home import home

if TYPE_CHECKING:
    import requests
    from pypi_simple import DistributionPackage

# Only as a separate part: eight digits after "git" are a hash.
DAY = re.compile(r"(?:^|\.)(20[0-9]{2})(0[1-9]|1[0-2])([0-2][0-9]|3[01])(?:\.|$)")
COMMIT = re.compile(r"(^|\.)g(it)?[0-9a-f]{6,}")
FILES = (".whl", ".tar.gz", ".zip")  # wheels and sdists


class VersionsError(BumpgateError):
    """No versions: the package does not exist, or has no wheel for this interpreter."""


class UnreachableError(VersionsError):
    """Package index or folder unreachable, as distinct from an empty listing."""


@dataclass(frozen=True)
class FoundVersion:
    """One version and its best matching wheel.

    version: in PEP 440 form. date: of the build, if its version or the index states it (UTC).
    yanked: None, or the reason ("" if the index gives none). sha256: "" if the index gives none.
    note: a caveat about the order, for the reader.
    """

    version: str
    date: date | None
    yanked: str | None
    url: str
    sha256: str = ""
    note: str = ""


def versions(
    package: str,
    *,
    index: str | None = None,
    find_links: Iterable[str] = (),
    python: str = RUNNING,
    pre: bool = False,
    since: date | None = None,
    until: date | None = None,
    from_store: bool = False,
) -> list[FoundVersion]:
    """List the versions with a wheel for the interpreter, oldest first, yanked ones marked.

    index, find_links: take precedence over the host's (UV_*, PIP_*). python: "3.11". pre: include pre-releases (alphas
    to candidates, nightlies). since, until: days, both included; they exclude versions without a date.
    from_store: our wheel store only. Raises UnreachableError, VersionsError (each one line).
    """
    fits = tag_ranks(python)
    stored = (_file(path, sha256) for sha256, path in store.contents())
    files = list(stored if from_store else _listed(package, index, tuple(find_links)))
    best: dict[Version, tuple[tuple[Any, ...], FoundVersion]] = {}
    others = 0
    for file in files:
        try:
            name, version, build, tags = parse_wheel_filename(file.filename)
        except ValueError:
            continue
        if name != canonicalize_name(package):
            continue
        rank = min((fits[tag] for tag in tags if tag in fits), default=None)
        if rank is None or not _accepts(file.requires_python, python):
            others += 1
            continue
        # A wheel may be yanked and replaced by one with another build number.
        order = (not file.is_yanked, -rank, build)
        if version not in best or order > best[version][0]:
            best[version] = order, _found(version, file)
    if not best:
        raise VersionsError(
            f"{package}: no wheel for Python {python} here; {others} for others"
            if others
            else f"{package}: none found: check the name, or name the index that has it with --index"
        )
    found = in_order(found for _, found in best.values())
    found = [f for f in found if pre or not Version(f.version).is_prerelease]
    if since is None and until is None:
        return found
    first, last = since or date.min, until or date.max
    return [f for f in found if f.date is not None and first <= f.date <= last]


def require(wanted: Requirement, near: Iterable[str], python: str, **places: Any) -> None:
    """Raise VersionsError, with a suggestion, if no index or folder has a version that a requirement allows.

    near: names of packages that may have been meant.
    python: "3.11", or a path, whose version is not read.
    places: index and find_links, as in `versions`. Nothing is raised if they cannot be reached.
    """
    if wanted.url or not re.fullmatch(r"\d+\.\d+", python):
        return
    try:
        found = versions(wanted.name, python=python, pre=True, **places)
    except UnreachableError:
        return
    except VersionsError as error:
        close = get_close_matches(canonicalize_name(wanted.name), ["torch", *near], 1)
        meant = f"{wanted}: no such package here: did you mean {close[0]}{wanted.specifier}?" if close else ""
        raise VersionsError(meant or str(error)) from None
    if any(wanted.specifier.contains(f.version, prereleases=True) for f in found):
        return
    newest = ", ".join([f.version for f in found if not Version(f.version).is_prerelease][-3:])
    raise VersionsError(
        f"{wanted}: no such version for Python {python}; the newest are {newest or found[-1].version}"
        f" (bumpgate versions {wanted.name} lists all {len(found)})"
    )


def missing_days(found: Iterable[FoundVersion]) -> list[date]:
    """Return the days without a build between the first and the last build."""
    days = sorted({f.date for f in found if f.date})
    if not days:
        return []
    return [d for n in range((days[-1] - days[0]).days) if (d := days[0] + timedelta(n)) not in days]


def build_day(version: str) -> date | None:
    """Return the day in a nightly's version, in .devYYYYMMDD or in its local part."""
    parsed = Version(version)
    for text in (str(parsed.dev or ""), parsed.local or ""):
        with suppress(ValueError):  # a day that the calendar lacks
            if match := DAY.search(text):
                return date(*map(int, match.groups()))
    return None


def in_order(found: Iterable[FoundVersion]) -> list[FoundVersion]:
    """Sort by PEP 440, but builds of one version that differ in a git hash by their day.

    A hash has no order: pip considers 3.6.0+gitf00 newer than 3.6.0+git123, whenever they were built. All of them
    come before the release itself, which PEP 440 sorts first.
    """

    parsed = [(Version(f.version), f) for f in found]
    by_commit = {version: bool(COMMIT.search(version.local or "")) for version, _ in parsed}

    def place(pair: tuple[Version, FoundVersion]) -> tuple[Version, bool, date, Version]:
        version, f = pair
        git = by_commit[version]
        return Version(version.public), not git, (f.date or date.min) if git else date.min, version

    days = Counter((v.base_version, f.date) for v, f in parsed if by_commit[v] or build_day(f.version))
    loose = Counter(v.public for v, f in parsed if by_commit[v] and f.date is None)
    out = []
    for version, f in sorted(parsed, key=place):
        builds = days[version.base_version, f.date] if f.date else 0
        notes = [f"one of {builds} builds of {f.date}"] if builds > 1 else []
        if by_commit[version] and loose[version.public] > 1:
            notes.append("no date: its place among the builds by commit is not known")
        out.append(replace(f, note="; ".join(notes)))
    return out


def _found(version: Version, file: DistributionPackage) -> FoundVersion:
    uploaded = None
    with suppress(OverflowError):  # at the ends of the calendar
        uploaded = file.upload_time.astimezone(timezone.utc).date() if file.upload_time else None
    day = build_day(str(version)) or uploaded
    yanked = (file.yanked_reason or "") if file.is_yanked else None
    return FoundVersion(str(version), day, yanked, file.url, file.digests.get("sha256", "").lower())


def tag_ranks(python: str) -> dict[Tag, int]:
    """Return the tags that the interpreter supports, best first."""
    if python == RUNNING:
        tags = list(sys_tags())
    else:
        match = re.fullmatch(r"(\d+)\.(\d+)", python)
        if match is None:
            raise VersionsError(f"invalid Python version {python!r} (expected e.g. 3.11)")
        numbers = int(match[1]), int(match[2])
        platforms = list(platform_tags())
        short = f"cp{match[1]}{match[2]}"
        tags = [*cpython_tags(numbers, platforms=platforms), *compatible_tags(numbers, short, platforms)]
    return {tag: rank for rank, tag in reversed(list(enumerate(tags)))}


def _accepts(requires: str | None, python: str) -> bool:
    try:
        # Check e.g. ">=3.11.4" against the newest patch release of 3.11.
        return not requires or f"{python}.99" in SpecifierSet(requires)
    except ValueError:
        return True


def _listed(package: str, index: str | None, find_links: tuple[str, ...]) -> Iterator[DistributionPackage]:
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    settings = host_settings()
    for place in (*find_links, *settings.get("UV_FIND_LINKS", "").split(",")):
        if place.strip():
            yield from links(place.strip())
    if settings.get("UV_NO_INDEX", "").lower() in ("1", "true", "yes", "on"):
        return
    extra = settings.get("UV_INDEX") or settings.get("UV_EXTRA_INDEX_URL", "")
    default = settings.get("UV_DEFAULT_INDEX") or settings.get("UV_INDEX_URL") or PYPI_SIMPLE_ENDPOINT
    for url in (*([index] if index else []), *extra.split(), default):
        # An index may be written name=https://...
        page = _page(package, re.sub(r"^[A-Za-z0-9_.-]+=(?=\w+:)", "", url))
        if page is not None:
            yield from page
            return


def source_distributions(package: str, index: str | None = None) -> list[DistributionPackage]:
    """Return the sdists of a package that the host's index lists. Raises UnreachableError."""
    return [file for file in _listed(package, index, ()) if file.package_type == "sdist"]


def _page(package: str, url: str) -> list[DistributionPackage] | None:
    """Return the files that one index lists; None if it lacks the package."""
    from pypi_simple import ACCEPT_JSON_PREFERRED, ProjectPage

    if folder := local_path(url):
        page = folder / canonicalize_name(package) / "index.html"
        if not any(folder.glob("*/index.html")):
            raise UnreachableError(f"{folder}: no such index folder: it has no folders PACKAGE/index.html")
        with one_fault(f"{page}: not a page of an index", UnreachableError):
            return _linked(page.read_bytes(), page.as_uri(), package) if page.is_file() else None
    address = f"{url.rstrip('/')}/{canonicalize_name(package)}/"
    with _answer(address, ACCEPT_JSON_PREFERRED) as answer:
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        if "json" not in answer.headers.get("Content-Type", ""):
            return _linked(answer.content, answer.url, package)
        return ProjectPage.from_response(answer, package).packages


@contextmanager
def _answer(url: str, accept: str) -> Iterator[requests.Response]:
    """Yield the response of an index. A failure, also while the response is read, is an UnreachableError."""
    import requests

    with requests.Session() as session:
        try:
            yield session.get(url, headers={"Accept": accept}, **http_options())
        except Exception as error:  # of the connection, or of whichever parser reads the answer
            raise UnreachableError(f"{redacted(url)} does not answer: {_why(error)}") from None


def _linked(html: bytes, base: str, package: str | None = None) -> list[DistributionPackage]:
    """Return the files of an HTML page. PEP 503 has no upload times; mirrors add them in the form that uv reads."""
    from pypi_simple import DistributionPackage
    from pypi_simple.html import RepositoryPage

    found = []
    for link in RepositoryPage.from_html(html, base).links:
        # The text may be something else: the listing of a web server shortens long names.
        name = unquote(urlsplit(link.url).path.rsplit("/", 1)[-1])
        file = DistributionPackage.from_link(
            replace(link, text=name) if name.endswith(FILES) else link, package
        )
        if not file.filename.endswith(FILES):
            continue
        file = replace(file, digests={kind: digest.lower() for kind, digest in file.digests.items()})
        uploaded = link.get_str_attrib("data-upload-time")
        if uploaded:
            file = replace(file, upload_time=datetime.fromisoformat(uploaded.replace("Z", "+00:00")))
        found.append(file)
    return found


def _why(error: Exception) -> str:
    """Return the innermost reason: requests wraps a refused connection four times."""
    if (response := getattr(error, "response", None)) is not None:
        return f"{response.status_code} {response.reason}"
    text = one_line(error, 2000)
    match = re.search(r"(\[Errno [^\]]*\] [A-Za-z ]+|[Tt]imed out|Name or service not known)", text)
    return match[1].strip() if match else one_line(re.sub(r"https?://\S+", "...", text), 120)


def links(place: str) -> list[DistributionPackage]:
    """Return the wheels of a folder, or those that a flat page links to. Raises UnreachableError (one line)."""
    if folder := local_path(place):
        if not folder.is_dir():
            raise UnreachableError(f"{place}: no such folder of wheels: name a folder, or the URL of a page")
        return [_file(path) for path in sorted(folder.glob("*.whl"))]
    with _answer(place, "text/html") as answer:
        answer.raise_for_status()
        return [f for f in _linked(answer.content, answer.url) if f.filename.endswith(".whl")]


def _file(path: Path, sha256: str = "") -> DistributionPackage:
    from pypi_simple import DistributionPackage

    digests = {"sha256": sha256} if sha256 else {}
    return DistributionPackage(path.name, path.absolute().as_uri(), None, None, "wheel", digests, None, None)


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
        sums = _sums(folder / store.SUMS) if folder else {}
        for link in links(place):
            name = Path(link.filename).name
            found.append(Offer(name, link.url, link.digests.get("sha256") or sums.get(name, "")))
    return found


def _sums(path: Path) -> dict[str, str]:
    """Return file name -> sha256, from the format of sha256sum; empty without such a file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    lines = re.findall(r"^([0-9a-fA-F]{64}) [ *](.+)$", text, re.MULTILINE)
    return {name.rsplit("/", 1)[-1]: digest.lower() for digest, name in lines}


def command(
    package: Annotated[str, typer.Argument(help="torch, triton, ...")],
    index: Annotated[str | None, typer.Option(help="An index that takes precedence over the host's.")] = None,
    find_links: Annotated[
        list[str] | None, typer.Option(help="A folder or page of wheels; repeatable.")
    ] = None,
    python: Annotated[str, typer.Option(help="List what this Python could install.")] = RUNNING,
    pre: Annotated[bool, typer.Option("--pre", help="Pre-releases and nightlies too.")] = False,
    since: Annotated[str, typer.Option(help="First day, YYYY-MM-DD.")] = "",
    until: Annotated[str, typer.Option(help="Last day, YYYY-MM-DD.")] = "",
    from_store: Annotated[bool, typer.Option("--store", help="Our wheel store alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """List the versions of a package that could be gated here, oldest first, with the day of each build.

    Exit codes: 0 done, 4 bad input, an unreachable index, or nothing to list.
    """
    where: dict[str, Any] = {"index": index, "find_links": find_links or (), "from_store": from_store}
    found = versions(package, python=python, pre=pre, since=_day(since), until=_day(until), **where)
    if as_json:
        typer.echo(json.dumps([asdict(f) | {"date": f.date and f.date.isoformat()} for f in found], indent=1))
        return
    width = max((len(f.version) for f in found), default=0)
    for f in found:
        yanked = "" if f.yanked is None else f"yanked: {f.yanked}" if f.yanked else "yanked"
        notes = "; ".join(filter(None, (yanked, f.note)))
        typer.echo(f"{f.version:{width}}  {f.date or '(no date)'!s:10}  {notes}".rstrip())
    if pre and (gaps := missing_days(f for f in found if build_day(f.version))):
        typer.echo(f"days without a nightly: {', '.join(map(str, gaps))}")


def _day(text: str) -> date | None:
    try:
        return date.fromisoformat(text) if text else None
    except ValueError:
        raise VersionsError(f"invalid day {text!r} (expected e.g. 2026-03-01)") from None
