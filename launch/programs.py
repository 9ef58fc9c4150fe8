"""The budget of unique programs (rule C27): how many graphs a run may compile, and the alert if it compiles more.

The number follows from the layer pattern. An extra graph means an unexpected shape, dtype or flag, and at full size
costs minutes on every rank: the run stops with a record of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx

from launch.contract import Contract, section
from launch.policies import RECURRENT, Backend
from model import Hybrid


class ProgramBudgetError(RuntimeError):
    """A run compiled more unique programs than its budget. The message is one line; `record` is the alert."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        super().__init__(
            f"step {record['step']}: {record['programs']} unique programs, the budget is {record['allowed']}; "
            f"the last one takes {', '.join(record['inputs'])}"
        )


def load_spare() -> int:
    """Read [budget.spare_programs]: programs a run may compile beyond its pattern's. Raises ContractError."""
    return section("budget", lambda table: int(table["spare_programs"]["value"]))


def pattern_programs(model: Hybrid, policy: str, contract: Contract) -> int:
    """Number of programs of `model` under `policy`: one per kind of region, or per stretch between breaks.

    Raises ValueError on an unknown policy.
    """
    kinds = model.config.regions
    features = model.token_features is not None
    if policy == "eager":
        return 0
    if policy in ("regional", "per_block"):
        compiled = {kind for kind in kinds if policy == "regional" or kind[0] not in RECURRENT}
        return len(compiled) + 1 + features  # the loss head, and the token features
    if policy.startswith("whole_"):
        hidden = contract.disabled_letters(policy)
        return 1 + sum(1 for disabled, _ in groupby(kind[0] in hidden for kind in kinds) if disabled)
    raise ValueError(f"unknown compile policy {policy!r}")


class Programs:
    """Count the unique programs that go through `backend`, and forward each to the backend `inner`.

    The same graph on inputs of the same shapes and dtypes is one program, however often it is compiled.
    """

    def __init__(self, allowed: int, inner: Backend = "inductor") -> None:
        self.allowed = allowed
        self.seen: dict[tuple[str, ...], None] = {}
        self._inner = torch._dynamo.lookup_backend(inner) if isinstance(inner, str) else inner

    def backend(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Backend for torch.compile. A graph that `inner` fails to compile is not counted."""
        program = graph.code, *map(_kind, inputs)  # before `inner`, which may change the graph
        compiled = self._inner(graph, inputs)
        self.seen[program] = None
        return compiled

    def check(self, step: int) -> None:
        """Raise ProgramBudgetError if this run has compiled more programs than its budget."""
        if len(self.seen) <= self.allowed:
            return
        _, *inputs = list(self.seen)[-1]
        record = {"alert": "program_budget", "rule": "C27", "step": step, "programs": len(self.seen)}
        record |= {"allowed": self.allowed, "inputs": [text for text in inputs if "[" in text][:4]}
        raise ProgramBudgetError(record)


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]".removeprefix("torch.")
    return type(value).__name__
