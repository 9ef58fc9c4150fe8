"""Single blocks: properties that no whole-model comparison can detect, and the weights at the start.

N streams.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model import preset
from model.attention import AttentionBlock
from model.config import HyperConfig, MLAConfig
from model.head import LossHead
from model.hybrid import BLOCKS
from model.layers import rms_norm
from model.mamba import inverse_softplus_of_log_uniform
from model.moe import MoEBlock
from suites.model.programs import TOGETHER
from suites.support.hybrids import SEED, build
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


RESIDUAL = ("output", "shared_out")  # the maps whose result is added to the stream


@lanes("cpu")
@pytest.mark.parametrize("changes", [{}, {"m_mixer": "mamba2"}, TOGETHER["latent_sparse_mimo"]])
def test_scales_follow_fan_in_and_depth(lane: Lane, changes: dict) -> None:
    """Each map keeps the scale of its input; those that end a block have 1/sqrt(2 depth) of it (GPT-2)."""
    model = build(preset("nam12", "narrow", **changes))
    reduced = (2 * model.config.depth) ** -0.5
    scales = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            last = reduced if name.split(".")[-1] in RESIDUAL else 1.0
            scales[name] = float(module.weight.detach().std()) * module.in_features**0.5 / last
        if isinstance(module, MoEBlock):
            scales[f"{name}.up"] = float(module.up.detach().std()) * module.up.shape[1] ** 0.5
            scales[f"{name}.down"] = float(module.down.detach().std()) * module.down.shape[1] ** 0.5 / reduced
    assert sum(name.split(".")[-1] in RESIDUAL for name in scales) == model.config.depth
    assert {name: scale for name, scale in scales.items() if abs(scale - 1) > 0.15} == {}


@lanes("cpu")
def test_time_steps_start_log_uniform(lane: Lane) -> None:
    """softplus(dt_bias) is in the published 0.001 to 0.1, each decade equally likely."""
    torch.manual_seed(SEED)
    dt = F.softplus(inverse_softplus_of_log_uniform(preset("nam12"), 10_000).double())
    assert 0.999e-3 < dt.min() < 1.01e-3
    assert 0.099 < dt.max() < 0.1001
    assert abs(float((dt < 0.01).double().mean()) - 0.5) < 0.03
    floored = F.softplus(inverse_softplus_of_log_uniform(preset("nam12", dt_floor=0.05), 1000).double())
    assert math.isclose(float(floored.min()), 0.05, rel_tol=1e-4)


@lanes("cpu")
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_attention_gate_starts_at_one_half(lane: Lane, gate: str) -> None:
    made = []
    for kind in ("none", gate):
        torch.manual_seed(SEED)
        made.append(AttentionBlock(preset("nam12", "narrow", attention_gate=kind)).double())
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.arange(9, dtype=torch.int32).expand(2, 9)
    plain, gated = (block(x, torch.zeros_like(positions), positions) - x for block in made)
    torch.testing.assert_close(gated, plain / 2, rtol=1e-12, atol=1e-12)


@lanes("cpu")
def test_matrix_recurrence_starts_as_the_identity(lane: Lane) -> None:
    config = preset("nam12", "narrow")
    block = build(config).blocks[config.letters.index("R")]
    assert torch.equal(block.recurrent, torch.eye(config.r_value).expand(config.r_heads, -1, -1))


@lanes("cpu")
def test_each_layer_reads_the_next_stream_first(lane: Lane) -> None:
    N, layers = 4, 7
    model = build(preset("nam12", "narrow", hyper=HyperConfig(streams=N, layers=layers)))
    assert [int(model.blocks[i].bias[:N].argmax()) for i in range(layers)] == [i % N for i in range(layers)]
