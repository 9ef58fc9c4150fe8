"""Compiled against eager by the fp64 ratio: compiling may not lose more accuracy than fp32 itself does.

For every parameter, |g_compiled - g_fp64| is held against |g_eager - g_fp64|. No stored values, so a torch that
rounds elsewhere stays green and one that loses digits does not. Source of the rule: torch's own accuracy check
for compiled models, restated per gradient.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from suites.support.hybrids import build, token_batch, watched_hybrid
from suites.support.lanes import Lane, lanes

# Reassociated sums differ by a random walk of rounding errors around the eager one's; a lost digit is 10x.
FACTOR = 3.0


def gradients(model: torch.nn.Module, ids: Tensor, call) -> dict[str, Tensor]:
    """Parameter name -> gradient in fp64, and the loss under the key `loss`."""
    model.zero_grad(set_to_none=True)
    loss = call(ids)
    loss.backward()
    found = {name: p.grad.double() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found | {"loss": loss.detach().double()}


def relative(found: Tensor, oracle: Tensor) -> float:
    """Frobenius error relative to the oracle's norm."""
    return float((found - oracle).norm() / oracle.norm().clamp(min=1e-30))


@lanes("cpu", "h200")
@pytest.mark.parametrize(("name", "policy"), [("nam52", "regional"), ("nam12", "whole_opaque")])
def test_gradients(lane: Lane, name: str, policy: str, row, canaries) -> None:
    canaries("graphs")
    with watched_hybrid(name, policy, device=lane.device) as hybrid:
        ids = token_batch(hybrid.config, 2, device=lane.device)
        hybrid.compiled.warm_up(ids)
        compiled = gradients(hybrid.model, ids, hybrid.compiled)
        calls = hybrid.report().calls
        model = build(hybrid.config, lane.device)
        eager = gradients(model, ids, model)
        oracle_model = build(hybrid.config, lane.device).double()
        oracle = gradients(oracle_model, ids, oracle_model)
    # The floor is one rounding of fp32: an eager error of 0 must not turn one last bit into a huge ratio.
    floor = torch.finfo(torch.float32).eps
    ratios = {
        key: relative(compiled[key], oracle[key]) / max(relative(eager[key], oracle[key]), floor) for key in oracle
    }
    worst = max(ratios, key=ratios.__getitem__)
    errors = sorted(relative(compiled[key], oracle[key]) for key in oracle)
    row(
        f"numerics/{name}-{policy}/worst_gradient_error_ratio",
        ratios[worst],
        unit="ratio",
        witness=calls,
        rule="C36",
        at_most=FACTOR,
        better="derived",
        evidence=(f"worst of {len(ratios)}: {worst}", f"median error to fp64 {errors[len(errors) // 2]:.2e}"),
        instruments=("graphs",),
    )
    missing = [key for key, gradient in compiled.items() if not torch.isfinite(gradient).all()]
    row(
        f"numerics/{name}-{policy}/non_finite_gradients",
        len(missing),
        unit="count",
        witness=len(compiled),
        rule="C33",
        expected=0,
        evidence=missing[:5],
    )
