"""Kills process groups once the process that writes to standard input has ended, however it ended.

Run by path: `python -I -S orphans.py`. Each line of input is the id of a group. Standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

if __name__ == "__main__":
    groups = [int(line) for line in sys.stdin]  # until the pipe closes
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
