"""The paired test on the noise of a real machine: live gates of torch 2.13.0 against itself, and replays of them."""

from __future__ import annotations

import json
import math
import random
from collections import Counter

from bumpgate.gate.plan import Plan
from bumpgate.gate.sequential import Outcome
from suites.self.recorded import PLACE, Session, replay, sessions
from suites.self.test_sequential import told

GATES = json.loads(PLACE.read_text(encoding="utf-8"))
SESSIONS = sessions(GATES)
REPLAYS = 200
EAGER = "throughput/nam52-eager/tokens_per_anchor"
COMPILED = ("throughput/nam52-regional/speedup_over_eager", "throughput/nam52-regional/tokens_per_anchor")


def held(slower: Session, seed: int) -> tuple[int, Counter[Outcome]]:
    """How many of REPLAYS gates call a row SLOWER, and what the rows of all came to."""
    rng, found, outcomes = random.Random(seed), 0, Counter[Outcome]()
    for _ in range(REPLAYS):
        rows = replay(SESSIONS, rng, slower, Plan())
        found += Outcome.SLOWER in rows.values()
        outcomes.update(rows.values())
    return found, outcomes


def test_no_live_gate_of_equal_builds_was_held() -> None:
    assert len(GATES) >= 10
    assert len(SESSIONS) >= 80
    assert {version for gate in GATES for version in gate["torch"]} == {"2.13.0+cpu"}
    assert Counter(gate["decision"] for gate in GATES)["HOLD"] == 0
    assert all(set(COMPILED) <= gate["log_ratios"].keys() for gate in GATES)
    assert max(gate["wall_seconds"] for gate in GATES) <= 15 * 60


def test_replays_of_equal_builds_are_held_in_two_of_a_hundred_at_most() -> None:
    found, outcomes = held({}, seed=1)
    text = f"{told('false HOLD', found, REPLAYS)}; rows: {dict(outcomes)}"
    print(text)
    assert found <= 0.02 * REPLAYS, text


def test_a_compiled_step_that_is_five_percent_slower_is_held_in_nineteen_of_twenty_replays() -> None:
    found, outcomes = held(dict.fromkeys(COMPILED, math.log(1.05)), seed=2)
    text = f"{told('found', found, REPLAYS)}; rows: {dict(outcomes)}"
    print(text)
    assert found >= 0.95 * REPLAYS, text


def test_five_percent_of_every_step_is_not_adopted() -> None:
    """The ratio of two torch steps does not move, and the others scatter more: HOLD, or UNKNOWN, but no ADOPT."""
    rng = random.Random(3)
    slower = dict.fromkeys((*COMPILED[1:], EAGER), math.log(1.05))
    gates = [replay(SESSIONS, rng, slower, Plan()) for _ in range(REPLAYS)]
    adopted = sum(set(rows.values()) == {Outcome.SAME} for rows in gates)
    found = sum(Outcome.SLOWER in rows.values() for rows in gates)
    text = f"{told('found', found, REPLAYS)}; {told('adopted', adopted, REPLAYS)}"
    print(text)
    assert adopted <= 0.02 * REPLAYS, text
