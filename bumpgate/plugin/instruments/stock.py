"""A model and inputs for the rows that `bumpgate init --model` writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

LAYERS = 2
# Sizes of what a layer does not determine: examples, and positions or pixels.
EXAMPLES, LENGTH = 4, 32


def build(factory: Callable[..., Any]) -> nn.Module:
    """Return the model of a factory, in evaluation mode and seeded. A Hugging Face class gets random weights.

    A class with a `config_class` is built from that configuration's defaults with 2 layers.
    Raises TypeError if the factory returns something else than a torch.nn.Module.
    """
    torch.manual_seed(0)
    if config_class := getattr(factory, "config_class", None):
        config = config_class()
        config.num_hidden_layers = LAYERS
        model = factory(config)
    else:
        model = factory()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{factory!r} returned {type(model).__name__}: it must return a torch.nn.Module")
    return model.eval()


def inputs(model: nn.Module, examples: int = EXAMPLES) -> tuple[Tensor, ...]:
    """Return seeded random inputs that fit the first layer with weights: token ids, features, or an image.

    Raises TypeError on another kind of layer: write the inputs by hand.
    """
    random = torch.Generator().manual_seed(1)
    for layer in model.modules():
        if isinstance(layer, nn.Embedding):
            return (torch.randint(layer.num_embeddings, (examples, LENGTH), generator=random),)
        if isinstance(layer, nn.Linear):
            return (torch.randn(examples, layer.in_features, generator=random),)
        if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            size = (examples, layer.in_channels, *[LENGTH] * len(layer.kernel_size))
            return (torch.randn(size, generator=random),)
    raise TypeError(f"no inputs are known for {type(model).__name__}: write them into `batch`")


def output(model: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the first floating-point tensor of a model's output: of Hugging Face the loss or the logits."""
    found = model(*inputs)
    leaves = tree_leaves(tuple(found.values()) if isinstance(found, dict) else found)
    return next(x for x in leaves if isinstance(x, Tensor) and x.is_floating_point())


def difference(found: Tensor, reference: Tensor) -> float:
    """Return the root mean square of the difference over that of the reference, computed in fp64."""
    apart, reference = found.double() - reference.double(), reference.double()
    return float(apart.norm() / reference.norm().clamp_min(1e-300))


def gradients(model: nn.Module, call: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the gradients of the mean squared output, of all parameters in one vector."""
    model.zero_grad()
    output(call, inputs).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
