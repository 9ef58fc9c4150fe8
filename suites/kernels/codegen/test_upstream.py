"""mamba-ssm's SSD kernels, forward, at the model's shapes: each autotune configuration compiled for an H200.

Only a GPU can determine the fastest configuration. This finds what a version of triton can lose: configurations that no
longer fit, and those that begin to spill. B batch, T tokens, H heads, P head dim, N state dim, G groups.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from bumpgate.core import kernel_code
from suites.support.lanes import Lane, lanes
from suites.support.recording_driver import Compiled, recording

B, T, H, P, CHUNK = 4, 4096, 112, 64, 128
SHAPES = {"N64-G8": (64, 8), "N128-G1": (128, 1)}
KERNELS = {
    "_chunk_cumsum_fwd_kernel",
    "_chunk_state_fwd_kernel",
    "_state_passing_fwd_kernel",
    "_bmm_chunk_fwd_kernel",
    "_chunk_scan_fwd_kernel",
}


@pytest.fixture(scope="module")
def upstream() -> Iterator[SimpleNamespace]:
    """The launch functions of the unpacked wheel, without the other imports of its package."""
    with pytest.MonkeyPatch.context() as patched:
        package = ModuleType("mamba_ssm")
        package.__path__ = [os.path.join(os.environ["BUMPGATE_UPSTREAM"], "mamba_ssm")]
        patched.setitem(sys.modules, "mamba_ssm", package)
        if importlib.util.find_spec("einops") is None:
            # Imported at the top of each file; the launch functions do not need it.
            patched.setitem(sys.modules, "einops", SimpleNamespace(rearrange=None, repeat=None))
        patched.setattr(torch.cuda, "device", lambda *_: nullcontext())
        files = ("ssd_chunk_state", "ssd_state_passing", "ssd_bmm", "ssd_chunk_scan")
        functions = {}
        for file in files:
            functions |= vars(import_module(f"mamba_ssm.ops.triton.{file}"))
        yield SimpleNamespace(**functions)
        for name in [n for n in sys.modules if n.startswith("mamba_ssm.")]:
            del sys.modules[name]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def forward(upstream: SimpleNamespace, N: int, G: int) -> list[Compiled]:
    """Compile the five launches of a call with documents, as in kernels/ssd_chunk_scan/upstream.py.

    Each with every configuration: the autotuner's choice for another shape is cleared first.
    """
    for kernel in KERNELS:
        getattr(upstream, kernel).cache.clear()
    x, key, query = meta(B, T, H, P), meta(B, T, G, N), meta(B, T, G, N)
    dt, A, D = (meta(*shape, dtype=torch.float32) for shape in ((B, T, H), (H,), (H,)))
    ids = meta(B, T, dtype=torch.int32)
    with recording() as launched:
        decay, dt = upstream._chunk_cumsum_fwd(dt, A, CHUNK)
        states = upstream._chunk_state_fwd(key, x, dt, decay, seq_idx=ids, states_in_fp32=True)
        states, _ = upstream._state_passing_fwd(
            states.flatten(3), decay[..., -1], seq_idx=ids, chunk_size=CHUNK, out_dtype=query.dtype
        )
        scores = upstream._bmm_chunk_fwd(query, key, CHUNK, seq_idx=ids, output_dtype=torch.float32)
        states = states.unflatten(-1, (P, N))
        upstream._chunk_scan_fwd(scores, x, dt, decay, query, states, D=D, seq_idx=ids)
    return launched


@lanes("cpu")
@pytest.mark.parametrize("shape", SHAPES)
def test_upstream_configurations_fit_and_spill(
    lane: Lane, shape: str, row, upstream: SimpleNamespace
) -> None:
    kernels: defaultdict[str, list[Compiled]] = defaultdict(list)
    for compiled in forward(upstream, *SHAPES[shape]):
        kernels[compiled.kernel].append(compiled)
    assert kernels.keys() == KERNELS
    for kernel, tried in kernels.items():
        fitting = [c for c in tried if c.fits]
        spilling = [c for c in fitting if c.binary.spilled_bytes]
        row.code(
            f"kernels/mamba_ssm.{kernel.lstrip('_')}-{shape}-bf16/code",
            kernel_code.text(fitting_configurations=len(fitting), spilling_configurations=len(spilling)),
            seen=tried,
            rule="C36",
            evidence=[f"{c.binary.spilled_bytes} bytes: {c.configuration()}" for c in spilling],
        )
