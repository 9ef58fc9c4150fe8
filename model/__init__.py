"""The hybrid Mamba-3 + attention + MoE model, built from the kernels' public functions."""

from model.config import HybridConfig, expand_pattern
from model.hybrid import Hybrid
from model.presets import preset

__all__ = ["Hybrid", "HybridConfig", "expand_pattern", "preset"]
