"""Compile policies: which part of the hybrid becomes one graph. The sources disagree, so each policy has a name.

eager           nothing is compiled
per_block       A and E blocks and the head are compiled separately; recurrent blocks (M, R) stay eager
whole_disabled  one compile over straight-line code; M and R are under torch.compiler.disable, one break each
regional        every block and the head is its own region; recurrences are custom ops (the default)
whole_opaque    one compile over straight-line code; recurrences are custom ops, so one graph in all
"""

from __future__ import annotations

import linecache
from collections.abc import Callable

import torch
from torch import Tensor, nn

from launch.contract import Contract
from model import Hybrid
from model.features import Features

POLICIES = ("eager", "per_block", "whole_disabled", "regional", "whole_opaque")
RECURRENT = "MR"

Backend = str | Callable[..., object]


class CompiledHybrid:
    """A hybrid under one policy: call it with ids (B,T) for the loss, after `warm_up` has marked the batch axis.

    Only `first` marks the dynamic axis: on the ids for whole-model policies, and on each tensor that enters a
    region for the policies that compile regions, since a mark is not propagated through an eager boundary.
    """

    def __init__(
        self, model: Hybrid, policy: str, contract: Contract, forward: Callable[..., Tensor]
    ) -> None:
        self.model, self.policy, self.contract, self.forward = model, policy, contract, forward

    def __call__(self, ids: Tensor, inputs: Features | None = None) -> Tensor:
        """ids (B,T) int64, and the inputs of the model's token features -> loss () fp32."""
        return self.forward(ids, inputs)

    def warm_up(self, ids: Tensor) -> None:
        """Run one forward and backward on `ids` with the batch axis marked dynamic, then clear the gradients.

        A batch below the contract's minimum is repeated up to it: Dynamo always specializes sizes 0 and 1.
        """
        minimum = self.contract.warmup_minimum
        if ids.shape[0] < minimum:
            ids = ids.repeat(minimum, 1)
        self.first(ids).backward()
        self.model.zero_grad(set_to_none=True)

    def first(self, ids: Tensor) -> Tensor:
        """Run the forward that marks the batch axis, in the warm-up or, without one, in the first step -> loss ()."""
        regions = self.policy in ("per_block", "regional")
        boundary = self.model.boundary
        if regions:
            self.model.boundary = self._mark
        try:
            return self.forward(ids if regions else self._mark(ids.clone()))
        finally:
            if regions:
                self.model.boundary = boundary

    def _mark(self, tensor: Tensor) -> Tensor:
        torch._dynamo.maybe_mark_dynamic(tensor, self.contract.dynamic_dim)
        return tensor


def straight_line(model: Hybrid) -> Callable[..., Tensor]:
    """Return the model's forward with its layer loop unrolled, one statement per layer.

    Dynamo cannot break inside a `for` loop: it runs the whole frame eagerly and still counts 0 graph breaks.
    """
    lines = [
        "def forward(ids, inputs=None):",
        "    x, doc_ids, positions, targets = model.embed(ids, inputs)",
        "    aux = zeros((), device=x.device)",
    ]
    for layer, letter in enumerate(model.config.letters):
        if letter == "E":
            lines += [f"    x, extra = block_{layer}(x)", "    aux = aux + extra"]
        else:
            lines.append(f"    x = block_{layer}(x, doc_ids, positions)")
    lines.append("    return model.head(x, model.embedding.weight, targets) + aux")
    scope: dict[str, object] = {f"block_{layer}": block for layer, block in enumerate(model.blocks)}
    scope |= {"model": model, "zeros": torch.zeros}
    filename = f"<straight line of {model.config.name}>"
    source = "\n".join(lines)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), scope)
    return scope["forward"]  # type: ignore[return-value]


def apply(model: Hybrid, policy: str, contract: Contract, backend: Backend = "inductor") -> CompiledHybrid:
    """Apply `policy` to `model`, in place: block types and parameter names do not change.

    Raises ValueError on an unknown policy. Compilation happens at the first call.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown compile policy {policy!r}: expected one of {', '.join(POLICIES)}")
    for letter, block in zip(model.config.letters, model.blocks):
        if letter in contract.disabled_letters(policy):
            disable(block)
    if policy in ("per_block", "regional"):
        for letter, block in zip(model.config.letters, model.blocks):
            if policy == "regional" or letter not in RECURRENT:
                block.compile(backend=backend)
        model.head.compile(backend=backend)
        if model.token_features is not None:
            model.token_features.compile(backend=backend)
    if policy.startswith("whole_"):
        return CompiledHybrid(model, policy, contract, torch.compile(straight_line(model), backend=backend))
    return CompiledHybrid(model, policy, contract, model)


def disable(block: nn.Module) -> None:
    """Hide one block from Dynamo, on the instance, so that other policies of the same class are unaffected."""
    block.forward = torch.compiler.disable(block.forward)  # type: ignore[method-assign]
