"""Wall time without the time that a thread waits for a core."""

from __future__ import annotations

import pytest

from bumpgate.plugin import timing


def test_core_lost_between_both_readings_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread waits from 1.0 to 1.5, after the clock was read and before its waiting time was."""
    clock = iter([1.0, 1.5])
    waited = iter([0.25, 0.75, 0.75])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(timing, "_waited_seconds", lambda: next(waited))
    assert timing._wall_seconds() == 0.75
