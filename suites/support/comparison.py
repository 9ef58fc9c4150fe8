"""Error bounds against the oracle: errors, the ratio rule, and the gradients that every implementation is checked on.

The ratio rule is that of flash-attention's tests (Dao-AILab/flash-attention, tests/test_flash_attn.py). There is no
general bound on rounding error, but the plain formula in the same dtype has one, too. With both measured against fp64,
an output may have 2 times the formula's error and a gradient 3 times. We apply these factors to the RMS error, and
twice these factors to the maximum error, which comes from a single entry: with the factors themselves it rejected 19 of
1300 correct results in fp32, while the weakest known fault is off by 80 times.
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
    """Convert floating-point tensors to fp64, in a tuple or a mapping; leave other values as they are."""
    if isinstance(inputs, Mapping):
        return dict(zip(inputs, doubled(inputs.values())))
    return tuple(t.double() if _is_float(t) else t for t in inputs)


def _is_float(t: object) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def error(found: Tensor, oracle: Tensor) -> tuple[float, float]:
    """Return the maximum and the RMS difference, computed in fp64."""
    wide = torch.promote_types(oracle.dtype, torch.float64)
    difference = (found.to(wide) - oracle.to(wide)).abs()
    return difference.max().item(), difference.square().mean().sqrt().item()


def over(ours: float, theirs: float) -> float:
    """Return the ratio of an error to the one that bounds it: NaN if the bound is not finite, infinity for x / 0."""
    if not math.isfinite(theirs):
        return math.nan
    return ours / theirs if theirs else (math.inf if ours else 0.0)


def error_ratio(found: Tensor, plain: Tensor, oracle: Tensor) -> float:
    """Return the error relative to that of the plain formula in the same dtype: the larger of half the ratio of the
    maximum errors and of the ratio of the RMS errors.

    Half, because a maximum error comes from one entry: for two computations of equal accuracy it differs between seeds
    by a factor of up to 3.5, the RMS by 1.4 (suites/kernels/test_mutants.py). If the plain formula is exact, 0 if the
    result is exact too, else infinity. NaN if the error of the plain formula is not finite: it bounds nothing.
    """
    pairs = zip((0.5, 1.0), error(found, oracle), error(plain, oracle))
    return largest(weight * over(ours, theirs) for weight, ours, theirs in pairs)


def worst(found: Named, oracle: Named) -> float:
    """Return the largest difference, relative to the largest entry of each tensor."""
    return largest(((found[n] - oracle[n]).abs().max() / oracle[n].abs().max()).item() for n in oracle)


def random_weights(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return fixed random weights of the outputs, in their dtypes; gradients are compared for the scalar sum w.out.

    A plain sum would give every entry the same cotangent, so that permuted entries would go unnoticed.
    """
    g = torch.Generator().manual_seed(1)
    return [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t) for t in outputs]


def _gradients(outputs: Iterable[Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return gradients of the weighted sum of differentiable outputs; zeros for an input that is not used."""
    outputs = [t for t in outputs if t.requires_grad]
    weights = random_weights(outputs)
    return torch.autograd.grad(outputs, leaves, weights, allow_unused=True, materialize_grads=True)


def _leaf(t: Any) -> Any:
    """Copy a tensor, so that neither gradients nor compiler marks reach the caller's."""
    return t.detach().clone().requires_grad_(_is_float(t)) if isinstance(t, Tensor) else t


def gradients(function: Callable[..., Any], *inputs: Any, **options: Any) -> list[Tensor]:
    """Return the outputs, then the gradient of each floating-point input, for a fixed random weighting."""
    leaves = [_leaf(t) for t in inputs]
    outputs = function(*leaves, **options)
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    return [*(t.detach() for t in outputs), *_gradients(outputs, [t for t in leaves if _is_float(t)])]


def values_and_gradients(
    outputs: Sequence[str], function: Callable[..., tuple[Tensor, ...]], inputs: Named
) -> Named:
    """Like `gradients`, by name, for a function of keyword tensors whose outputs have the names `outputs`."""
    leaves = {n: _leaf(t) for n, t in inputs.items()}
    found = function(**leaves)
    floats = {n: t for n, t in leaves.items() if _is_float(t)}
    by_input = dict(zip(floats, _gradients(found, [*floats.values()])))
    return {n: t.detach() for n, t in zip(outputs, found)} | by_input


def pooled(runs: Iterable[Named]) -> Named:
    """Concatenate each tensor over several runs: the maximum of few errors varies from seed to seed."""
    runs = list(runs)
    return {n: torch.cat([run[n].flatten() for run in runs]) for n in runs[0]}


class Ratios(NamedTuple):
    """The error ratio of an output, the worst of its gradients, and the number of values compared."""

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
    """Compare `function` and `plain` on the inputs with `oracle` on the inputs in fp64.

    Raises AssertionError if a gradient has another dtype than its input, or the output another than the first input.
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
    """Report rows <id>/forward_error_ratio and <id>/gradient_error_ratio: the worst case, with all as evidence."""
    compared = sum(ratio.elements for ratio in ratios.values())
    forward = {case: ratio.forward for case, ratio in ratios.items()}
    gradient = {case: ratio.gradient for case, ratio in ratios.items()}
    ratio_row(row, f"{id}/forward_error_ratio", forward, compared, AT_MOST["forward"])
    ratio_row(row, f"{id}/gradient_error_ratio", gradient, compared, gradient_at_most)


def report_pooled(
    row: Callable[..., Any], id: str, found: Named, plain: Named, oracle: Named, inputs: Container[str]
) -> None:
    """Report the same rows for pooled results: names in `inputs` are gradients, the others are outputs."""
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
    """Report the largest of the named error ratios under the ratio rule, with all of them as evidence."""
    row(
        id,
        largest(ratios.values()),
        unit="ratio",
        witness=witness,
        at_most=at_most,
        rule="C36",
        evidence=[*(f"{name}: {ratio:.3f}" for name, ratio in ratios.items()), *evidence],
    )
