"""Tokens per anchor workload of a train step of the 52-layer hybrid, and its waiting time.

Rule C37. The anchor is NumPy and interpreter work, so that it does not change with torch.
"""

from __future__ import annotations

import statistics
from functools import partial

from bumpgate.plugin.rows import Seen
from launch.step import make_optimizer, train_step
from suites.support.anchor import anchor
from suites.support.hybrids import token_batch, watched_hybrid, work_of
from suites.support.lanes import Lane, lanes

ROUNDS = 80
# In twenty processes the ratio of two torch steps deviated by up to 3.2 %, the ratio to the anchor by 8.7 %; next to
# invisible neighbours by up to 10 % and 25 %. The gate, which steps both sides alternately, finds smaller changes.
TOLERANCE = {"speedup": 0.15, "anchor": 0.35, "wall": 0.03}


@lanes("cpu")
def test_train_step(lane: Lane, row, canaries, paired_timer) -> None:
    canaries("graphs")
    with watched_hybrid("nam52", "regional") as hybrid, watched_hybrid("nam52", "eager") as eager:
        ids = token_batch(hybrid.config, 2)
        hybrid.compiled.warm_up(ids)
        steps = {}
        for name, each in (("regional", hybrid), ("eager", eager)):
            optimizer = make_optimizer(each.model)
            steps[name] = lambda each=each, optimizer=optimizer: train_step(each.compiled, optimizer, ids)
        calls = hybrid.watch.report.calls
        timed = paired_timer({"anchor": anchor, **steps}, ROUNDS)
        calls = hybrid.watch.report.calls - calls
    tokens = ids.numel()
    seen, work = Seen(calls, timed.evidence()), work_of(hybrid.model, ids)
    report = partial(row.timed, rule="C37", seen=seen, work=work)
    higher = partial(report, better="higher")
    for name in steps:
        case = f"throughput/nam52-{name}"
        rate = timed.ratio("anchor", name).times(tokens)
        evidence = [f"{_rate(tokens, timed.seconds[name])} tokens per CPU second"]
        about = {"tolerance": TOLERANCE["anchor"], "evidence": evidence, "series": timed.paired_costs(name)}
        higher(f"{case}/tokens_per_anchor", rate, "tokens", **about)
        waits = timed.wall_over_cpu(name)
        report(f"{case}/wall_over_cpu", waits, "ratio", tolerance=TOLERANCE["wall"], paired=True)
    speedup = timed.ratio("eager", "regional")
    higher("throughput/nam52-regional/speedup_over_eager", speedup, "ratio", tolerance=TOLERANCE["speedup"])


def _rate(tokens: int, seconds: list[float]) -> str:
    return f"{tokens / statistics.median(seconds):.0f}" if seconds else "no quiet round:"
