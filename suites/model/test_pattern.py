"""Layer patterns and presets: the counts that every compile expectation is derived from."""

from __future__ import annotations

import pytest

from model import expand_pattern, preset
from model.config import (
    DSAConfig,
    EngramConfig,
    HybridConfig,
    HyperConfig,
    MLAConfig,
    MTPConfig,
    StructureConfig,
)
from model.presets import NAMES, SIZES
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
