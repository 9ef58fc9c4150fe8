"""The ratio rule rejects every known wrong result of every op, and no correct one.

In fp32, the strict case: there a formula's own error is some 1e-7, so that the rule detects every relevant fault.
"""

from __future__ import annotations

import math

from suites.kernels.mutants import faults, subjects
from suites.support.comparison import AT_MOST
from suites.support.lanes import Lane, lanes
from suites.support.planted import report_fault
from suites.support.reduce import largest

FAULTY_SEEDS, RIGHT_SEEDS = 3, 100


@lanes("cpu")
def test_every_fault_is_rejected(lane: Lane, row, record_property):
    least = {}
    for op, subject in subjects().items():
        runs = [(inputs, subject.run(inputs)) for inputs in map(subject.inputs, range(FAULTY_SEEDS))]
        judges = [subject.judge(inputs) for inputs, _ in runs]
        for name, fault in faults(subject).items():
            found = [judge(fault(subject, *run)) for judge, run in zip(judges, runs)]
            # Every bound rejects NaN, like infinity: it must not be the least rejected ratio.
            least[f"{op}: {name}"] = min(math.inf if math.isnan(ratio) else ratio for ratio in found)
    killed = [name for name, ratio in least.items() if ratio > AT_MOST["forward"]]
    for name in least:
        report_fault(record_property, "C36", name, f"kernels/mutants-{lane.name}/killed")
    survived = [f"survived: {name} ({least[name]:.3g})" for name in least if name not in killed]
    closest = min(killed, key=least.get, default=None)
    row(
        f"kernels/mutants-{lane.name}/killed",
        len(killed),
        unit="count",
        witness=len(least),
        expected=len(least),
        rule="C36",
        evidence=[*survived, f"least rejected: {closest} ({least.get(closest, 0):.3g})"],
    )


@lanes("cpu")
def test_no_correct_result_is_rejected(lane: Lane, row):
    alarms, seen = [], {}
    for op, subject in subjects().items():
        ratios = []
        for seed in range(RIGHT_SEEDS):
            inputs = subject.inputs(seed)
            ratios.append(subject.judge(inputs)(subject.run(inputs)))
        # NaN is not an agreement either, and compares false.
        alarms += [f"{op}, seed {i}: {r:.3f}" for i, r in enumerate(ratios) if not r <= AT_MOST["forward"]]
        seen[op] = largest(ratios)
    row(
        f"kernels/mutants-{lane.name}/false_alarms",
        len(alarms),
        unit="count",
        witness=len(seen) * RIGHT_SEEDS,
        expected=0,
        rule="C36",
        evidence=[*alarms, *(f"{op}: at most {ratio:.3f}" for op, ratio in seen.items())],
    )
