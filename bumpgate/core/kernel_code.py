"""Resource counts of a GPU kernel's compiled code as one value: "registers=255 spills=8 wgmma=64".

Standard library only. Compilers change these counts from release to release for good reasons, so the code of two
releases is compared count by count, each in the direction that is worse; see BOUNDS.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

COUNT = re.compile(r"([a-z][a-z_]*)=(\d+)")
# Count -> (1 where more is worse and -1 where less is, the factor by which it may be worse). registers and
# shared_memory have no bound: they cost speed only through programs_per_sm.
BOUNDS = {
    # A spilled byte is stored to local memory and loaded again.
    "spills": (1, 1.0),
    # Fewer of them: a part of the product no longer runs on the tensor cores.
    "wgmma": (-1, 1.0),
    # Programs that an SM holds at once hide each other's latency: 9 to 7 costs nothing, 8 to 5 costs 4 %.
    "programs_per_sm": (-1, 1.5),
    # Of the configurations that an autotuner chooses from: those that a device can launch, and those that spill.
    "fitting_configurations": (-1, 1.0),
    "spilling_configurations": (1, 1.0),
}


def text(**counts: int) -> str:
    """Format counts as the value of a row."""
    return " ".join(f"{name}={count}" for name, count in counts.items())


def parse(value: object) -> dict[str, int]:
    """Return the counts by name. Raises ValueError on anything that `text` does not return."""
    found = [COUNT.fullmatch(word) for word in value.split(" ")] if isinstance(value, str) else []
    counts = {f[1]: int(f[2]) for f in found if f}
    if not counts or len(counts) < len(found):
        raise ValueError(f"{value!r} is not a list of counts such as 'registers=255 spills=0'")
    return counts


def worse(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, str]:
    """Return name -> "140 -> 400" for the counts that are worse than `before` by more than their bound, or missing."""
    found = {}
    for name, (sign, factor) in BOUNDS.items():
        if name not in before:
            continue
        old, new = before[name], after.get(name)
        if new is None or (new > old * factor if sign > 0 else new * factor < old):
            found[name] = f"{old} -> {'not read' if new is None else new}"
    return found


def nearest(version: str, reviewed: Iterable[str]) -> str:
    """Return the newest reviewed version that is not above `version`; the oldest one if all are above it."""
    ordered = sorted(reviewed, key=numbers)
    below = [v for v in ordered if numbers(v) <= numbers(version)]
    return below[-1] if below else ordered[0]


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version as its sort key."""
    return tuple(int(n) for n in re.findall(r"\d+", version))


# The class of an instruction, by the prefix of its SASS name.
CLASSES: dict[str, str | tuple[str, ...]] = {
    "wgmma": "HGMMA",
    "mma": "HMMA",
    "cp_async": "LDGSTS",
    "tma": "UTMA",
    "ldmatrix": "LDSM",
    "mufu": "MUFU",
    "ffma": "FFMA",
    "shuffle": "SHFL",
    "barrier": "BAR",
    "local_load": "LDL",
    "local_store": "STL",
    "atomic": ("ATOM", "RED."),
    "call": "CALL",
}
INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)", re.MULTILINE
)
WIDTH = re.compile(r"\.(U8|S8|U16|S16|64|128)\b")
BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclass(frozen=True)
class Binary:
    """One cubin. registers and stack_bytes per thread; instructions: total count by SASS name (padding left out)."""

    registers: int
    stack_bytes: int
    instructions: Counter[str]

    @property
    def spilled_bytes(self) -> int:
        """Return the bytes that the code stores to local memory, each store counted once, as in ptxas -v.

        An array that is indexed by a variable would count too: it is as slow, and our kernels have none.
        """
        return sum(_bytes(name) * n for name, n in self.instructions.items() if name.startswith("STL"))

    def classes(self) -> dict[str, int]:
        """Return the number of instructions of each class of CLASSES that occurs."""
        counts = {
            c: sum(n for name, n in self.instructions.items() if name.startswith(p))
            for c, p in CLASSES.items()
        }
        return {c: n for c, n in counts.items() if n}


def read_sass(text: str) -> Binary | None:
    """Parse what `cuobjdump -res-usage -sass` printed; None if it lists no kernel's instructions."""
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    instructions = Counter(name for name in INSTRUCTION.findall(text) if name != "NOP")
    return Binary(int(usage[1]), int(usage[2]), instructions) if usage and instructions else None


def _bytes(instruction: str) -> int:
    width = WIDTH.search(instruction)
    return BYTES[width[1]] if width else 4
