"""Sessions of real gates of a build against itself, kept for replay: `python -m tools.recorded gate.json ...`

`--starts` keeps the rows of process starts instead of those of training steps.

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
STARTS = Path(__file__).with_name("recorded_starts.json")
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


def starts(gates: Sequence[dict[str, Any]]) -> list[Session]:
    """Return all sessions of the rows of process starts: their test ends for all of them at once."""
    return [
        dict(zip(gate["log_ratios"], values, strict=True))
        for gate in gates
        for values in zip(*gate["log_ratios"].values(), strict=True)
    ]


def main(arguments: Sequence[str]) -> None:
    kept = []
    of_starts = "--starts" in arguments
    place, read = (STARTS, starts) if of_starts else (PLACE, sessions)
    for path in (argument for argument in arguments if argument != "--starts"):
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
                    if row.startswith(START) is of_starts
                },
            }
        )
    write_atomic(place, json.dumps(kept, indent=1) + "\n")
    print(f"{place.name}: {len(kept)} gates, {len(read(kept))} sessions of every row")


if __name__ == "__main__":
    main(sys.argv[1:])
