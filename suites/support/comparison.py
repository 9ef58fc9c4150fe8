"""How far a result may lie from its oracle: errors, the ratio rule, and the gradients that every side is asked for.

The ratio rule is that of flash-attention's tests (Dao-AILab/flash-attention, tests/test_flash_attn.py). How large
a rounding error may be nobody can say in general, but the plain formula in the same dtype has one, too: with both
measured against fp64, an output may be off by 2 times the formula's error and a gradient by 3 times. We hold the RMS
error to these factors, and the largest error, which is a single entry's, to twice them: held to the factors
themselves it rejected 19 of 1300 right results in fp32, while the weakest known fault is off by 80 times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from suites.support.reduce import largest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
AT_MOST = {"forward": 2.0, "gradient": 3.0}
Named = dict[str, Tensor]


def doubled(inputs: Any) -> Any:
    """The same numbers in fp64, in a tuple or by name; what is no float is left as it is."""
    if isinstance(inputs, Mapping):
        return dict(zip(inputs, doubled(inputs.values())))
    return tuple(t.double() if _is_float(t) else t for t in inputs)


def _is_float(t: object) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def error(found: Tensor, oracle: Tensor) -> tuple[float, float]:
    """Largest and RMS difference, taken in fp64."""
    wide = torch.promote_types(oracle.dtype, torch.float64)
    difference = (found.to(wide) - oracle.to(wide)).abs()
    return difference.max().item(), difference.square().mean().sqrt().item()


def over(ours: float, theirs: float) -> float:
    """One error over another, which is to bound it; NaN if the other one is not finite, infinity for x / 0."""
    if not math.isfinite(theirs):
        return math.nan
    return ours / theirs if theirs else (math.inf if ours else 0.0)


def error_ratio(found: Tensor, plain: Tensor, oracle: Tensor) -> float:
    """How much further from the oracle than the plain formula in the same dtype: the worse of half the ratio of the
    largest errors and of the ratio of the RMS errors.

    Half, because a largest error is one entry's: that of two computations of equal worth differs from seed to seed
    by a factor of up to 3.5, their RMS by 1.4 (suites/kernels/test_mutants.py). Where the plain formula is exact, 0
    if the result is exact too, else infinity. NaN where the error of the plain formula is not finite: it bounds
    nothing.
    """
    pairs = zip((0.5, 1.0), error(found, oracle), error(plain, oracle))
    return largest(weight * over(ours, theirs) for weight, ours, theirs in pairs)


def worst(found: Named, oracle: Named) -> float:
    """Largest difference, relative to the largest entry of each tensor."""
    return largest(((found[n] - oracle[n]).abs().max() / oracle[n].abs().max()).item() for n in oracle)


def random_weights(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Fixed random weights of the outputs, in their dtypes: the scalar sum w.out has the gradients to compare.

    A plain sum would not do: it gives every entry the same cotangent, under which permuted entries look right.
    """
    g = torch.Generator().manual_seed(1)
    return [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t) for t in outputs]


def _gradients(outputs: Iterable[Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of the weighted sum of the outputs that have one; zeros for an input that no output depends on."""
    outputs = [t for t in outputs if t.requires_grad]
    weights = random_weights(outputs)
    return torch.autograd.grad(outputs, leaves, weights, allow_unused=True, materialize_grads=True)


def _leaf(t: Any) -> Any:
    """A copy of each tensor: no gradient and no mark of the compiler's reaches the caller's own."""
    return t.detach().clone().requires_grad_(_is_float(t)) if isinstance(t, Tensor) else t


def gradients(function: Callable[..., Any], *inputs: Any, **options: Any) -> list[Tensor]:
    """The outputs, then the gradient of each floating-point input, of a fixed random weighting of the outputs."""
    leaves = [_leaf(t) for t in inputs]
    outputs = function(*leaves, **options)
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    return [*(t.detach() for t in outputs), *_gradients(outputs, [t for t in leaves if _is_float(t)])]


def values_and_gradients(
    outputs: Sequence[str], function: Callable[..., tuple[Tensor, ...]], inputs: Named
) -> Named:
    """The same by name, for a function of keyword tensors whose outputs have these names."""
    leaves = {n: _leaf(t) for n, t in inputs.items()}
    found = function(**leaves)
    floats = {n: t for n, t in leaves.items() if _is_float(t)}
    by_input = dict(zip(floats, _gradients(found, [*floats.values()])))
    return {n: t.detach() for n, t in zip(outputs, found)} | by_input


def pooled(runs: Iterable[Named]) -> Named:
    """Each tensor of several runs laid end to end: the largest of few errors wanders from seed to seed."""
    runs = list(runs)
    return {n: torch.cat([run[n].flatten() for run in runs]) for n in runs[0]}


class Ratios(NamedTuple):
    """The error ratio of an output, the worst one of its gradients, and how many numbers were compared."""

    forward: float
    gradient: float
    elements: int


def error_ratios(
    function: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    inputs: Sequence[Any],
    **options: Any,
) -> Ratios:
    """`function` and `plain` on the inputs, against `oracle` on the inputs in fp64.

    Raises AssertionError on a result in another dtype than its input: the output's is that of the first one.
    """
    exact = gradients(oracle, *doubled(inputs), **options)
    rounded = gradients(plain, *inputs, **options)
    found = gradients(function, *inputs, **options)
    floats = [t for t in inputs if _is_float(t)]
    assert [t.dtype for t in found] == [t.dtype for t in (inputs[0], *floats)]
    forward, *backward = (error_ratio(*three) for three in zip(found, rounded, exact))
    return Ratios(forward, largest(backward), sum(t.numel() for t in exact))


def report_cases(
    row: Callable[..., Any],
    id: str,
    ratios: Mapping[str, Ratios],
    gradient_at_most: float = AT_MOST["gradient"],
) -> None:
    """Rows <id>/forward_error_ratio and <id>/gradient_error_ratio: the worst case, with all of them as evidence."""
    compared = sum(ratio.elements for ratio in ratios.values())
    forward = {case: ratio.forward for case, ratio in ratios.items()}
    gradient = {case: ratio.gradient for case, ratio in ratios.items()}
    ratio_row(row, f"{id}/forward_error_ratio", forward, compared, AT_MOST["forward"])
    ratio_row(row, f"{id}/gradient_error_ratio", gradient, compared, gradient_at_most)


def report_pooled(
    row: Callable[..., Any], id: str, found: Named, plain: Named, oracle: Named, inputs: Container[str]
) -> None:
    """The same rows for pooled results: a name among the inputs is a gradient's, the others are outputs."""
    for direction, at_most in AT_MOST.items():
        names = [n for n in oracle if (n in inputs) == (direction == "gradient")]
        ratios = {n: error_ratio(found[n], plain[n], oracle[n]) for n in names}
        compared = sum(oracle[n].numel() for n in names)
        ratio_row(row, f"{id}/{direction}_error_ratio", ratios, compared, at_most)


def ratio_row(
    row: Callable[..., Any],
    id: str,
    ratios: Mapping[str, float],
    witness: int,
    at_most: float,
    evidence: Iterable[str] = (),
) -> None:
    """Reports the largest of the error ratios by name under the ratio rule, and all of them as its evidence."""
    row(
        id,
        largest(ratios.values()),
        unit="ratio",
        witness=witness,
        at_most=at_most,
        rule="C36",
        evidence=[*(f"{name}: {ratio:.3f}" for name, ratio in ratios.items()), *evidence],
    )
