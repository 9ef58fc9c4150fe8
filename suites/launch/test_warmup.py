"""Whether a warm-up runs, by the table (rule C30); a run without one marks its batch axis in the first step (C12)."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest

from bumpgate.plugin.instruments import DynamoWatch, reset_dynamo
from launch import train
from launch.data import SyntheticBatches
from launch.programs import ProgramBudgetError
from launch.warmup import Start, WarmUp, load_warmup
from suites.launch.trainers import CONFIG, smoke_trainer
from suites.support.lanes import lanes
from suites.support.planted import planted

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane")]

STARTS = [Start(*c) for c in itertools.product(("cpu", "cuda", "xla"), *[(False, True)] * 5)]


def warm_up_expected(start: Start) -> bool:
    """Return whether a warm-up runs, from the rule's wording and not from the table of the contract."""
    if not start.requested or start.device == "xla" or (start.fsdp and not start.compiled):
        return False
    return not (start.device == "cuda" and start.regional and start.moe)


def wrong(table: WarmUp) -> list[Start]:
    return [start for start in STARTS if (table.skipped(start) == "") != warm_up_expected(start)]


def test_warm_up_table_follows_the_rule(row) -> None:
    table = load_warmup()
    missed = wrong(table)
    about = {"seen": sum(map(warm_up_expected, STARTS)), "rule": "C30", "evidence": missed}
    right = len(STARTS) - len(missed)
    row.count("launch/warmup/decisions_as_the_rule", right, expected=len(STARTS), **about)
    assert len(STARTS) == 3 * 2**5
    assert {table.skipped(start) for start in STARTS} == {"", *table.skip}, "each table decides somewhere"


@planted("C30", "the warm-up is forced where cuda, regional and MoE meet")
def test_each_skip_table_is_needed() -> None:
    table = load_warmup()
    for name in table.skip:
        without = WarmUp({n: when for n, when in table.skip.items() if n != name}, table.monitoring)
        missed = wrong(without)
        assert missed, name
        assert not any(map(warm_up_expected, missed))


@planted("C12", "no warm-up, and the first step marks no axis")
def test_first_step_replaces_the_warm_up(restored_dynamo, monkeypatch, canaries, row) -> None:
    """Without a warm-up: the same losses, and another batch compiles nothing. A step that marks none would compile."""
    canaries("graphs")
    losses, more = {}, {}
    for case in ("warm_up", "first_step", "no_mark"):
        reset_dynamo()
        skip = {} if case == "warm_up" else {"all": {"requested": True}}
        monkeypatch.setattr(train, "load_warmup", lambda skip=skip: WarmUp(skip, "1"))
        with DynamoWatch() as watch:
            run = smoke_trainer(4, batch=4, policy="regional", backend=watch.backend("eager"))
            assert run.no_warm_up == ("" if case == "warm_up" else "all")
            if case == "no_mark":
                run.compiled.first = run.compiled.forward
            boundary = run.model.boundary
            run.run(2, allow_synthetic="smoke")
            assert run.model.boundary is boundary, "only the first forward marks"
            before = watch.refresh().unique_graphs
            run.source = SyntheticBatches(CONFIG.vocab_size, 6, 16, 0, CONFIG.bos_id)
            with pytest.raises(ProgramBudgetError) if case == "no_mark" else nullcontext():
                run.run(4, allow_synthetic="smoke")
            more[case] = watch.refresh().unique_graphs - before
        losses[case] = run.losses
        assert before > 0
    about = {"seen": before, "rule": "C30", "instruments": ("graphs",)}
    row.count("launch/warmup-first_step/graphs_of_another_batch", more["first_step"], expected=0, **about)
    assert losses["first_step"] == losses["warm_up"]
    assert more["warm_up"] == 0 < more["no_mark"]
