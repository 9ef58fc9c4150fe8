"""Steps of a gate, each a function from its state to the next: environments, canaries, lanes, pairs, verdict.

Each step is saved before the next begins. On CPU both environments run at once, each with half of the workers; a
test that needs the machine to itself waits for the other side as well. The complete selection runs in each, timed tests
included: this warms both compile caches, so that no session has a cold start, and shows which rows are timed (those
that carry an interval).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bumpgate.core import accepted
from bumpgate.core.errors import one_line
from bumpgate.core.rows import Record
from bumpgate.core.text import some
from bumpgate.env.freeze import changes, without_cuda
from bumpgate.gate import adopted_run_cache, drift, evidence
from bumpgate.gate.environments import ROUNDS, SIDES, side_name
from bumpgate.gate.evidence import sides_of
from bumpgate.gate.interim import Interim, certain_findings, first_answer
from bumpgate.gate.pairing import TimedRuns
from bumpgate.gate.remeasure import read_again, spoiled_again
from bumpgate.gate.runner import Bench
from bumpgate.gate.state import NAME, Gate, GateError, Inputs
from bumpgate.gate.timed import Sessions, timed_rows
from bumpgate.gate.verdict import small_changes
from bumpgate.process.host import host_class
from bumpgate.process.runner import NOTHING_SELECTED, USAGE, LaneRun, installed
from bumpgate.table import summary


def run_gate(bench: Bench, gate: Gate) -> Gate:
    """Run the remaining steps, then judge. Raises GateError if pytest rejects the selection."""
    gate = enter(bench, replace(gate, finished=False))
    if not gate.failed:
        for names in bench.groups([name for name in SIDES if gate.sides[name].canaries is None]):
            gate = bench.save(canaries(bench, gate, names))
        gate = adopted_run_cache.recall(bench, gate)
        for names in bench.groups([name for name in SIDES if not gate.sides[name].measured]):
            gate = bench.save(measure(bench, gate, names))
        if gate.paired is None and not bench.config.fast:
            gate = show_first_answer(bench, read_again(bench, gate))
        gate = pair(bench, gate)
    return bench.save(replace(judge(bench, gate), finished=True))


def enter(bench: Bench, gate: Gate) -> Gate:
    """Record each side's installed packages, or why its environment is unavailable.

    Raises GateError on another host, on other packages than before, and if a side that was measured before the gate
    was resumed does not start for what is left.
    """
    host = host_class()
    if gate.host not in ("", host):
        raise GateError(f"started on {gate.host}, and this is {host}: gate again, in another --out")
    gate = replace(gate, host=host)
    unusable: dict[str, str] = {}
    for name in gate.sides:
        gate, failure = _enter_side(bench, gate, name)
        if gate.sides[name].measured and failure:
            unusable[name] = failure
        shown = gate.sides[name].name
        bench.view.say(f"{shown}: {failure}" if failure else shown)
    for line in without_cuda(gate.moved):
        bench.view.say(f"moved: {line}")
    gate = bench.save(gate)
    for name, failure in unusable.items():
        if gate.paired is None or gate.paired.open_tests():
            raise GateError(
                f"the {name} environment does not start any more ({one_line(failure)}): repair it, then "
                "--resume; what was measured is kept"
            )
    return gate


def _enter_side(bench: Bench, gate: Gate, name: str) -> tuple[Gate, str]:
    """Return the gate with a side's packages, and why its environment does not start; "" if it does."""
    side, spec, failure = gate.sides[name], bench.environments[name], bench.environments[name].failure
    found: dict[str, Any] = {}
    if not failure:
        with bench.view.doing(f"{name}: importing torch"):
            there = installed(spec.python, bench.root, bench.config.lane, spec.variables)
        failure = there.failure
        if not failure:
            found = {"packages": there.packages, "git_version": there.git_version, "wheels": spec.wheels}
            for field, now in found.items():
                if side.packages and getattr(side, field) != now:
                    raise other_packages(name, getattr(side, field), now)
            found["artifacts"] = spec.artifacts
    python = "" if spec.failure else str(spec.python)
    found = {field: {**x} for field, x in found.items()}
    side = replace(side, command=spec.command, python=python, **found)
    shown = side_name(name, bench.config.candidate, side.packages)
    if base := bench.config.base:
        shown = f"commit {base[:12]} (adopted)" if name == "adopted" else "work tree (candidate)"
    side = replace(side, name=shown)
    return gate.with_side(name, side if side.measured else replace(side, failure=failure)), failure


def canaries(bench: Bench, gate: Gate, names: Sequence[str]) -> Gate:
    """Run the canaries in these environments and record why each failed one did."""
    folder = bench.lane.canaries
    if not folder or not (bench.root / folder).exists():
        # A lane without canaries verifies each row's instrument in the row's own process.
        failed = {"canaries": f"no {folder} in this tree, so no instrument is verified"} if folder else {}
        for name in names:
            gate = gate.changed(name, canaries=failed)
        return gate
    for name, run in bench.run_sides(names, "canaries", [folder], "canaries-{}.json").items():
        gate = gate.changed(name, canaries=_failed_canaries(bench, name, run))
    return gate


