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
    """Expand to one letter per layer: layer i is `pattern[i % len]` up to `depth`.

    With `|` (starts of pipeline stages) the concatenation must be exactly `depth` long.
    Raises ValueError on an empty pattern, an unknown letter, or a wrong length.
    """
    letters = pattern.replace("|", "")
    if not letters:
        raise ValueError("layer_pattern is empty: name at least one block letter of A, M, E, R")
    unknown = sorted(set(letters) - set(LETTERS))
    if unknown:
        raise ValueError(
            f"layer_pattern {pattern!r} has unknown letters {unknown}: expected {sorted(LETTERS)}"
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
class NgramConfig:
    """Hashed n-grams: `heads` tables per order, of about `table` rows of width `dim`."""

    orders: tuple[int, ...] = (2, 3)
    heads: int = 8
    table: int = 500_000
    dim: int = 16
    seed: int = 20260


@dataclass(frozen=True)
class StructureConfig:
    """Rows of the category, dependency level, depth, sibling and node type tables, and their common width."""

    sizes: tuple[int, ...] = (9, 16, 64, 64, 256)
    dim: int = 64


@dataclass(frozen=True)
class TreeConfig:
    """Slots for chunks and for edges of each kind, width of a chunk's state, message steps.

    Without `causal` it is the published form, in which a token reads the mean of its whole chunk, also later tokens.
    """

    chunks: int = 64
    edges: int = 64
    width: int = 64
    steps: int = 3
    causal: bool = True


@dataclass(frozen=True)
class EngramConfig:
    """The A layers (0-based) that carry a branch, its pooling orders, and D over its bottleneck's width."""

    layers: tuple[int, ...]
    orders: tuple[int, ...] = (2, 3, 4)
    reduction: int = 4


@dataclass(frozen=True)
class MTPConfig:
    """Future tokens beyond the next one, the decay of their weights, and the weight of the whole term."""

    steps: int = 1
    decay: float = 0.6
    weight: float = 0.3


@dataclass(frozen=True)
class HyperConfig:
    """Residual streams through the first `layers` layers; `mix_branches` also weights attention against Engram."""

    streams: int = 4
    layers: int = 7
    iterations: int = 5
    uniform: float = 0.0
    mix_branches: bool = False


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention: ranks of the query's and the key-value latent, head dims by part."""

    q_rank: int = 64
    kv_rank: int = 64
    nope_dim: int = 64
    rope_dim: int = 64
    value_dim: int = 64


@dataclass(frozen=True)
class DSAConfig:
    """Sparse attention on the A layers of these ranks (the first A layer is rank 1): indexer sizes, chosen keys."""

    ranks: tuple[int, ...]
    heads: int = 32
    width: int = 64
    top_k: int = 256
    loss_weight: float = 1e-3


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
    attention_gate: str = "none"  # or a sigmoid gate on the output by "head" or by "channel"
    window: int = 0  # keys that a query sees in a block of kind A:gqa; 0: all

    mla: MLAConfig | None = None  # on the A layers without sparse attention
    dsa: DSAConfig | None = None

    # M: Mamba-3 SISO ("mamba3") or MIMO ("mimo", with m_rank), or Mamba-2 ("mamba2")
    m_mixer: str = "mamba3"
    m_heads: int = 8
    m_head_dim: int = 16
    m_state: int = 16
    m_groups: int = 2
    m_rank: int = 4
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
    null_rho: float = 0.0  # share of real experts among the slots a token may choose; 0: no null experts
    bias_rate: float = 0.0  # step of the selection bias toward uniform load; 0: constant bias
    expert_groups: int = 1  # experts are chosen from the best `chosen_groups` groups
    chosen_groups: int = 1

    # R: M2RNN
    r_heads: int = 4
    r_key: int = 16
    r_value: int = 16

    logit_softcap: float = 15.0
    norm_eps: float = 1e-5

    # Optional features: None disables the feature; outputs are bitwise unchanged.
    ngram: NgramConfig | None = None
    structure: StructureConfig | None = None
    tree: TreeConfig | None = None
    engram: EngramConfig | None = None
    mtp: MTPConfig | None = None
    hyper: HyperConfig | None = None

    def __post_init__(self) -> None:
        expand_pattern(self.layer_pattern, self.depth)
        checks = {
            "q_heads must be a multiple of kv_heads": self.q_heads % self.kv_heads == 0,
            "m_heads must be a multiple of m_groups": self.m_heads % self.m_groups == 0,
            "head_dim must be even for rotary embedding": self.head_dim % 2 == 0,
            "top_k must lie in 1..experts": 1 <= self.top_k <= self.experts,
            "m_mixer must be 'mamba3', 'mimo' or 'mamba2'": self.m_mixer in ("mamba3", "mimo", "mamba2"),
            "capacity_factor must be at least 1": self.capacity_factor >= 1.0,
            "null_rho must lie in 0..1": 0.0 <= self.null_rho <= 1.0,
            "chosen_groups must lie in 1..expert_groups": 1 <= self.chosen_groups <= self.expert_groups,
            "experts must be a multiple of expert_groups": self.experts % self.expert_groups == 0,
            "the chosen groups must hold top_k experts": self.top_k * self.expert_groups
            <= self.experts * self.chosen_groups,
            "attention_gate must be 'none', 'head' or 'channel'": self.attention_gate
            in ("none", "head", "channel"),
            **self._feature_rules(),
        }
        for rule, holds in checks.items():
            if not holds:
                raise ValueError(f"{self.name}: {rule}")

    def _feature_rules(self) -> dict[str, bool]:
        """Return the constraints of the enabled features on each other and on the layers."""
        rules = {}
        if self.dsa:
            count = self.letters.count("A")
            rules[f"dsa.ranks must lie in 1..{count}, the A layers"] = set(self.dsa.ranks) <= {
                *range(1, count + 1)
            }
        if whole := sorted({"A:mla", "A:dsa"} & {*self.kinds}):
            # These blocks attend to all earlier tokens: a window would silently do nothing.
            rules[
                f"window {self.window} needs A:gqa blocks, not {', '.join(whole)}: set it to 0"
            ] = not self.window
        if self.mla:
            rules["mla.rope_dim must be even"] = self.mla.rope_dim % 2 == 0
        if self.engram:
            on = [self.letters[i] if 0 <= i < self.depth else "none" for i in self.engram.layers]
            rules["engram.layers is empty: name an A layer, or leave engram None"] = bool(on)
            rules[f"engram.layers must be A layers, not {on}"] = set(on) <= {"A"}
        if self.mtp:
            rules["mtp.steps must be at least 1"] = self.mtp.steps >= 1
        if self.hyper:
            rules["hyper.streams must be at least 2"] = self.hyper.streams >= 2
            rules["hyper.layers must lie in 1..depth"] = 1 <= self.hyper.layers <= self.depth
            rules["hyper.uniform must lie in 0..1"] = 0.0 <= self.hyper.uniform <= 1.0
            # Without a second branch the mixer would silently do nothing.
            rules["hyper.mix_branches needs engram.layers"] = bool(self.engram) or not self.hyper.mix_branches
        return rules

    @property
    def letters(self) -> str:
        """The expanded pattern, one letter per layer."""
        return expand_pattern(self.layer_pattern, self.depth)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each layer: its letter, and for A and M the block type ("A:dsa", "M:mamba3", "E")."""
        kinds, rank = [], 0
        for letter in self.letters:
            rank += letter == "A"
            if letter == "A":
                sparse = self.dsa is not None and rank in self.dsa.ranks
                kinds.append("A:dsa" if sparse else "A:mla" if self.mla else "A:gqa")
            else:
                kinds.append(f"M:{self.m_mixer}" if letter == "M" else letter)
        return tuple(kinds)

    @property
    def regions(self) -> tuple[str, ...]:
        """Kind of each layer, and what wraps its block: layers of one entry compile to one graph."""
        engram = self.engram.layers if self.engram else ()
        streams = self.hyper.layers if self.hyper else 0

        def region(layer: int, kind: str) -> str:
            place = "first" * (layer == 0) + "last" * (layer == streams - 1)
            return kind + "+engram" * (layer in engram) + f"+hyper{place}" * (layer < streams)

        return tuple(region(layer, kind) for layer, kind in enumerate(self.kinds))

    @property
    def m_angles(self) -> int:
        """Rotation angles per token: half of the even number of rotated state dims."""
        return int(self.m_state * self.m_rope_fraction) // 2

    @property
    def null_slots(self) -> int:
        """Copies of the null logit next to the experts in a token's top-k."""
        return int(self.experts * (1 - self.null_rho) / self.null_rho) if self.null_rho else 0

    @property
    def choices(self) -> int:
        """Slots per token, such that `top_k` of them are real experts at a share of `null_rho`."""
        return math.ceil(self.top_k / self.null_rho) if self.null_rho else self.top_k

    def bucket(self, tokens: int) -> int:
        """Slots per expert and sequence: the capacity for `tokens` tokens, rounded up to a power of two."""
        return 1 << max(self.slots(tokens) - 1, 0).bit_length()

    def slots(self, tokens: int) -> int:
        """Capacity before rounding up: slots per expert and sequence."""
        return math.ceil(tokens * self.top_k / self.experts * self.capacity_factor)

    def padding_overhead(self, tokens: int) -> float:
        """Share of extra slots due to rounding the capacity up to a power of two."""
        return self.bucket(tokens) / self.slots(tokens) - 1.0

    def replace(self, **changes: object) -> HybridConfig:
        """Return a copy with some fields changed (and checked)."""
        return replace(self, **changes)
