"""The TPU's own compiler without a TPU: libtpu's compile-only client, used through jax.

A train step is traced by torch_xla, exported as StableHLO and compiled for chips that are not present. The result is
what such a chip would run: its instructions, fusions and collectives, and its memory in bytes. It cannot be run here.
Every private name of jax that this project reads is in this file; jax and libtpu are pinned.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

# A compile-only client must not query the metadata server, and jax itself needs no TPU.
ENVIRONMENT = {"PJRT_DEVICE": "CPU", "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
CHIPS = {"v6e:1x1": 1, "v6e:2x2": 4}
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_OPCODE = re.compile(r"^\s+(?:ROOT )?%\S+ = .*?(?:\}|\]|\)) ([a-z][a-z0-9-]*)\(", re.MULTILINE)


class AotError(RuntimeError):
    """The compiler returned no program, or its dump has an unexpected format. The message is one line."""


@dataclass(frozen=True)
class Compiled:
    """A program for a chip. instructions, fusions and collectives (by kind) are counts, the others bytes per chip."""

    chip: str
    instructions: int
    fusions: int
    collectives: dict[str, int]
    temporary_bytes: int
    argument_bytes: int
    code_bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def chips(topology: str) -> Any:
    """Return the devices of an absent topology. One process at a time: libtpu aborts if two load at once."""
    from jax.experimental import topologies

    # No chip is used here, so libtpu's lock of one process per chip protects nothing.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    with FileLock(Path(tempfile.gettempdir()) / f"bumpgate-{os.getuid()}.libtpu"):
        return topologies.get_topology_desc(topology, platform="tpu").devices


def compile_for(topology: str, bytecode: bytes) -> Compiled:
    """Compile StableHLO (torch_xla's portable bytecode) for each chip of the topology, one of CHIPS.

    Raises AotError with the compiler's own first line if compilation fails, for example if the program is too large for
    the chip's memory.
    """
    os.environ.pop("TPU_ACCELERATOR_TYPE", None)  # older compile-only clients abort on it
    from jax._src.interpreters import mlir
    from jax.errors import JaxRuntimeError
    from jaxlib import xla_client
    from jaxlib.mlir.dialects import stablehlo

    devices = chips(topology)
    module = stablehlo.deserialize_portable_artifact(mlir.make_ir_context(), bytecode)
    with tempfile.TemporaryDirectory() as dump:
        options = _options(xla_client, len(devices), dump)
        try:
            program = devices[0].client.compile(module, xla_client.DeviceList(tuple(devices)), options)
        except JaxRuntimeError as error:
            raise AotError(" ".join(str(error).split())[:600]) from None
        text = _optimized(Path(dump))
    opcodes, memory = opcode_counts(text), program.get_compiled_memory_stats()
    return Compiled(
        chip=devices[0].device_kind,
        instructions=opcodes.total(),
        fusions=opcodes["fusion"],
        collectives=collectives(opcodes),
        temporary_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
    )


def _options(xla_client: Any, chips: int, dump: str) -> Any:
    """Set options for one partitioned program and a text dump: jaxlib cannot parse a newer libtpu's HLO."""
    import numpy as np

    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, chips
    options.device_assignment = xla_client.DeviceAssignment.create(np.arange(chips, dtype=np.int32)[None])
    options.executable_build_options.use_spmd_partitioning = chips > 1
    options.executable_build_options.use_shardy_partitioner = False  # torch_xla writes GSPMD annotations
    options.env_option_overrides = [("xla_dump_to", dump), ("xla_dump_hlo_as_text", True)]
    return options


def _optimized(dump: Path) -> str:
    """Return the optimized module's text. The compiler moves parts into separate modules, dumped next to it."""
    found = [path for path in dump.glob("*.after_optimizations.txt") if ".extracted." not in path.name]
    if len(found) != 1:
        raise AotError(
            f"{len(found)} optimized modules in the dump, expected 1: {[path.name for path in found]}"
        )
    return found[0].read_text()


def opcode_counts(text: str) -> Counter[str]:
    """Count each operation in a module's text, in all its computations."""
    return Counter(_OPCODE.findall(text))


def collectives(opcodes: Counter[str]) -> dict[str, int]:
    """Count collectives by kind; one that runs in parallel with computation is counted at its start."""
    counts = {kind: opcodes[kind] + opcodes[f"{kind}-start"] for kind in COLLECTIVES}
    return {kind: count for kind, count in counts.items() if count}
