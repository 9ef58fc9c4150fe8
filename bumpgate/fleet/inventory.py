"""Inventories of hosts, and what differs between them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import psutil
from packaging.utils import canonicalize_name

from bumpgate.core.errors import one_line
from bumpgate.process.host import cores, cpu_model, gpu_models, read_or_empty
from bumpgate.process.tree_digest import bind

COMPILERS = ("c++", "nvcc", "ptxas")
# Settings that choose indexes, folders and compilers. Values are not compared: they may hold passwords.
SETTINGS = ("BUMPGATE_", "CC", "CUDA_HOME", "CXX", "PIP_", "TORCH", "TRITON_", "UV_")
SHOWN = 3


def take(folder: Path) -> dict[str, str]:
    """Return the facts of this host on which results may depend. folder: the source tree."""
    tree = bind(folder) if folder.is_dir() else None
    packages: dict[str, str] = {}
    for d in metadata.distributions():  # the first on the path is the one that is imported
        packages.setdefault(str(canonicalize_name(d.metadata["Name"])), d.version)
    settings = sorted(name for name in os.environ if name.startswith(SETTINGS))
    facts = {
        "source tree": tree.tree[:16] if tree else f"{folder} does not exist",
        "commit": tree.commit[:12] if tree else "none",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{_system()}, {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "processor": f"{cpu_model()}, {cores()} cores",
        "gpus": ", ".join(gpu_models()) or "none",
        "driver": one_line(read_or_empty("/proc/driver/nvidia/version").partition("\n")[0]) or "none",
        "memory": f"{round(psutil.virtual_memory().total / 2**30)} GiB",
        "settings": ", ".join(settings) or "none",
    }
    facts |= {name: _version(name) for name in COMPILERS}
    return facts | {f"package {name}": version for name, version in sorted(packages.items())}


def differences(found: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield a line for each fact that differs, with the hosts that differ from most others. found: facts by host.

    Without a majority, each value is listed with its hosts.
    """
    for fact in dict.fromkeys(name for facts in found.values() for name in facts):
        values = {host: facts.get(fact, "none") for host, facts in found.items()}
        counts = Counter(values.values()).most_common()
        if len(counts) == 1:
            continue
        usual, many = counts[0]
        if 2 * many > len(values):
            for host, value in values.items():
                if value != usual:
                    yield f"{host}: {fact} is {value}; {usual} on the {many} other{'s' * (many > 1)}"
            continue
        listed = (
            f"{value} on {', '.join(hosts[:SHOWN])}{f' and {len(hosts) - SHOWN} more' * (len(hosts) > SHOWN)}"
            for value, _ in counts
            for hosts in [[host for host, its in values.items() if its == value]]
        )
        yield f"{fact}: {'; '.join(listed)}"


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def _version(program: str) -> str:
    """Return the first line of `PROGRAM --version` that has a number."""
    if shutil.which(program) is None:
        return "none"
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return next((line for line in done.stdout.splitlines() if any(map(str.isdigit, line))), "unknown")
