"""Commits between two builds, from a clone and from a GitHub API on loopback that serves the same repository."""

from __future__ import annotations

import base64
import json
import subprocess
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from bumpgate.bisect import ranges
from bumpgate.bisect.answer import Answer, closing_text
from bumpgate.bisect.attribution import Attribution, PackageChange
from bumpgate.bisect.candidates import Range
from bumpgate.bisect.journal import BisectPlan
from bumpgate.bisect.search import SearchResult
from bumpgate.core.errors import BumpgateError
from bumpgate.env.build import Environment
from tests.support.git_repository import GitRepository
from tests.support.loopback import Loopback

TORCH = "https://github.com/pytorch/pytorch"


@dataclass
class FakeApi(Loopback):
    """GitHub's commits, comparisons and contents of one repository. requests: paths; tokens: Authorization headers."""

    repository: GitRepository
    requests: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeApi:
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                api.requests.append(self.path)
                api.tokens.append(self.headers.get("Authorization", ""))
                try:
                    status, answer = 200, api._answer(self.path)
                except subprocess.CalledProcessError:
                    status, answer = 404, {"message": "Not Found"}
                payload = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *args: object) -> None:
                """Suppress logging."""

        self.serve(Handler)
        return self

    def _answer(self, path: str) -> Any:
        parts = urlsplit(path)
        _, _, _, _, kind, rest = parts.path.split("/", 5)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if kind == "commits":
            return self._commit(self.repository.git("rev-parse", "--verify", f"{rest}^{{commit}}"))
        if kind == "contents":
            text = self.repository.git("show", f"{query['ref']}:{rest}")
            return {"content": base64.encodebytes(f"{text}\n".encode()).decode()}
        old, _, new = rest.partition("...")
        hashes = self.repository.git("rev-list", "--reverse", f"{old}..{new}").split()
        start, size = (int(query["page"]) - 1) * int(query["per_page"]), int(query["per_page"])
        return {"total_commits": len(hashes), "commits": [*map(self._commit, hashes[start : start + size])]}

    def _commit(self, name: str) -> Any:
        text = self.repository.git("log", "-1", "--format=%H%n%aI%n%P%n%B", name)
        full, date, parents, message = text.split("\n", 3)
        content = {"message": message, "author": {"date": date}}
        return {"sha": full, "commit": content, "parents": [{"sha": p} for p in parents.split()]}


@dataclass
class Nights:
    """A clone of torch: main, and the commits of two nights on its nightly branch."""

    clone: GitRepository
    main: list[str]
    good: str
    bad: str


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    folder = tmp_path / "pytorch"
    folder.mkdir()
    clone = GitRepository(folder)
    pin = ".ci/docker/ci_commit_pins/triton.txt"
    main = [clone.commit(f"Change {i} (#{500 + i})", {pin: f"{i // 3:x}" * 40 + "\n"}) for i in range(6)]
    clone.git("checkout", "--quiet", "--orphan", "nightly")
    night = {}
    for i in (1, 4):
        night[i] = clone.commit(f"2026-11-{i:02} nightly release ({main[i]})")
    clone.git("checkout", "--quiet", "--force", "main")
    return Nights(clone, main, night[1], night[4])


def environment(folder: Path, torch: str, triton: str) -> Environment:
    site = folder / "lib" / "python3.12" / "site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "version.py").write_text(f"git_version = {torch!r}\n")
    info = site / "torch-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: torch\nVersion: 2.0\nProject-URL: Repository, {TORCH}\n")
    return Environment("", folder / "bin" / "python", "", {"torch": "2.0", "triton": triton})


def answer(package: str = "torch") -> Answer:
    result = SearchResult((1,), 0, 1.0, 4, 0)
    change = (PackageChange(package, "1", "2"),)
    span = Range("torch", ("2.0", "2.1"), "2.0", "2.1", {})
    plan = BisectPlan(("2.0", "2.1"), "2.0", "2.1", ())
    blamed = Attribution(change, 2, 2, 0)
    return Answer(span, plan, result, blamed, "2.0", "2.1", links=(f"{TORCH}/compare/a...b",))


