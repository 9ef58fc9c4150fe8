"""Layer patterns and presets: the counts that every compile expectation is derived from, and the blocks of each layer.

B batch, T tokens, D model dim.
"""

from __future__ import annotations

import pytest
import torch

from model import Hybrid, HybridConfig, expand_pattern, preset
from model.attention import AttentionBlock
from model.config import (
    DSAConfig,
    EngramConfig,
    HyperConfig,
    MLAConfig,
    MTPConfig,
    StructureConfig,
)
from model.dsa import DSABlock
from model.mamba import Mamba2Block, Mamba3Block
from model.mamba_mimo import Mamba3MIMOBlock
from model.mla import MLABlock
from model.moe import MoEBlock
from model.presets import NAMES, SIZES
from suites.support.hybrids import build, token_batch
from suites.support.lanes import Lane, lanes


@lanes("cpu")
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("nam12", {"A": 3, "E": 5, "M": 3, "R": 1}),
        ("nam52", {"A": 13, "E": 26, "M": 13, "R": 0}),
        ("nam56r", {"A": 13, "E": 22, "M": 13, "R": 4}),
    ],
)
def test_published_layer_counts(lane: Lane, name: str, counts: dict[str, int]) -> None:
    for size in SIZES:
        letters = preset(name, size).letters
        assert {letter: letters.count(letter) for letter in "AEMR"} == counts


@lanes("cpu")
def test_defaults_of_a_configuration(lane: Lane) -> None:
    config = preset("nam12")
    assert (config.expert_groups, config.chosen_groups, config.null_rho, config.bias_rate) == (1, 1, 0, 0)
    own = HybridConfig("own", "narrow", "AEMR", depth=4, d_model=64, vocab_size=256, seq_len=128)
    assert (own.q_heads, own.kv_heads, own.m_heads, own.experts, own.top_k) == (8, 2, 8, 64, 6)
    assert (own.routed_scale, own.capacity_factor, own.aux_weight, own.z_weight) == (2.5, 1.25, 0.01, 1e-3)
    assert StructureConfig().sizes == (9, 16, 64, 64, 256)


@lanes("cpu")
def test_positions_of_nam56r(lane: Lane) -> None:
    letters = preset("nam56r").letters
    assert [i for i, letter in enumerate(letters, 1) if letter == "A"] == list(range(1, 52, 4))
    assert [i for i, letter in enumerate(letters, 1) if letter == "R"] == [12, 24, 36, 48]


@lanes("cpu")
def test_narrow_keeps_every_layer_expert_and_top_k(lane: Lane) -> None:
    for name in NAMES:
        narrow, full = preset(name, "narrow"), preset(name, "full")
        assert (narrow.letters, narrow.experts, narrow.top_k) == (full.letters, full.experts, full.top_k)
        assert (narrow.seq_len, full.seq_len) == (64, 4096)


@lanes("cpu")
@pytest.mark.parametrize(("factor", "overhead"), [(1.0, 1 / 3), (1.25, 1 / 15), (1.5, 7 / 9)])
def test_padding_overhead_follows_from_the_configuration(lane: Lane, factor: float, overhead: float) -> None:
    """4096 tokens, 64 experts, top-6: 33 %, 6.7 % and 78 %, not the commonly quoted 25 %."""
    config = preset("nam52", "full", capacity_factor=factor)
    assert config.padding_overhead(4096) == pytest.approx(overhead, abs=1e-9)


@lanes("cpu")
def test_pipeline_stages(lane: Lane) -> None:
    assert expand_pattern("AEME|AEME|AEMR", 12) == "AEMEAEMEAEMR"


@lanes("cpu")
@pytest.mark.parametrize(
    ("pattern", "depth", "message"),
    [
        ("", 4, "empty"),
        ("|", 4, "empty"),
        ("AXE", 4, r"unknown letters \['X'\]"),
        ("AE|ME", 5, "4 layers"),
        ("AE", 0, "at least 1"),
    ],
)
def test_bad_patterns_are_refused(lane: Lane, pattern: str, depth: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand_pattern(pattern, depth)


@lanes("cpu")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_heads": 3}, "multiple of kv_heads"),
        ({"top_k": 65}, "top_k must lie in"),
        ({"capacity_factor": 0.5}, "capacity_factor"),
        ({"m_mixer": "mamba1"}, "m_mixer must be"),
        ({"m_heads": 3}, "multiple of m_groups"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"mla": MLAConfig(rope_dim=15)}, "mla.rope_dim must be even"),
        ({"attention_gate": "token"}, "attention_gate must be"),
        ({"window": 9, "mla": MLAConfig()}, "window 9 needs A:gqa blocks, not A:mla: set it to 0"),
        ({"window": 9, "dsa": DSAConfig(ranks=(2,))}, "window 9 needs A:gqa blocks, not A:dsa: set it to 0"),
        ({"dsa": DSAConfig(ranks=(14,))}, "dsa.ranks must lie in 1..13"),
        ({"null_rho": 1.5}, "null_rho must lie in 0..1"),
        ({"expert_groups": 5}, "multiple of expert_groups"),
        ({"expert_groups": 16, "chosen_groups": 1}, "the chosen groups must hold top_k experts"),
        ({"expert_groups": 2, "chosen_groups": 3}, "chosen_groups must lie"),
        ({"mtp": MTPConfig(steps=0)}, "mtp.steps must be at least 1"),
        ({"engram": EngramConfig(layers=(2,))}, r"must be A layers, not \['M'\]"),
        ({"engram": EngramConfig(layers=(0, 1))}, r"must be A layers, not \['A', 'E'\]"),
        ({"engram": EngramConfig(layers=(52,))}, r"must be A layers, not \['none'\]"),
        ({"engram": EngramConfig(layers=())}, "engram.layers is empty"),
        ({"hyper": HyperConfig(), "engram": EngramConfig(layers=())}, "engram.layers is empty"),
        ({"hyper": HyperConfig(mix_branches=True)}, "mix_branches needs engram.layers"),
        ({"hyper": HyperConfig(layers=0)}, "hyper.layers must lie in"),
        ({"hyper": HyperConfig(layers=53)}, "hyper.layers must lie in"),
        ({"hyper": HyperConfig(streams=1)}, "hyper.streams must be at least 2"),
        ({"hyper": HyperConfig(uniform=1.5)}, "hyper.uniform must lie in"),
    ],
)
def test_bad_configurations_are_refused(lane: Lane, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset("nam52", "narrow", **changes)


@lanes("cpu")
def test_unknown_preset_names_the_known_ones(lane: Lane) -> None:
    with pytest.raises(ValueError, match=r"nam12.*nam52.*nam56r"):
        preset("nam53")


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
