"""The error of every op next to its plain formula's error, within bounds of rounding, and after a single cast.

The specs have the functions, cases, bounds and wrong kernels. The ratio rule must reject every known wrong result, and
no correct one. An op ignores autocast, and unwritten memory is NaN in all tests of this folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import op_support
from suites.ops import specs
from suites.ops.spec import Comparison, Named, OpSpec, Outputs, ScanSpec
from suites.support.comparison import (
    AT_MOST,
    DTYPES,
    doubled,
    error,
    error_ratio,
    outputs_of,
    random_weights,
    ratio_row,
    trained,
)
from suites.support.lanes import Lane, lanes
from suites.support.planted import report_fault
from suites.support.reduce import largest, smallest

ALL = [(op, name, one) for op in specs().values() for name, one in op.comparisons.items()]
EVERYWHERE = [one for one in ALL if not one[2].only_on_gpu]
COMPARISONS = {f"{op.name} {name}".strip(): one for op, name, one in EVERYWHERE}
FAULTY_SEEDS, RIGHT_SEEDS = 3, 100
TORCH = {dtype: str(t).removeprefix("torch.") for dtype, t in DTYPES.items()} | {"fp16": "float16"}


def each(comparisons: list[tuple[OpSpec, str, Comparison]]) -> Any:
    """Parametrize a test by op and comparison."""
    found = [
        pytest.param(op, one, id=f"{op.name}-{name}" if name else op.name) for op, name, one in comparisons
    ]
    return pytest.mark.parametrize(("op", "comparison"), found)


def report_errors(row: Any, lane: Lane, op: OpSpec, comparison: Comparison, dtype: str) -> None:
    """Report the worst error ratio of all cases, with all ratios as evidence."""
    ratios: dict[str, dict[str, float]] = {metric: {} for metric in comparison.rows}
    compared = dict.fromkeys(comparison.rows, 0)
    for name, case in comparison.cases.items():
        found, plain, oracle = comparison.errors(case, getattr(torch, TORCH[dtype]), lane.device)
        for metric in comparison.rows:
            of_outputs = {"forward": [True], "gradient": [False]}.get(metric.split("_")[0], [True, False])
            for n in (n for n in oracle if n.isdigit() in of_outputs):
                what = f"output {n}" if n.isdigit() else f"gradient of {n}"
                ratios[metric][f"{name} {what}".strip()] = error_ratio(found[n], plain[n], oracle[n])
                compared[metric] += oracle[n].numel()
    (name,) = (n for n, one in op.comparisons.items() if one is comparison)
    standard = "-".join(filter(None, (f"kernels/{op.name}", lane.name, dtype, name)))
    id = comparison.id.format(torch=TORCH[dtype]) or standard
    for metric, at_most in comparison.rows.items():
        ratio_row(row, f"{id}/{metric}", ratios[metric], compared[metric], at_most)


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
@each(EVERYWHERE)
def test_error_is_at_most_that_of_the_plain_formula(
    lane: Lane, op: OpSpec, comparison: Comparison, dtype: str, row
) -> None:
    """kernels/<op>-<lane>-<dtype>/forward_error_ratio and gradient_error_ratio; the specs have the ids."""
    report_errors(row, lane, op, comparison, dtype)


@lanes("h200")
@pytest.mark.long(60)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@each([one for one in ALL if one[2].only_on_gpu])
def test_error_on_a_gpus_own_path(lane: Lane, op: OpSpec, comparison: Comparison, dtype: str, row) -> None:
    report_errors(row, lane, op, comparison, dtype)


def outside(bounds: Named, found: Named, oracle: Named) -> dict[str, float]:
    """Return the share of entries beyond their bound, by the name of the result. NaN is beyond any bound."""
    within = {n: (found[n] - oracle[n]).abs() <= bound for n, bound in bounds.items()}
    return {n: 1 - float(close.double().mean()) for n, close in within.items()}


@lanes("cpu", "h200")
@each([one for one in ALL if one[2].bound])
def test_fp32_error_is_rounding_only(lane: Lane, op: OpSpec, comparison: Comparison) -> None:
    """In every case; in the last one each wrong formula must exceed the bound of each result that it changes."""
    for case in comparison.cases.values():
        arguments = comparison.draw(case, torch.float32, lane.device)
        oracle = comparison.named(*trained(comparison.exact, doubled(arguments)))
        bounds = comparison.bound(arguments, oracle)
        for function in (comparison.op, *comparison.forms):
            found = comparison.named(*trained(function, arguments))
            assert not any(outside(bounds, found, oracle).values()), (case, function)
    for name, fault in comparison.wrong.items():
        found = comparison.named(*trained(comparison.op, fault.planted(arguments)))
        spared = {[*found][i] for i in fault.spares}
        seen = [n for n in bounds if n not in spared]
        shares = outside({n: bounds[n] for n in seen}, found, oracle)
        assert smallest(shares.values()) > comparison.share, (name, shares)


def narrowed(op: OpSpec, arguments: Named, narrow: str) -> Named:
    """Return the arguments with 16-bit values in all inputs, in those of a free dtype, or in the others.

    The values of the other inputs are rounded, too, so that all three have the same values.
    """
    made = dict(arguments)
    for name, t in arguments.items():
        if isinstance(t, Tensor) and t.is_floating_point() and name not in op.stays_fp32:
            chosen = narrow == "all" or (name in op.free) == (narrow == "free")
            made[name] = t.bfloat16() if chosen else t.bfloat16().float()
    return made


@lanes("cpu", "h200")
@pytest.mark.parametrize("narrow", ["all", "free", "others"])
@each(EVERYWHERE)
def test_bf16_is_computed_in_fp32_and_cast_once(
    lane: Lane, op: OpSpec, comparison: Comparison, narrow: str
) -> None:
    """Bitwise on a CPU, with mixed dtypes as well: a bf16 sum, product, state or logsumexp changes a bit.

    A kernel with matrix products may round its operands, so on a GPU only the other kernels are checked.
    """
    if lane.device == "cuda" and not op.elementwise:
        return
    for case in comparison.cases.values():
        arguments = narrowed(op, comparison.draw(case, torch.float32, lane.device), narrow)
        wide = {
            n: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t
            for n, t in arguments.items()
        }
        outputs, grads = trained(comparison.op, arguments)
        weights = random_weights(t for t in outputs if t.is_floating_point() and comparison.trains)
        exact = comparison.named(*trained(comparison.op, wide, weights))
        for name, t in comparison.named(outputs, grads).items():
            assert name.isdigit() or t.dtype == arguments[name].dtype, name
            once = exact[name].to(t.dtype)
            if name in op.from_output and t.dtype != torch.float32:
                off = (t.double() - exact[name]).square().mean().sqrt()
                assert off <= 2**-8 * exact[name].square().mean().sqrt(), name
            elif lane.device == "cuda":
                room = 2**-8 * once.abs() + 2**-18 * once.abs().max()
                assert ((t - once).abs() <= room).all(), name
            else:
                assert torch.equal(t, once), name


def _first(change: Callable[[Tensor], Tensor]) -> Callable[[Comparison, Named, Outputs], Outputs]:
    """Return the fault that changes a copy of the first output only."""
    return lambda comparison, inputs, right: (change(right[0].clone()), *right[1:])


def _one_wrong_element(y: Tensor) -> Tensor:
    """Change the entry of median size by 1 %. Zeros do not count: a factor of 1.01 would not change them."""
    sizes = y.abs().flatten()
    used = sizes.nonzero().flatten()
    y.view(-1)[used[sizes[used].argsort()[len(used) // 2]]] *= 1.01
    return y


def _zeroed_tail(y: Tensor) -> Tensor:
    """Leave the last token unwritten; of dispatched tokens, the last row of each expert; of a product, a column."""
    y[:, -1] = 0
    return y


def _tf32_operands(comparison: Comparison, inputs: Named, right: Outputs) -> Outputs:
    """Round operands as a Triton product of fp32 does by default: 10 bits of each factor."""
    return comparison.run({n: _tf32(t) for n, t in inputs.items()})


def _tf32(t: Any) -> Any:
    if not isinstance(t, Tensor) or t.dtype != torch.float32:
        return t
    return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


FAULTS_OF_EVERY_OP = {
    "3 % scale": _first(lambda y: y * 1.03),
    "one wrong element": _first(_one_wrong_element),
    "zeroed tail": _first(_zeroed_tail),
    "tf32 operands": _tf32_operands,
}


@lanes("cpu")
def test_every_fault_is_rejected(lane: Lane, row, record_property) -> None:
    """In fp32, the strict case: there a formula's own error is some 1e-7, so that every relevant fault is seen."""
    least = {}
    for op, one in COMPARISONS.items():
        runs = [(inputs, one.run(inputs)) for inputs in map(one.example, range(FAULTY_SEEDS))]
        judges = [one.judge(inputs) for inputs, _ in runs]
        for name, fault in (FAULTS_OF_EVERY_OP | dict(one.faults)).items():
            found = [judge(fault(one, *run)) for judge, run in zip(judges, runs)]
            # Every bound rejects NaN, like infinity: it must not be the least rejected ratio.
            least[f"{op}: {name}"] = min(math.inf if math.isnan(ratio) else ratio for ratio in found)
    killed = [name for name, ratio in least.items() if ratio > AT_MOST["forward"]]
    for name in least:
        report_fault(record_property, "C36", name, f"kernels/mutants-{lane.name}/killed")
    survived = [f"survived: {name} ({least[name]:.3g})" for name in least if name not in killed]
    closest = min(killed, key=least.get, default=None)
    row.count(
        f"kernels/mutants-{lane.name}/killed", len(killed), expected=len(least), rule="C36", seen=least,
        evidence=[*survived, f"least rejected: {closest} ({least.get(closest, 0):.3g})"],
    )  # fmt: skip


