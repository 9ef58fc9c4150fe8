"""Timed rows for a busy machine: CPU time of functions that alternate, as log-ratio medians; and waiting.

The ratio of CPU times of two workloads that alternate in one process varies far less than wall medians. CPU time does
not see a sleep, a lock, I/O or lost parallelism, so wall time is measured in the same rounds, minus the time that the
thread was ready to run without a core: the excess over CPU time is waiting within the step.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path

import psutil

from bumpgate.core.rows import COST_PER_ROUND
from bumpgate.plugin.duet import Duet, partner
from bumpgate.process.gpu_shares import Place
from bumpgate.process.locks import locked

LOCK = Path(tempfile.gettempdir()) / f"bumpgate-{os.getuid()}.machine"


@contextmanager
def machine(*, exclusive: bool, patient: bool = False, place: Place | None = None) -> Iterator[None]:
    """Hold the machine: timed rows exclusively, everything else shared. patient: see locked().

    place: of a run on GPUs. It holds the machine shared; a timed row its own GPUs exclusively, everything else all GPUs
    of the run shared.
    """
    with ExitStack() as stack:
        stack.enter_context(locked(LOCK, exclusive=exclusive and not place, patient=patient))
        if place:
            for gpu in place.own if exclusive else place.gpus:
                stack.enter_context(locked(Path(f"{LOCK}-gpu-{gpu}"), exclusive=exclusive, patient=patient))
        yield


@dataclass(frozen=True)
class Median:
    """A median of rounds with its 99 % confidence interval from order statistics, for `row.timed`.

    series: costs of each round, which a gate compares with the other side's; empty outside of a duet.
    lines: how many rounds were kept.
    """

    median: float
    low: float
    high: float
    rounds: int
    series: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    lines: tuple[str, ...] = ()

    @property
    def witness(self) -> int:
        return self.rounds

    @property
    def instruments(self) -> tuple[str, ...]:
        return ()

    def evidence(self) -> tuple[str, ...]:
        return self.lines

    @classmethod
    def of(
        cls,
        values: Sequence[float],
        series: Mapping[str, tuple[float, ...]] | None = None,
        lines: tuple[str, ...] = (),
    ) -> Median:
        """Return the median of positive values; of fewer than QUIET_NEEDED, with an interval of a factor of 2."""
        logs = sorted(map(math.log, values))
        n, median = len(logs), math.exp(statistics.median(logs))
        if n < QUIET_NEEDED:
            return cls(median, median / 2, median * 2, n, series or {}, lines)
        reach = math.ceil(2.576 * math.sqrt(n) / 2)
        low, high = logs[max(0, n // 2 - reach)], logs[min(n - 1, n // 2 + reach)]
        return cls(median, math.exp(low), math.exp(high), n, series or {}, lines)

    def times(self, factor: float) -> Median:
        """Return the median multiplied by a positive constant. Its series stays the measured one."""
        return replace(self, median=self.median * factor, low=self.low * factor, high=self.high * factor)


@dataclass
class Rounds:
    """CPU seconds by function name, one value per kept round.

    wall: seconds by function name, without the time that the thread waited for a core.
    quiet, disturbed: numbers of rounds. The disturbed ones are kept only if too few were quiet.
    paired: the other side of a session went through the same rounds.
    """

    seconds: dict[str, list[float]]
    wall: dict[str, list[float]]
    quiet: int = 0
    disturbed: int = 0
    paired: bool = False

    @property
    def witness(self) -> int:
        return len(next(iter(self.seconds.values())))

    @property
    def instruments(self) -> tuple[str, ...]:
        return ()

    def evidence(self) -> tuple[str, ...]:
        if self.witness > self.quiet:
            return (
                f"the machine was busy in {self.disturbed} of {self.witness} rounds: all are kept, and no interval"
                " is narrower than a factor of 2 either way",
            )
        return (f"{self.quiet} quiet rounds kept, {self.disturbed} disturbed ones dropped",)

    def ratio(self, numerator: str, denominator: str) -> Median:
        """Return the median of the paired ratios of CPU seconds, with the order statistics that enclose it at 99 %.

        With fewer than QUIET_NEEDED quiet rounds the interval is a factor of 2 either way, which no tolerance
        contains: the row will be INCONCLUSIVE. Its series is the inverse ratio: the higher the ratio, the lower the
        cost of the denominator.
        """
        series = self.paired_costs(denominator, numerator)
        return self._median(self.seconds[numerator], self.seconds[denominator], series)

    def cost(self, name: str) -> Median:
        """Return the same for a function's CPU seconds."""
        return self._median(self.seconds[name], [1.0] * self.witness, self.paired_costs(name))

    def rate(self, name: str, amount: float) -> Median:
        """Return what a function does per CPU second, such as tokens: `amount` is of one call. Higher is better."""
        cost = self.cost(name)
        median, low, high = (amount / x for x in (cost.median, cost.high, cost.low))
        return replace(cost, median=median, low=low, high=high)

    def wall_over_cpu(self, name: str) -> Median:
        """Return the same for a function's wall time over its CPU time: 1 if it never waits."""
        return self._median(self.wall[name], self.seconds[name], self.paired_waits(name))

    def _median(self, above: list[float], below: list[float], series: dict[str, tuple[float, ...]]) -> Median:
        return Median.of([a / b for a, b in zip(above, below)], series, self.evidence())

    def paired_costs(self, numerator: str, denominator: str = "") -> dict[str, tuple[float, ...]]:
        """Return the series that the gate compares round by round with the other side's; empty outside of a duet.

        CPU seconds of a function, or their ratio to another one's: lower is better.
        """
        below = self.seconds[denominator] if denominator else [1.0] * self.witness
        costs = tuple(a / b for a, b in zip(self.seconds[numerator], below))
        return {COST_PER_ROUND: costs} if self.paired else {}

    def paired_waits(self, name: str) -> dict[str, tuple[float, ...]]:
        """Return the series of a function's wall time over its CPU time; empty outside of a duet."""
        costs = tuple(a / b for a, b in zip(self.wall[name], self.seconds[name]))
        return {COST_PER_ROUND: costs} if self.paired else {}


