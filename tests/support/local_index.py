"""A package index on loopback that serves small fake wheels, for tests that install, list and bisect.

    with LocalIndex([fake_wheel(folder, "torch", "1.0", {"torch/__init__.py": "..."})]) as index:
        index.url            # PEP 503 (HTML) and PEP 691 (JSON), with PEP 700 upload times and sizes
        index.yank("torch", "1.0", "broken")
        index.fail(500)      # status of every response from now on; fail(0) ends it
        index.gone.add(name) # listed, but its file returns 404, as on a nightly index
        index.pause()        # files are not sent until index.resume()
        index.requests       # requested paths, in order

A wheel contains only the files given by the test, so a build takes well under a second.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import threading
import time
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote, unquote

import pytest
from packaging.utils import canonicalize_name, parse_wheel_filename

from tests.support.loopback import Loopback

JSON_TYPE = "application/vnd.pypi.simple.v1+json"
WHEEL = "application/octet-stream"


def isolated(monkeypatch: pytest.MonkeyPatch, folder: Path, index_url: str) -> None:
    """Isolate from the host's pip and uv settings and caches: only this index, and all files below `folder`."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_", "BUMPGATE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("UV_DEFAULT_INDEX", index_url)
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_CACHE_DIR", str(folder / "uv"))
    monkeypatch.setenv("BUMPGATE_HOME", str(folder / "home"))


