"""A Triton driver that simulates an H200: kernels are compiled for sm_90a and recorded, and never run.

Triton queries its active driver for the target, the device's limits, a loader of cubins and a launcher. This driver
answers for an H200. Its loader parses the cubin instead of loading it, and its launcher records which compiled kernel
was launched. So a launch function runs unchanged, on meta tensors, with the configuration, the specialized strides and
the alignment that it has on the GPU. Triton's private names occur only in this file.

The data comes from the cubin that would be loaded, through the Triton wheel's own cuobjdump: registers and stack from
its resource table, spilled bytes and instruction classes from its SASS.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver as drivers

from bumpgate.core.kernel_code import Binary, read_sass

WARP = 32
TARGET = GPUTarget("cuda", 90, WARP)
# What one program may use, and the registers that its threads share, allocated per warp in units of 256.
SHARED_MEMORY_BYTES = 227 * 1024
REGISTERS, REGISTERS_AT_ONCE = 65536, 256
THREADS = 1024
# Resources of an SM of compute capability 9.0: shared memory, of which each program reserves a part, warps and
# programs.
SM_SHARED_MEMORY_BYTES, RESERVED_BYTES = 228 * 1024, 1024
WARPS, PROGRAMS = 64, 32


@dataclass(frozen=True)
class Compiled:
    """A kernel in one configuration.

    constants: compile-time arguments by name, including those that Triton specializes itself (a stride of 1, an absent
    pointer). signature: the types of the others. shared_memory_bytes is per program. source: Triton's.
    """

    kernel: str
    constants: Mapping[str, object]
    signature: Mapping[str, str]
    num_warps: int
    num_stages: int
    shared_memory_bytes: int
    binary: Binary
    source: Any = None

    @property
    def fits(self) -> bool:
        """Return whether an H200 would launch it."""
        warp = -(-self.binary.registers * WARP // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
        return self.shared_memory_bytes <= SHARED_MEMORY_BYTES and warp * self.num_warps <= REGISTERS

    @property
    def programs_per_sm(self) -> int:
        """Return the number of programs that one SM of an H200 holds at once; 0 if not even one fits."""
        warp = -(-self.binary.registers * WARP // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
        by_shared_memory = SM_SHARED_MEMORY_BYTES // (self.shared_memory_bytes + RESERVED_BYTES)
        return min(REGISTERS // (warp * self.num_warps), by_shared_memory, WARPS // self.num_warps, PROGRAMS)

    def configuration(self) -> str:
        """Format the compile-time arguments, warps and stages in one line."""
        given = {**self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages}
        return " ".join(f"{name}={value}" for name, value in given.items())


class RecordingDriver(DriverBase):
    """`launched`: what was launched since the driver became active, each compiled kernel once, in order."""

    def __init__(self) -> None:
        self.launched: list[Compiled] = []
        self.utils = _Loader()
        self.launcher_cls = _Launcher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Any:
        """Return the autotuner's benchmark function: it launches each configuration once and reports equal times."""

        def launch_once(launch: Any, *, quantiles: Any = None, **_: Any) -> list[float]:
            launch()
            return [1.0] * len(quantiles or [1])

        return launch_once

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(0)

    def clear_cache(self, cache: torch.Tensor) -> None:
        pass


class _Loader:
    """Parses a cubin where a driver would load it."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Report no limit of shared memory: a kernel that does not fit is measured too, and its row reports that."""
        limits = {"max_shared_mem": 2**31 - 1, "max_num_regs": REGISTERS}
        return limits | {"multiprocessor_count": 132, "warpSize": WARP}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[Any, ...]:
        binary = read_cubin(cubin)
        return name, binary, binary.registers, binary.stack_bytes // 4, THREADS


class _Launcher:
    """Replaces the C function that launches one compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.source, self.metadata = source, metadata
        self.compiled: Compiled | None = None

    def __call__(self, grid_x: int, grid_y: int, grid_z: int, stream: int, function: Binary, *_: Any) -> None:
        if self.compiled is None:
            self.compiled = _compiled(self.source, self.metadata, function)
        launched = drivers.active.launched
        if not any(self.compiled is c for c in launched):
            launched.append(self.compiled)


def _compiled(source: Any, metadata: Any, binary: Binary) -> Compiled:
    names = source.fn.arg_names

    def named(path: tuple[int, ...]) -> str:
        return ".".join([names[path[0]], *map(str, path[1:])])

    return Compiled(
        kernel=metadata.name,
        constants={named(path): getattr(value, "value", value) for path, value in source.constants.items()},
        signature={name: str(ty) for name, ty in source.signature.items() if ty != "constexpr"},
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        shared_memory_bytes=metadata.shared,
        binary=binary,
        source=source,
    )


@contextmanager
def recording() -> Iterator[list[Compiled]]:
    """Compile every launch of a Triton kernel inside the block for an H200 and record it; nothing runs.

    Yields the growing list. Not for TRITON_INTERPRET=1: the interpreter does not use a driver.
    """
    before, recorder = drivers._active, RecordingDriver()
    drivers.set_active(recorder)
    try:
        yield recorder.launched
    finally:
        drivers._active = before


def read_cubin(cubin: bytes) -> Binary:
    """Parse a cubin. Raises RuntimeError if cuobjdump cannot read it or lists no instruction."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    binary = read_sass(done.stdout + done.stderr)
    if binary is None:
        raise RuntimeError(f"cuobjdump ended with {done.returncode} and printed {done.stderr.strip()!r}")
    return binary
