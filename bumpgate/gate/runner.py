"""Runs lanes of a gate's sides: which run at once, with which interpreter, compile caches and share of the machine."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from bumpgate.core import lanes
from bumpgate.core.rows import Record, read_record
from bumpgate.gate.drift import Oldest, Recent
from bumpgate.gate.environments import SIDES, EnvSpec
from bumpgate.gate.plan import SessionPlan
from bumpgate.gate.state import Gate, GateConfig
from bumpgate.gate.view import View
from bumpgate.process.gpu_shares import GpuShare, merged, parts
from bumpgate.process.host import cpu_workers
from bumpgate.process.runner import LaneCall, LaneRun, options_of, run_lanes
from bumpgate.process.tree_digest import Binding

# xdist's variable for the number of workers of `-n auto`.
WORKERS = "PYTEST_XDIST_AUTO_NUM_WORKERS"
# A requirement, or a wheel file, of triton.
TRITON = re.compile(r"(.*/)?triton(-\d|\s*([=<>!~@;]|$))", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a gate uses and does not change.

    started: of the gate, in time.monotonic(), as if it had never been interrupted.
    deadline: in time.monotonic(); no session starts that would end after it.
    tree: returns the binding of the work tree, which must not change during the gate.
    fresh: measure the adopted side even if a cached run of it is valid (bumpgate.gate.adopted_run_cache).
    shares: of the machine, for lanes and sessions that run at once on several GPUs.
    """

    config: GateConfig
    root: Path
    out: Path
    environments: Mapping[str, EnvSpec]
    view: View
    plan: SessionPlan
    recent: Recent
    oldest: Oldest
    today: date
    started: float
    deadline: float = math.inf
    tree: Callable[[], Binding | None] = lambda: None
    fresh: bool = False
    shares: Sequence[GpuShare] = ()

    @property
    def lane(self) -> lanes.Lane:
        return lanes.require(self.root, self.config.lane)

    def save(self, gate: Gate) -> Gate:
        """Write gate.json, and return the gate with its wall time so far."""
        gate = replace(gate, wall_seconds=time.monotonic() - self.started)
        gate.write(self.out)
        return gate

    def record(self, gate: Gate, name: str) -> Record | None:
        """Return the record of a side's run; None if it left none."""
        found = gate.sides[name].record
        return read_record(self.out / found) if found else None

    def options(self, gate: Gate, record: Record | None = None) -> list[str]:
        """Return the options of the selection, for a later run of some of its tests. record: default is a saved one."""
        saved = record or self.record(gate, "adopted") or self.record(gate, "candidate")
        return options_of(self.config.selection, saved)

    def tiers(self, gate: Gate) -> dict[str, str]:
        """Return env_vars that make a whole-lane gate of triton collect the codegen tier, if both sides have triton."""
        of_triton = any(TRITON.match(text) for text in (self.config.candidate, self.config.adopted))
        both = all("triton" in gate.sides[name].packages for name in SIDES)
        return {"BUMPGATE_TIERS": "codegen"} if of_triton and both and not self.config.selection else {}

    def groups(self, names: Sequence[str]) -> list[list[str]]:
        """Group the sides that run at once: all of them on CPU or with a share each, one at a time on one device."""
        at_once = self.lane.device == "cpu" or len(self.shares) >= len(names)
        return [list(names)] if names and at_once else [[name] for name in names]

    def shares_of(self, number: int) -> list[list[GpuShare]]:
        """Return the shares of the machine for each of `number` lanes that run at once; none if it is not divided."""
        return parts(self.shares, number) if self.shares else [[] for _ in range(number)]

    def halves(self, names: Sequence[str]) -> list[list[GpuShare]]:
        """Return each side's part of the machine, the same if it runs alone: of two shares or more its half."""
        both = SIDES if len(self.shares) > 1 and {*names} <= {*SIDES} else names
        own = dict(zip(both, self.shares_of(len(both))))
        return [own[name] for name in names]

    def run_sides(
        self,
        names: Sequence[str],
        what: str,
        selection: Sequence[str],
        record: str,
        env_vars: Mapping[str, str] = {},
        by_side: Mapping[str, Mapping[str, str]] = {},
    ) -> dict[str, LaneRun]:
        """Run the lane once per side, all at once, each with its share of the workers and GPUs.

        record: file name, with {} for the side.
        by_side: env_vars of one side alone.
        """
        workers = {WORKERS: str(cpu_workers(len(names)))} if len(names) > 1 else {}
        calls = []
        for name, own in zip(names, self.halves(names)):
            variables = {**workers, **env_vars, **by_side.get(name, {})}
            share = merged(own) if own else None
            calls.append(self.call(name, selection, record.format(name), 0, variables, share))
        return dict(zip(names, self.run_calls(names, what, calls)))

    def call(
        self,
        name: str,
        selection: Sequence[str],
        record: str,
        pair: int,
        env_vars: Mapping[str, str],
        share: GpuShare | None = None,
    ) -> LaneCall:
        """Return a lane run of one side.

        pair: index of the pair of compile caches.
        share: None for the machine.
        """
        spec = self.environments[name]
        variables = {**spec.caches(pair), **(share.variables() if share else {}), **env_vars}
        path = self.out / record
        return LaneCall(
            spec.python, self.root, self.config.lane, selection, record=path, environment=variables
        )

    def run_calls(
        self, names: Sequence[str], what: str, calls: Sequence[LaneCall], timeout: float | None = None
    ) -> list[LaneRun]:
        """Run these lanes at once and show which sides they belong to. timeout: wall seconds."""
        runs = {name: call.progress for name, call in zip(names, calls)} if len(names) == len(calls) else {}
        with self.view.doing(what if runs else f"{' and '.join(names)}: {what}", runs):
            return run_lanes(calls, timeout)