def fake_wheel(
    folder: Path,
    name: str,
    version: str,
    body: str | Mapping[str, str] = "",
    requires: Iterable[str] = (),
    *,
    tag: str = "py3-none-any",
    requires_python: str = "",
    source: str = "",
) -> Path:
    """Write a wheel and return its path.

    body: the text of `<name>/__init__.py`, or file name to text; `__version__` is added to an __init__ of text.
    requires: PEP 508 strings. tag: part of the file name, e.g. "cp311-cp311-manylinux_2_28_x86_64".
    source: repository URL in its metadata.
    """
    package = name.replace("-", "_")
    if isinstance(body, str):
        body = {f"{package}/__init__.py": f"__version__ = {version!r}\n{body}"}
    info = f"{package}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {r}" for r in requires]
    lines += [f"Requires-Python: {requires_python}"] if requires_python else []
    lines += [f"Project-URL: Repository, {source}"] if source else []
    files = {
        **body,
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    return pack(folder / f"{package}-{version}-{tag}.whl", info, files)


def pack(
    path: Path,
    info: str,
    files: Mapping[str, str | bytes],
    swapped: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
    """Write the archive of a wheel with its RECORD. swapped: files that differ from what RECORD says."""
    content = {name: data.encode() if isinstance(data, str) else data for name, data in files.items()}
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in content.items())
    content[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**content, **swapped}.items():
            # A fixed date makes the wheel's bytes reproducible.
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@dataclass
class LocalIndex(Loopback):
    """Serves wheels while the `with` block runs. packages: wheel files, more can be added with `add`.

    dates: upload time by version, for every package; other versions have none in the response.
    delay: seconds before a wheel is sent.
    html: serve HTML pages alone, as download.pytorch.org does.
    plain: files that a page lists without a digest of the wheel, and with one of its metadata.
    gone: files that are listed, and answer 404.
    cut: bytes after which each transfer breaks off, 0 for none.
    spoilt: a file whose bytes differ from the listed ones.
    """

    packages: Iterable[Path] = ()
    dates: Mapping[str, datetime] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    delay: float = 0.0
    html: bool = False
    plain: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    cut: int = 0
    spoilt: str = ""

    def __post_init__(self) -> None:
        self._files: dict[str, dict[str, Path]] = {}
        self._yanked: dict[tuple[str, str], str] = {}
        self._sending = threading.Event()
        self._sending.set()
        self._status = 0
        self.wheels = self.packages

    @property
    def url(self) -> str:
        """URL of the simple index, without a trailing slash."""
        return f"{super().url}/index"

    def add(self, path: Path) -> None:
        name = str(parse_wheel_filename(path.name)[0])
        self._files.setdefault(name, {})[path.name] = path

    def remove(self, path: Path) -> None:
        """Remove a wheel from the listing, as a nightly index does with old ones."""
        del self._files[str(parse_wheel_filename(path.name)[0])][path.name]

    @property
    def wheels(self) -> list[Path]:
        """The listed wheels; assigning lists others instead."""
        return [path for files in self._files.values() for path in files.values()]

    @wheels.setter
    def wheels(self, paths: Iterable[Path]) -> None:
        self._files.clear()
        for path in paths:
            self.add(path)

    @property
    def fetched(self) -> list[str]:
        """Names of the files that were requested, in order."""
        return [unquote(path.rsplit("/", 1)[-1]) for path in self.requests if path.startswith("/files/")]

    def pause(self) -> None:
        self._sending.clear()

    def resume(self) -> None:
        self._sending.set()

    def yank(self, name: str, version: str, reason: str = "") -> None:
        self._yanked[canonicalize_name(name), version] = reason

    def fail(self, status: int) -> None:
        """Answer every request with this status; 0 restores normal responses."""
        self._status = status

    def __enter__(self) -> LocalIndex:
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index._answer(self)

            def do_HEAD(self) -> None:
                index._answer(self, body=False)

            def log_message(self, *args: object) -> None:
                """Suppress logging."""

        self.serve(Handler)
        return self

    def __exit__(self, *error: object) -> None:
        self.resume()
        super().__exit__()

    def _answer(self, handler: BaseHTTPRequestHandler, body: bool = True) -> None:
        self.requests.append(handler.path)
        status, kind, content = self._page(unquote(handler.path), handler.headers.get("Accept", ""))
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if body:
            # A killed client is not a server error.
            with contextlib.suppress(ConnectionError):
                handler.wfile.write(content[: self.cut or None] if kind == WHEEL else content)

    def _page(self, path: str, accepts: str) -> tuple[int, str, bytes]:
        if self._status:
            return self._status, "text/plain", b"planted"
        parts = path.strip("/").split("/")
        if parts[0] == "files":
            self._sending.wait()
            time.sleep(self.delay)
            if parts[-1] in self.gone:
                return 404, "text/plain", b"gone"
        if parts[0] == "files" and len(parts) == 3 and parts[2] in self._files.get(parts[1], {}):
            content = self._files[parts[1]][parts[2]].read_bytes()
            spoilt = content[:100] + b"spoilt" + content[106:]
            return 200, WHEEL, spoilt if parts[2] == self.spoilt else content
        if parts[0] == "index" and len(parts) == 2 and parts[1] in self._files:
            files = [self._entry(parts[1], p) for p in self._files[parts[1]].values()]
            if JSON_TYPE in accepts and not self.html:
                return 200, JSON_TYPE, _json(parts[1], files)
            return 200, "text/html", _html(files, self.plain)
        return 404, "text/plain", b"not here"

    def _entry(self, name: str, path: Path) -> dict[str, object]:
        version = str(parse_wheel_filename(path.name)[1])
        content = path.read_bytes()
        entry: dict[str, object] = {
            "filename": path.name,
            "url": f"/files/{name}/{quote(path.name)}",
            "hashes": {"sha256": hashlib.sha256(content).hexdigest()},
            "size": len(content),
            "yanked": self._yanked.get((name, version), False) or (name, version) in self._yanked,
        }
        if version in self.dates:
            uploaded = self.dates[version].astimezone(timezone.utc)
            entry["upload-time"] = uploaded.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return entry


def _json(name: str, files: list[dict[str, object]]) -> bytes:
    return json.dumps({"meta": {"api-version": "1.1"}, "name": name, "files": files}).encode()


def _html(files: list[dict[str, object]], plain: set[str]) -> bytes:
    lines = ["<!DOCTYPE html><html><body>"]
    for entry in files:
        name, sha256 = entry["filename"], entry["hashes"]["sha256"]  # type: ignore[index]
        yanked = f' data-yanked="{entry["yanked"]}"' if entry["yanked"] else ""
        digest, metadata = f"#sha256={sha256}", ""
        if name in plain:
            digest, metadata = "", f' data-core-metadata="sha256={sha256[::-1]}"'
        lines.append(f'<a href="{entry["url"]}{digest}"{metadata}{yanked}>{name}</a>')
    return "\n".join([*lines, "</body></html>"]).encode()
