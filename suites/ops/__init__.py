"""One file per op: everything that its tests need, as one OpSpec.

An op is a folder of kernels/ with an op.py. The file suites/ops/<op>.py has the same name, and a SPEC. No list names
the ops.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from suites.ops.spec import KernelOp, OpSpec, Timed

ROOT = Path(__file__).resolve().parents[2]


def op_names(root: Path = ROOT) -> list[str]:
    """Return the folders of kernels/ that hold an op, sorted."""
    return sorted(path.parent.name for path in root.glob("kernels/*/op.py"))


@cache
def specs() -> dict[str, OpSpec]:
    """Import the spec of every op, by name. Imports torch, but not triton."""
    return {name: import_module(f"suites.ops.{name}").SPEC for name in op_names()}


@cache
def timed_cases() -> dict[str, Timed]:
    """Return the cases at the model's shapes of all ops, by name."""
    return {name: case for spec in specs().values() for name, case in spec.timed.items()}


@cache
def interpreted() -> dict[str, KernelOp]:
    """Return how the kernels of all ops run in Triton's interpreter, by name. Imports triton."""
    return {op.name: op for spec in specs().values() if spec.interpreter for op in spec.interpreter()}
