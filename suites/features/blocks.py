"""Programs of the model's counts for `bumpgate reproduce`, which first reduces the settings of each.

A program's parameters are its settings, in the order in which they shrink. B batch, T tokens, D model dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.hybrid import BLOCKS, documents
from model.presets import preset
from suites.features.corpus.case import one_graph


def block_and_inputs(kind: str, tokens: int, width: int, batch: int = 2) -> tuple[nn.Module, list[Tensor]]:
    """Return a block of the narrow hybrid and its inputs: a stream (B,T,D), but for E document ids and positions."""
    config = preset("nam56r", d_model=width)
    ids = torch.randint(0, config.vocab_size, (batch, tokens))
    inputs = [torch.randn(batch, tokens, width), *documents(ids, config.bos_id)]
    return BLOCKS[kind](config), inputs[: 1 if kind == "E" else 3]


def graph_breaks(kinds=("A:gqa", "M:mamba3", "E", "R"), tokens: int = 64, width: int = 64) -> list[str]:
    """A block of the hybrid no longer compiles to one graph."""
    made = [(kind, *block_and_inputs(kind, tokens, width)) for kind in kinds]
    return [f"{kind} {line}" for kind, block, inputs in made for line in one_graph(block, *inputs)]


def recompiles(kinds=("A:gqa", "M:mamba3", "E", "R"), batches=(2, 3, 4), width: int = 64) -> int:
    """Graphs of the hybrid's blocks over batches of several sizes."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]):
        graphs.append(graph)
        return graph.forward

    for kind in kinds:
        block, _ = block_and_inputs(kind, 16, width)
        compiled = torch.compile(block, backend=backend)
        for batch in batches:
            compiled(*block_and_inputs(kind, 16, width, batch)[1])
    return len(graphs)
