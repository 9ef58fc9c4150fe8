"""Executed training steps: compiles, executions, transfers and fallbacks of each, and the loss against eager's.

T tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor

from launch.contract import load
from launch.data import DataError, PackedBatches, SyntheticBatches, TokenFile
from launch.optimizers import AdamW, Muon, TensorOptimizer
from launch.policies import apply
from launch.train import Trainer, TrainingPlan
from launch.xla import steps as xla
from launch.xla.environment import XlaEnvironmentError, check
from launch.xla.steps import TrainStep, XlaError, barrier_layers, set_learning_rate
from model import HybridConfig, preset
from suites.support.child import ROOT
from suites.support.lanes import Lane, lanes, needs_tpu
from suites.support.planted import planted
from suites.support.reduce import largest_difference
from suites.xla.support import (
    TILES,
    Counts,
    OnDevice,
    counted,
    each_step,
    eager_losses,
    fresh_size,
    on_device,
    tile,
)

INSTRUMENTS = ("xla_compiles", "xla_transfers", "xla_fallbacks")
STEPS = 4


def dense() -> HybridConfig:
    """Two layers without experts: small enough to compile completely in 3 s. Each call's programs are new to XLA."""
    return preset("nam12", "narrow", layer_pattern="AM", depth=2, vocab_size=512 + fresh_size())


def small() -> HybridConfig:
    """One A, E, M, E tile, also new to XLA."""
    return preset("nam12", "narrow", depth=4, vocab_size=512 + fresh_size())


def micro_batches(made: OnDevice, steps: int, accumulate: int = 1) -> list[list[Tensor]]:
    """Return different data for every micro-batch of every step."""
    return [[made.batch(seed=accumulate * s + m) for m in range(accumulate)] for s in range(steps)]


def step_rows(
    row, case: str, rule: str, found: Sequence[Counts], first: int, executions: int, settled: int = 1
) -> None:
    """Report the rows of a run: `first` compiles at step 0, none after `settled` steps, `executions` per step, no host
    read.

    The first step also uploads the program's constants, once.
    """
    shared = {"rule": rule, "instruments": INSTRUMENTS, "evidence": found}
    later, done = found[settled:], sum(c.executions for c in found)
    expected = {
        "compiles_of_first_step": (found[0].compiles, first),
        "compiles_once_settled": (sum(c.compiles for c in later), 0),
        "executions_a_step": (max(c.executions for c in found), executions),
        "downloads_a_step": (max(c.downloads for c in found), 0),
        "uploads_once_settled": (max(c.uploads for c in later), 0),
        "cpu_fallbacks": (sum(sum(c.fallbacks.values()) for c in found), 0),
    }
    for metric, (value, required) in expected.items():
        row.count(f"xla/{case}/{metric}", value, expected=required, seen=done, **shared)


@lanes("v6e")
@pytest.mark.parametrize("name", TILES)
def test_tile_trains_like_eager(lane: Lane, name: str, row, canaries) -> None:
    canaries(*INSTRUMENTS)
    made = on_device(tile(name))
    step, losses = TrainStep(made.model, made.optimizer), []
    found = each_step(lambda micro: losses.append(step(micro)), micro_batches(made, STEPS))
    step_rows(row, f"{name}-tile", "X7", found, first=2, executions=2)
    ours, eager = [loss.item() for loss in losses], eager_losses(made.config, STEPS)
    error = largest_difference(ours, eager, relative=True)
    row.bound(
        f"xla/{name}-tile/loss_error",
        error,
        "relative",
        seen=set(eager),
        rule="C36",
        # Roundings of 6e-8 over some 1e3 chained fp32 operations; the maximum was 6e-7 on PJRT CPU.
        at_most=1e-5,
        evidence=[f"xla {ours}", f"eager {eager}"],
        series={"xla": ours, "eager": eager} if math.isfinite(error) else {},
    )


@lanes("v6e")
@pytest.mark.parametrize("optimizer", [AdamW, Muon])
def test_mode_a_is_one_program_at_any_learning_rate(
    lane: Lane, optimizer: type[TensorOptimizer], row, canaries
) -> None:
    canaries(*INSTRUMENTS)
    made = on_device(dense())
    if optimizer is Muon:
        matrices = [p for p in made.model.parameters() if p.ndim == 2]
        others = [p for p in made.model.parameters() if p.ndim != 2]
        groups = [{"params": matrices}, {"params": others, "rule": "adamw"}]
        made.optimizer = Muon(groups, lr=1e-3, capturable=True)
    step = TrainStep(made.model, made.optimizer)
    assert step.mode == "A"
    case = f"mode_a-{optimizer.__name__.lower()}"
    step_rows(row, case, "X2", each_step(step, micro_batches(made, STEPS)), first=1, executions=1)
    set_learning_rate(made.optimizer, 5e-4)  # the small program that sets it is compiled here
    found = []
    for lr in (3e-4, 0.0, 1.0):
        with counted() as counts:
            set_learning_rate(made.optimizer, lr)
            step([made.batch()])
        found.append(counts)
    rates = {float(group["lr"]) for group in made.optimizer.param_groups}
    shared = {"rule": "X6", "evidence": found, "instruments": INSTRUMENTS}
    compiles, seen = sum(c.compiles for c in found), len(found) if rates == {1.0} else 0
    row.count(f"xla/{case}/compiles_of_new_rates", compiles, expected=0, seen=seen, **shared)


