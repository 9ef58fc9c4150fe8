"""torch features that the model does not use but similar stacks compile, and their known regressions.

Each row is the smallest program that shows one known regression, with the affected versions. B batch, H heads, T
tokens, P head dim.
"""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import flex_attention

from bumpgate.plugin.instruments import reset_dynamo
from suites.support.lanes import Lane, lanes

# Releases on which the row was run: present in 2.15.0; absent in 2.13.0 and 2.14.1.
FLOAT_CAPTURE = "torch>=2.15,<2.16"
SOFTCAPS = (30.0, 15.0, 7.0)
B, H, T, P = 2, 4, 33, 16


@lanes("cpu")
def test_flex_attention_with_changed_softcap(lane: Lane, row) -> None:
    """One compiled flex_attention, called with softcaps of several values, equals the eager one for each."""
    reset_dynamo()
    compiled = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")
    q, k, v = torch.randn(3, B, H, T, P, dtype=torch.float64, device=lane.device).unbind()
    refused = []
    for softcap in SOFTCAPS:

        def capped(score, b, h, i, j, softcap=softcap):
            return softcap * torch.tanh(score / softcap)

        try:
            found = compiled(q, k, v, score_mod=capped)
        except RuntimeError as error:
            if "SymFloat" not in str(error):
                raise
            refused.append(f"softcap {softcap}: the fake of flex_attention refuses a captured SymFloat")
            continue
        torch.testing.assert_close(found, flex_attention(q, k, v, score_mod=capped))
    row.defect(
        "features/flex_attention-float_capture/second_value_refused",
        bool(refused),
        known_in=FLOAT_CAPTURE,
        reason="Dynamo makes the second value of a captured float a SymFloat, which flex_attention's fake does not "
        "take: an attention with two softcaps no longer compiles (torch/_higher_order_ops/flex_attention.py)",
        rule="R1",
        seen=len(SOFTCAPS) - len(refused),
        evidence=refused,
    )
