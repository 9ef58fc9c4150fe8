"""The hybrid's configuration: one frozen record, checked at construction.

A pattern is a string of block letters: A attention, M Mamba, E mixture of experts, R M2RNN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

LETTERS = {
    "A": "attention",
    "M": "Mamba-3 (or Mamba-2) state space",
    "E": "mixture of experts",
    "R": "M2RNN matrix-state recurrence",
}


def expand_pattern(pattern: str, depth: int) -> str:
    """One letter a layer: layer i is `pattern[i % len]` up to `depth`.

    With `|` (starts of pipeline stages) the concatenation must be exactly `depth` long.
    Raises ValueError on an empty pattern, an unknown letter, or a wrong length.
    """
    letters = pattern.replace("|", "")
    if not letters:
        raise ValueError("layer_pattern is empty: name at least one block letter of A, M, E, R")
    unknown = sorted(set(letters) - set(LETTERS))
    if unknown:
        raise ValueError(
            f"layer_pattern {pattern!r} has unknown letters {unknown}: known are {sorted(LETTERS)}"
        )
    if depth < 1:
        raise ValueError(f"depth must be at least 1, not {depth}")
    if "|" in pattern:
        if len(letters) != depth:
            raise ValueError(
                f"layer_pattern {pattern!r} has {len(letters)} layers in its stages, depth is {depth}"
            )
        return letters
    return "".join(letters[i % len(letters)] for i in range(depth))


@dataclass(frozen=True)
class HybridConfig:
    """Sizes and switches of one hybrid model. Widths count elements, `T` counts tokens."""

    name: str
    size: str
    layer_pattern: str
    depth: int
    d_model: int
    vocab_size: int
    seq_len: int
    bos_id: int = 2

    # A: grouped-query attention
    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 16
    rope_base: float = 500_000.0
    attention_softcap: float = 30.0
    window: int = 0

    # M: Mamba-3 SISO, or Mamba-2 ("mamba2")
    m_mixer: str = "mamba3"
    m_heads: int = 8
    m_head_dim: int = 16
    m_state: int = 16
    m_groups: int = 2
    m_rope_fraction: float = 0.5
    m_chunk: int = 64
    m_conv_width: int = 4
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_floor: float = 1e-4
    a_floor: float = 1e-4

    # E: routed and shared experts
    experts: int = 64
    top_k: int = 6
    expert_hidden: int = 32
    shared_hidden: int = 32
    capacity_factor: float = 1.25
    routed_scale: float = 2.5
    aux_weight: float = 0.01
    z_weight: float = 1e-3

    # R: M2RNN
    r_heads: int = 4
    r_key: int = 16
    r_value: int = 16

    logit_softcap: float = 15.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        expand_pattern(self.layer_pattern, self.depth)
        checks = {
            "q_heads must be a multiple of kv_heads": self.q_heads % self.kv_heads == 0,
            "m_heads must be a multiple of m_groups": self.m_heads % self.m_groups == 0,
            "head_dim must be even for rotary embedding": self.head_dim % 2 == 0,
            "top_k must lie in 1..experts": 1 <= self.top_k <= self.experts,
            "m_mixer must be 'mamba3' or 'mamba2'": self.m_mixer in ("mamba3", "mamba2"),
            "capacity_factor must be at least 1": self.capacity_factor >= 1.0,
        }
        for rule, holds in checks.items():
            if not holds:
                raise ValueError(f"{self.name}: {rule}")

    @property
    def letters(self) -> str:
        """The expanded pattern, one letter a layer."""
        return expand_pattern(self.layer_pattern, self.depth)

    @property
    def m_angles(self) -> int:
        """Rotation angles a token: half of the even number of state dims that rotate."""
        return int(self.m_state * self.m_rope_fraction) // 2

    def bucket(self, tokens: int) -> int:
        """Slots an expert and a sequence: the next power of two of the capacity for `tokens` tokens."""
        capacity = math.ceil(tokens * self.top_k / self.experts * self.capacity_factor)
        return 1 << max(capacity - 1, 0).bit_length()

    def padding_overhead(self, tokens: int) -> float:
        """Share of extra slots that rounding the capacity up to a power of two costs."""
        capacity = math.ceil(tokens * self.top_k / self.experts * self.capacity_factor)
        return self.bucket(tokens) / capacity - 1.0

    def with_(self, **changes: object) -> HybridConfig:
        """A copy with some fields changed (and checked)."""
        return replace(self, **changes)
