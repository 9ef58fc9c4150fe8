"""Blocks as CUDA graphs: a forward is captured once and replayed without the host.

A capture allows no host read, no branch on a value and no allocation that outlives it. A block that is captured and
replayed with the same bits therefore runs its whole forward, including our kernels, without the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from model import Hybrid

WARM_UPS = 3


class CaptureError(RuntimeError):
    """A block cannot be captured. The message is one line."""


def chosen_blocks(model: Hybrid, kinds: Iterable[str]) -> dict[str, nn.Module]:
    """Return the first block of each requested kind. Raises ValueError if the model has none of a kind.

    The error catches a misspelt kind, which would otherwise capture nothing and pass.
    """
    first = dict(zip(reversed(model.config.kinds), reversed(model.blocks)))
    missing = sorted(set(kinds) - set(first))
    if missing:
        have = ", ".join(sorted(first))
        raise ValueError(f"{model.config.name} has no block of kind {', '.join(missing)}; it has {have}")
    return {kind: first[kind] for kind in kinds}


def _end_of_recording() -> None:
    """Restore random number generation: torch 2.11 leaves the generator in capture mode after a failed capture."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


def capture(block: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor, ...]]:
    """Capture block(*inputs) without gradients on CUDA -> a function of like tensors that replays it.

    The result is overwritten by the next replay. Raises CaptureError with CUDA's reason.
    """
    held = tuple(t.clone() for t in inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(WARM_UPS):  # compile kernels and allocate memory before the capture
            block(*held)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.no_grad(), torch.cuda.graph(graph):
            recorded = block(*held)
    except RuntimeError as error:
        _end_of_recording()
        raise CaptureError(f"{type(block).__name__}: {str(error).splitlines()[0]}") from error
    outputs = (recorded,) if isinstance(recorded, Tensor) else tuple(recorded)

    def replay(*given: Tensor) -> tuple[Tensor, ...]:
        for kept, new in zip(held, given, strict=True):
            kept.copy_(new)
        graph.replay()
        return outputs

    return replay