# CPU share of one processor that others may use in a round, and how many quiet rounds an interval needs.
FOREIGN_SHARE = 0.1
QUIET_NEEDED = 15
# In a gate: disturbed rounds, as a multiple of the quiet ones that were asked for, after which no more are awaited.
PATIENCE = 2


def interleaved(functions: dict[str, Callable[[], object]], rounds: int, budget: float = 90.0) -> Rounds:
    """Return the CPU and wall seconds of functions (name -> callable), timed in turn, round by round.

    It ends when `rounds` quiet rounds are kept, or after `budget` wall seconds. The order rotates by one place per
    round. A round in which others used the machine is dropped, since a busy sibling thread slows large code by a third,
    unless fewer than QUIET_NEEDED were quiet: then all are kept, and every interval is wide. Under $BUMPGATE_DUET the
    other side goes through the same rounds at once, and a neighbour slows both alike. $BUMPGATE_ROUNDS, of a gate, sets
    fewer rounds, and PATIENCE.
    """
    duet = partner()
    patience = PATIENCE if "BUMPGATE_ROUNDS" in os.environ else math.inf
    rounds = min(rounds, int(os.environ.get("BUMPGATE_ROUNDS", rounds)))
    names = list(functions)
    for name in names:
        functions[name]()
    if duet:
        duet.agree(names, "what they time")
    kept = Rounds({name: [] for name in names}, {name: [] for name in names}, paired=duet is not None)
    deadline, calm = time.monotonic() + budget, list[bool]()
    while kept.quiet < rounds and kept.disturbed < patience * rounds:
        if calm and _over(deadline, duet):
            break
        if duet:
            duet.change_places()
        watch = Watch()
        turn = len(calm) % len(names)
        spent, passed = {}, {}
        for name in names[turn:] + names[:turn]:
            start, wall = time.process_time(), _wall_seconds()
            functions[name]()
            spent[name], passed[name] = time.process_time() - start, _wall_seconds() - wall
        calm.append(watch.was_quiet(duet))
        kept.quiet, kept.disturbed = calm.count(True), calm.count(False)
        for name in names:
            kept.seconds[name].append(spent[name])
            kept.wall[name].append(passed[name])
    if kept.quiet >= min(rounds, QUIET_NEEDED):
        for series in (*kept.seconds.values(), *kept.wall.values()):
            series[:] = compress(series, calm)
    return kept


def _wall_seconds() -> float:
    """Return the wall time minus this thread's waiting time for a core, by Linux's scheduler statistics.

    Both are read again if the thread lost its core in between.
    """
    waited = _waited_seconds()
    while True:
        now, before = time.perf_counter(), waited
        waited = _waited_seconds()
        if waited == before:
            return now - waited


def _waited_seconds() -> float:
    """Return how long this thread has been ready to run without a core; 0 where the system does not report it."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _over(deadline: float, duet: Duet | None) -> bool:
    over = time.monotonic() >= deadline
    return bool(duet.exchange(over, "whether the time is over")) or over if duet else over


class Watch:
    """Detects whether other processes than this one and its children used the machine since it was created."""

    def __init__(self) -> None:
        self.started, self.total, self.own = time.monotonic(), _busy_seconds(), cpu_seconds()

    def was_quiet(self, duet: Duet | None) -> bool:
        """Return whether the machine was quiet, on both sides in a duet. Children that still run count as others."""
        own = cpu_seconds() - self.own
        ours = own + (duet.exchange(own, "its CPU seconds") if duet else 0.0)
        foreign = _busy_seconds() - self.total - ours
        quiet = foreign <= FOREIGN_SHARE * (time.monotonic() - self.started)
        return bool(duet.exchange(quiet, "whether it was quiet")) and quiet if duet else quiet


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def _busy_seconds() -> float:
    """Return the CPU seconds used on this machine so far by all processes, stolen time included."""
    t = psutil.cpu_times()
    return float(sum(t) - t.idle - t.iowait - getattr(t, "guest", 0.0) - getattr(t, "guest_nice", 0.0))
