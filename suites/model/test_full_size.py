"""One training step of the full-size models on one GPU, in bf16: forward and backward fit, and the loss is finite.

B batch, T tokens.
"""

from __future__ import annotations

import math

import pytest
import torch

from model import Hybrid, preset
from suites.support.hybrids import SEED, token_batch
from suites.support.lanes import Lane, lanes

BATCH = 1


@lanes("h200")
@pytest.mark.parametrize("name", ["nam52", "nam56r"])
def test_a_step_fits(lane: Lane, name: str, row, exclusive_machine) -> None:
    config = preset(name, "full")
    torch.manual_seed(SEED)
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model = Hybrid(config).to(torch.bfloat16)
    ids = token_batch(config, BATCH, device=lane.device)
    torch.cuda.reset_peak_memory_stats()
    loss = model(ids)
    loss.backward()
    peak = torch.cuda.max_memory_allocated()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    # A model that knows nothing predicts each id alike; the softcap keeps a random one near it.
    assert abs(float(loss.detach()) - math.log(config.vocab_size)) < 3
    assert not missing, missing
    row(
        f"model/{name}-full-{BATCH}x{config.seq_len}/peak_memory_bytes",
        peak,
        unit="bytes",
        witness=sum(p.numel() for p in model.parameters()),
        rule="C37",
        better="lower",
        tolerance=0.02,
        evidence=[
            f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f}e9 parameters, loss {float(loss.detach()):.3f}"
        ],
    )
    del model, loss
    torch.cuda.empty_cache()
