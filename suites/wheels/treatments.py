"""The functions of the kernel wheels inside the model's A and M blocks, passed to Dynamo in each of three forms.

allow_in_graph  as one node of Dynamo's graph, which AOTAutograd traces
disable         called outside of the graph: a break
custom_op       wrapped in an opaque op with a fake and a backward

`python -m suites.wheels.treatments counts FORM` is a process of its own: a form that crashes takes no other one with
it. B batch, T tokens, H heads, P head dim, N state dim, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import model.attention
import model.mamba
from bumpgate.core.errors import one_line
from kernels.ssd_chunk_scan import SsdInputs
from launch.contract import load
from launch.step import make_optimizer, train_step
from model import Hybrid
from suites.kernels.peer_tuning import keep_winners
from suites.support.child import Programs
from suites.support.hybrids import build, token_batch, watched_hybrid
from suites.support.instruments import autograd_in_custom_op

FORMS = ("allow_in_graph", "disable", "custom_op")
CHUNK = 128
# Two blocks A, two M and four E, of widths that every wheel takes: the trimmed flash-attn has head dims 64 and 128,
# and causal-conv1d's rows of the input projection must be a multiple of 8 wide.
NARROW = {
    "depth": 8,
    "q_heads": 2,
    "kv_heads": 1,
    "head_dim": 64,
    "m_heads": 8,
    "m_head_dim": 64,
    "m_mixer": "mamba2",
}
main = Programs()

Function = Callable[..., Tensor]


def flash_attention() -> Function:
    """Return q (B,T,Hq,P), k and v (B,T,Hkv,P), one document a row -> (B,T,Hq,P)."""
    from flash_attn import flash_attn_func

    return lambda q, k, v: flash_attn_func(q, k, v, causal=True)


def chunk_scan() -> Function:
    """Return x (B,T,H,P), dt (B,T,H), A (H,), B and C (B,T,G,N), D (H,), one document a row -> (B,T,H,P)."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return lambda x, dt, A, Bmat, Cmat, D: mamba_chunk_scan_combined(x, dt, A, Bmat, Cmat, CHUNK, D=D)


def short_conv() -> Function:
    """Return x (B,T,D), weight (D,W), bias (D,), one document a row -> silu of the convolution (B,T,D)."""
    from causal_conv1d import causal_conv1d_fn

    return lambda x, weight, bias: causal_conv1d_fn(
        x.transpose(1, 2), weight, bias, activation="silu"
    ).transpose(1, 2)


class Site(NamedTuple):
    """Where the model calls an op of a wheel.

    function: imports the wheel, outside of what Dynamo traces. called: its function -> what replaces the model's op.
    """

    module: Any
    op: str
    function: Callable[[], Function]
    called: Callable[[Function], Callable[..., Any]]


def _attention(function: Function) -> Callable[..., Tensor]:
    return lambda q, k, v, doc_ids, softcap, window: function(q, k, v)


def _scan(function: Function) -> Callable[..., Any]:
    def call(i: SsdInputs, chunk_size: int) -> tuple[Tensor, None]:
        return function(i.x, i.dt, i.A, i.Bmat, i.Cmat, i.D), None

    return call


def _conv(function: Function) -> Callable[..., Tensor]:
    return lambda x, weight, bias, doc_ids: function(x, weight, bias)


# Import name of a wheel -> its site.
SITES = {
    "flash_attn": Site(model.attention, "attention", flash_attention, _attention),
    "mamba_ssm": Site(model.mamba, "ssd_chunk_scan", chunk_scan, _scan),
    "causal_conv1d": Site(model.mamba, "causal_conv1d", short_conv, _conv),
}


def given_as(form: str, name: str, function: Function) -> Function:
    """Return the function in one form. Raises KeyError on an unknown form."""
    return {
        "eager": lambda function: function,
        "allow_in_graph": torch.compiler.allow_in_graph,
        "disable": torch.compiler.disable,
        "custom_op": partial(opaque, f"bumpgate_wheels::{name}"),
    }[form](function)


def opaque(name: str, function: Function) -> Function:
    """Wrap a differentiable function, whose result has the shape and dtype of its first input, in a custom op.

    The backward runs the function once more, as under activation checkpointing: a wheel's own backward has another
    signature in each release.
    """

    def forward(inputs: list[Tensor]) -> Tensor:
        return function(*inputs).contiguous()

    def backward(inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
        with autograd_in_custom_op():
            leaves = [t.detach().requires_grad_() for t in inputs]
            return [g.contiguous() for g in torch.autograd.grad(function(*leaves), leaves, gradient)]

    op = torch.library.custom_op(name, forward, mutates_args=())
    op.register_fake(lambda inputs: inputs[0].new_empty(inputs[0].shape))
    op_backward = torch.library.custom_op(f"{name}_backward", backward, mutates_args=())
    op_backward.register_fake(lambda inputs, gradient: [t.new_empty(t.shape) for t in inputs])

    def save(ctx: Any, inputs: tuple[list[Tensor]], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[0])

    def differentiate(ctx: Any, gradient: Tensor) -> tuple[list[Tensor]]:
        return (op_backward(list(ctx.saved_tensors), gradient),)

    op.register_autograd(differentiate, setup_context=save)
    return lambda *inputs: op(list(inputs))


@contextmanager
def inside(packages: Sequence[str], form: str) -> Iterator[None]:
    """Make the model call the wheels' functions in one form inside the block."""
    with ExitStack() as stack:
        for package in packages:
            site = SITES[package]
            called = site.called(given_as(form, site.function.__name__, site.function()))
            stack.enter_context(mock.patch.object(site.module, site.op, called))
        yield


def _loss_gradients(model: Hybrid, loss: Tensor) -> Tensor:
    loss.backward()
    found = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


def count(package: str, form: str) -> dict[str, Any]:
    """Compile a narrow hybrid as one region with a wheel's function in one form, and train it for 70 steps.

    Returns breaks, graphs, recompiles, reasons, and the difference of the gradient from eager's, relative to it; or
    `raised`, one line, if the model does not compile.
    """
    contract = load()
    keep_winners()
    with watched_hybrid("nam52", "whole_opaque", device="cuda", backend="aot_eager", **NARROW) as hybrid:
        hybrid.model.bfloat16()
        ids = token_batch(hybrid.config, 2, device="cuda")
        with inside([package], "eager"):
            eager = build(hybrid.config, "cuda", torch.bfloat16)
            expected = _loss_gradients(eager, eager(ids))
        with inside([package], form):
            try:
                found = _loss_gradients(hybrid.model, hybrid.compiled.first(ids))
            except RuntimeError as error:
                return {"raised": f"{type(error).__name__}: {one_line(error)}"[:300]}
            optimizer = make_optimizer(hybrid.model)
            before = len(hybrid.report().recompiles)
            for step in range(contract.recompile_budget_steps):
                train_step(
                    hybrid.compiled, optimizer, token_batch(hybrid.config, 2, seed=step, device="cuda")
                )
        report = hybrid.report()
    return {
        "breaks": len(report.breaks),
        "graphs": report.unique_graphs,
        "recompiles": len(report.recompiles) - before,
        "calls": report.calls,
        "difference": float((found - expected).norm() / expected.norm()),
        "evidence": list(report.evidence())[:6],
    }


@main
def counts(form: str) -> dict[str, Any]:
    return {package: count(package, form) for package in SITES}


if __name__ == "__main__":
    main.main()
