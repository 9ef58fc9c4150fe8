"""Golden results of every kind of block and every preset, in fp64: fixtures/model/golden.safetensors.

Weights and inputs are computed by formula, so that neither is stored and no random number is drawn. A gradient is
stored as its inner product with such a formula: one number per parameter, which changes with any entry.
B batch, T tokens, D model dim.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from model import Hybrid, preset
from model.hybrid import BLOCKS, documents
from model.presets import NAMES

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "model" / "golden.safetensors"
# Relative to an array's largest entry. 52 layers of fp64 sums in another order read 1e-12 apart.
RELATIVE = 1e-9
TOKENS = 24
Named = dict[str, Tensor]


def formula(shape: tuple[int, ...], phase: int) -> Tensor:
    """Return fp64 values in -1..1, different for each phase."""
    n = int(torch.tensor(shape).prod()) if shape else 1
    return torch.cos(torch.arange(n, dtype=torch.float64) * 2.399963 + phase).reshape(shape)


def set_by_formula(model: nn.Module) -> nn.Module:
    """Overwrite all parameters: matrices scaled by their fan-in, vectors in 0..1."""
    with torch.no_grad():
        for phase, parameter in enumerate(model.parameters()):
            values = formula(tuple(parameter.shape), phase)
            parameter.copy_(
                values * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5 + 0.5 * values
            )
    return model


def ids_by_formula(config) -> Tensor:
    """Return two rows of documents of 7 to 12 tokens (2,T) int64."""
    token = torch.arange(2 * TOKENS).view(2, TOKENS)
    ids = 8 + token * 7919 % 97
    ids[0, [0, 7, 19]] = ids[1, [0, 12]] = config.bos_id
    return ids


def gradient_numbers(model: nn.Module) -> Tensor:
    """Return one number per parameter; 0 if there is no gradient."""
    numbers = [
        (p.grad.cpu() * formula(tuple(p.shape), 17 + i)).sum()
        if p.grad is not None
        else torch.zeros((), dtype=p.dtype)
        for i, p in enumerate(model.parameters())
    ]
    return torch.stack(numbers)


def subjects() -> list[str]:
    """Return the kinds of blocks, then the presets."""
    return [*BLOCKS, *NAMES]


def results(subject: str, device: str = "cpu") -> Named:
    """Compute output, gradient of the input, and the gradients' numbers, in fp64 on the CPU."""
    found = _block(subject, device) if subject in BLOCKS else _preset(subject, device)
    return {f"{subject}/{name}": t.detach().cpu().contiguous() for name, t in found.items()}


def _block(kind: str, device: str) -> Named:
    # Every sub-config that a kind may need; a block reads only its own.
    config = preset("nam56r", "narrow", capacity_factor=16.0)
    block = set_by_formula(BLOCKS[kind](config).double()).to(device)
    doc_ids, positions = (t.to(device) for t in documents(ids_by_formula(config), config.bos_id))
    x = formula((2, TOKENS, config.d_model), 5).to(device).requires_grad_()
    y = block(x)[0] if kind == "E" else block(x, doc_ids, positions)
    (y * formula(tuple(y.shape), 11).to(device)).sum().backward()
    return {"output": y, "dinput": x.grad, "dweights": gradient_numbers(block)}


def _preset(name: str, device: str) -> Named:
    config = preset(name, "narrow", capacity_factor=16.0)
    model = set_by_formula(Hybrid(config).double()).to(device)
    ids = ids_by_formula(config).to(device)
    loss = model(ids)
    loss.backward()
    with torch.no_grad():
        logits = model.logits(ids)[:, ::5, ::31]
    return {"loss": loss.reshape(1), "logits": logits, "dweights": gradient_numbers(model)}


def stored() -> Named:
    """Load every golden array."""
    return load_file(FIXTURE) if FIXTURE.exists() else {}


def differences(found: Named, expected: Named) -> list[str]:
    """Return a line for each array that is missing, or off by more than RELATIVE of its largest entry."""
    lines = []
    for name, t in found.items():
        if name not in expected or expected[name].shape != t.shape:
            lines.append(f"{name}: not in the fixture, or of another shape")
            continue
        off = ((t - expected[name]).abs().max() / expected[name].abs().max()).item()
        if not off <= RELATIVE:
            lines.append(f"{name}: off by {off:.1e} of its largest entry")
    return lines
