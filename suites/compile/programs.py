"""Programs for fresh processes: `python -m suites.compile.programs NAME ARGUMENT` prints JSON on its last line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from launch.ablation import attribute
from launch.contract import apply_dynamo, load
from launch.cuda_graphs import CaptureError, capture
from model import preset
from suites.support.child import Programs
from suites.support.hybrids import token_batch
from suites.support.instruments import wrong_decomposition, wrong_lowering

program = Programs()


class ReadsOnTheHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@program
def failed_recording(device: str) -> dict[str, object]:
    """Record a block that cannot be captured, which torch does not guarantee that a process survives.

    refusal: the error in one line. drawn, replayed: whether random numbers and another block's replay are right.
    """
    x, refusal = torch.ones(4, device=device), ""
    try:
        capture(ReadsOnTheHost(), (x,))
    except CaptureError as error:
        refusal = str(error)
    drawn = torch.randn(1000, device=device).std()
    (doubled,) = capture(Doubles(), (x,))(x + 1)
    return {
        "refusal": refusal,
        "drawn": bool(0.8 < drawn < 1.2),
        "replayed": torch.equal(doubled, 2 * (x + 1)),
    }


aten = torch.ops.aten
# Two, so that a wrongly reused graph is detected; one where each costs a second run of the C++ compiler.
LENGTHS = {"lowering": (16,)}


def no_guards() -> AbstractContextManager[Any]:
    """Make Dynamo keep no guard, so that the first graph serves every later input."""
    options = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    compile = torch.compile
    return mock.patch.object(
        torch, "compile", lambda *args, **kwargs: compile(*args, options=dict(options), **kwargs)
    )


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "guards": no_guards,
    # Twice the gradient of relu, and abs in place of relu.
    "decomposition": partial(
        wrong_decomposition, aten.threshold_backward.default, lambda gradient, *_: 2 * gradient
    ),
    "lowering": partial(wrong_lowering, aten.relu.default, aten.abs.default),
}


@program
def stage_fault(fault: str) -> dict[str, object]:
    """Inject a fault into one stage of the compiler; return the finding on one mixture-of-experts layer and the head.

    With a TORCHINDUCTOR_CACHE_DIR of its own: what a faulty stage generates is stored under the correct program's key.
    """
    apply_dynamo(contract := load())
    config = preset("nam12", layer_pattern="E", depth=1)
    batches = [token_batch(config, 2, tokens) for tokens in LENGTHS.get(fault, (32, 16))]
    with FAULTS[fault]():
        finding = attribute(config, batches, "regional", contract)
    return {**asdict(finding), "line": str(finding)}


if __name__ == "__main__":
    program.main()
