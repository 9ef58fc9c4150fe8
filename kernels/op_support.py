"""What the ops have in common around their mathematics: autocast, fresh outputs, and checks of their inputs.

Not an op: it knows none of them. The checks are static, they read shapes and dtypes and no data, and each raises
ValueError in one line that begins with the op's name.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

IMPLS = ("op", "reference")
WITH_PEER = (*IMPLS, "upstream")


def full_precision(t: Tensor) -> torch.autocast:
    """Autocast reaches into an op's body and would run its products in bf16; they belong in fp32."""
    return torch.autocast(t.device.type, enabled=False)


def fresh(t: Tensor) -> Tensor:
    """A copy in canonical strides: an op may return neither a view of an input nor strides its fake lacks."""
    return t.clone(memory_format=torch.contiguous_format)


def launch_on_cuda(op: Any, kernel: str, fp64: Callable[..., Any] | None = None) -> None:
    """On CUDA the custom op runs `kernel`, a dotted name imported at the first call: the CPU does without triton.

    `fp64` takes its place where the first input is fp64, the oracle's dtype, which the kernel does not know.
    """
    module, _, name = kernel.rpartition(".")

    def launch(*inputs: Any) -> Any:
        if fp64 is not None and inputs[0].dtype == torch.float64:
            return fp64(*inputs)
        return getattr(import_module(module), name)(*inputs)

    op.register_kernel("cuda")(launch)


def plain_on_xla(impl: str, t: Tensor) -> str:
    """`impl`, but "reference" in place of "op" for tensors on XLA.

    torch_xla runs a custom op's body below functionalization: a write into a view is lost there, without a word, and
    a step of narrow nam12 made 211 uploads, traced through none. Nor is there a compiler to be opaque to.
    """
    return "reference" if impl == "op" and t.device.type == "xla" else impl


def has_shape(t: Tensor, shape: tuple[int, ...]) -> bool:
    """Axis by axis: to compare tuples would leave a dead node in the graph for a symbolic batch."""
    return t.dim() == len(shape) and all(a == b for a, b in zip(t.shape, shape))


def check_impl(op: str, impl: str, impls: tuple[str, ...] = IMPLS) -> None:
    """Raises ValueError where impl is none of `impls`."""
    if impl not in impls:
        raise ValueError(f"{op}: impl is {impl!r}, choices are {impls}")


def peer(op: str, module: str, install: str) -> Any:
    """The third-party module behind impl="upstream". Raises ImportError with the install line where it is absent."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{op}: impl 'upstream' needs {module} ({error}); install it with: {install}"
        ) from error


def check_shapes(op: str, wanted: Mapping[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    """`wanted`: name -> (tensor, its shape). Raises ValueError on the first tensor of another shape."""
    for name, (tensor, shape) in wanted.items():
        if not has_shape(tensor, shape):
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, wanted {tuple(shape)}")


def check_floating(op: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError on the first tensor, by name, that is not floating point."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{op}: {name} must be floating point, not {tensor.dtype}")


def check_doc_ids(op: str, doc_ids: Tensor) -> None:
    """Raises ValueError where the document ids are not int32."""
    if doc_ids.dtype != torch.int32:
        raise ValueError(f"{op}: doc_ids must be int32, not {doc_ids.dtype}")
