"""Environment variables that an XLA process needs before torch_xla is imported: set them, or refuse to run.

torch_xla reads most of these once, at import. This module therefore imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

# Variable -> its value and the reason.
ALWAYS = {
    "XLA_NO_SPECIAL_SCALARS": (
        "1",
        "else 0 and 1 are constants of the program: a scalar that becomes 0 compiles the step again",
    ),
}
# If PJRT runs on CPU instead of a TPU: the same programs, compiled in a third of the time.
STAND_IN = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
}
DEVICES = ("CPU", "TPU")


class XlaEnvironmentError(ValueError):
    """The environment violates the requirements of XLA runs. The message is one line."""


def enter(environment: MutableMapping[str, str]) -> None:
    """Add missing variables; existing values are kept. PJRT_DEVICE defaults to CPU."""
    environment.setdefault("PJRT_DEVICE", "CPU")
    required = {name: value for name, (value, _) in ALWAYS.items()}
    for name, value in (required | (STAND_IN if environment["PJRT_DEVICE"] == "CPU" else {})).items():
        environment.setdefault(name, value)


def check(environment: Mapping[str, str]) -> None:
    """Raise XlaEnvironmentError if a variable is missing or differs."""
    device = environment.get("PJRT_DEVICE")
    if device not in DEVICES:
        raise XlaEnvironmentError(f"PJRT_DEVICE is {device!r}: export PJRT_DEVICE={' or '.join(DEVICES)}")
    for name, (value, reason) in ALWAYS.items():
        if environment.get(name) != value:
            raise XlaEnvironmentError(
                f"{name} is {environment.get(name)!r}: export {name}={value} before Python starts ({reason})"
            )
