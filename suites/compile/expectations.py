"""What each compile policy must show on a layer pattern, derived from the pattern alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

RECURRENT = "MR"


@dataclass(frozen=True)
class Expected:
    """Counts of one training forward: graph breaks, blocks run eagerly, compiled calls, unique graphs."""

    graph_breaks: int
    eager_islands: int
    compiled_calls: int
    unique_graphs: int


def expected(letters: str, policy: str) -> Expected:
    """The counts that `policy` must show on the expanded pattern `letters`; the loss head is one more region."""
    recurrent = sum(letter in RECURRENT for letter in letters)
    visible = set(letters) - set(RECURRENT)
    # Adjacent disabled blocks share one gap between graphs: there is no code between them to compile.
    gaps = sum(1 for disabled, _ in groupby(letters, lambda letter: letter in RECURRENT) if disabled)
    return {
        "eager": Expected(0, len(letters), 0, 0),
        "per_block": Expected(0, recurrent, len(letters) - recurrent + 1, len(visible) + 1),
        "whole_disabled": Expected(recurrent, recurrent, gaps + 1, gaps + 1),
        "regional": Expected(0, 0, len(letters) + 1, len(set(letters)) + 1),
        "whole_opaque": Expected(0, 0, 1, 1),
    }[policy]
