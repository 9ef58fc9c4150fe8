"""Memory of a physical TPU chip while SPMD is on, where torch_xla shows one virtual device that has none.

torch_xla.core.xla_model.get_memory_info refuses the virtual device and cannot name a physical one. A patched build
adds a reading by the runtime's own names ("TPU:3"); the stock build has none, and here that is an error and no zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch_xla

BINDING = "_xla_runtime_memory_info"


class MemoryReadingError(RuntimeError):
    """No reading of a chip's memory. The message is one line."""


def chip_memory(chip: str) -> dict[str, int]:
    """bytes_used and bytes_limit of a chip by its runtime name, "TPU:3".

    Raises MemoryReadingError where this torch_xla has no such reading, where it fails, and where it says 0: a chip
    that trains uses some, and has a limit.
    """
    read: Callable[[str], Mapping[str, Any]] | None = getattr(torch_xla._XLAC, BINDING, None)
    if read is None:
        raise MemoryReadingError(
            f"no memory reading of {chip}: torch_xla {torch_xla.__version__} has no {BINDING}; "
            "it comes with xla_runtime_memory_info.diff"
        )
    try:
        info = read(chip)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise MemoryReadingError(f"no memory reading of {chip}: {reason}") from None
    found = {name: int(info.get(name, 0)) for name in ("bytes_used", "bytes_limit")}
    if not all(found.values()):
        raise MemoryReadingError(f"no memory reading of {chip}: the runtime says {dict(info)}")
    return found
