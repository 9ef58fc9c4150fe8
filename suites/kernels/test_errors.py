"""The error of every op: next to that of its plain formula, within bounds of rounding, and of a single cast.

The specs have the functions, cases and bounds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from suites.ops import specs
from suites.ops.spec import Comparison, Named, OpSpec
from suites.support.comparison import DTYPES, doubled, error_ratio, random_weights, ratio_row, trained
from suites.support.lanes import Lane, lanes
from suites.support.reduce import smallest

ALL = [(op, name, one) for op in specs().values() for name, one in op.comparisons.items()]
TORCH = {dtype: str(t).removeprefix("torch.") for dtype, t in DTYPES.items()} | {"fp16": "float16"}


def each(comparisons: list[tuple[OpSpec, str, Comparison]]) -> Any:
    """Parametrize a test by op and comparison."""
    found = [
        pytest.param(op, one, id=f"{op.name}-{name}" if name else op.name) for op, name, one in comparisons
    ]
    return pytest.mark.parametrize(("op", "comparison"), found)


def report_errors(row: Any, lane: Lane, comparison: Comparison, dtype: str) -> None:
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
    id = comparison.id.format(lane=lane.name, dtype=dtype, torch=TORCH[dtype])
    for metric, at_most in comparison.rows.items():
        ratio_row(row, f"{id}/{metric}", ratios[metric], compared[metric], at_most)


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
@each([one for one in ALL if not one[2].only_on_gpu])
def test_error_is_at_most_that_of_the_plain_formula(
    lane: Lane, op: OpSpec, comparison: Comparison, dtype: str, row
) -> None:
    """kernels/<op>-<lane>-<dtype>/forward_error_ratio and gradient_error_ratio; the specs have the ids."""
    report_errors(row, lane, comparison, dtype)


@lanes("h200")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@each([one for one in ALL if one[2].only_on_gpu])
def test_error_on_a_gpus_own_path(lane: Lane, op: OpSpec, comparison: Comparison, dtype: str, row) -> None:
    report_errors(row, lane, comparison, dtype)


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
@each([one for one in ALL if not one[2].only_on_gpu])
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
