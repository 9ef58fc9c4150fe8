"""Golden arrays: inputs, results and gradients of every op's reference, stored as fp64 in fixtures/<op>.safetensors.

A bump can change a reference and its kernel together; the stored arrays stay. They hold everything that a comparison
needs, including the weights of the outputs, so that reading them draws no random number. Names in a file: input.<n>,
weight.<output>, output.<output>, grad.<input>. B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from kernels.attention import attention
from kernels.causal_conv1d import causal_conv1d
from kernels.cross_entropy import cross_entropy
from kernels.dsa_indexer import dsa_attention, dsa_distribution, dsa_indexer, dsa_indexer_loss
from kernels.grouped_gemm import grouped_gemm
from kernels.m2rnn import m2rnn
from kernels.mla import mla
from kernels.moe_combine import moe_combine
from kernels.moe_dispatch import moe_dispatch
from kernels.rms_norm_gated import rms_norm_gated
from kernels.ssd_chunk_scan import ssd_chunk_scan
from suites.kernels import inputs as op_inputs
from suites.support.comparison import Named

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
RELATIVE = (
    1e-12  # of an array's largest entry: machines differ in the last bits of exp and in the order of sums
)


class Golden(NamedTuple):
    """One op: a function that draws its inputs by name, its output names, and its function of inputs and impl."""

    inputs: Callable[[], Named]
    outputs: tuple[str, ...]
    function: Callable[..., Any]


def ops() -> list[str]:
    """Return every folder under kernels/ that holds an op."""
    return sorted(path.parent.name for path in (ROOT / "kernels").glob("*/op.py"))


def stored(op: str, folder: Path = FIXTURES) -> Named:
    """Return the arrays in the file of an op, empty if it has no file."""
    path = folder / f"{op}.safetensors"
    return load_file(path) if path.exists() else {}


def made(op: str) -> Named:
    """Compute the current arrays of an op. Its inputs are exact in fp32: a run in fp32 starts from the same values."""
    inputs = {n: _as_fp32_holds(t) for n, t in GOLDEN[op].inputs().items()}
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
    found = GOLDEN[op].function(**inputs, impl=impl)
    return dict(zip(GOLDEN[op].outputs, [found] if isinstance(found, Tensor) else found, strict=True))


def _as_fp32_holds(t: Tensor) -> Tensor:
    return t.float().double() if t.is_floating_point() else t


def _as_fp64(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def _named(names: str, tensors: Iterable[Tensor]) -> Named:
    return dict(zip(names.split(), tensors))


def _siso(impl: str, **inputs: Tensor) -> tuple[Tensor, ...]:
    return op_inputs.mamba3_siso.SCAN.of(8, impl=impl)(**inputs)


def _mimo(impl: str, **inputs: Tensor) -> tuple[Tensor, ...]:
    return op_inputs.mamba3_mimo.SCAN.of(8, impl=impl)(**inputs)


def _dsa_inputs() -> Named:
    index = _named(
        "index_q index_k index_weights doc_ids", op_inputs.dsa_indexer.make_index_inputs(T=20, width=8)
    )
    return index | _named("q k v", op_inputs.dsa_indexer.make_inputs(T=20, P=8)[:3])


def _dsa(impl: str, q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, **index: Tensor) -> tuple[Tensor, ...]:
    """Return the choice, the attention over it, and the indexer's training target and scores."""
    of_index = index["index_q"], index["index_k"], index["index_weights"]
    indices = dsa_indexer(*of_index, doc_ids, top_k=5, impl=impl)
    out = dsa_attention(q, k, v, indices, scale=0.4, softcap=2.0, impl=impl)
    target = dsa_distribution(q, k, indices, scale=0.4, softcap=2.0, impl=impl)
    return indices, out, dsa_indexer_loss(*of_index, indices, target, impl=impl)


MAMBA3 = ("y", "theta", "h", "k_prev", "v_prev")
SCAN = {"T": 20, "H": 2, "P": 4, "N": 6, "G": 1, "starts": (5, 6, 13)}
EXPERTS = {"num_experts": op_inputs.moe_dispatch.E, "bucket": 4}

GOLDEN = {
    "attention": Golden(
        lambda: _named("q k v doc_ids", op_inputs.attention.make_inputs(P=8)),
        ("out",),
        partial(attention, scale=0.4, softcap=2.0, window=7),
    ),
    "causal_conv1d": Golden(
        lambda: _named("x weight bias doc_ids", op_inputs.causal_conv1d.make_inputs()), ("y",), causal_conv1d
    ),
    "cross_entropy": Golden(
        lambda: _named("logits target", op_inputs.cross_entropy.make_inputs()),
        ("loss",),
        partial(cross_entropy, softcap=3.0),
    ),
    "dsa_indexer": Golden(_dsa_inputs, ("indices", "out", "loss"), _dsa),
    "grouped_gemm": Golden(
        lambda: _named("x weight counts", op_inputs.grouped_gemm.make_inputs()), ("y",), grouped_gemm
    ),
    "m2rnn": Golden(lambda: op_inputs.m2rnn.make_inputs(H=2), ("y", "final"), m2rnn),
    "mamba3_mimo": Golden(lambda: op_inputs.mamba3_mimo.make_inputs(**SCAN, R=2, A=2), MAMBA3, _mimo),
    "mamba3_siso": Golden(lambda: op_inputs.mamba3_siso.make_inputs(**SCAN, R=2), MAMBA3, _siso),
    "mla": Golden(
        lambda: _named(" ".join(op_inputs.mla.NAMES), op_inputs.mla.make_inputs(T=20, C=8, P=8, R=4, Pv=8)),
        ("out",),
        partial(mla, scale=0.4, softcap=2.0),
    ),
    "moe_combine": Golden(
        lambda: _named("y expert slot weights", op_inputs.moe_combine.make_inputs()),
        ("out",),
        partial(moe_combine, bucket=8),
    ),
    "moe_dispatch": Golden(
        lambda: _named("x expert", op_inputs.moe_dispatch.make_inputs(dtype=torch.float64)),
        ("padded", "slot", "overflow"),
        partial(moe_dispatch, **EXPERTS),
    ),
    "rms_norm_gated": Golden(
        lambda: _named("x gate weight", op_inputs.rms_norm_gated.make_inputs(D=16)),
        ("y",),
        partial(rms_norm_gated, group_size=8),
    ),
    "ssd_chunk_scan": Golden(
        lambda: op_inputs.ssd_chunk_scan.make_inputs(**SCAN),
        ("y", "final"),
        partial(ssd_chunk_scan, chunk_size=8),
    ),
}