@lanes("v6e")
def test_accumulation_has_two_variants_at_step_0_and_none_later(lane: Lane, row, canaries) -> None:
    canaries(*INSTRUMENTS)
    made = on_device(small())
    step = TrainStep(made.model, made.optimizer)
    found = each_step(step, micro_batches(made, STEPS, accumulate=3))
    # Programs: gradients created, gradients accumulated, the update, and the mean of the three losses.
    step_rows(row, "mode_b-accumulate_3", "X7", found, first=4, executions=5)


@pytest.mark.v6e
@planted("X7", "a short last micro-batch in a later step: further variants")
def test_short_micro_batch_recompiles(canaries) -> None:
    canaries(*INSTRUMENTS)
    made = on_device(small())
    batches = micro_batches(made, 2, accumulate=2)
    batches[1][1] = made.batch(batch=1, seed=9)
    first, later = each_step(TrainStep(made.model, made.optimizer), batches)
    assert first.compiles == 4
    assert later.compiles > 0


@pytest.mark.v6e
@planted("X7", "micro-batches of a model with experts traced into one program")
def test_step_without_barriers_is_one_program(canaries) -> None:
    canaries(*INSTRUMENTS)
    made = on_device(small())
    step = TrainStep(made.model, made.optimizer)
    step._step = step._plain_step
    (counts,) = each_step(step, micro_batches(made, 1, accumulate=3))
    assert (counts.compiles, counts.executions) == (1, 1)


@lanes("v6e")
def test_barriers_cut_forward_and_backward_alike(lane: Lane, row, canaries) -> None:
    canaries(*INSTRUMENTS)
    made = on_device(small())
    every = 2
    step = TrainStep(made.model, made.optimizer, barrier_every=every)
    programs = 2 * len(barrier_layers(made.config.depth, every)) + 1
    found = each_step(step, micro_batches(made, STEPS))
    # Constants that cross a barrier are new uploads at step 0 and cached ones from then on, which share buffers.
    case = f"barrier_every_{every}"
    step_rows(row, case, "X8", found, first=programs, executions=programs, settled=2)
    second = found[1].compiles
    row.count(f"xla/{case}/compiles_of_second_step", second, seen=programs, rule="X8", evidence=found)


@pytest.mark.v6e
def test_barrier_positions() -> None:
    assert barrier_layers(52, 0) == ()
    assert barrier_layers(52, 13) == (12, 25, 38)
    assert barrier_layers(5, 2) == (1, 3)
    assert barrier_layers(4, 2) == (1,)
    assert barrier_layers(4, 4) == barrier_layers(4, 9) == ()


@pytest.mark.v6e
@planted("X8", "a barrier after the last layer")
def test_barrier_after_the_last_layer_adds_programs(monkeypatch: pytest.MonkeyPatch, canaries) -> None:
    canaries(*INSTRUMENTS)
    monkeypatch.setattr(xla, "barrier_layers", lambda depth, every: tuple(range(every - 1, depth, every)))
    made = on_device(dense())
    step = TrainStep(made.model, made.optimizer, barrier_every=2)
    (counts,) = each_step(step, micro_batches(made, 1))
    assert counts.executions == 3 != 2 * len(barrier_layers(2, 2)) + 1


@lanes("v6e")
def test_mode_follows_from_the_model(lane: Lane, row) -> None:
    patterns = {"A": ("A", "M", "R", "AM", "AMR"), "B": ("E", "AEME", "AEMEAEMEAEMR")}
    expected = {pattern: mode for mode, group in patterns.items() for pattern in group}
    modes = {p: xla.mode_of(preset("nam12", "narrow", layer_pattern=p, depth=len(p))) for p in expected}
    wrong = {p: mode for p, mode in modes.items() if mode != expected[p]}
    row.count("xla/modes/wrong", len(wrong), expected=0, seen=modes, rule="X6", evidence=wrong)


@pytest.mark.v6e
@planted("X6", "Mode A for a model with experts")
def test_mode_a_with_experts_is_refused() -> None:
    made = on_device(small())
    with pytest.raises(XlaError, match="has experts: Mode A has crashed libtpu on them, use Mode B"):
        TrainStep(made.model, made.optimizer, mode="A")


@pytest.mark.v6e
@planted("X8", "torch.compile in front of XLA, as a policy and as Module.compile")
def test_torch_compile_is_refused() -> None:
    made = on_device(dense())
    with pytest.raises(XlaError, match="on XLA the policy is eager"):
        TrainStep(apply(made.model, "whole_opaque", load()), made.optimizer)
    made.model.blocks[1].compile(backend="eager")
    with pytest.raises(XlaError, match=r"blocks\.1 and 0 more are under torch\.compile"):
        TrainStep(made.model, made.optimizer)


