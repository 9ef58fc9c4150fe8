"""Provenance of a record: versions, machine, commit. Read from files, so that nothing here imports torch.

A session's controller calls this before any worker runs, and must survive a torch that does not import.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import runpy
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from bumpgate.core.lanes import Lane
from bumpgate.process.host import cpu_model, host_cores, read_or_empty
from bumpgate.process.tree_digest import measured_tree

TRITON_NAMES = ("triton", "pytorch-triton", "pytorch-triton-xpu", "pytorch-triton-rocm")


def collect(lane: Lane, device: str, root: Path, record: Path, *, full_run: bool) -> dict[str, Any]:
    """Return what distinguishes one record from another; JSON types only, null for missing facts.

    record: the path of the record, which is no part of the sources.
    """
    return {
        "lane": lane.name,
        "device": device,
        "driver": driver(),
        "cpu": cpu_model(),
        "cores": host_cores(),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **versions(),
        **({"xla": xla_versions()} if lane.device == "xla" else {}),
        **_commit(root),
        "tree": measured_tree(root, record),
        "command": command_line(sys.argv),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "full_run": full_run,
    }


def missing_bytecode() -> str:
    """Return one line with a command if no process can import torch from bytecode; "" otherwise.

    An image built with $PYTHONDONTWRITEBYTECODE has none, and each process of a lane takes seconds longer.
    """
    found = importlib.util.find_spec("torch")
    if not sys.dont_write_bytecode or not found or not found.origin:
        return ""
    if Path(importlib.util.cache_from_source(found.origin)).exists():
        return ""
    folder = shlex.quote(str(Path(found.origin).parent))
    return (
        "torch has no bytecode, and $PYTHONDONTWRITEBYTECODE keeps it so: each process compiles its sources again. "
        f"Compile them once with: python -m compileall -q -j 0 {folder}"
    )


def command_line(arguments: list[str]) -> str:
    """Return the command line that repeats the run, with the program's name instead of its path."""
    program, *rest = arguments
    module = Path(program)
    started = ("python", "-m", module.parent.name) if module.name == "__main__.py" else (module.name,)
    return shlex.join([*started, *rest])


@lru_cache(maxsize=1)
def versions() -> dict[str, str | None]:
    """Return torch, torch_git, triton and wheel_set: the hash of every installed name and version."""
    torch = _torch_version_file()
    return {
        "torch": torch.get("__version__"),
        "torch_git": torch.get("git_version"),
        "triton": next((v for v in map(_installed, TRITON_NAMES) if v), None),
        "wheel_set": _wheel_set(),
    }


def xla_versions() -> str:
    """Return the pinned set in one line."""
    names = ("torch_xla", "libtpu", "jax")
    found = [f"torch {versions()['torch']}", *(f"{name} {_installed(name)}" for name in names)]
    return " | ".join([*found, f"PJRT_DEVICE={os.environ.get('PJRT_DEVICE')}"])


def _torch_version_file() -> dict[str, Any]:
    """Return the globals of torch/version.py, run alone: the wheel's label and the commit that it was built from."""
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    return runpy.run_path(str(path)) if path and path.is_file() else {}


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _wheel_set() -> str:
    read = (d.metadata for d in metadata.distributions())
    names = sorted({f"{m['Name']}=={m['Version']}".lower() for m in read})
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def driver() -> str | None:
    """Return the version of the loaded NVIDIA kernel module."""
    found = re.search(r"Module\s+(?:for \S+\s+)?(\d[\d.]+)", read_or_empty("/proc/driver/nvidia/version"))
    return found[1] if found else None


def _commit(root: Path) -> dict[str, Any]:
    """Return the commit of the work tree, and whether the tree differs from it; null outside of git."""
    commit = _git(root, "rev-parse", "HEAD")
    return {"commit": commit, "dirty": None if commit is None else bool(_git(root, "status", "--porcelain"))}


def _git(root: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