@lanes("cpu")
def test_no_correct_result_is_rejected(lane: Lane, row) -> None:
    alarms, seen = [], {}
    for op, one in COMPARISONS.items():
        examples = map(one.example, range(RIGHT_SEEDS))
        ratios = [one.judge(inputs)(one.run(inputs)) for inputs in examples]
        # NaN is not an agreement either, and compares false.
        alarms += [f"{op}, seed {i}: {r:.3f}" for i, r in enumerate(ratios) if not r <= AT_MOST["forward"]]
        seen[op] = largest(ratios)
    row.count(
        f"kernels/mutants-{lane.name}/false_alarms", alarms, expected=0, rule="C36",
        seen=len(seen) * RIGHT_SEEDS, evidence=[f"{op}: at most {ratio:.3f}" for op, ratio in seen.items()],
    )  # fmt: skip


def in_fp32(function: Callable[..., Any], one: Comparison, device: str) -> list[Tensor]:
    """Return outputs and gradients of the last case under the caller's autocast state."""
    outputs, grads = trained(function, one.draw([*one.cases.values()][-1], torch.float32, device))
    return [*outputs, *grads.values()]


def without_gradients(function: Callable[..., Any]) -> Callable[..., Outputs]:
    return lambda **inputs: [t.detach() for t in outputs_of(function(**inputs))]


