"""One NaN or infinity as the last value that a row compares makes the row a REGRESSION.

The ops are poisoned where they return to autograd, and the lane's own tests then run unchanged: every error-ratio row
of suites/kernels in the baselines has its test here by construction. A fault in an earlier value is easier to detect,
because Python's `max` keeps a NaN that comes first.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from bumpgate.core.baseline import Baseline, violation
from bumpgate.core.rows import Judgement, Verdict
from bumpgate.plugin import rows
from kernels.rms_norm_gated import rms_norm_gated
from launch import ablation
from launch.step import train_step
from model import preset
from suites.cache import test_warm_restart
from suites.compile import test_moe_buckets
from suites.kernels import golden, model_shapes, test_model_shapes, test_peers
from suites.kernels.golden import GOLDEN
from suites.kernels.interpret import ratio as interpret_ratio
from suites.kernels.scan_op import ScanOp
from suites.kernels.workloads import Case, Work
from suites.launch import test_autofit
from suites.model import golden as model_golden
from suites.numerics import test_compiled_gradients, test_loss, test_loss_explosion
from suites.support.comparison import error_ratio
from suites.support.instruments import EveryOperator
from suites.support.lanes import LANES, Lane
from suites.support.reduce import (
    growth,
    largest,
    largest_difference,
    name_of_largest,
    smallest,
    sum_of_smallest,
)
from suites.throughput import test_full_size
from suites.wheels import smoke
from tests.support.tree import ROOT

BAD = [math.nan, math.inf]
CPU = LANES["cpu"]


class Poison(EveryOperator):
    """Writes `value` to the last entry of the last tensor returned by the `call`-th call of our ops.

    direction: "forward" (last public output) or "gradient". `calls` counts the calls of each; call 0 poisons none.
    """

    def __init__(self, direction: str = "", value: float = math.nan, call: int = 0) -> None:
        super().__init__()
        self.direction, self.value, self.call = direction, value, call
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        direction = {"_fwd": "forward", "_bwd": "gradient"}.get(name[-4:], "")
        if func.namespace == "bumpgate" and direction:
            self.calls[direction] += 1
            if direction == self.direction and self.calls[direction] == self.call:
                compared = public(name.removesuffix("_fwd"), found) if direction == "forward" else found
                poison_last(compared, self.value)
        return found


def public(op: str, outputs: Any) -> list[Tensor]:
    """Return the outputs of an op's public function that its rows compare.

    Mamba-3's v_prev is compared bit by bit before its rows are created. The ops of dsa_indexer return one output each.
    """
    names = GOLDEN[op].outputs if op in GOLDEN else ("out",)
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    return [t for name, t in zip(names, outputs) if name != "v_prev"]


def poison_last(tensors: Any, value: float) -> None:
    last = [t for t in ([tensors] if isinstance(tensors, Tensor) else tensors) if t.is_floating_point()][-1]
    last[tuple(size - 1 for size in last.shape)] = value


def ratio_tests() -> dict[str, list[str]]:
    """Map test ids of suites/kernels, without the lane, to their error-ratio rows in the baselines."""
    found: dict[str, list[str]] = {}
    for lane in ("cpu", "h200"):
        for id, row in json.loads((ROOT / f"baselines/{lane}.json").read_text())["rows"].items():
            if row["test"].startswith("suites/kernels/test_") and id.endswith("error_ratio"):
                test = re.sub(rf"-{lane}\]$", "]", row["test"])
                found.setdefault(test, []).append(id)
    return found


TESTS = ratio_tests()
OF_OPS = [test for test in TESTS if "test_model_shapes" not in test]


def run_test(function: Callable[..., Any], lane: Lane, **arguments: Any) -> dict[str, Judgement]:
    """Run a test function and return its rows as judged by its lane; a failed assertion ends it early."""
    name = function.__name__
    item = SimpleNamespace(stash={}, nodeid=name, user_properties=[], path=Path(), location=("", 0, name))
    recorder = rows.RowRecorder(item, Baseline(lane.name), {}, {})
    found: dict[str, Judgement] = {}

    def row(id: str, *args: Any, **fields: Any) -> None:
        found[id] = recorder(id, *args, **fields)

    try:
        function(lane, row=row, **arguments)
    except AssertionError:
        assert found, "no row before the test failed"
    return found


def assert_red(judged: Judgement) -> None:
    assert not math.isfinite(judged.row.value), judged.row
    assert "not a finite number" in violation(judged.row)
    assert judged.verdict is Verdict.REGRESSION


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def remembered(op: ScanOp) -> Callable[..., dict[str, Tensor]]:
    """Return `op.trained` that computes the results of the recurrence once: only those of the op are poisoned."""
    kept: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def trained(scan: Callable[..., Any], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if scan is not op.recurrence:
            return op.trained(scan, inputs)
        for before, found in kept:
            pairs = ((before[name], inputs[name]) for name in inputs)
            if all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs):
                return dict(found)
        kept.append((inputs, op.trained(scan, inputs)))
        return dict(kept[-1][1])

    return trained


@pytest.mark.parametrize("test", OF_OPS)
def test_non_finite_last_value_of_an_op_is_red(test: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, name, dtype = re.fullmatch(r"(.*)\.py::(\w+)\[(\w+)\]", test).groups()
    module = importlib.import_module(path.replace("/", "."))
    if hasattr(module, "SCAN"):
        monkeypatch.setattr(module, "results", remembered(module.SCAN))
    run = partial(run_test, getattr(module, name), CPU, dtype=dtype)
    with Poison() as counted:
        clean = run()
    assert not any(violation(judged.row) for judged in clean.values())
    checked = set()
    for direction in ("forward", "gradient"):
        names = [id for id in clean if id.endswith("/error_ratio") or f"/{direction}_" in id]
        for value in BAD if names else []:
            with Poison(direction, value, call=counted.calls[direction]) as poison:
                found = run()
            assert poison.calls == counted.calls
            assert poison.call > 0
            for id in names:
                assert_red(found[id])
                checked.add(id)
    assert checked == {id for id in TESTS[test] if "-h200" not in id}


def small_case(*_: Any, **__: Any) -> Case:
    """rms_norm_gated on the CPU instead of a GPU case, as its own peer."""
    inputs = test_peers.norm_inputs("cpu")
    op, reference = (partial(rms_norm_gated, group_size=64, impl=impl) for impl in ("op", "eager"))
    return Case(op, reference, op, inputs, Work(1.0, 1.0))


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shapes, "tuned_case", small_case)
    for module in (test_model_shapes, smoke):
        monkeypatch.setattr(module, "tuned_case", small_case)
        monkeypatch.setattr(module, "oracle_gib", lambda name: 0)
        monkeypatch.setattr(module, "claimed", lambda gib: nullcontext())


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("direction", ["forward", "gradient"])
@pytest.mark.parametrize("test", [test for test in TESTS if test not in OF_OPS])
def test_non_finite_value_at_the_models_shapes_is_red(
    test: str, direction: str, value: float, without_a_gpu: None
) -> None:
    name = re.search(r"\[(.*)\]", test)[1]
    with Poison(direction, value, call=1):
        found = run_test(test_model_shapes.test_error, LANES["h200"], name=name)
    assert sorted(found) == sorted(TESTS[test])
    assert_red(found[f"kernels/{name}/{direction}_error_ratio"])


@pytest.mark.parametrize("value", BAD)
def test_wheel_smoke_test_fails_on_a_non_finite_gradient(value: float, without_a_gpu: None, capsys) -> None:
    assert smoke.main("norm/1") == 0
    with Poison("gradient", value, call=1):
        assert smoke.main("norm/1") == 1
    assert f"error {value:.2f} times" in capsys.readouterr().err


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("call", [1, 2])
def test_peer_comparison_fails_on_a_non_finite_gradient(
    value: float, call: int, request: pytest.FixtureRequest, record_property, monkeypatch
) -> None:
    def norm(*inputs: Tensor, impl: str) -> Tensor:
        return rms_norm_gated(*inputs, group_size=64, impl="op" if impl == "upstream" else impl)

    monkeypatch.setitem(test_peers.PEERS, "norm", (norm, test_peers.norm_inputs, "torch"))
    compare = partial(test_peers.test_peer_computes_the_same_function, CPU, "norm", request, record_property)
    compare()
    with Poison("gradient", value, call=call), pytest.raises(AssertionError, match=str(value)):
        compare()


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("at", range(1, test_full_size.FIRST_STEPS))
def test_loss_growth_with_a_non_finite_loss_is_red(at: int, value: float) -> None:
    losses = [3.0, 2.9, 2.8, 2.7]
    losses[at] = value
    found = run_test(
        lambda lane, row: test_full_size._report_losses(row, "throughput/nam52-full", losses), LANES["h200"]
    )
    assert_red(found["throughput/nam52-full/loss_growth"])


def poisoned_steps(steps: int, value: float) -> Callable[..., Tensor]:
    """Return a fake launch.step.train_step whose loss is `value` at the last of `steps` steps."""
    count = iter(range(steps))
    return lambda *args: train_step(*args) if next(count) < steps - 1 else torch.tensor(value)


@pytest.mark.parametrize("value", BAD)
def test_loss_explosion_with_a_non_finite_loss_is_red(value: float, monkeypatch) -> None:
    monkeypatch.setattr(test_loss_explosion, "train_step", poisoned_steps(test_loss_explosion.STEPS, value))
    found = run_test(test_loss_explosion.test_loss_does_not_explode, CPU)
    assert_red(found["numerics/cancelling_experts-four_steps/largest_loss"])


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("run", [1, 2])
def test_twenty_steps_with_a_non_finite_last_loss_are_red(run: int, value: float, monkeypatch) -> None:
    """Uses fixed losses: compiling the model takes minutes, and is done in the lane."""
    curves = [[3.0 - 0.1 * step for step in range(20)] for _ in range(2)]
    curves[run - 1][-1] = value
    losses = iter([*curves[0], *curves[1]])
    compiled = SimpleNamespace(warm_up=lambda ids: None)
    hybrid = SimpleNamespace(
        config=preset("nam52"),
        compiled=compiled,
        model=SimpleNamespace(load_state_dict=lambda state: None),
        report=lambda: SimpleNamespace(calls=1),
    )
    monkeypatch.setattr(rows, "proved_instruments", {"graphs"})
    monkeypatch.setattr(test_loss, "watched_hybrid", lambda *_, **__: nullcontext(hybrid))
    monkeypatch.setattr(test_loss, "build", lambda *_: SimpleNamespace(state_dict=dict))
    monkeypatch.setattr(test_loss, "make_optimizer", lambda model: None)
    monkeypatch.setattr(test_loss, "train_step", lambda *_: next(losses))
    found = run_test(test_loss.test_loss_over_twenty_steps, CPU, name="nam52", canaries=lambda *names: None)
    assert_red(found["numerics/nam52-regional-20_steps/repeat_difference"])
    if run == 1:
        assert_red(found["numerics/nam52-regional-20_steps/loss_fall"])


@pytest.mark.parametrize("value", BAD)
def test_moe_buckets_with_a_non_finite_output_are_red(value: float, monkeypatch) -> None:
    calls = iter(range(len(test_moe_buckets.SKEWS)))
    plain = test_moe_buckets.dropless

    def poisoned(block: Any, x: Tensor) -> Tensor:
        y = plain(block, x)
        if next(calls) == len(test_moe_buckets.SKEWS) - 1:
            poison_last(y, value)
        return y

    monkeypatch.setattr(rows, "proved_instruments", set(test_moe_buckets.INSTRUMENTS))
    monkeypatch.setattr(test_moe_buckets, "dropless", poisoned)
    found = run_test(
        test_moe_buckets.test_moe_compiles_one_graph_per_bucket, CPU, canaries=lambda *names: None
    )
    assert_red(found["compile/nam52-moe_buckets/error_to_dropless"])


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("side", [0, 1])
def test_restart_with_a_non_finite_last_loss_is_red(side: int, value: float) -> None:
    cold, warm = (
        {"cpu_seconds": s, "wall_seconds": s, "graphs": 1, "losses": [3.0, 2.0]} for s in (9.0, 1.0)
    )
    (cold, warm)[side]["losses"][-1] = value
    found = run_test(test_warm_restart.test_warm_restart_is_cheap_and_bit_equal, CPU, restarts=(cold, warm))
    assert_red(found["cache/nam12-regional-restart/loss_difference"])


@pytest.mark.parametrize("value", BAD)
def test_split_step_with_a_non_finite_gradient_is_red(value: float, monkeypatch) -> None:
    plain, calls = test_autofit.after, count()

    def poisoned(step: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        found = plain(step)
        if next(calls) == 4:
            poison_last(found, value)
        return found

    monkeypatch.setattr(test_autofit, "after", poisoned)
    found = run_test(test_autofit.test_split_batch_step_equals_full_step, CPU)
    assert_red(found["launch/autofit/difference_of_a_split_step"])


@pytest.fixture
def xla_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """Import test_steps and test_meshes of suites/xla without torch_xla."""
    parts = ("core", "core.xla_model", "debug", "debug.metrics", "distributed", "distributed.spmd", "runtime")
    for name in ("torch_xla", *(f"torch_xla.{part}" for part in parts)):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    before = set(sys.modules)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(rows, "proved_instruments", {"xla_compiles", "xla_transfers", "xla_fallbacks"})
    yield importlib.import_module("suites.xla.test_steps"), importlib.import_module("suites.xla.test_meshes")
    for name in set(sys.modules) - before:
        if name.startswith(("suites.xla", "launch")):
            del sys.modules[name]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("side", [0, 1])
def test_tpu_steps_with_a_non_finite_last_loss_are_red(
    side: int, value: float, xla_tests, monkeypatch
) -> None:
    steps, _ = xla_tests
    curves = [torch.tensor([3.0, 2.9, 2.8, 2.7]) for _ in range(2)]
    curves[side][-1] = value
    ours, eager = curves
    made = SimpleNamespace(model=None, optimizer=None, config=None)
    monkeypatch.setattr(steps, "on_device", lambda config: made)
    monkeypatch.setattr(steps, "micro_batches", lambda *_: [None] * steps.STEPS)
    monkeypatch.setattr(steps, "each_step", lambda step, micro: [step(None) for _ in micro])
    monkeypatch.setattr(steps, "step_rows", lambda *_, **__: None)
    monkeypatch.setattr(steps, "eager_losses", lambda *_: eager.tolist())
    for name in steps.TILES:
        losses = iter(ours)
        monkeypatch.setattr(steps, "TrainStep", lambda *_, losses=losses: lambda micro: next(losses))
        found = run_test(
            steps.test_tile_trains_like_eager, LANES["v6e"], name=name, canaries=lambda *names: None
        )
        assert_red(found[f"xla/{name}-tile/loss_error"])


@pytest.mark.parametrize("value", BAD)
def test_mesh_steps_with_a_non_finite_last_loss_are_red(value: float, xla_tests, monkeypatch) -> None:
    _, meshes = xla_tests
    for name in meshes.SHAPES:
        child = {
            "losses": [3.0, 2.8, value],
            "counts": [[2, 2, 0]] * 3,
            "shape": [2] * len(name.split("-")),
            "specs": defaultdict(str),
            "receipt": "",
        }
        children = {"meshes": {name: child}, "eager": [3.0, 2.8, 2.6], "downloads_of_item": 1}
        monkeypatch.setattr(meshes, "on_meshes", lambda platform, children=children: children)
        found = run_test(meshes.test_mesh_agrees_with_eager, LANES["v6e"], name=name)
        assert_red(found[f"meshes/{name}/loss_difference"])


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("column", [0, 1])
def test_compiled_gradient_ratios_keep_a_non_finite_error(column: int, value: float) -> None:
    errors = {"first": [1e-14, 1e-14], "last": [1e-14, 1e-14]}
    errors["last"][column] = value
    ratios = test_compiled_gradients.error_ratios(errors, floor=1e-15)
    assert name_of_largest(ratios) == "last"
    assert not math.isfinite(ratios["last"])


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("side", [0, 1])
def test_worst_ablation_group_keeps_a_non_finite_error(side: int, value: float) -> None:
    errors, limits = ({"first": 1e-7, "last": 1e-7} for _ in range(2))
    (errors, limits)[side]["last"] = value
    group, ratio = ablation.worst_group(errors, limits)
    assert group == "last"
    assert not ratio <= ablation.FACTOR


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("side", [0, 1, 2])
def test_error_ratio_keeps_a_non_finite_entry_of_any_side(side: int, value: float) -> None:
    """Sides: the op, the eager formula or the oracle; the last pair has the value on two sides."""
    three = [torch.tensor([1.0, 2.0]) + i * 1e-6 for i in range(3)]
    assert error_ratio(*three) < 3
    three[side][-1] = value
    assert not math.isfinite(error_ratio(*three))
    if side > 0:  # interpreted kernels: the rule asserts that the kernel's own result is finite
        assert interpret_ratio.outside(*([t] for t in three))
    three[side - 1][-1] = value
    assert not math.isfinite(error_ratio(*three))


@pytest.mark.parametrize("value", BAD)
def test_golden_differences_report_a_non_finite_array(value: float) -> None:
    kept = {"output.y": torch.ones(2).double(), "grad.x": torch.ones(2).double()}
    found = kept | {"grad.x": torch.tensor([1.0, value]).double()}
    for pair in ((found, kept), (kept, found), (found, found)):
        assert golden.differences(*pair, golden.RELATIVE)
        assert model_golden.differences(*pair)


@pytest.mark.parametrize("reduce", [largest, smallest])
@pytest.mark.parametrize("at", range(3))
def test_reductions_keep_non_finite_values(reduce: Callable[..., float], at: int) -> None:
    for value in (math.nan, math.inf, -math.inf):
        values = [0.1, 0.2, 0.3]
        values[at] = value
        assert str(reduce(values)) == str(value)
        values[at - 1] = math.nan
        assert math.isnan(reduce(iter(values)))
    with pytest.raises(ValueError):
        reduce([])


def test_reductions_of_finite_values() -> None:
    assert (largest([1, 3, 2]), smallest(iter([2.0, 1.0]))) == (3, 1.0)
    assert name_of_largest({"a": 1.0, "b": math.inf, "c": 2.0}) == "b"
    assert name_of_largest({"a": math.inf, "b": math.nan, "c": 2.0}) == "b"
    assert largest_difference([1.0, 3.0], [1.5, -4.0]) == 7.0
    assert largest_difference([1.0, 3.0], [1.5, -4.0], relative=True) == 1.75
    assert growth([2.0, 3.0, 1.0]) == 1.5
    assert sum_of_smallest([1.0, 0.25, 0.5, 100.0], 3 / 4) == 1.75
    assert math.isnan(sum_of_smallest([1.0, math.nan, 0.5, 0.25], 3 / 4))
    assert math.isnan(sum_of_smallest([1.0, math.inf, 0.5, 0.25], 3 / 4))
    with pytest.raises(ValueError):
        largest_difference([1.0], [1.0, 2.0])
