"""tlparse's own pages of a trace, if it is installed: every graph, guard and kernel that the report leaves out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from bumpgate.core.errors import one_line

SECONDS = 600
ABSENT = "tlparse's own pages show every graph, guard and kernel: pip install tlparse"


def program() -> str | None:
    """Return the path of tlparse: of this environment, else on PATH; None without one."""
    own = str(Path(sys.executable).parent)
    return shutil.which("tlparse", path=os.pathsep.join((own, os.environ.get("PATH", os.defpath))))


def pages(logs: Sequence[Path], folder: Path) -> tuple[dict[str, str], str]:
    """Return log name -> address of its page, relative to the folder's parent; and a line on logs without one.

    folder is replaced completely, or not changed if no page was made.
    """
    if (tool := program()) is None:
        return {}, ABSENT
    made: dict[str, str] = {}
    faults = []
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as partial:
        fresh = Path(partial, folder.name)
        fresh.mkdir()
        for log in logs:
            if fault := _run(tool, log, fresh / log.stem):
                faults.append(f"{log.name}: {fault}")
            else:
                made[log.name] = quote(f"{folder.name}/{log.stem}/index.html")
        if made:
            if folder.exists():
                folder.rename(Path(partial, "old"))
            fresh.rename(folder)
    more = f" (and {len(faults) - 1} more)" * (len(faults) > 1)
    return made, f"tlparse made no page of {faults[0]}{more}" if faults else ""


def _run(tool: str, log: Path, out: Path) -> str:
    """Run tlparse; return why it failed, in one line, or ""."""
    command = [tool, str(log), "-o", str(out), "--no-browser"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"not finished in {SECONDS} s"
    except OSError as error:
        return f"{tool}: {error.strerror}"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no output"]
        return one_line(f"exit {done.returncode}: {lines[0]}")
    return "" if (out / "index.html").is_file() else "no index.html"
