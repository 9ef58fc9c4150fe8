"""Blocks as CUDA graphs: a forward is recorded once and replayed without the host.

A recording accepts no host read, no branch on a value and no allocation that outlives it, so a block that records and
replays to the same bits proves that its whole forward, our kernels in it, runs without the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from model import Hybrid

WARM_UPS = 3


class CaptureError(RuntimeError):
    """A block that cannot be recorded, in one line."""


def chosen_blocks(model: Hybrid, kinds: Iterable[str]) -> dict[str, nn.Module]:
    """The first block of each requested kind. Raises ValueError where the model has none of a kind.

    Without it a misspelt kind would leave nothing to record and nothing to fail.
    """
    first = dict(zip(reversed(model.config.kinds), reversed(model.blocks)))
    missing = sorted(set(kinds) - set(first))
    if missing:
        have = ", ".join(sorted(first))
        raise ValueError(f"{model.config.name} has no block of kind {', '.join(missing)}; it has {have}")
    return {kind: first[kind] for kind in kinds}


def _end_of_recording() -> None:
    """Makes random numbers possible again after a recording that failed.

    torch 2.11 leaves the device's generator as one that is being recorded, and each later draw raises "Offset
    increment outside graph capture encountered unexpectedly". A copy of its state is not marked so.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


def capture(block: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor, ...]]:
    """Records block(*inputs) without gradients on CUDA -> a function of like tensors that replays it.

    The result is overwritten by the next replay. Raises CaptureError with CUDA's reason.
    """
    held = tuple(t.clone() for t in inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(WARM_UPS):  # kernels are compiled and memory is taken before the recording
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
