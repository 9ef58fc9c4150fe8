"""The ratio rule rejects every known wrong result of every op, and no correct one.

In fp32, the strict case: there a formula's own error is some 1e-7, so that the rule detects every relevant fault.
"""

from __future__ import annotations

import math

from suites.kernels.mutants import comparisons, faults
from suites.support.comparison import AT_MOST
from suites.support.lanes import Lane, lanes
from suites.support.planted import report_fault
from suites.support.reduce import largest

FAULTY_SEEDS, RIGHT_SEEDS = 3, 100


@lanes("cpu")
def test_every_fault_is_rejected(lane: Lane, row, record_property):
    least = {}
    for op, one in comparisons().items():
        runs = [(inputs, one.run(inputs)) for inputs in map(one.example, range(FAULTY_SEEDS))]
        judges = [one.judge(inputs) for inputs, _ in runs]
        for name, fault in faults(one).items():
            found = [judge(fault(one, *run)) for judge, run in zip(judges, runs)]
            # Every bound rejects NaN, like infinity: it must not be the least rejected ratio.
            least[f"{op}: {name}"] = min(math.inf if math.isnan(ratio) else ratio for ratio in found)
    killed = [name for name, ratio in least.items() if ratio > AT_MOST["forward"]]
    for name in least:
        report_fault(record_property, "C36", name, f"kernels/mutants-{lane.name}/killed")
    survived = [f"survived: {name} ({least[name]:.3g})" for name in least if name not in killed]
    closest = min(killed, key=least.get, default=None)
    row.count(
        f"kernels/mutants-{lane.name}/killed",
        len(killed),
        expected=len(least),
        rule="C36",
        seen=least,
        evidence=[*survived, f"least rejected: {closest} ({least.get(closest, 0):.3g})"],
    )


@lanes("cpu")
def test_no_correct_result_is_rejected(lane: Lane, row):
    alarms, seen = [], {}
    for op, one in comparisons().items():
        ratios = []
        for seed in range(RIGHT_SEEDS):
            inputs = one.example(seed)
            ratios.append(one.judge(inputs)(one.run(inputs)))
        # NaN is not an agreement either, and compares false.
        alarms += [f"{op}, seed {i}: {r:.3f}" for i, r in enumerate(ratios) if not r <= AT_MOST["forward"]]
        seen[op] = largest(ratios)
    row.count(
        f"kernels/mutants-{lane.name}/false_alarms",
        alarms,
        expected=0,
        rule="C36",
        seen=len(seen) * RIGHT_SEEDS,
        evidence=[f"{op}: at most {ratio:.3f}" for op, ratio in seen.items()],
    )
