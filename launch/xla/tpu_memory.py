"""Memory of a physical TPU chip under SPMD, where torch_xla exposes only one virtual device without memory.

torch_xla.core.xla_model.get_memory_info refuses the virtual device and cannot address a physical one. A patched build
adds a reading by the runtime's own names ("TPU:3"). The stock build has none; this module then raises, never returns 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch_xla

BINDING = "_xla_runtime_memory_info"


class MemoryReadingError(RuntimeError):
    """A chip's memory cannot be read. The message is one line."""


def chip_memory(chip: str) -> dict[str, int]:
    """Return bytes_used and bytes_limit of a chip by its runtime name, "TPU:3".

    Raises MemoryReadingError if this torch_xla has no such reading, if it fails, or if it returns 0: a chip in
    training uses some memory, and has a limit.
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
        raise MemoryReadingError(f"no memory reading of {chip}: the runtime returned {dict(info)}")
    return found
