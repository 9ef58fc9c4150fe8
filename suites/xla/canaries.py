"""Canaries of the XLA instruments: tiny programs with known counts, each of a size used nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_xla

from bumpgate.plugin.instruments.canaries import CanaryError
from suites.xla import support as device


def _expect(what: str, measured: object, known: object) -> None:
    if measured != known:
        raise CanaryError(f"{what}: read {measured!r}, known {known!r} (torch_xla {torch_xla.__version__})")


def _fresh() -> torch.Tensor:
    x = torch.ones(device.fresh_size(), 3).to(torch_xla.device())
    torch_xla.sync()
    return x


def xla_compiles() -> None:
    """One program executed twice: 1 compile, then 0; 1 execution each."""
    x = _fresh()
    seen = []
    for _ in range(2):
        with device.counted() as counts:
            y = x.sin()
            torch_xla.sync()
        seen.append((counts.compiles, counts.executions, counts.downloads, counts.uploads))
        del y
    _expect("compiles, executions, downloads, uploads", seen, [(1, 1, 0, 0), (0, 1, 0, 0)])


def xla_transfers() -> None:
    """One .to(device): 1 upload; one .item(): 1 download and the execution that it triggers."""
    _fresh()  # a process's first transfer includes the device's own state
    host = torch.ones(device.fresh_size(), 3)
    with device.counted() as counts:
        x = host.to(torch_xla.device())
    _expect("uploads, executions of .to()", (counts.uploads, counts.executions), (1, 0))
    total = x.sum()
    with device.counted() as counts:
        total.item()
    _expect("downloads, executions of .item()", (counts.downloads, counts.executions), (1, 1))


def xla_fallbacks() -> None:
    """nonzero has no lowering: 1 fallback of that name; sin has one: none."""
    x = _fresh()
    with device.counted() as counts:
        torch.nonzero(x)
    _expect("fallbacks of nonzero", dict(counts.fallbacks), {"aten::nonzero": 1})
    with device.counted() as counts:
        x.sin()
    _expect("fallbacks of sin", dict(counts.fallbacks), {})


def xla_programs() -> None:
    """Equal programs hash alike and others do not; two more operators are two more instructions; nothing executes."""
    x = _fresh()
    with device.counted() as counts:
        short, again, long = x.sin(), x.sin(), x.sin().cos().exp()
        _expect("equal programs hash alike", device.graph_hash([short]), device.graph_hash([again]))
        _expect("another hashes alike", device.graph_hash([short]) == device.graph_hash([long]), False)
        _expect("instructions more", device.instructions([long]) - device.instructions([short]), 2)
        _expect("sines", device.opcodes([long])["sine"], 1)
    _expect("compiles, executions", (counts.compiles, counts.executions), (0, 0))


def xla_no_execution() -> None:
    """A host read inside a trace raises at its own line, and only there; execution is allowed again afterwards."""
    x = _fresh()
    _expect("refusal of arithmetic", device.refused_by_tracer(lambda: x + 1), "")
    _expect("refusal of .item() is silent", device.refused_by_tracer(lambda: x.sum().item()) == "", False)
    _expect("a sum after the refusal", x.sum().item(), float(x.numel()))


XLA_CANARIES: dict[str, Callable[[], None]] = {
    f.__name__: f for f in (xla_compiles, xla_transfers, xla_fallbacks, xla_programs, xla_no_execution)
}
