"""One training step of the full-size models on one GPU, in bf16: forward and backward fit, and the loss is finite.

B batch, T tokens.
"""

from __future__ import annotations

import math

import pytest
import torch

from model import Hybrid, HybridConfig, preset
from suites.support.gpu_memory import claimed
from suites.support.hybrids import SEED, token_batch
from suites.support.lanes import Lane, lanes

BATCH = 1
GIB = 40  # peaks: nam56r 34, nam52 26


@lanes("h200")
@pytest.mark.parametrize("name", ["nam52", "nam56r"])
def test_full_size_step_fits_in_memory(lane: Lane, name: str, row) -> None:
    config = preset(name, "full")
    with claimed(GIB):
        loss, peak, parameters, missing = forward_and_backward(config)
    # An untrained model predicts each id alike; the softcap keeps a random one close to that.
    assert abs(loss - math.log(config.vocab_size)) < 3
    assert not missing, missing
    row.cost(
        f"model/{name}-full-{BATCH}x{config.seq_len}/peak_memory_bytes", peak, "bytes", tolerance=0.02,
        rule="C37", seen=parameters, evidence=[f"{parameters / 1e9:.2f}e9 parameters, loss {loss:.3f}"],
    )  # fmt: skip


def forward_and_backward(config: HybridConfig) -> tuple[float, int, int, list[str]]:
    """Return the loss, the peak of additional bytes, the parameter count, and parameters without a finite gradient."""
    torch.manual_seed(SEED)
    held = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model = Hybrid(config).to(torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    loss = model(token_batch(config, BATCH, device="cuda"))
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - held
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    return float(loss.detach()), peak, sum(p.numel() for p in model.parameters()), missing
