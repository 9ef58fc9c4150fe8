"""A bisect of 12 nights with fixed outcomes, run through its journal: the search, then the attribution."""

from __future__ import annotations

from collections import Counter
from typing import Any

from bumpgate.bisect.attribution import Attribution, Mixture, attribute
from bumpgate.bisect.journal import BisectPlan
from bumpgate.bisect.search import ProbeOutcome, Search
from tests.support.searching import labels

NIGHTS = tuple(labels(12))
PLAN = BisectPlan(NIGHTS, NIGHTS[0], NIGHTS[-1], ("pytest", "-q"), false_bad=0.1, false_good=0.05)
PACKAGES = ("torch", "triton", "numpy")
GOOD_SET, BAD_SET = dict.fromkeys(PACKAGES, "1"), dict.fromkeys(PACKAGES, "2")
# The fault is at 7; 6 does not install; the second reading of the good endpoint and the first of 8 are false.
MISREAD = {(8, 0): "GOOD", (0, 0): "BAD"}


def read_candidate(searched: Search, index: int) -> ProbeOutcome:
    """Outcome of a probe: depends only on how often its candidate was read before."""
    if index == 6:
        return ProbeOutcome.SKIP
    before = Counter(i for i, _ in searched.history)[index]
    return ProbeOutcome[MISREAD.get((index, before), "BAD" if index >= 7 else "GOOD")]


def read_mixture(mixture: Mixture) -> ProbeOutcome:
    return ProbeOutcome.BAD if "triton" in mixture else ProbeOutcome.GOOD


def drive(state: Any, probed: list[object] | None = None) -> Attribution:
    """Run a whole bisect: the search, then the attribution, each reading through the journal."""
    while state.search.result() is None:
        index = state.decide()[0]
        if probed is not None:
            probed.append(index)
        state.record(index, read_candidate(state.search, index))

    def probe(mixture: Mixture, packages: dict[str, str]) -> ProbeOutcome:
        state.decide_mixture(mixture)
        if probed is not None:
            probed.append(mixture)
        state.record_mixture(mixture, read_mixture(mixture))
        return read_mixture(mixture)

    return attribute(GOOD_SET, BAD_SET, probe, known=list(state.mixtures))
