"""One process of the ablation checks: injects a fault into one stage of the compiler, prints the finding as JSON.

`python -m suites.compile.stage_faults FAULT` with TORCHINDUCTOR_CACHE_DIR set to a separate directory: the code that
a faulty stage generates is stored under the correct program's key.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest import mock

import torch

from launch.ablation import attribute
from launch.contract import apply_dynamo, load
from model import preset
from suites.support.child import print_result
from suites.support.hybrids import token_batch
from suites.support.instruments import wrong_decomposition, wrong_lowering

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
    "none": nullcontext,
    "guards": no_guards,
    # Twice the gradient of relu, and abs in place of relu.
    "decomposition": partial(
        wrong_decomposition, aten.threshold_backward.default, lambda gradient, *_: 2 * gradient
    ),
    "lowering": partial(wrong_lowering, aten.relu.default, aten.abs.default),
}


def main(fault: str) -> dict[str, object]:
    """Return the finding on one mixture-of-experts layer and the head."""
    apply_dynamo(contract := load())
    config = preset("nam12", layer_pattern="E", depth=1)
    batches = [token_batch(config, 2, tokens) for tokens in LENGTHS.get(fault, (32, 16))]
    with FAULTS[fault]():
        finding = attribute(config, batches, "regional", contract)
    return {**asdict(finding), "line": str(finding)}


if __name__ == "__main__":
    print_result(main(*sys.argv[1:]))
