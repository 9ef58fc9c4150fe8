"""A user's command line for the shell."""

from __future__ import annotations

import subprocess

from bumpgate.core.errors import BumpgateError, one_line


def require_syntax(command: str) -> None:
    """Raise BumpgateError (one line) if /bin/sh cannot parse a command line of the option --command."""
    done = subprocess.run(["/bin/sh", "-n", "-c", command], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise BumpgateError(f"--command {command!r}: {one_line(done.stderr)}")
