"""Steps of a gate: canaries in both environments, the selection once in each, paired sessions, the verdict.

Each step is saved before the next begins. On CPU both environments run at once, each with half of the workers; a
test that needs the machine to itself waits for the other side as well. The complete selection runs in each, timed tests
included: this warms both compile caches, so that no session has a cold start, and shows which rows are timed (those
that carry an interval).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from bumpgate.core import accepted, lanes
from bumpgate.core.errors import one_line
from bumpgate.core.findings import Finding, group
from bumpgate.core.rows import Problem, Record, read_record, write_record
from bumpgate.env.freeze import changes
from bumpgate.gate import drift, kept
from bumpgate.gate.accepted_times import apply_to_times
from bumpgate.gate.again import read_again, spoiled_again
from bumpgate.gate.answers import Interim, certain_findings, first_answer
from bumpgate.gate.drift import Recent, find_drifts
from bumpgate.gate.gaps import anchor_gap, left_out, tree_gap
from bumpgate.gate.plan import SessionPlan
from bumpgate.gate.result import NAME, Gate, GateError
from bumpgate.gate.sequential import summarise
from bumpgate.gate.sides import ROUNDS, TITLES, EnvSpec, side_name
from bumpgate.gate.timed import Sessions, timed_rows
from bumpgate.gate.timed_findings import of_adopted_alone, unequal_losses
from bumpgate.gate.timed_runs import TimedRuns
from bumpgate.gate.verdict import Side, judge_gate
from bumpgate.gate.view import View
from bumpgate.process.gpu_shares import GpuShare, merged, parts
from bumpgate.process.host import cpu_workers, host_class
from bumpgate.process.runner import (
    NOTHING_SELECTED,
    USAGE,
    LaneCall,
    LaneRun,
    by_hand,
    installed,
    options_of,
    run_lanes,
)
from bumpgate.process.tree_digest import SHOWN, Binding
from bumpgate.table import summary

# xdist's variable for the number of workers of `-n auto`.
WORKERS = "PYTEST_XDIST_AUTO_NUM_WORKERS"
# A requirement, or a wheel file, of triton.
TRITON = re.compile(r"(.*/)?triton(-\d|\s*([=<>!~@;]|$))", re.IGNORECASE)


@dataclass
class GateRunner:
    """Runs one gate on one machine. deadline: in time.monotonic(); no session starts that would end after it.

    tree: returns the binding of the work tree, which must not change during the gate. fresh: measure the adopted side
    even if a kept run of it is valid (bumpgate.gate.kept). shares: of the machine, for lanes and sessions that run at
    once on several GPUs.
    """

    gate: Gate
    root: Path
    out: Path
    env_specs: Mapping[str, EnvSpec]
    view: View
    plan: SessionPlan
    recent: Recent
    today: date
    deadline: float = math.inf
    tree: Callable[[], Binding | None] = lambda: None
    fresh: bool = False
    shares: Sequence[GpuShare] = ()

    def __post_init__(self) -> None:
        self._started = time.monotonic() - self.gate.wall_seconds
        self._unusable: dict[
            str, str
        ] = {}  # side -> why its environment, measured before, does not start now

    def run(self) -> None:
        """Run the remaining steps, then judge. Raises GateError if pytest rejects the selection."""
        sides = self.gate.sides
        self.gate.finished = False
        self.enter()
        self._require_measured_sides()
        if not (sides["adopted"].failure or sides["candidate"].failure):
            for names in self.groups(
                [name for name in ("adopted", "candidate") if sides[name].canaries is None]
            ):
                self.canaries(names)
                self.save()
            self._recall()
            for names in self.groups([name for name in ("adopted", "candidate") if not sides[name].measured]):
                self.measure(names)
                self.save()
            if self.gate.paired is None and not self.gate.config.fast:
                read_again(self)
                self._first_answer()
            self.pair()
        self.judge()
        self.gate.finished = True
        self.save()

    def save(self) -> None:
        """Save the gate state to gate.json."""
        self.gate.wall_seconds = time.monotonic() - self._started
        self.gate.write(self.out)

    def enter(self) -> None:
        """Record each side's installed packages, or why its environment is unavailable."""
        host = host_class()
        if self.gate.host not in ("", host):
            raise GateError(f"started on {self.gate.host}, and this is {host}: gate again, in another --out")
        self.gate.host = host
        for name, side in self.gate.sides.items():
            spec = self.env_specs[name]
            side.command, side.python = spec.command, "" if spec.failure else str(spec.python)
            failure, found = spec.failure, None
            if not failure:
                with self.view.doing(f"{TITLES[name]}: importing torch"):
                    found = installed(spec.python, self.root, self.gate.config.lane, spec.variables)
                failure = found.failure
            if found and not failure:
                then = (side.packages, side.git_version, side.wheels)
                for was, now in zip(then, (found.packages, found.git_version, spec.wheels)):
                    if side.packages and was != now:
                        raise other_packages(name, was, now)
                side.packages, side.git_version = dict(found.packages), dict(found.git_version)
                side.wheels = dict(spec.wheels)
            side.name = side_name(TITLES[name], self.gate.config.candidate, side.packages)
            if side.measured and failure:
                self._unusable[name] = failure
            elif not side.measured:
                side.failure = failure
            self.view.say(f"{side.name}: {failure}" if failure else side.name)
        for line in self.gate.moved:
            self.view.say(f"moved: {line}")
        self.save()

    def _require_measured_sides(self) -> None:
        """Raise GateError if a side that was measured before the gate was resumed does not start for what is left."""
        for name, failure in self._unusable.items():
            if self.gate.paired is None or self.gate.paired.open_tests():
                raise GateError(
                    f"the {TITLES[name]} environment does not start any more ({one_line(failure)}): repair it, then "
                    "--resume; what was measured is kept"
                )

    def canaries(self, names: Sequence[str]) -> None:
        """Run the canaries in these environments and record why each failed one did."""
        folder = lanes.require(self.root, self.gate.config.lane).canaries
        if not folder or not (self.root / folder).exists():
            # A lane without canaries verifies each row's instrument in the row's own process.
            reason = f"no {folder} in this tree, so no instrument is verified"
            for name in names:
                self.gate.sides[name].canaries = {"canaries": reason} if folder else {}
            return
        runs = self.run_sides(names, "canaries", [folder], "canaries-{}.json")
        for name, run in runs.items():
            self.gate.sides[name].canaries = self._failed_canaries(name, run)

    def _failed_canaries(self, name: str, run: LaneRun) -> dict[str, str]:
        if run.code == NOTHING_SELECTED:
            self.view.say(f"{TITLES[name]}: this lane has no canaries")
            return {}
        judgements = run.record.judgements if run.record else ()
        failed = {
            j.row.id.split("/")[1]: one_line(j.row.evidence[0] if j.row.evidence else j.reason)
            for j in judgements
            if j.row.value is not True
        }
        if not failed and (run.failure or (run.record and run.record.problems)):
            failed["canaries"] = one_line(run.failure or (run.record and str(run.record.problems[0])))
        outcome = f"FAILED: {', '.join(failed)}" if failed else f"{len(judgements)} agree"
        self.view.say(f"{TITLES[name]}: canaries: {outcome}; {run.seconds:.0f} s")
        return failed

    def measure(self, names: Sequence[str]) -> None:
        """Run the selection once per side. Raises GateError if pytest rejects it in the adopted environment."""
        variables = {"BUMPGATE_ROUNDS": str(ROUNDS), **self._tiers()}
        with self._interim(names).watching():
            runs = self.run_sides(
                names, "counts and numerics", self.gate.config.selection, "{}.json", env_vars=variables
            )
        if "adopted" in runs and runs["adopted"].code == USAGE:
            # Nothing is measured yet, so there is nothing to resume.
            (self.out / NAME).unlink()
            raise GateError(f"pytest rejects the selection: {runs['adopted'].failure}")
        for name, run in runs.items():
            side = self.gate.sides[name]
            side.measured, side.failure = True, run.failure
            self.env_specs[name].mark_filled(0, self.gate.binding)
            if run.record:
                path = self.out / f"{name}.json"
                record = spoiled_again(self, name, run.record, path)
                side.record = path.name
                self.view.say(f"{TITLES[name]}: {summary(record)}")
                if name == "adopted" and not run.failure:
                    self._keep(record, path)
            if run.failure:
                self.view.say(f"{TITLES[name]}: {run.failure} (log: {run.log})")

    def _keep(self, record: Record, path: Path) -> None:
        if (key := self._kept_key()) and not tree_gap(self.gate, self.tree()):
            kept.save(key, record, path, self.env_specs["adopted"].cache_folders.values())

    def _recall(self) -> None:
        """Take the adopted side's rows from a kept run of the same tree, packages and host, if there is one."""
        side, key = self.gate.sides["adopted"], self._kept_key()
        found = kept.find(key) if key and not (side.measured or self.fresh) else None
        if found is None:
            return
        path, side.kept = found
        record = read_record(path)
        side.measured, side.record = True, "adopted.json"
        write_record(
            self.out / side.record,
            record.provenance,
            record.judgements,
            complete=True,
            problems=record.problems,
        )
        self.view.say(f"{TITLES['adopted']}: {summary(record)}")
        self.view.say(f"  its run of {side.kept}: same tree, packages and host (--fresh runs it again)")
        self.save()

    def _kept_key(self) -> str:
        """Return the key of the adopted side's run; "" if its rows may depend on more than can be recorded.

        A user's interpreter can change while its versions stay.
        """
        spec, side, config = self.env_specs["adopted"], self.gate.sides["adopted"], self.gate.config
        if spec.lock is None or self.gate.binding is None:
            return ""
        return kept.key(
            lane=config.lane,
            selection=config.selection,
            command=config.command,
            without=config.without,
            variables={
                "rounds": ROUNDS,
                **self._tiers(),
                **kept.variables(self.root, self.gate.binding.files),
            },
            tree=self.gate.binding.tree,
            bumpgate=self.gate.binding.bumpgate,
            accepted=self._accepted(),
            python=side.python,
            packages=side.packages,
            git_version=side.git_version,
            host=self.gate.host,
            gpus=[len(s.gpus) for s in self._halves(["adopted"])[0]],
        )

    def _accepted(self) -> list[str]:
        """Return the lane's accepted entries that hold today: the kept rows are judged by them."""
        entries = accepted.load(self.root / "baselines" / accepted.FILE)
        lane = self.gate.config.lane
        return sorted(repr(a) for a in entries if a.lane == lane and not a.expired(self.today))

    def pair(self) -> None:
        """Run the sessions with the adopted build, then those with the anchor, if any; none of a fast gate."""
        sides = self.gate.sides
        if self.gate.config.fast:
            return
        adopted, candidate = self.record("adopted"), self.record("candidate")
        if adopted is None or candidate is None or sides["adopted"].failure or sides["candidate"].failure:
            return
        if self.gate.paired is None:
            pairs = 1 + min(len(self.env_specs[name].more) for name in ("adopted", "candidate"))
            rows = timed_rows(adopted, candidate)
            self.gate.paired = Sessions(rows, self.plan, self.plan.budget, cache_pairs=pairs)
        timed = TimedRuns(self, self.options())
        timed.warm(self.gate.paired)
        timed.sessions(self.gate.paired, "adopted")
        if "anchor" in sides and not sides["anchor"].failure:
            if self.gate.drifted is None:
                self.gate.drifted = Sessions(self.gate.paired.tests, None, drift.SESSIONS)
            timed.sessions(self.gate.drifted, "anchor")

    def _first_answer(self) -> None:
        """Show and save what is known before the sessions begin: the findings that do not depend on times."""
        sides = self._sides()
        if sides["adopted"].record and sides["candidate"].record:
            found = certain_findings(self.gate.config.lane, sides["adopted"], sides["candidate"])
            for line in first_answer(found):
                self.view.say(line)
            self.gate.findings = tuple(found)
            self.save()

    def _interim(self, running: Sequence[str]) -> Interim:
        """Return a comparison of the records that these running sides, and those measured before, have so far."""
        there = [name for name in ("adopted", "candidate") if name in running or self.gate.sides[name].record]
        records = {name: self.out / f"{name}.json" for name in there}
        config = self.gate.config
        return Interim(config.lane, self._sides(), records, self._started, self.view.say, not config.fast)

    def _sides(self) -> dict[str, Side]:
        return {
            name: Side(s.name, self._judged(name), s.failure, s.canaries or {}, s.command)
            for name, s in self.gate.sides.items()
        }

    def judge(self) -> None:
        """Compute the decision and its findings from all measurements."""
        gate, lane, sides = self.gate, self.gate.config.lane, self._sides()
        alone: list[Problem] = []
        if gate.paired:
            alone = _add_faults(sides, gate.paired)
            if gate.drifted:
                sides["candidate"] = _with_problems(sides["candidate"], gate.drifted.problems("candidate"))
            gate.timed = summarise(gate.paired.log_ratios, self.plan, gate.paired.family)
        drifted = gate.drifted.log_ratios if gate.drifted else {}
        acceptances = accepted.load(self.root / "baselines" / accepted.FILE)
        found = find_drifts(self.recent, lane, list(gate.timed), drifted, self.today, acceptances)
        gate.drifts = {row: drifts[-1] for row, drifts in found.items()}
        timed, crept, lines = apply_to_times(gate.timed, found, acceptances, lane, self.today)
        verdict = judge_gate(lane, sides["adopted"], sides["candidate"], timed, crept)
        lost = unequal_losses(lane, gate.paired) if gate.paired else []
        gaps = [
            *anchor_gap(gate, self.root, self.options()),
            *tree_gap(gate, self.tree()),
            *left_out(gate, self.record("candidate")),
        ]
        findings = group([*verdict.findings, *of_adopted_alone(lane, alone), *lost, *gaps])
        gate.decision = findings[0].decision if findings else verdict.decision
        gate.findings = tuple(self._with_interpreter(f) for f in findings)
        gate.accepted = tuple(lines)

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

        record: file name, with {} for the side. by_side: env_vars of one side alone.
        """
        more = {WORKERS: str(cpu_workers(len(names)))} if len(names) > 1 else {}
        calls = []
        for name, own in zip(names, self._halves(names)):
            variables = {**more, **env_vars, **by_side.get(name, {})}
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
        """Return a lane run of one side. pair: index of the pair of compile caches. share: None for the machine."""
        spec = self.env_specs[name]
        environment = {**spec.caches(pair), **(share.variables() if share else {}), **env_vars}
        lane = self.gate.config.lane
        return LaneCall(spec.python, self.root, lane, selection, self.out / record, environment=environment)

    def run_calls(
        self, names: Sequence[str], what: str, calls: Sequence[LaneCall], timeout: float | None = None
    ) -> list[LaneRun]:
        """Run these lanes at once and show which sides they belong to. timeout: wall seconds."""
        with self.view.doing(f"{' and '.join(TITLES[name] for name in names)}: {what}"):
            return run_lanes(calls, timeout)

    def shares_of(self, number: int) -> list[list[GpuShare]]:
        """Return the shares of the machine for each of `number` lanes that run at once; none if it is not divided."""
        return parts(self.shares, number) if self.shares else [[] for _ in range(number)]

    def _halves(self, names: Sequence[str]) -> list[list[GpuShare]]:
        """Return each side's part of the machine, the same if it runs alone: of two shares or more its half."""
        both = (
            ("adopted", "candidate")
            if len(self.shares) > 1 and {*names} <= {"adopted", "candidate"}
            else names
        )
        own = dict(zip(both, self.shares_of(len(both))))
        return [own[name] for name in names]

    def groups(self, names: Sequence[str]) -> list[list[str]]:
        """Group the sides that run at once: all of them on CPU or with a share each, one at a time on one device."""
        on_cpu = lanes.require(self.root, self.gate.config.lane).device == "cpu"
        if names and (on_cpu or len(self.shares) >= len(names)):
            return [list(names)]
        return [[name] for name in names]

    def _tiers(self) -> dict[str, str]:
        """Return env_vars that make a whole-lane gate of triton collect the codegen tier, if both sides have triton."""
        options, sides = self.gate.config, self.gate.sides
        of_triton = any(TRITON.match(text) for text in (options.candidate, options.adopted))
        both = all("triton" in sides[name].packages for name in ("adopted", "candidate"))
        return {"BUMPGATE_TIERS": "codegen"} if of_triton and both and not options.selection else {}

    def record(self, name: str) -> Record | None:
        """Return the record of a side's run; None if it left none."""
        found = self.gate.sides[name].record
        return read_record(self.out / found) if found else None

    def options(self, record: Record | None = None) -> list[str]:
        """Return the options of the selection, for a later run of some of its tests. record: default is a saved one."""
        return options_of(
            self.gate.config.selection, record or self.record("adopted") or self.record("candidate")
        )

    def _judged(self, name: str) -> Record | None:
        """Return a side's record for the verdict: empty if the side was not run because of the other one."""
        side = self.gate.sides[name]
        spared = not (side.measured or side.failure)
        return Record({"lane": self.gate.config.lane}, ()) if spared else self.record(name)

    def _with_interpreter(self, f: Finding) -> Finding:
        """Put the side's interpreter into the repro: plain `pytest` depends on the shell's environment."""
        python = self.env_specs["adopted" if f.adopted and not f.candidate else "candidate"].python
        if not f.repro.startswith("pytest "):
            return f
        return replace(f, repro=by_hand(python, self.root, f.repro, self.options()))


def other_packages(name: str, then: Mapping[str, str], now: Mapping[str, str]) -> GateError:
    """Return the error for resuming with a side whose environment has changed."""
    moved = changes(then, now)
    more = f" and {len(moved) - SHOWN} more" if len(moved) > SHOWN else ""
    what = f"{', '.join(moved[:SHOWN])}{more}"
    return GateError(f"the {TITLES[name]} packages differ from before ({what}): gate again, in another --out")


def _add_faults(sides: dict[str, Side], sessions: Sessions) -> list[Problem]:
    """Add the problems of the timed processes to both sides' records; return those that only the adopted side had."""
    candidate, faults = (
        _with_problems(sides["candidate"], sessions.problems("candidate")),
        sessions.problems("adopted"),
    )
    of_candidate = {p.test for p in candidate.record.problems} if candidate.record else set()
    shared = [p for p in faults if p.test in of_candidate]
    sides |= {"adopted": _with_problems(sides["adopted"], shared), "candidate": candidate}
    return [p for p in faults if p not in shared]


def _with_problems(side: Side, problems: Sequence[Problem]) -> Side:
    if side.record is None or not problems:
        return side
    return replace(side, record=replace(side.record, problems=(*side.record.problems, *problems)))
