"""Compiled against eager by the fp64 ratio: compiling may not lose more accuracy than the dtype itself does.

For every kind of parameter, |g_compiled - g_fp64| is compared with |g_eager - g_fp64|, both pooled over the blocks that
have one and over several batches, of which each leaves out its worst quarter. There are no stored values, so a torch
that only rounds differently stays green and one that loses digits does not. Source of the rule: torch's own accuracy
check for compiled models, applied per gradient.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from bumpgate.plugin.rows import RowRecorder
from model import Hybrid, HybridConfig
from suites.support.comparison import over
from suites.support.hybrids import Watched, build, token_batch
from suites.support.reduce import largest, name_of_largest, sum_of_smallest

# Both errors are rounding noise. One tensor's ratio has a heavy tail (a 4-element bias read 15 on unchanged code);
# pooled, 18 groups of 4 batches over three models read at most 1.8 on cpu. On H200s, where atomic sums round in varying
# order, a kind of a single block in four batches read 0.98, 1.5 and 2.6. A lost digit reads 10.
FACTOR = 3.0
BATCHES = {"cpu": 4, "cuda": 12}
# The gradient jumps where a sparse layer chooses another key, or where q.k of its indexer, which goes through a relu,
# changes sign. Of 90 batches of nam56r on cpu, eager against fp64, rounding did the first in 4 (errors of all kinds, up
# to 0.14 instead of 3e-6), the second in 2 (index_query and index_key, 12 and 500 times). On H200s one of two runs of
# the same build read 21 for index_query. A digit that compiling loses is lost in every batch; a fault in a quarter of
# them or fewer is not seen here, unless it is not finite.
KEPT = 3 / 4


def kind(model: Hybrid, name: str) -> str:
    """Return the class and parameter that a name such as `blocks.6.skip` belongs to."""
    block = re.match(r"blocks\.(\d+)\.(.*)", name)
    return f"{type(model.blocks[int(block[1])]).__name__}.{block[2]}" if block else name


def gradients(model: Hybrid, ids: Tensor, call: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return parameter name -> gradient in fp64, and the loss under the key `loss`."""
    model.zero_grad(set_to_none=True)
    loss = call(ids)
    loss.backward()
    found = {name: p.grad.double() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found | {"loss": loss.detach().double()}


def squared_error(found: Tensor, oracle: Tensor) -> float:
    """Return the squared Frobenius error relative to the oracle's norm."""
    return float((found - oracle).norm() / oracle.norm().clamp(min=1e-30)) ** 2


def error_ratios(errors: Mapping[str, Sequence[float]], floor: float) -> dict[str, float]:
    """Return kind -> square root of compiled over eager squared error, with `floor` as the minimum of the eager one.

    NaN if the eager error is not finite: it bounds nothing.
    """
    return {key: over(ours, largest((plain, floor))) ** 0.5 for key, (ours, plain) in errors.items()}


@dataclass
class Errors:
    """Squared errors by kind, a number for each batch, and the parameters whose gradient was not finite."""

    squared: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    non_finite: set[str] = field(default_factory=set)

    def add(self, model: Hybrid, found: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
        of_batch: dict[str, float] = defaultdict(float)
        for key, gradient in found.items():
            of_batch[kind(model, key)] += squared_error(gradient, exact[key])
            if not torch.isfinite(gradient).all():
                self.non_finite.add(key)
        for group, squared in of_batch.items():
            self.squared[group].append(squared)


@cache
def reference(
    config: HybridConfig, device: str, dtype: torch.dtype
) -> tuple[list[Tensor], list[dict[str, Tensor]], Errors]:
    """Return batches, their gradients in fp64, and the errors of eager in `dtype`; computed once per process.

    The oracle has the weights of `dtype`.
    """
    batches = [token_batch(config, 2, seed=seed, device=device) for seed in range(BATCHES[device])]
    eager, oracle = build(config, device, dtype), build(config, device, dtype).double()
    exact, errors = [], Errors()
    for ids in batches:
        exact.append(gradients(oracle, ids, oracle))
        errors.add(eager, gradients(eager, ids, eager), exact[-1])
    return batches, exact, errors


def ratios_of(hybrid: Watched, device: str) -> tuple[dict[str, float], set[str]]:
    """Return kind -> error of the compiled hybrid over eager's, and the parameters whose gradient is not finite."""
    dtype = next(hybrid.model.parameters()).dtype
    batches, exact, plain = reference(hybrid.config, device, dtype)
    ours = Errors()
    for ids, of_batch in zip(batches, exact, strict=True):
        ours.add(hybrid.model, gradients(hybrid.model, ids, hybrid.compiled), of_batch)
    # The floor is one rounding: an eager error of 0 must not turn one last bit into a huge ratio.
    floor = int(KEPT * len(batches)) * torch.finfo(dtype).eps ** 2
    kept = {
        key: [sum_of_smallest(errors.squared[key], KEPT) for errors in (ours, plain)] for key in ours.squared
    }
    return error_ratios(kept, floor), ours.non_finite | plain.non_finite


def report_gradients(row: RowRecorder, case: str, hybrid: Watched, device: str) -> None:
    """Report the worst ratio of a compiled hybrid, and its gradients that are not finite."""
    ratios, non_finite = ratios_of(hybrid, device)
    worst = name_of_largest(ratios)
    row.bound(
        f"numerics/{case}/worst_gradient_error_ratio", ratios[worst], "ratio", at_most=FACTOR,
        rule="C36", seen=hybrid.report().calls, evidence=(f"worst of {len(ratios)} kinds: {worst}",),
    )  # fmt: skip
    row.count(
        f"numerics/{case}/non_finite_gradients", len(non_finite), expected=0, rule="C33",
        seen=ratios, evidence=sorted(non_finite)[:5],
    )  # fmt: skip
