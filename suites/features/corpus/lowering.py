"""Programs that Inductor or AOTAutograd cannot lower, and custom ops and regions inside them."""

from __future__ import annotations

import torch
from torch import Tensor

from suites.features.corpus.case import compiled_differs, regression


@torch.library.custom_op("corpus::reverse_into", mutates_args=("target",))
def reverse_into(source: Tensor, target: Tensor) -> None:
    """Write the entries of source into target in reverse order, one by one."""
    for n in range(len(source)):
        target[len(source) - 1 - n] = source[n]


@regression(
    "lowering-op_on_a_clone",
    "A custom op that reads a clone of the tensor that it writes gets that tensor twice",
    issue=198031,
    bad="2.11.0 2.12.0 2.13.0 2.14.1",
    good="2.15.0",
)
def op_on_a_clone() -> list[str]:
    def reversed_(x: Tensor) -> Tensor:
        reverse_into(x.clone(), x)
        return x * 2

    return compiled_differs(reversed_, torch.arange(8.0))