def _failed_canaries(bench: Bench, name: str, run: LaneRun) -> dict[str, str]:
    if run.code == NOTHING_SELECTED:
        bench.view.say(f"{name}: this lane has no canaries")
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
    bench.view.say(f"{name}: canaries: {outcome}; {run.seconds:.0f} s")
    return failed


def measure(bench: Bench, gate: Gate, names: Sequence[str]) -> Gate:
    """Run the selection once per side. Raises GateError if pytest rejects it in the adopted environment."""
    variables = {"BUMPGATE_ROUNDS": str(ROUNDS), **bench.tiers(gate)}
    interim = Interim(
        lane=bench.config.lane,
        sides=sides_of(gate, _records(bench, gate)),
        records={n: bench.out / f"{n}.json" for n in SIDES if n in names or gate.sides[n].record},
        started=bench.started,
        say=bench.view.say,
        again=not bench.config.fast,
    )
    with interim.watching():
        runs = bench.run_sides(names, "counts and numerics", bench.config.selection, "{}.json", variables)
    if "adopted" in runs and runs["adopted"].code == USAGE:
        # Nothing is measured yet, so there is nothing to resume.
        (bench.out / NAME).unlink()
        raise GateError(f"pytest rejects the selection: {runs['adopted'].failure}")
    for name, run in runs.items():
        gate = gate.changed(name, measured=True, failure=run.failure)
        bench.environments[name].mark_filled(0, gate.binding)
        if run.record:
            record = spoiled_again(bench, gate, name, run.record)
            gate = gate.changed(name, record=f"{name}.json")
            bench.view.say(f"{name}: {summary(record)}")
            if name == "adopted" and not run.failure:
                adopted_run_cache.keep(bench, gate, record)
        if run.failure:
            bench.view.say(f"{name}: {run.failure} (log: {run.log})")
    return gate


def pair(bench: Bench, gate: Gate) -> Gate:
    """Run the sessions with the adopted build, then those with the anchor, if any; none of a fast gate."""
    adopted, candidate = (bench.record(gate, name) for name in SIDES)
    if bench.config.fast or adopted is None or candidate is None or gate.failed:
        return gate
    if gate.paired is None:
        pairs = 1 + min(len(bench.environments[name].more) for name in SIDES)
        rows = timed_rows(adopted, candidate)
        gate = replace(gate, paired=Sessions(rows, bench.plan, bench.plan.budget, cache_pairs=pairs))
    assert gate.paired
    timed = TimedRuns(bench, gate, bench.options(gate))
    timed.warm(gate.paired)
    timed.sessions(gate.paired, "adopted")
    if "anchor" in gate.sides and not gate.sides["anchor"].failure:
        if gate.drifted is None:
            gate = bench.save(replace(gate, drifted=Sessions(gate.paired.tests, None, drift.SESSIONS)))
        assert gate.drifted is not None
        replace(timed, gate=gate).sessions(gate.drifted, "anchor")
    return gate


def show_first_answer(bench: Bench, gate: Gate) -> Gate:
    """Show and save what is known before the sessions begin: the findings that do not depend on times."""
    sides = sides_of(gate, _records(bench, gate))
    if not (sides["adopted"].record and sides["candidate"].record):
        return gate
    found = certain_findings(bench.config.lane, sides["adopted"], sides["candidate"])
    for line in first_answer(found):
        bench.view.say(line)
    return bench.save(replace(gate, findings=tuple(found)))


def judge(bench: Bench, gate: Gate) -> Gate:
    """Compute the decision and its findings from all measurements."""
    lane, rows = bench.config.lane, list(gate.paired.log_ratios) if gate.paired else []
    entries = accepted.load(bench.root / "baselines" / accepted.FILE)
    inputs = Inputs(
        plan=bench.plan,
        today=bench.today,
        acceptances=tuple(a for a in entries if a.lane == lane),
        readings=bench.recent(lane, rows, drift.HISTORY_DAYS) if rows else {},
        tree=tuple(gate.binding.differences(now)) if gate.binding and (now := bench.tree()) else (),
    )
    records, options = _records(bench, gate), bench.options(gate)
    judged = evidence.judge(replace(gate, inputs=inputs), records, bench.root, options)
    if not (small := small_changes(judged.findings)):
        return judged
    inputs = replace(inputs, oldest=bench.oldest(lane, small, drift.HISTORY_DAYS))
    return evidence.judge(replace(gate, inputs=inputs), records, bench.root, options)


def _records(bench: Bench, gate: Gate) -> dict[str, Record | None]:
    return {name: bench.record(gate, name) for name in gate.sides}


def other_packages(name: str, then: Mapping[str, str], now: Mapping[str, str]) -> GateError:
    """Return the error for resuming with a side whose environment has changed."""
    moved = changes(then, now)
    return GateError(f"the {name} packages differ from before ({some(moved)}): gate again, in another --out")
