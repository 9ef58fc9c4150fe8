"""Waits for several children at once, limited by the cores of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bumpgate.process.host import cores

# Cores per child that imports torch and compiles: with fewer, children slow down each other and other processes.
CORES_A_CHILD = 4
Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Map `function`, which waits for a child, over `items` in threads; results in order. Raises the first error."""
    with ThreadPoolExecutor(max(1, (cores() or 1) // CORES_A_CHILD)) as pool:
        return list(pool.map(function, items))
