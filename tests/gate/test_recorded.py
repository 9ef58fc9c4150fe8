"""The paired test on the noise of a real machine: live gates of torch 2.13.0 against itself, and replays of them."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from tests.support.simulation import wilson
from tests.support.tree import ROOT
from tools.recorded import FIXED_STARTS, PLACE, WHOLE, sessions
from tools.replay import CASES, COMPILED, EAGER, LARGE, ROWS, SPEEDUP, WARM, Case, rates

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


def test_documented_table_has_every_case() -> None:
    table = (ROOT / "docs/gate_statistics.md").read_text(encoding="utf-8").split("| planted | gates |")[1]
    names = re.findall(r"^\| ([^|]+?) \| \d+ \|", table, re.MULTILINE)
    assert names == [case.name for case in (*CASES, *LARGE)]


def whole(name: str) -> Case:
    """Return the case of all timed rows of the CPU lane with this name."""
    return next(case for case in CASES if case.recorded == WHOLE and case.name.endswith(name))


def test_unchanged_gate_of_all_timed_rows_is_adopted() -> None:
    runs = 200
    found, _ = rates(whole("unchanged"), runs, seed=6)
    assert wilson(found["HOLD"], runs)[1] <= 0.02, found
    assert wilson(found["UNKNOWN"], runs)[1] <= 0.05, found


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("10 % of steps 2x slower", 0.8),
        ("10 % of warm starts 2x slower", 0.8),
        ("10 % of all processes 2x slower", 0.9),
    ],
)
def test_slow_processes_among_all_timed_rows_are_held(name: str, least: float) -> None:
    """A tenth of the gates see too few slow processes of one kind in 28 sessions: 150 replays bound that by 80 %."""
    runs = 150
    found, _ = rates(whole(name), runs, seed=6)
    assert wilson(found["HOLD"], runs)[0] >= least, found


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