@lanes("cpu", "h200")
@each(EVERYWHERE)
def test_autocast_changes_no_bit(lane: Lane, op: OpSpec, comparison: Comparison) -> None:
    """Of an op, of the outputs of its other forms, such as mla's absorbed one, and of a scan that is traced."""
    forms = [*comparison.forms, *([partial(op.run, impl="eager")] if isinstance(op, ScanSpec) else [])]
    for function in (comparison.op, *map(without_gradients, forms)):
        plain = in_fp32(function, comparison, lane.device)
        with torch.autocast(lane.device, torch.bfloat16):
            product = torch.eye(2, device=lane.device) @ torch.eye(2, device=lane.device)
            cast = in_fp32(function, comparison, lane.device)
        assert product.dtype == torch.bfloat16
        assert all(map(torch.equal, cast, plain))


@lanes("cpu")
@each([one for one in EVERYWHERE if one[0].loses_digits and not one[1]])
def test_op_loses_precision_without_disabling_autocast(
    lane: Lane, op: OpSpec, comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control, in each direction: autocast would run the fp32 products inside a custom op in bf16.

    Not every result changes: a state may be a copy of an input. m2rnn's lerp rejects a bf16 product with fp32; the ops
    without matrix products have nothing that autocast on the CPU would cast.
    """
    outputs = len(comparison.run(comparison.example(0)))
    plain = in_fp32(comparison.op, comparison, lane.device)
    monkeypatch.setattr(op_support, "autocast_disabled", lambda t: nullcontext())
    with torch.autocast(lane.device, torch.bfloat16):
        cast = in_fp32(comparison.op, comparison, lane.device)
    for part in (slice(outputs), slice(outputs, None)):
        assert largest(error(*both)[0] for both in zip(cast[part], plain[part])) > 1e-3


@lanes("cpu", "h200")
def test_unwritten_memory_is_nan(lane: Lane) -> None:
    """So the error ratio of a tensor with one unwritten entry is NaN, and each row of it is red."""
    like = torch.ones(5, device=lane.device)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        given = like.to(dtype)
        made = torch.empty(5, dtype=dtype, device=lane.device), given.new_empty(5), torch.empty_like(given)
        for fresh in made:
            assert fresh.isnan().all()
            written = given.clone()
            written[-1:] = fresh[-1:]
            assert math.isnan(error_ratio(written, given + 1, given))
    assert (torch.empty(5, dtype=torch.int32, device=lane.device) == torch.iinfo(torch.int32).max).all()
