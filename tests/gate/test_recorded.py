"""The paired test on the noise of a real machine: live gates of torch 2.13.0 against itself, and replays of them."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.support.simulation import wilson
from tools.recorded import FIXED_STARTS, PLACE, sessions
from tools.replay import COMPILED, EAGER, ROWS, SPEEDUP, WARM, Case, rates

GATES = json.loads(PLACE.read_text(encoding="utf-8"))


def test_no_live_gate_of_equal_builds_was_held() -> None:
    assert len(GATES) >= 10
    assert len(sessions(GATES)) >= 80
    assert {version for gate in GATES for version in gate["torch"]} == {"2.13.0+cpu"}
    assert Counter(gate["decision"] for gate in GATES)["HOLD"] == 0
    assert all(set(ROWS) <= gate["log_ratios"].keys() for gate in GATES)
    assert max(gate["wall_seconds"] for gate in GATES) <= 15 * 60


def test_replays_of_equal_builds_are_adopted() -> None:
    runs = 200
    found, _ = rates(Case("unchanged"), runs, seed=1)
    assert wilson(found["HOLD"], runs)[1] <= 0.02, found
    assert wilson(found["UNKNOWN"], runs)[1] <= 0.05, found


@pytest.mark.parametrize("rows", [(EAGER,), (SPEEDUP,), (COMPILED,), (EAGER, COMPILED)], ids="+".join)
def test_five_percent_slower_is_held(rows: tuple[str, ...]) -> None:
    runs = 120
    found, _ = rates(Case("slower", dict.fromkeys(rows, 1.05)), runs, seed=2)
    assert wilson(found["HOLD"], runs)[0] >= 0.95, found


def test_candidate_with_slow_processes_is_held() -> None:
    runs = 600
    found, _ = rates(Case("bimodal", slow=0.1), runs, seed=3)
    assert wilson(found["HOLD"], runs)[0] >= 0.9, found


def test_starts_on_a_noisy_machine_are_not_held() -> None:
    """Sessions of a gate that read SLOW MODE for a build against itself: 3 slow processes against 1."""
    runs = 400
    found, _ = rates(Case("starts", recorded=FIXED_STARTS), runs, seed=6)
    assert found["HOLD"] / runs <= 0.02, found


def test_slow_start_on_a_noisy_machine_is_not_adopted() -> None:
    runs = 100
    found, _ = rates(Case("starts", {WARM: 1.2}, recorded=FIXED_STARTS), runs, seed=7)
    assert wilson(found["ADOPT"], runs)[1] <= 0.05, found


def test_rough_candidate_is_held() -> None:
    runs = 100
    found, _ = rates(Case("rough", rough=0.4), runs, seed=4)
    assert wilson(found["HOLD"], runs)[0] >= 0.9, found


def test_bias_of_compile_caches_is_not_held() -> None:
    runs = 400
    found, _ = rates(Case("caches", cache_sd=0.005), runs, seed=5)
    assert wilson(found["HOLD"], runs)[1] <= 0.02, found
