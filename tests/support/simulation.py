"""Noise of simulated timed rows, and rates of simulated runs with their Wilson intervals.

Noise as measured: each fresh process is biased by 1 to 3 % (standard deviation, drawn for each row), its rounds
vary by 2 to 3 %. With heavy tails one session in 20 is off by 20 %; the noisiest rows have 3 % of both.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

from bumpgate.gate.sequential import log_ratio_of_rounds

ROWS = tuple(f"throughput/case{i}/seconds" for i in range(15))
ROUNDS = 20
MEASURED, HEAVY, WORST = NOISES = ("measured", "heavy tails", "noisiest rows")
Draw = Callable[[], float]


def row_noise(rng: random.Random, noise: str) -> Draw:
    """Draw the error of one session's log-ratio. With two processes per side, its variance is that of one reading."""
    worst = noise == WORST
    bias, scatter = (0.03, 0.03) if worst else (rng.uniform(0.01, 0.03), rng.uniform(0.02, 0.03))
    # 1.25: a reading is the median of its rounds, not their mean.
    deviation = math.hypot(bias, 1.25 * scatter / math.sqrt(ROUNDS))

    def draw() -> float:
        bad = noise == HEAVY and rng.random() < 1 / 20
        return rng.gauss(0, deviation) + (rng.choice((-0.2, 0.2)) if bad else 0)

    return draw


def busy_duet(rng: random.Random, *, swaps: bool = True) -> Draw:
    """Draw the log-ratio of a session whose every round is disturbed: a neighbour stays on one of two cores a while.

    There it slows the CPU time of the side by up to 60 %. swaps: the sides change cores after each round, as they do.
    """
    session = 0

    def draw() -> float:
        nonlocal session
        session += 1
        adopted, candidate, neighbour = [], [], rng.random() < 1 / 2
        bias = rng.gauss(0, 0.03)
        for i in range(2 * ROUNDS):
            neighbour ^= rng.random() < 1 / 5
            with_adopted = neighbour == bool((session + i * swaps) % 2) if swaps else False
            slower = rng.uniform(1, 1.6)
            adopted.append(rng.lognormvariate(0, 0.03) * (slower if with_adopted else 1))
            candidate.append(rng.lognormvariate(bias, 0.03) * (1 if with_adopted else slower))
        return log_ratio_of_rounds(adopted, candidate)

    return draw


def wilson(hits: int, runs: int) -> tuple[float, float]:
    """95 % Wilson interval of a rate."""
    z = 1.96
    middle = (hits + z * z / 2) / (runs + z * z)
    half = z / (runs + z * z) * math.sqrt(hits * (runs - hits) / runs + z * z / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def rate_text(what: str, hits: int, runs: int, used: list[int] | None = None) -> str:
    """Format a rate with its Wilson interval. used: sessions of each run."""
    low, high = wilson(hits, runs)
    text = f"{what}: {hits} of {runs} = {hits / runs:.2%} [{low:.2%}, {high:.2%}]"
    if used:
        text += (
            f"; sessions median {statistics.median(used):g}, 95th percentile {sorted(used)[-len(used) // 20]}"
        )
    return text