@pytest.mark.v6e
@planted("C36", "a weight that is not a number, on the device")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_weight_stays_one_in_the_loss(value: float) -> None:
    """By the comparison of the rows above; it stays one after the update, too."""
    made = on_device(dense())
    with torch.no_grad():
        made.model.embedding.weight[..., -1].fill_(value)
    step = TrainStep(made.model, made.optimizer)
    for loss in (step([made.batch()]), step([made.batch(seed=2)])):
        assert not largest_difference([loss.item()], [1.0], relative=True) <= 1.0


@pytest.mark.v6e
@planted("X2", "a tensor to the power of a Python step count: a program at every step")
def test_python_step_count_recompiles_every_step(canaries) -> None:
    canaries(*INSTRUMENTS)
    x, steps = torch.ones(17, 3).to(torch_xla.device()), itertools.count(2)

    def step(_: Sequence[Tensor]) -> Tensor:
        x.copy_(x ** next(steps))
        torch_xla.sync()
        return x

    assert [counts.compiles for counts in each_step(step, [[]] * 4)] == [1, 1, 1, 1]


@pytest.mark.v6e
@planted("X2", "an optimizer that is not capturable; scalars that share one buffer")
def test_causes_of_a_second_compile_of_a_step(monkeypatch: pytest.MonkeyPatch, canaries) -> None:
    canaries(*INSTRUMENTS)
    made = on_device(dense())
    with pytest.raises(XlaError, match="must be capturable"):
        TrainStep(made.model, AdamW(made.model.parameters()))
    monkeypatch.setattr(xla, "own_buffers", lambda scalars: torch_xla.sync())
    step = TrainStep(made.model, made.optimizer)
    assert [counts.compiles for counts in each_step(step, micro_batches(made, 3))][1:] == [1, 0]


@pytest.mark.v6e
@planted("X10", "XLA_NO_SPECIAL_SCALARS unset, and PJRT_DEVICE")
def test_xla_environment_is_checked() -> None:
    check({"PJRT_DEVICE": "TPU", "XLA_NO_SPECIAL_SCALARS": "1"})
    with pytest.raises(XlaEnvironmentError, match="export XLA_NO_SPECIAL_SCALARS=1 before Python starts"):
        check({"PJRT_DEVICE": "TPU"})
    with pytest.raises(XlaEnvironmentError, match="export PJRT_DEVICE=CPU or TPU"):
        check({"XLA_NO_SPECIAL_SCALARS": "1"})


@lanes("v6e")
@planted("X12", "a runtime that reports 0 bytes, and one that reports nothing")
def test_memory_is_read_or_refused(lane: Lane, row, monkeypatch, device_class: str) -> None:
    messages = []
    for info in ({"bytes_used": 0}, {}):
        monkeypatch.setattr(xm, "get_memory_info", lambda device, info=info: info)
        with pytest.raises(XlaError, match="no memory reading of this device"):
            xla.memory_in_use()
    monkeypatch.undo()
    try:
        messages.append(f"{xla.memory_in_use()} bytes")
    except XlaError as error:
        messages.append(str(error))
    loud = (
        "GetAllocatorStats" in messages[0] if device_class == "pjrt-cpu" else not messages[0].startswith("0 ")
    )
    row.bound("xla/memory/loud", loud, "bool", expected=True, seen=messages, rule="X12", evidence=messages)


@lanes("v6e")
@needs_tpu("PJRT on CPU keeps no allocator statistics", "xla/memory_tpu/bytes_in_use_rise")
def test_memory_in_use_rises_with_an_allocation(lane: Lane, row) -> None:
    before = xla.memory_in_use()
    block = torch.ones(1 << 26, device=torch_xla.device())
    torch_xla.sync()
    xm.wait_device_ops()
    rise = xla.memory_in_use() - before
    size = block.numel() * block.element_size()
    row.bound("xla/memory_tpu/bytes_in_use_rise", rise, "bytes", at_least=size, seen=1, rule="X12")


@lanes("v6e")
@planted("X13", "random ids as training data")
def test_run_needs_the_receipt_of_its_data(lane: Lane, row) -> None:
    config = preset("nam12", "narrow", layer_pattern="A", depth=1)
    corpus = PackedBatches(TokenFile(ROOT / "fixtures/corpus"), 2, 16, seed=0)
    plan = TrainingPlan(steps=1, policy="eager", optimizer="adamw")
    random = SyntheticBatches(config.vocab_size, 2, 16, 0, config.bos_id)
    with pytest.raises(DataError, match="random ids are not training data"):
        Trainer(config, plan, random, device="xla").run()
    summary = Trainer(config, plan, corpus, device="xla").run()
    found = {"seen": summary["step"], "evidence": [str(summary["data"])]}
    row.bound("xla/receipt/kind", summary["kind"], "kind", expected="training", rule="X13", **found)
