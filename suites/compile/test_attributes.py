"""Python scalars that a forward reads from its modules: each is a guard, so none may change from step to step. Rule C8.

The modules' own __getattribute__ observes them in eager training steps: the names are those that were read, whether
by the module's forward or by a function that it calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor, nn

from launch.step import make_optimizer, train_step
from suites.support.hybrids import Watched, token_batch, watched_hybrid
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

STEPS = 3
NAME = "nam56r"


@contextmanager
def scalars_read(model: nn.Module) -> Iterator[dict[str, set[str]]]:
    """Yield a mapping that fills with the bool, int and float attributes read: path -> the values, as text."""
    paths = {module: path for path, module in model.named_modules()}
    seen: dict[str, set[str]] = defaultdict(set)

    def reading(module: nn.Module, name: str) -> object:
        value = object.__getattribute__(module, name)
        if type(value) in (bool, int, float) and module in paths:
            seen[f"{paths[module]}.{name}"].add(repr(value))
        return value

    with pytest.MonkeyPatch.context() as patch:
        for kind in {type(module) for module in paths}:
            patch.setattr(kind, "__getattribute__", reading)
        yield seen


def read_in_training(hybrid: Watched) -> dict[str, set[str]]:
    optimizer = make_optimizer(hybrid.model)
    hybrid.compiled.warm_up(token_batch(hybrid.config, 2))
    with scalars_read(hybrid.model) as seen:
        for step in range(STEPS):
            train_step(hybrid.compiled, optimizer, token_batch(hybrid.config, 2, seed=step))
    return seen


def changed(seen: dict[str, set[str]]) -> dict[str, set[str]]:
    return {path: values for path, values in seen.items() if len(values) > 1}


@lanes("cpu")
def test_scalar_attributes_keep_their_values(lane: Lane, row) -> None:
    with watched_hybrid(NAME, "eager") as hybrid:
        seen = read_in_training(hybrid)
        experts = hybrid.config.letters.count("E")
    assert sum(path.endswith(".min_bucket") for path in seen) == experts, "every MoE block reads its bucket"
    moved = changed(seen)
    row.count(
        f"compile/{NAME}-attributes/changed_between_steps", len(moved), expected=0, rule="C8", seen=seen,
        evidence=[f"{path}: {', '.join(sorted(values))}" for path, values in moved.items()],
    )  # fmt: skip


@lanes("cpu")
@planted("C8", "a Python counter in one block")
def test_scalar_counter_in_a_block_is_found(lane: Lane) -> None:
    with watched_hybrid(NAME, "eager") as hybrid:
        index = hybrid.config.letters.index("E")
        block = hybrid.model.blocks[index]
        inner, block.calls = block.forward, 0

        def counting(x: Tensor) -> tuple[Tensor, Tensor]:
            block.calls += 1
            return inner(x)

        block.forward = counting
        assert set(changed(read_in_training(hybrid))) == {f"blocks.{index}.calls"}
