"""The blocks that a preset chooses between: the block of each layer, and the resulting number of parameters.

B batch, T tokens, D model dim.
"""

from __future__ import annotations

import pytest
import torch

from model import Hybrid, HybridConfig, preset
from model.attention import AttentionBlock
from model.dsa import DSABlock
from model.mamba import Mamba2Block, Mamba3Block
from model.mamba_mimo import Mamba3MIMOBlock
from model.mla import MLABlock
from model.moe import MoEBlock
from model.presets import NAMES, SIZES
from suites.support.hybrids import build, token_batch
from suites.support.lanes import Lane, lanes

SPARSE = (1, 2, 3, 5, 6, 7, 9, 10, 11)
# Computed by `parameters` below, and equal to the count of the model's own tensors: billions at full size.
BILLIONS = {"nam12": 0.2013, "nam52": 4.2055, "nam56r": 4.2168, "nam56r_4096": 5.6874}


def attention_parameters(c: HybridConfig) -> int:
    D, heads = c.d_model, c.q_heads * c.head_dim
    return D * heads + 2 * D * c.kv_heads * c.head_dim + heads * D


def indexer_parameters(c: HybridConfig) -> int:
    return c.d_model * (c.dsa.heads * c.dsa.width + c.dsa.width + c.dsa.heads)


def latent_parameters(c: HybridConfig) -> int:
    D, H, m = c.d_model, c.q_heads, c.mla
    query = D * m.q_rank + m.q_rank * H * (m.nope_dim + m.rope_dim)
    return (
        query
        + D * (m.kv_rank + m.rope_dim)
        + H * m.kv_rank * (m.nope_dim + m.value_dim)
        + H * m.value_dim * D
    )


def mamba3_parameters(c: HybridConfig) -> int:
    D, H, N, R = c.d_model, c.m_heads, c.m_state, c.m_rank if c.m_mixer == "mimo" else 1
    inner = H * c.m_head_dim
    projected = 2 * inner + 2 * c.m_groups * N * R + 3 * H + c.m_angles
    up_and_down = 3 * inner * R if c.m_mixer == "mimo" else 0
    return D * projected + inner * D + 2 * H + 2 * N + 2 * H * N * R + up_and_down


def expert_parameters(c: HybridConfig) -> int:
    D = c.d_model
    return D * c.experts + 2 * c.experts * D * c.expert_hidden + 3 * D * c.shared_hidden


def m2rnn_parameters(c: HybridConfig) -> int:
    D, H, K, V = c.d_model, c.r_heads, c.r_key, c.r_value
    mixed = H * (2 * K + V)
    return D * (H * V + mixed + H) + H * V * D + mixed * (c.m_conv_width + 1) + H * V * V + 3 * H + H * V


def parameters(c: HybridConfig) -> int:
    """Compute the number of weights of the whole model from the config alone; the head is tied."""
    total, rank = c.vocab_size * c.d_model, 0
    for letter in c.letters:
        rank += letter == "A"
        if letter == "A" and c.dsa and rank in c.dsa.ranks:
            total += attention_parameters(c) + indexer_parameters(c)
        elif letter == "A":
            total += latent_parameters(c) if c.mla else attention_parameters(c)
        else:
            total += {"M": mamba3_parameters, "E": expert_parameters, "R": m2rnn_parameters}[letter](c)
    return total


@lanes("cpu")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_parameter_counts_equal_the_arithmetic(lane: Lane, name: str, size: str) -> None:
    config = preset(name, size)
    with torch.device("meta"):
        model = Hybrid(config)
    assert sum(p.numel() for p in model.parameters()) == parameters(config)
    if size == "full":
        assert parameters(config) / 1e9 == pytest.approx(BILLIONS[name], abs=5e-5)


@lanes("cpu")
@pytest.mark.parametrize(
    ("name", "changes", "letter", "expected"),
    [
        ("nam56r", {}, "A", [DSABlock if rank in SPARSE else MLABlock for rank in range(1, 14)]),
        ("nam12", {}, "A", [AttentionBlock] * 3),
        ("nam52", {}, "A", [AttentionBlock] * 13),
        ("nam12", {"m_mixer": "mamba3"}, "M", [Mamba3Block] * 3),
        ("nam12", {"m_mixer": "mimo"}, "M", [Mamba3MIMOBlock] * 3),
        ("nam12", {"m_mixer": "mamba2"}, "M", [Mamba2Block] * 3),
    ],
    ids=["nam56r", "nam12", "nam52", "mamba3", "mimo", "mamba2"],
)
@pytest.mark.parametrize("size", SIZES)
def test_layers_have_the_configured_blocks(
    lane: Lane, name: str, changes: dict, letter: str, expected: list[type], size: str
) -> None:
    config = preset(name, size, **changes)
    with torch.device("meta"):
        blocks = Hybrid(config).blocks
    assert [type(block) for kind, block in zip(config.letters, blocks) if kind == letter] == expected


@lanes("cpu", "h200")
def test_indexer_learns_from_its_own_loss_only(lane: Lane) -> None:
    """Its gradient is that of its own loss; the gradients of the rest do not depend on it."""
    config = preset("nam56r")
    ids = token_batch(config, 2, device=lane.device)
    gradients = []
    for weight in (0.0, 1.0):
        dsa = type(config.dsa)(**{**vars(config.dsa), "loss_weight": weight})
        model = build(config.replace(dsa=dsa), lane.device, torch.float64)
        model(ids).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    indexer = [n for n in gradients[0] if "index_" in n]
    assert len(indexer) == 3 * len(SPARSE)
    without, with_loss = gradients
    assert all(without[n] is None for n in indexer)
    assert all(with_loss[n].any() for n in indexer)
    for n in without.keys() - set(indexer):
        torch.testing.assert_close(with_loss[n], without[n], rtol=1e-12, atol=1e-14)


@lanes("cpu", "h200")
@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trip(lane: Lane, name: str) -> None:
    """A model with other weights loads it exactly; the overflow counter is bookkeeping and not included."""
    config = preset(name)
    model, other = build(config, lane.device), Hybrid(config).to(lane.device)
    ids = token_batch(config, 2, device=lane.device)
    with torch.no_grad():
        loss = model(ids)
        assert not torch.equal(other(ids), loss)
        saved = {key: value.clone() for key, value in model.state_dict().items()}
        other.load_state_dict(saved)
        assert torch.equal(other(ids), loss)
    assert not any("overflow" in key for key in saved)
    assert sum(isinstance(block, MoEBlock) for block in model.blocks) == config.letters.count("E")
    assert {name.rsplit(".")[-1] for name, _ in model.named_buffers()} >= {"overflow"}
