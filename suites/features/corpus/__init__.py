"""Regressions of torch that a hybrid training stack has met or could meet, as small programs.

held_out_inductor and held_out_tracing were collected after the gate and the bisect were built: neither was changed for
them.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from suites.features.corpus.case import CASES, Case

# Each module adds its cases to CASES, in the order of the names.
for module in sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "case"):
    import_module(f"{__name__}.{module}")

__all__ = ["CASES", "Case"]
