"""Memory of a process."""

from __future__ import annotations

import re
from pathlib import Path


def peak_rss_bytes() -> int:
    """Return the largest resident set of this process since it started its program, in bytes. Linux only.

    `ru_maxrss` of getrusage is not it: a process inherits that of the parent that started it.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM: the kernel does not report the peak memory")
    return int(found[1]) * 1024
