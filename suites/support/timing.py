"""Timed rows that can be believed on a busy machine: CPU time, interleaved with an anchor, as log-ratio medians.

Wall medians wander by a third on a loaded box; the ratio of CPU times of two workloads that alternate in one
process wanders by 2-3 %. What is left is a bias of the process, which only more processes remove.
pytest-benchmark times one function after the other and switches itself off under xdist, so it does not fit.
"""

from __future__ import annotations

import fcntl
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from suites.support.rows import InfraError

LOCK = Path(tempfile.gettempdir()) / f"bumpgate-{os.getuid()}.machine"


@contextmanager
def machine(*, exclusive: bool) -> Iterator[None]:
    """Holds the machine: timed rows exclusively, everything else shared.

    Two locks: an exclusive waiter keeps the gate, so that a stream of shared holders cannot starve it.
    """
    with open(f"{LOCK}.gate", "w") as gate, open(f"{LOCK}.lock", "w") as lock:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        if not exclusive:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield


def anchor() -> None:
    """A fixed workload that no torch can change: small NumPy arrays and interpreter work, about 40 CPU ms."""
    for i in range(0, len(_ARRAYS), 2):
        pair = np.concatenate([_ARRAYS[i], _ARRAYS[i + 1]], axis=1).reshape(256, 64)
        mixed = np.tanh(pair @ _WEIGHTS[i % len(_WEIGHTS)])
        sum(k & 7 for k in range(500))
        _ARRAYS[i], _ARRAYS[i + 1] = mixed[:128], mixed[128:]


_GENERATOR = np.random.default_rng(0)
_ARRAYS = [_GENERATOR.standard_normal((128, 64), dtype=np.float32) for _ in range(600)]
_WEIGHTS = [_GENERATOR.standard_normal((64, 64), dtype=np.float32) / 8 for _ in range(52)]


@dataclass(frozen=True)
class Ratio:
    """A median ratio with its 99 % confidence interval from order statistics."""

    median: float
    low: float
    high: float
    pairs: int


@dataclass
class Rounds:
    """CPU seconds by function name, a value a quiet round; `disturbed` rounds were measured and not kept."""

    seconds: dict[str, list[float]]
    quiet: int = 0
    disturbed: int = 0

    def ratio(self, numerator: str, denominator: str) -> Ratio:
        """The median of the paired ratios, with the order statistics that enclose it at 99 %.

        With fewer than QUIET_NEEDED quiet rounds the interval is a factor of 2 either way, which no tolerance
        contains: the row will be INCONCLUSIVE.
        """
        pairs = zip(self.seconds[numerator], self.seconds[denominator])
        logs = sorted(math.log(a / b) for a, b in pairs)
        n, median = len(logs), statistics.median(logs)
        if self.quiet < QUIET_NEEDED:
            return Ratio(math.exp(median), math.exp(median) / 2, math.exp(median) * 2, n)
        reach = math.ceil(2.576 * math.sqrt(n) / 2)
        low, high = logs[max(0, n // 2 - reach)], logs[min(n - 1, n // 2 + reach)]
        return Ratio(math.exp(median), math.exp(low), math.exp(high), n)


# CPU share of one processor that others may use in a round, and how many quiet rounds an interval needs.
FOREIGN_SHARE = 0.1
QUIET_NEEDED = 15


def _busy_seconds() -> tuple[float, float]:
    """CPU seconds used on this machine so far (stolen ones too): by everybody, and by this process."""
    t = psutil.cpu_times()
    everybody = sum(t) - t.idle - t.iowait - getattr(t, "guest", 0.0) - getattr(t, "guest_nice", 0.0)
    return everybody, time.process_time()


def interleaved(functions: dict[str, Callable[[], object]], rounds: int, budget: float = 90.0) -> Rounds:
    """Times the functions in turn until `rounds` quiet rounds are kept or `budget` wall seconds are spent.

    The order turns by one place a round. A round in which others used the machine is not kept: CPU time does not
    count their work, but a busy sibling thread slows large code by a third and a tight loop hardly at all.
    $BUMPGATE_ROUNDS asks for fewer rounds: the gate's paired sessions need more processes, not more rounds.
    Raises InfraError where no round was quiet: a ratio of nothing is no measurement.
    """
    rounds = min(rounds, int(os.environ.get("BUMPGATE_ROUNDS", rounds)))
    names = list(functions)
    for name in names:
        functions[name]()
    kept = Rounds({name: [] for name in names})
    deadline = time.monotonic() + budget
    while kept.quiet < rounds and time.monotonic() < deadline:
        started, (all_before, own_before) = time.monotonic(), _busy_seconds()
        turn = (kept.quiet + kept.disturbed) % len(names)
        spent = {}
        for name in names[turn:] + names[:turn]:
            start = time.process_time()
            functions[name]()
            spent[name] = time.process_time() - start
        wall, (all_after, own_after) = time.monotonic() - started, _busy_seconds()
        if (all_after - all_before) - (own_after - own_before) > FOREIGN_SHARE * wall:
            kept.disturbed += 1
            continue
        kept.quiet += 1
        for name in names:
            kept.seconds[name].append(spent[name])
    if not kept.quiet:
        raise InfraError(f"none of {kept.disturbed} rounds was quiet: others use this machine")
    return kept
