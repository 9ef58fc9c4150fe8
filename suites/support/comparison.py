"""Error bounds against the oracle: errors, the ratio rule, and the gradients that every implementation is checked on.

The ratio rule is that of flash-attention's tests (Dao-AILab/flash-attention, tests/test_flash_attn.py). There is no
general bound on rounding error, but the plain formula in the same dtype has one, too. With both measured against fp64,
an output may have 2 times the formula's error and a gradient 3 times. We apply these factors to the RMS error, and
twice these factors to the maximum error, which comes from a single entry: with the factors themselves it rejected 19 of
1300 correct results in fp32, while the weakest known fault is off by 80 times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from suites.support.reduce import largest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
AT_MOST = {"forward": 2.0, "gradient": 3.0}
Named = dict[str, Tensor]
# The rule for interpreted kernels. The floor is relative to the largest entry (for the RMS, to the RMS): a small plain
# error may be luck, and in fp64 there is none, because the plain reference is the oracle itself.
FACTOR = 3.0
FLOOR = {torch.float64: 1e-12, torch.float32: 4 * 2**-23, torch.float16: 4 * 2**-10}


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
    by a factor of up to 3.5, the RMS by 1.4 (suites/kernels/test_errors.py). If the plain formula is exact, 0 if the
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


def _leaf(t: Any) -> Any:
    """Copy a tensor, so that neither gradients nor compiler marks reach the caller's."""
    return t.detach().clone().requires_grad_(_is_float(t)) if isinstance(t, Tensor) else t


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    """Return the outputs of an op as a tuple."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def trained(
    function: Callable[..., Any], inputs: Mapping[str, Any], weights: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], Named]:
    """Return the outputs, and the gradient of each floating-point input by name.

    weights: of the differentiable outputs; by default those of `random_weights`. An unused input has zeros.
    """
    leaves = {n: _leaf(t) for n, t in inputs.items()}
    outputs = outputs_of(function(**leaves))
    used = [t for t in outputs if t.requires_grad]
    weights = (
        random_weights(used) if weights is None else [w.to(t) for w, t in zip(weights, used, strict=True)]
    )
    floats = {n: t for n, t in leaves.items() if _is_float(t)}
    found = torch.autograd.grad(used, [*floats.values()], weights, allow_unused=True, materialize_grads=True)
    return [t.detach() for t in outputs], dict(zip(floats, found))


def gradients(function: Callable[..., Any], *inputs: Any, **options: Any) -> list[Tensor]:
    """Return the outputs, then the gradient of each floating-point input, for a fixed random weighting."""

    def positional(**leaves: Any) -> Any:
        return function(*leaves.values(), **options)

    outputs, found = trained(positional, {str(i): t for i, t in enumerate(inputs)})
    return [*outputs, *found.values()]


def pooled(runs: Iterable[Named]) -> Named:
    """Concatenate each tensor over several runs: the maximum of few errors varies from seed to seed."""
    runs = list(runs)
    return {n: torch.cat([run[n].flatten() for run in runs]) for n in runs[0]}


def ratio_row(
    row: Any, id: str, ratios: Mapping[str, float], witness: int, at_most: float, evidence: Iterable[str] = ()
) -> None:
    """Report the largest of the named error ratios under the ratio rule, with all of them as evidence."""
    lines = [*(f"{name}: {ratio:.3f}" for name, ratio in ratios.items()), *evidence]
    row.bound(
        id, largest(ratios.values()), "ratio", at_most=at_most, seen=witness, rule="C36", evidence=lines
    )


def outside(
    found: Sequence[Tensor],
    plain: Sequence[Tensor],
    oracle: Sequence[Tensor],
    terms: float = 0.0,
    softcap: float | None = None,
) -> dict[int, list[str]]:
    """Return which outputs of an interpreted kernel break the ratio rule, and by how much.

    The max and RMS error may be FACTOR times the error of the plain reference in the same dtype, or the floor.
    terms: the minimum size of an output's terms. If they cancel, the output is smaller than their rounding, and the
        plain reference may be exact by luck.
    softcap: not None if the second output is a logsumexp, whose floor is the documented error of 1e-7 softcap of the
        kernel's "fast" softcap: lost in fp16 weights, but lse is fp32 in both.
    Raises AssertionError if an output differs from the plain one in shape or dtype, is strided, or is not finite.
    """
    broken: dict[int, list[str]] = {}
    for i, (ours, theirs, exact) in enumerate(zip(found, plain, oracle, strict=True)):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), i
        assert ours.is_contiguous(), i
        assert ours.isfinite().all(), i
        if not ours.numel():
            continue
        size = exact.double().abs().max().item(), exact.double().square().mean().sqrt().item()
        floors = [FLOOR[ours.dtype] * largest((s, terms)) for s in size]
        if i == 1 and softcap is not None:
            floors = [4e-7 * largest((4.0, softcap))]
        for kind, e, p, floor in zip(("max", "rms"), error(ours, exact), error(theirs, exact), floors):
            allowed = largest((FACTOR * p, floor))
            # An infinite bound comes from a plain formula that overflowed: it bounds nothing.
            if not e <= allowed < math.inf:
                broken.setdefault(i, []).append(f"{kind} error {e:.1e}, allowed {allowed:.1e}")
    return broken
