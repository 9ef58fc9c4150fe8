"""Sessions of real gates of a build against itself, kept for replay: `python -m tools.recorded gate.json ...`

`--whole` keeps every timed row, in a separate file; otherwise only those of training steps.

A session of two equal builds measures only noise, of any distribution. Resampling with replacement gives any number
of gates with the noise of a real machine (Efron 1979, "Bootstrap methods").
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bumpgate.core.rows import write_atomic

PLACE = Path(__file__).with_name("recorded_sessions.json")
WHOLE = Path(__file__).with_name("recorded_gates.json")
# Of starts that stayed on one core, as they did before 2026-11-25, on a machine with busy neighbours.
FIXED_STARTS = Path(__file__).with_name("recorded_fixed_starts.json")
START = "throughput/start-"

# No row was decided before its eighth session when these gates ran.
COMPLETE_SESSIONS = 8

# Row id -> log-ratio in one session.
Session = dict[str, float]


def sessions(gates: Sequence[dict[str, Any]]) -> list[Session]:
    """Return the first COMPLETE_SESSIONS of each gate: later ones lack decided rows, which would bias the sample."""
    return [
        {row: values[i] for row, values in gate["log_ratios"].items()}
        for gate in gates
        for i in range(COMPLETE_SESSIONS)
    ]


def by_test(gates: Sequence[dict[str, Any]]) -> dict[str, list[Session]]:
    """Return the sessions of each test, "cold", "warm" and "step": a test ends for all its rows at once.

    A row that lost a reading is one session ahead of the others from there on.
    """
    found: dict[str, list[Session]] = {}
    for gate in gates:
        rows: dict[str, list[str]] = {}
        for row in gate["log_ratios"]:
            rows.setdefault(test_of(row), []).append(row)
        for test, names in rows.items():
            values = zip(*(gate["log_ratios"][name] for name in names))
            found.setdefault(test, []).extend(dict(zip(names, session)) for session in values)
    return found


def test_of(row: str) -> str:
    """Return which test measures a row."""
    if not row.startswith(START):
        return "step"
    return "cold" if "/cold_" in row else "warm"


def main(arguments: Sequence[str]) -> None:
    kept = []
    whole = "--whole" in arguments
    place = WHOLE if whole else PLACE
    for path in (argument for argument in arguments if argument != "--whole"):
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
                    if whole or not row.startswith(START)
                },
            }
        )
    write_atomic(place, json.dumps(kept, indent=1) + "\n")
    counts = {test: len(found) for test, found in by_test(kept).items()} if whole else len(sessions(kept))
    print(f"{place.name}: {len(kept)} gates, {counts} sessions")


if __name__ == "__main__":
    main(sys.argv[1:])
