"""Memory of the chip that a training uses, for its log."""

from __future__ import annotations

import psutil
import torch


def memory_of(device: torch.device) -> dict[str, int | str]:
    """Return bytes_used and bytes_limit of a GPU or TPU chip; on the CPU, of this process and the host.

    A chip that gives no reading has the key `memory_error`, one line, instead: 0 would look like a reading.
    """
    if device.type == "cuda":
        free, limit = torch.cuda.mem_get_info(device)
        return {"bytes_used": limit - free, "bytes_limit": limit}
    if device.type == "xla":
        from launch.xla.tpu_memory import MemoryReadingError, chip_memory

        try:
            return {**chip_memory(f"TPU:{device.index or 0}")}
        except MemoryReadingError as error:
            return {"memory_error": str(error)}
    return {"bytes_used": psutil.Process().memory_info().rss, "bytes_limit": psutil.virtual_memory().total}
