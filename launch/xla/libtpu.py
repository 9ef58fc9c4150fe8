"""libtpu, the TPU's compiler and runtime: its version is pinned exactly, its flags are checked by a table per version.

A libtpu that does not support one of LIBTPU_INIT_ARGS aborts the process at the first device, on every host of a
slice. The flags are therefore checked before torch_xla is imported; this module imports only the standard library.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from importlib import metadata

VARIABLE = "LIBTPU_INIT_ARGS"
# Version -> flag -> whether that libtpu accepts it. Measured with the compile-only client; a version (or nightly) that
# is not listed has not been tested. `jf`, which once replaced xla_disable_hlo_passes, has been removed as well; the
# remaining flags are named after a chip generation.
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
    """libtpu is not the pinned version, or does not support a flag. The message is one line."""


def installed() -> str:
    """Return the installed version. Raises LibtpuError if there is none."""
    try:
        return metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        raise LibtpuError("libtpu is not installed: bumpgate lanes install v6e") from None


def check_pinned(version: str, pinned: str) -> None:
    """Raise LibtpuError unless the two strings are equal: 0.0.36, 0.0.37 and a nightly of it all differ."""
    if version != pinned:
        raise LibtpuError(
            f"libtpu {version} is installed, {pinned} is pinned: uv pip install libtpu=={pinned}"
        )


def flags(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the flags in LIBTPU_INIT_ARGS, without dashes and values."""
    words = shlex.split(environment.get(VARIABLE, ""))
    return tuple(word.lstrip("-").partition("=")[0] for word in words if word.startswith("-"))


def check_flags(environment: Mapping[str, str], version: str) -> None:
    """Raise LibtpuError on a flag that this version does not support, or that was not tested with it."""
    known = FLAGS.get(version, {})
    for flag in flags(environment):
        if flag not in known:
            raise LibtpuError(f"{VARIABLE}: --{flag} has not been tried on libtpu {version}: add it to FLAGS")
        if not known[flag]:
            takes = [other for other, yes in known.items() if yes]
            raise LibtpuError(
                f"{VARIABLE}: libtpu {version} does not take --{flag} (of its kind: {', '.join(takes)})"
            )
