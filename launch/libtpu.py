"""libtpu, the TPU's compiler and runtime: its version is pinned and compared whole, its flags go by a table a version.

A libtpu that does not know one of LIBTPU_INIT_ARGS ends the process at the first device, on every host of a slice. So
the flags are checked before torch_xla is imported, and this module imports the standard library only.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from importlib import metadata

VARIABLE = "LIBTPU_INIT_ARGS"
# Version -> flag -> whether that libtpu takes it. Measured with the compile-only client; a version, a nightly too,
# that stands not here has not been asked. `jf`, which once replaced xla_disable_hlo_passes, has gone itself; what is
# left is named after a chip's generation.
_OLD = {
    "xla_disable_hlo_passes": False,
    "xla_jf_vmem_memory_space_assignment": True,
    "xla_vf_vmem_memory_space_assignment": True,
    "xla_gf_vmem_memory_space_assignment": True,
}
FLAGS: dict[str, dict[str, bool]] = {
    "0.0.36": _OLD,
    "0.0.37": _OLD,
    "0.0.51": _OLD | {"xla_jf_vmem_memory_space_assignment": False},
}


class LibtpuError(RuntimeError):
    """Another libtpu than the pinned one, or a flag that it does not take. The message is one line."""


def installed() -> str:
    """The installed version. Raises LibtpuError where there is none."""
    try:
        return metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        raise LibtpuError("libtpu is not installed: install the extra v6e") from None


def check_pinned(version: str, pinned: str) -> None:
    """Raises LibtpuError unless the two are the same text: 0.0.36, 0.0.37 and a nightly of it are three programs."""
    if version != pinned:
        raise LibtpuError(
            f"libtpu {version} is installed, {pinned} is pinned: uv pip install libtpu=={pinned}"
        )


def flags(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the flags in LIBTPU_INIT_ARGS, without dashes and values."""
    words = shlex.split(environment.get(VARIABLE, ""))
    return tuple(word.lstrip("-").partition("=")[0] for word in words if word.startswith("-"))


def check_flags(environment: Mapping[str, str], version: str) -> None:
    """Raises LibtpuError on a flag that this version does not take, and on one that it has not been asked about."""
    known = FLAGS.get(version, {})
    for flag in flags(environment):
        if flag not in known:
            raise LibtpuError(f"{VARIABLE}: --{flag} has not been tried on libtpu {version}: add it to FLAGS")
        if not known[flag]:
            takes = [other for other, yes in known.items() if yes]
            raise LibtpuError(
                f"{VARIABLE}: libtpu {version} does not take --{flag} (of its kind: {', '.join(takes)})"
            )
