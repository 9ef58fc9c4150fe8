"""Properties of single blocks that no whole-model comparison can detect."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from model import preset
from model.config import MLAConfig
from model.head import LossHead
from model.hybrid import BLOCKS
from model.layers import rms_norm
from suites.support.hybrids import build
from suites.support.lanes import Lane, lanes


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softcap_is_computed_in_fp32(lane: Lane, dtype: torch.dtype) -> None:
    """The product is in the model's dtype, and what follows it is not: tanh in 16 bits is off by 4e-3."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 16, generator=g).to(lane.device, dtype)
    embedding = 4 * torch.randn(50, 16, generator=g).to(lane.device)
    found = LossHead(softcap=15.0, eps=1e-5).logits(x, embedding)
    product = F.linear(rms_norm(x, 1e-5), embedding.to(dtype)).double()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), 15 * torch.tanh(product / 15), rtol=1e-6, atol=1e-6)


@lanes("cpu")
@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("kind", ["A:gqa", "A:mla"])
def test_output_gate_equals_the_formula(lane: Lane, kind: str, gate: str) -> None:
    """y[h,p] sigmoid(W[h] . u), by channel W[h P + p], with u the normed stream."""
    H, P = 4, 8
    mla = MLAConfig(16, 16, 8, 8, value_dim=P)
    config = preset("nam12", "narrow", q_heads=H, head_dim=P, mla=mla, attention_gate=gate)
    torch.manual_seed(0)
    block = BLOCKS[kind](config).double()
    torch.nn.init.normal_(block.gate, std=config.d_model**-0.5)
    x = 3 * torch.randn(2, 5, config.d_model, dtype=torch.float64)
    positions = torch.arange(5, dtype=torch.int32).expand(2, 5)
    projected: list[torch.Tensor] = []
    block.output.register_forward_pre_hook(lambda module, inputs: projected.append(inputs[0]))
    with torch.no_grad():
        block(x, torch.zeros_like(positions), positions)
        weight, block.gate = block.gate, None
        block(x, torch.zeros_like(positions), positions)
        gated, plain = (t.unflatten(-1, (H, P)) for t in projected)
        u = x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
        for h in range(H):
            for p in range(P):
                factor = torch.sigmoid(u @ weight[h if gate == "head" else h * P + p])
                torch.testing.assert_close(
                    gated[..., h, p], plain[..., h, p] * factor, rtol=1e-11, atol=1e-12
                )


@lanes("cpu", "h200")
def test_mamba3_decay_has_a_floor(lane: Lane) -> None:
    """However small its projection, A stays a_floor away from 0, so that every state decays."""
    config = preset("nam12", "narrow", a_floor=1e-3)
    block = build(config, lane.device, torch.float64).blocks[config.letters.index("M")]
    block.input.register_forward_hook(lambda module, inputs, output: torch.full_like(output, -50.0))
    x = torch.ones(1, 3, config.d_model, dtype=torch.float64, device=lane.device)
    _, _, _, a_dt, dt, *_ = block._project(x)
    torch.testing.assert_close(a_dt / dt, torch.full_like(dt, -1e-3))
