"""Golden arrays: inputs, results and gradients of every op's reference, stored as fp64 in fixtures/<op>.safetensors.

A bump can change a reference and its kernel together; the stored arrays stay. They hold everything that a comparison
needs, including the weights of the outputs, so that reading them draws no random number. Names in a file: input.<n>,
weight.<output>, output.<output>, grad.<input>. B batch, T tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from suites.ops import specs
from suites.ops.spec import outputs_of
from suites.support.comparison import Named

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
RELATIVE = (
    1e-12  # of an array's largest entry: machines differ in the last bits of exp and in the order of sums
)


def stored(op: str, folder: Path = FIXTURES) -> Named:
    """Return the arrays in the file of an op, empty if it has no file."""
    path = folder / f"{op}.safetensors"
    return load_file(path) if path.exists() else {}


def made(op: str) -> Named:
    """Compute the current arrays of an op. Its inputs are exact in fp32: a run in fp32 starts from the same values."""
    inputs = {n: _as_fp32_holds(t) for n, t in specs()[op].golden.inputs().items()}
    outputs = _outputs(op, inputs, impl="eager")
    g = torch.Generator().manual_seed(1)
    floats = {n: t for n, t in outputs.items() if t.is_floating_point()}
    arrays = {f"input.{n}": t for n, t in inputs.items()}
    arrays |= {f"weight.{n}": torch.randn(t.shape, generator=g).double() for n, t in floats.items()}
    return {n: t.contiguous() for n, t in (arrays | results(op, arrays)).items()}


def results(
    op: str, arrays: Named, impl: str = "eager", dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> Named:
    """Return output.* and grad.*, of the weighted sum of the outputs, from the input.* and weight.* among the arrays.

    Computed in `dtype` on `device`; returned in fp64 on the CPU.
    """

    def given(kind: str) -> Named:
        found = {n.removeprefix(kind): t for n, t in arrays.items() if n.startswith(kind)}
        return {n: t.to(device, dtype if t.is_floating_point() else None) for n, t in found.items()}

    inputs, weights = given("input."), given("weight.")
    leaves = {n: t.clone().requires_grad_() for n, t in inputs.items() if t.is_floating_point()}
    outputs = _outputs(op, inputs | leaves, impl)
    grads = torch.autograd.grad([outputs[n] for n in weights], [*leaves.values()], [*weights.values()])
    found = {f"output.{n}": t.detach() for n, t in outputs.items()}
    found |= {f"grad.{n}": t for n, t in zip(leaves, grads)}
    return {n: _as_fp64(t.cpu()) for n, t in found.items()}


def differences(found: Named, kept: Named, relative: float) -> list[str]:
    """Return a line for each array that is missing, has another shape, or is off by more than `relative` of its largest
    entry. Integers must be equal.
    """
    if not kept:
        return ["nothing stored"]
    lines = [f"{n}: not stored" for n in found if n not in kept]
    lines += [f"{n}: stored, but no longer made" for n in kept if n not in found]
    for name in found.keys() & kept.keys():
        ours, theirs = found[name], kept[name]
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            lines.append(f"{name}: {ours.dtype} {[*ours.shape]}, stored {theirs.dtype} {[*theirs.shape]}")
        elif not ours.is_floating_point():
            lines += [] if torch.equal(ours, theirs) else [f"{name}: other integers"]
        elif not (off := ((ours - theirs).abs().max() / theirs.abs().max()).item()) <= relative:
            lines.append(f"{name}: off by {off:.1e} of the largest entry, allowed {relative:.0e}")
    return sorted(lines)


def _outputs(op: str, inputs: Named, impl: str) -> Named:
    golden = specs()[op].golden
    return dict(zip(golden.outputs, outputs_of(golden.function(**inputs, impl=impl)), strict=True))


def _as_fp32_holds(t: Tensor) -> Tensor:
    return t.float().double() if t.is_floating_point() else t


def _as_fp64(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t
