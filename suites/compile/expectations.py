"""Expected counts of each compile policy on a layer pattern, derived from the kinds of its layers alone."""

from __future__ import annotations

from collections.abc import Sequence
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


def expected(kinds: Sequence[str], policy: str, *, features: bool = False) -> Expected:
    """Return the counts that `policy` must show on the layers' kinds (HybridConfig.regions). A kind is a block letter
    and what distinguishes blocks of that letter; the loss head is one more region, and so are features of the tokens.
    """
    hidden = [kind[0] in RECURRENT for kind in kinds]
    recurrent, layers = sum(hidden), len(kinds)
    visible = {kind for kind in kinds if kind[0] not in RECURRENT}
    # Adjacent disabled blocks share one gap between graphs: there is no code between them to compile.
    gaps = sum(1 for disabled, _ in groupby(hidden) if disabled)
    more = 1 + features
    return {
        "eager": Expected(0, layers, 0, 0),
        "per_block": Expected(0, recurrent, layers - recurrent + more, len(visible) + more),
        "whole_disabled": Expected(recurrent, recurrent, gaps + 1, gaps + 1),
        "regional": Expected(0, 0, layers + more, len(set(kinds)) + more),
        "whole_opaque": Expected(0, 0, 1, 1),
    }[policy]
