"""Environments that a bisect builds ahead, and its progress on a terminal."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from bumpgate.bisect.answer import Watcher
from bumpgate.bisect.prefetch import Prefetch
from bumpgate.bisect.probe import Cause, ProbeResult, Reading
from bumpgate.bisect.search import ProbeOutcome
from bumpgate.env.build import build
from bumpgate.env.request import Request
from tests.support.builds import make_builds
from tests.support.local_index import LocalIndex, isolated


def test_prefetch_builds_ahead_unless_disk_is_nearly_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalIndex() as index:
        isolated(monkeypatch, tmp_path, index.url)
        make_builds(tmp_path / "wheels", index)
        requests = [Request((f"torch=={v}",)) for v in ("2.0.0", "99.0", "2.1.0")]
        full = Prefetch(free=1 << 62)
        full.start(requests)
        assert index.requests == []
        ahead = Prefetch(free=0)
        ahead.start(requests)
        places = tmp_path / "home/environments"
        deadline = time.monotonic() + 60
        while len(list(places.glob("[!.]*/bumpgate.json"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        ahead.stop()
        before = len(index.requests)
        for request in (requests[0], requests[2]):
            assert build(request).packages["torch"] == request.requirements[0][len("torch==") :]
        assert len(index.requests) == before, "the environment was built again"


def test_watcher_reports_progress_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Watcher(console) as watcher:
        watcher.probing("torch 2.1.0")
        watcher.probed(
            "torch 2.1.0",
            Reading(Path(), Cause.RAN, 1, seconds=2.5),
            ProbeResult(ProbeOutcome.BAD, "exit [1]"),
            "x",
        )
    assert "\x1b[" in out.getvalue()
    assert "torch 2.1.0 in 2.5 s: exit [1]; x" in out.getvalue()
    assert watcher.seconds == 2.5
    plain = io.StringIO()
    with Watcher(Console(file=plain, width=40)) as watcher:
        watcher.probed(
            "torch 2.1.0", Reading(Path(), Cause.RAN, 1), ProbeResult(ProbeOutcome.GOOD, "z" * 90), ""
        )
    assert plain.getvalue() == f"GOOD    torch 2.1.0 in 0.0 s: {'z' * 90}\n"
