"""mamba-ssm's own SSD kernels under the interpreter, unmodified, against our reference in fp64.

Our kernels are tested against our reference. If others' kernels pass by the same rule, the reference computes the same
function. Only a GPU can determine the fastest of their autotune configurations: here the smallest tiles are used.

B batch, T tokens, H heads, P head dim, N state dim, G groups.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from kernels.ssd_chunk_scan.eager import ssd_chunk_scan_eager
from kernels.ssd_chunk_scan.naive import SsdInputs, ssd_chunk_scan_step
from kernels.ssd_chunk_scan.upstream import INSTALL, load, ssd_chunk_scan_upstream
from suites.ops.spec import INTERPRETED_DTYPES as DTYPES
from suites.ops.ssd_chunk_scan import make_inputs
from suites.support.comparison import doubled, gradients, outside
from suites.support.lanes import Lane, lanes
from suites.support.operands import OperandsIn

TILES = "mamba_ssm.ops.triton."
STRIDES_OF_NONE = "mamba-ssm==2.3.2.post1"  # the one version that was tested
SIZES = (2, 37, 4, 8, 16, 2, 16)  # B T H P N G chunk size
# Where documents begin, and whether an initial state is given.
CASES = {
    "state": ((), True),
    "documents": ((5, 6, 27), False),
    "documents-state": ((5, 6, 27), True),
    "documents-at-chunks": ((16, 29), True),  # in row 0 with its second chunk, in row 1 with its third
}


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """Import the package without its __init__, which needs a CUDA extension and the transformers library. The device is
    the host with one SM, and each kernel uses its configuration with the smallest tiles, the cheapest here.
    """
    found = importlib.util.find_spec("mamba_ssm")
    assert found is not None, f"mamba_ssm is absent: {INSTALL}"
    package = ModuleType("mamba_ssm")
    package.__path__ = list(found.submodule_search_locations)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "mamba_ssm", package)
        patched.setattr(torch.cuda, "device", lambda *_: nullcontext())
        patched.setattr(
            torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=1)
        )
        load()
        for kernel in tuned():
            patched.setattr(kernel, "configs", [min(kernel.configs, key=size)])
        yield
        for name in [n for n in sys.modules if n.startswith("mamba_ssm.")]:
            del sys.modules[name]


def make_op_inputs(dtype: torch.dtype, starts: tuple[int, ...] = (5, 6, 27)) -> list[Tensor]:
    """Return the op's inputs without chunk_size."""
    inputs = make_inputs(*SIZES[:-1], dtype=dtype, starts=starts)
    return [*(inputs | {"D": inputs["D"].to(dtype)}).values()]


def tuned() -> list[Autotuner]:
    modules = [m for name, m in sys.modules.items() if name.startswith(TILES)]
    return [k for m in modules for k in vars(m).values() if isinstance(k, Autotuner)]


def size(configuration: triton.Config) -> int:
    return math.prod(configuration.kwargs.values())


def broken(
    launch: Callable[..., Sequence[Tensor]], dtype: torch.dtype, starts: tuple[int, ...], state: bool
) -> list[str]:
    """Return violations of the ratio rule in (y, final state, gradients of the inputs) of `launch`."""
    *inputs, given = make_op_inputs(dtype, starts)
    inputs.append(given if state else torch.zeros_like(given))

    def results(scan: Callable[..., Sequence[Tensor]], given: Sequence[Tensor]) -> list[Tensor]:
        return gradients(lambda *tensors: scan(SsdInputs(*tensors[:-1]), tensors[-1], SIZES[-1]), *given)

    exact = results(ssd_chunk_scan_eager, doubled(inputs))
    with OperandsIn(dtype) if dtype == torch.float16 else nullcontext():
        plain = results(ssd_chunk_scan_eager, inputs)
    return outside(results(launch, inputs), plain, exact)


@lanes("cpu")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_scan_meets_error_ratio_rule(lane: Lane, dtype: str, case: str) -> None:
    assert not broken(ssd_chunk_scan_upstream, DTYPES[dtype], *CASES[case])


@lanes("cpu")
def test_error_ratio_rule_rejects_document_leaks(lane: Lane) -> None:
    def leaking(i: SsdInputs, *rest: Any) -> tuple[Tensor, Tensor]:
        return ssd_chunk_scan_upstream(i._replace(doc_ids=torch.zeros_like(i.doc_ids)), *rest)

    assert broken(leaking, torch.float32, *CASES["documents"])


@lanes("cpu")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_step_meets_error_ratio_rule(lane: Lane, dtype: str) -> None:
    inputs = of_a_token(DTYPES[dtype])
    exact, plain = (
        ssd_chunk_scan_step(SsdInputs(*tensors[:-1]), tensors[-1]) for tensors in (doubled(inputs), inputs)
    )
    assert not outside(upstream_step(*inputs), plain, exact)


@lanes("cpu")
def test_step_without_a_bias(lane: Lane, row) -> None:
    """Defect present: without a bias, the default, the step reads the strides of None. Workaround: a bias of zeros."""
    inputs = of_a_token(torch.float32)
    signature = ""
    try:
        found, expected = upstream_step(*inputs, biased=False), upstream_step(*inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    except (AttributeError, TypeError) as error:
        signature = str(error)
        if "NoneType" not in signature:
            raise
    row.defect(
        "kernels/upstream_ssd_step/no_bias_refused", bool(signature), known_in=STRIDES_OF_NONE,
        reason="selective_state_update reads the strides of dt_bias also where it is None "
        "(mamba_ssm/ops/triton/selective_state_update.py)", witness=len(inputs), rule="C36",
        evidence=[signature] if signature else [],
    )  # fmt: skip


def of_a_token(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the inputs of `ssd_chunk_scan_step` in their order, the state last."""
    x, dt, A, Bmat, Cmat, D, _, state = make_op_inputs(dtype)
    return x[:, 0], dt[:, 0], A, Bmat[:, 0], Cmat[:, 0], D, state


def upstream_step(
    x: Tensor, dt: Tensor, A: Tensor, Bmat: Tensor, Cmat: Tensor, D: Tensor, state: Tensor,
    biased: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Arguments and results of `ssd_chunk_scan_step`; the kernel updates the state in place. biased: with zeros."""
    H, P, N = state.shape[1:]
    state = state.clone()
    rate, decay = dt[..., None].expand(-1, -1, P), A[:, None, None].expand(-1, P, N)
    step = import_module(f"{TILES}selective_state_update").selective_state_update
    bias = dt.new_zeros(H, 1).expand(-1, P) if biased else None
    return step(state, x, rate, decay, Bmat, Cmat, D[:, None].expand(-1, P), dt_bias=bias), state