@pytest.mark.parametrize("kind", ["clone", "api"])
def test_commits_of_main_are_listed_for_two_nights(
    nights: Nights, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nights are commits of another branch; their titles name those of main."""
    monkeypatch.setattr(ranges, "PER_PAGE", 2)
    monkeypatch.setenv("BUMPGATE_GITHUB_TOKEN", "secret-token")
    first = environment(tmp_path / "a", nights.good, "3.8.0+git00000000")
    last = environment(tmp_path / "b", nights.bad, "3.8.0+git11111111")
    with FakeApi(nights.clone) as api:
        place = api.url if kind == "api" else str(nights.clone.folder)
        found = ranges.described(answer(), (first, last), [place])
        assert [c["commit"] for c in found.commits] == nights.main[2:5]
        assert [c["pull"] for c in found.commits] == [502, 503, 504]
        text = closing_text(found, 0, 0)
        assert f"commits     3 of {TORCH}/compare/{nights.main[1][:12]}...{nights.main[4][:12]}\n" in text
        assert f"            {nights.main[3][:12]} 2026-11-05 Change 3 (#503)\n" in text
        pin = f"https://github.com/triton-lang/triton/compare/{'0' * 12}...{'1' * 12}"
        assert f"triton pin  {pin}\n" in text
        assert "secret-token" not in text
        assert set(api.tokens) <= {"Bearer secret-token"}
        assert bool(api.tokens) == (kind == "api")


def test_triton_commits_and_llvm_are_listed_if_triton_moved(nights: Nights, tmp_path: Path) -> None:
    folder = tmp_path / "triton"
    folder.mkdir()
    triton = GitRepository(folder)
    commits = [triton.commit(f"Triton {i} (#{i})", {"cmake/llvm-hash.txt": f"{i}" * 40}) for i in range(4)]
    wheels = [f"3.8.0+git{commits[i][:8]}" for i in (1, 3)]
    first = environment(tmp_path / "a", nights.good, wheels[0])
    last = environment(tmp_path / "b", nights.bad, wheels[1])
    both = [str(nights.clone.folder), str(folder)]
    text = closing_text(ranges.described(answer(), (first, last), both), 0, 0)
    assert "Change 3 (#503)" in text
    assert (
        f"2 of https://github.com/triton-lang/triton/compare/{commits[1][:12]}...{commits[3][:12]}\n" in text
    )
    assert f"{commits[2][:12]} " in text
    assert f"llvm        https://github.com/llvm/llvm-project/compare/{'1' * 12}...{'3' * 12}" in text
    same = environment(tmp_path / "c", nights.bad, wheels[0])
    text = closing_text(ranges.described(answer(), (first, same), both), 0, 0)
    assert "triton" not in text.replace("triton pin", "")


def test_commits_without_a_clone_leave_the_compare_link(nights: Nights, tmp_path: Path) -> None:
    first = environment(tmp_path / "a", "a" * 40, "3.8.0")
    last = environment(tmp_path / "b", nights.bad, "3.8.0")
    text = closing_text(ranges.described(answer(), (first, last), [str(nights.clone.folder)]), 0, 0)
    assert f"compare     {TORCH}/compare/a...b\n" in text
    assert "not listed:" in text
    assert f"has no commit '{'a' * 40}'" in text
    assert text.count("see the compare link") == 1


def test_unreachable_api_leaves_the_compare_link(
    nights: Nights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bumpgate.process.web.time.sleep", lambda seconds: None)
    first = environment(tmp_path / "a", "a" * 40, "3.8.0")
    last = environment(tmp_path / "b", nights.bad, "3.8.0")
    with FakeApi(nights.clone) as api:
        url = api.url
        found = ranges.described(answer(), (first, last), [url])
    assert any("404" in line for line in found.ranges)
    found = ranges.described(answer(), (first, last), [url])
    assert any("no connection; see the compare link" in line for line in found.ranges)
    assert found.links


def test_repository_that_is_neither_clone_nor_https_is_refused(tmp_path: Path) -> None:
    for place, words in (
        ("http://example.com", "is not an https URL"),
        (str(tmp_path), "not a git repository"),
        (str(tmp_path / "x"), "the folder does not exist"),
    ):
        with pytest.raises(BumpgateError, match=words):
            ranges.check([place])
