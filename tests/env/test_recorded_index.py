"""Versions are read from recorded pages of a real index, in both of its forms (fixtures/index)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import date
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from bumpgate.env import versions
from bumpgate.env.versions import FoundVersion
from tests.support.local_index import JSON_TYPE, isolated
from tests.support.loopback import Loopback
from tests.support.tree import ROOT

PAGES = ROOT / "fixtures" / "index"


@dataclass
class Recorded(Loopback):
    """Serves the recorded page of a project, as HTML or as JSON, whatever the client accepts. accepted: its headers."""

    form: str
    accepted: list[str] = field(default_factory=list)

    def __enter__(self) -> Recorded:
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.accepted.append(self.headers["Accept"])
                path = PAGES / f"{self.path.strip('/').rpartition('/')[2]}.{index.form}"
                self.send_response(200 if path.exists() else 404)
                self.send_header("Content-Type", {"html": "text/html", "json": JSON_TYPE}[index.form])
                self.end_headers()
                self.wfile.write(path.read_bytes() if path.exists() else b"")

            def log_message(self, *args: object) -> None:
                """Suppress logging."""

        self.serve(Handler)
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/index"


def read(form: str, package: str, folder: Path, **options: object) -> list[FoundVersion]:
    with Recorded(form) as index, pytest.MonkeyPatch.context() as patch:
        isolated(patch, folder, index.url)
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setattr(versions, "platform_tags", lambda: ["manylinux_2_28_x86_64", "linux_x86_64"])
        found = versions.versions(package, **options)  # type: ignore[arg-type]
    assert all(accept.startswith(JSON_TYPE) for accept in index.accepted)
    return found


@pytest.mark.parametrize("form", ["html", "json"])
def test_recorded_page_lists_wheels_of_each_python(form: str, tmp_path: Path) -> None:
    found = read(form, "torch-xla", tmp_path, python="3.11")
    assert [f.version for f in found] == [
        *("2.1.0", "2.2.0", "2.3.0", "2.4.0", "2.5.0", "2.5.1"),
        *("2.6.0", "2.6.1", "2.7.0", "2.8.0", "2.8.1", "2.9.0"),
    ]
    assert all("-cp311-cp311-manylinux_2_28_x86_64.whl" in f.url and len(f.sha256) == 64 for f in found)
    assert [f.version for f in read(form, "torch-xla", tmp_path, python="3.13")] == [
        "2.8.0",
        "2.8.1",
        "2.9.0",
    ]


@pytest.mark.parametrize("form", ["html", "json"])
def test_recorded_requires_python_leaves_out_newer_releases(form: str, tmp_path: Path) -> None:
    assert [f.version for f in read(form, "sympy", tmp_path, python="3.7")][-2:] == ["1.10", "1.10.1"]


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
