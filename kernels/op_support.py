"""Shared support code of the ops: autocast, output copies, registration, and input checks.

This module does not depend on any op. The checks are static: they read shapes and dtypes, not data. Each raises
ValueError with one line that begins with the op's name.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

Named = dict[str, tuple[Tensor, str]]  # name -> (tensor, its axes, one letter each)

# The names of files of an op: its definition, plain torch, the custom op, and a peer.
IMPLS = ("naive", "eager", "op")
WITH_PEER = (*IMPLS, "upstream")


def autocast_disabled(t: Tensor) -> torch.autocast:
    """Disable autocast inside an op, so that its products run in fp32 and not in bf16."""
    return torch.autocast(t.device.type, enabled=False)


def contiguous_clone(t: Tensor) -> Tensor:
    """Copy t to canonical strides: an op may not return a view of an input, or strides that differ from its fake."""
    return t.clone(memory_format=torch.contiguous_format)


def opaque_op(
    kernel: str = "", *, eager_fp64: bool = False, schema: str | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that declares the op `bumpgate::NAME` from NAME, the eager function that computes it.

    It runs with autocast disabled, and its results are copied to canonical strides.
    kernel: "module:function" that computes it on CUDA, imported at the first call (no triton on CPU); "" for none.
    eager_fp64: whether CUDA runs the eager function if the first input is fp64 (the oracle's dtype).
    schema: of an op whose function takes *arguments; None reads it from the annotations.
    """

    def declare(body: Callable[..., Any]) -> Any:
        @wraps(body)
        def eager(*inputs: Any) -> Any:
            with autocast_disabled(inputs[0]):
                results = body(*inputs)
            if isinstance(results, Tensor):
                return contiguous_clone(results)
            copies = [contiguous_clone(t) for t in results]
            return copies if isinstance(results, list) else tuple(copies)

        def launch(*inputs: Any) -> Any:
            if eager_fp64 and inputs[0].dtype == torch.float64:
                return eager(*inputs)
            module, _, name = kernel.partition(":")
            return getattr(import_module(module), name)(*inputs)

        op = torch.library.custom_op(f"bumpgate::{body.__name__}", eager, mutates_args=(), schema=schema)
        if kernel:
            op.register_kernel("cuda")(launch)
        return op

    return declare


def scan_schemas(inputs: Any, state: Any) -> tuple[str, str]:
    """Return the schemas of a scan's forward and backward op, from the classes of its inputs and of its state.

    Forward: inputs, state, chunk_size -> y, the final state. Backward: the same, then the gradients of these results
    -> the gradients of inputs and state.
    """
    tensors = ", ".join(f"Tensor {name}" for name in (*inputs._fields, *state._fields))
    results = ", ".join(["Tensor"] * (1 + len(state._fields)))
    grads = ", ".join(f"Tensor d{name}" for name in ("y", *state._fields))
    given = f"{tensors}, SymInt chunk_size"
    return f"({given}) -> ({results})", f"({given}, {grads}) -> Tensor[]"


def document_borders(doc_ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return where documents begin (B,T), and their offsets (cu_seqlens) in the flattened batch, int32.

    The offsets are None if every row is one document. Reads doc_ids on the host.
    """
    starts = torch.ones_like(doc_ids, dtype=torch.bool)
    starts[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    if not bool(starts[:, 1:].any()):
        return starts, None
    end = doc_ids.new_tensor([doc_ids.numel()])
    return starts, torch.cat((starts.flatten().nonzero().flatten(), end)).to(torch.int32)


def resolve_impl(impl: str, t: Tensor) -> str:
    """Return `impl`, with "op" replaced by "eager" for tensors on XLA.

    torch_xla runs a custom op's body below functionalization: a write into a view is silently lost there, and a step
    of narrow nam12 made 211 uploads, but none when traced. Opacity to a compiler is also not needed on XLA.
    """
    return "eager" if impl == "op" and t.device.type == "xla" else impl


def has_shape(t: Tensor, shape: tuple[int, ...]) -> bool:
    """Compare t.shape axis by axis: comparing tuples would leave a dead node in the graph for a symbolic batch."""
    return t.dim() == len(shape) and all(a == b for a, b in zip(t.shape, shape))


def check_impl(op: str, impl: str, impls: tuple[str, ...] = IMPLS) -> None:
    """Raise ValueError if impl is not in `impls`."""
    if impl not in impls:
        raise ValueError(f"{op}: impl is {impl!r}, choices are {impls}")


def peer(op: str, module: str, install: str) -> Any:
    """Import the third-party module of impl="upstream". Raises ImportError with the install command if missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{op}: impl 'upstream' needs {module} ({error}); install it with: {install}"
        ) from error


def bind_shapes(op: str, spec: str, *tensors: Tensor | None) -> tuple[Named, dict[str, int]]:
    """Match tensors with a spec such as "q:BTHP k:BTGP" -> (name -> (tensor, axes), axis -> size).

    Each letter is an axis, whose size is read from the first tensor with this axis. None is left out.
    Raises ValueError, with the whole spec, on a wrong number of dimensions.
    """
    named: Named = {}
    for part, tensor in zip(spec.split(), tensors):
        name, _, axes = part.partition(":")
        if tensor is not None:
            named[name] = tensor, axes
    if any(tensor.dim() != len(axes) for tensor, axes in named.values()):
        first, *others = [f"{name} must be ({','.join(axes)})" for name, (_, axes) in named.items()]
        forms = ", ".join([first, *(text.replace(" must be", "") for text in others)])
        dims = ", ".join(f"{tensor.dim()}-d" for tensor, _ in named.values())
        raise ValueError(f"{op}: {forms}, not {dims}")
    sizes: dict[str, int] = {}
    for tensor, axes in named.values():
        for axis, size in zip(axes, tensor.shape):
            sizes.setdefault(axis, size)
    return named, sizes


def check_shapes(op: str, named: Named, sizes: Mapping[str, int]) -> None:
    """Raise ValueError on the first tensor whose shape differs from the sizes of its axes."""
    for name, (tensor, axes) in named.items():
        shape = tuple(sizes[axis] for axis in axes)
        if not has_shape(tensor, shape):
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {shape}")


def check_scan(op: str, named: Named, sizes: Mapping[str, int], alike: str, chunk_size: int = 1) -> None:
    """Check the inputs of a scan. alike: names of the tensors that share one dtype, separated by spaces.

    Raises ValueError on a wrong shape, a dtype that is not floating point, different dtypes of the tensors `alike`,
    document ids that are not int32, and a chunk size below 1.
    """
    check_shapes(op, named, sizes)
    check_floating(op, {name: tensor for name, (tensor, _) in named.items() if name != "doc_ids"})
    dtypes = [named[name][0].dtype for name in alike.split()]
    if any(dtype != dtypes[0] for dtype in dtypes):
        names = ", ".join(alike.split())
        raise ValueError(f"{op}: {names} must share one dtype, not {', '.join(map(str, dtypes))}")
    check_doc_ids(op, named["doc_ids"][0])
    if chunk_size < 1:
        raise ValueError(f"{op}: chunk_size must be at least 1, not {chunk_size}")


def check_floating(op: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError on the first tensor, by name, that is not floating point."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{op}: {name} must be floating point, not {tensor.dtype}")


def check_doc_ids(op: str, doc_ids: Tensor) -> None:
    """Raise ValueError if the document ids are not int32."""
    if doc_ids.dtype != torch.int32:
        raise ValueError(f"{op}: doc_ids must be int32, not {doc_ids.dtype}")
