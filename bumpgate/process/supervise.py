"""Runs a command, and kills it with all its children when the parent process is gone.

Run by path, in its own process group: `python supervise.py COMMAND ...`, with stdin a pipe that the parent never
writes to. A killed parent cannot clean up, but its end of the pipe closes, which is detected here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

# Added to the number of a signal that ended the command; pytest's own exit codes are far below.
SIGNALLED = 128


def end_with_the_starter() -> None:
    """Wait for the other end of the pipe to close, however its holder ended, then kill the group."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    # The command gets the signal itself, as part of the group; a handler, unlike SIG_IGN, is not inherited.
    signal.signal(signal.SIGINT, lambda *_: None)
    threading.Thread(target=end_with_the_starter, daemon=True).start()
    # Inherited descriptors are meant for the command; this process's own are not inherited.
    code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL, close_fds=False)
    os._exit(code if code >= 0 else SIGNALLED - code)
