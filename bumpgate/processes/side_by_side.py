"""Waiting for several children at once, as many as the host has cores for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bumpgate.processes.host import cores

# Of a child that imports torch and compiles: with fewer they slow each other down, and what runs beside them.
CORES_A_CHILD = 4
Given = TypeVar("Given")
Told = TypeVar("Told")


def side_by_side(function: Callable[[Given], Told], given: Iterable[Given]) -> list[Told]:
    """function of each, in order; for functions that wait for a child. Raises what the first that fails raises."""
    with ThreadPoolExecutor(max(1, (cores() or 1) // CORES_A_CHILD)) as pool:
        return list(pool.map(function, given))
