"""Sessions of real gates of a build against itself, kept to be replayed: `python -m suites.self.recorded gate.json ...`

What a session of two equal builds reads is noise, whatever its law; drawn anew with replacement it makes as many
gates as one likes, of the noise of a real machine (Efron 1979, "Bootstrap methods").
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bumpgate.gate.plan import Plan
from bumpgate.gate.sequential import Outcome, decide
from bumpgate.rows import write_atomic

PLACE = Path(__file__).with_name("recorded_sessions.json")

# Row id -> log-ratio, of one session.
Session = dict[str, float]


def sessions(gates: Sequence[dict[str, Any]]) -> list[Session]:
    """Those that read every row: a row that was decided early has none of the later ones."""
    found = []
    for gate in gates:
        rows = gate["log_ratios"]
        whole = min(map(len, rows.values()))
        found += [{row: values[i] for row, values in rows.items()} for i in range(whole)]
    return found


def replay(
    drawn_from: Sequence[Session], rng: random.Random, slower: Session, plan: Plan
) -> dict[str, Outcome]:
    """One gate of sessions drawn with replacement; slower: log-ratio that is added to a row's readings."""
    readings: dict[str, list[float]] = {row: [] for row in drawn_from[0]}
    outcomes = dict.fromkeys(readings, Outcome.INCONCLUSIVE)
    for look in plan.looks:
        still = [row for row, outcome in outcomes.items() if outcome is Outcome.INCONCLUSIVE]
        if not still:
            break
        for session in rng.choices(drawn_from, k=look.sessions - max(map(len, readings.values()))):
            for row in still:
                readings[row].append(session[row] + slower.get(row, 0.0))
        outcomes = decide(readings, plan)
    return outcomes


def main(paths: Sequence[str]) -> None:
    kept = []
    for path in paths:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        kept.append(
            {
                "started": raw["started"],
                "decision": raw["decision"],
                "wall_seconds": raw["wall_seconds"],
                "host": raw["host"],
                "torch": [raw["sides"][side]["packages"]["torch"] for side in ("good", "bad")],
                "log_ratios": {
                    row: [round(x, 6) for x in values]
                    for row, values in raw["sessions"]["log_ratios"].items()
                },
            }
        )
    write_atomic(PLACE, json.dumps(kept, indent=1) + "\n")
    print(f"{PLACE.name}: {len(kept)} gates, {len(sessions(kept))} sessions of every row")


if __name__ == "__main__":
    main(sys.argv[1:])
