"""Batches of probes for hosts that run in parallel: the likeliest next steps of the sequential search, all at once.

The search decides one probe at a time. Its possible futures form a tree with one branch per outcome; a batch is the
part of it that is reached with the highest probability, so a probe whose result turns out not to matter is unlikely.
"""

from __future__ import annotations

import heapq
from collections import Counter

from bumpgate.bisect.search import Search


def batch(search: Search, workers: int) -> list[int]:
    """Return up to `workers` candidates to probe at once, the most useful first; empty if the search is finished.

    A candidate occurs as often as it would be read in a row. All outcomes are recorded, in any order.
    """
    chosen: list[int] = []
    # Ordered by probability; the number keeps equal ones in the order in which they were found.
    futures: list[tuple[float, int, Search, Counter[int]]] = [(-1.0, 0, search, Counter())]
    found = 1
    while futures and len(chosen) < workers:
        weight, _, ahead, counts = heapq.heappop(futures)
        due = ahead.next()
        if not due:
            continue
        ends = len(due) > 1
        for index in due:
            counts = counts + Counter([index])
            if chosen.count(index) < counts[index] and len(chosen) < workers:
                chosen.append(index)
        if ends:
            # Both ends are read before anything else, and nearly always as they were named.
            outcomes = [([(i, ahead.old if i == ahead.first else ahead.new) for i in due], 1.0)]
        else:
            new = ahead.chance(due[0])
            outcomes = [([(due[0], ahead.new)], new), ([(due[0], ahead.old)], 1 - new)]
        for outcome, probability in outcomes:
            if probability > 0:
                heapq.heappush(futures, (weight * probability, found, ahead.after(outcome), counts))
                found += 1
    return chosen
