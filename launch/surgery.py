"""Weight surgery between training phases: FIRE, DASH and ReDo. Eager only, and never on XLA.

Each reads values on the host or draws new weights: if traced, that would be a graph constant or a graph break.

A, B the two sides of a matrix, F hidden units, D model dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from model import Hybrid

FIRE_ITERATIONS = 15
DASH_RATE, DASH_THRESHOLD, DASH_FLOOR = 0.01, 0.05, 0.5
REDO_RATE, REDO_DORMANT, REDO_OUTGOING = 0.1, 0.025, 0.1


def eager_only(name: str, *tensors: Tensor) -> None:
    """Raise RuntimeError, one line, inside a compiled region or on an XLA tensor."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{name}: weight surgery is eager only: call it between steps, outside torch.compile"
        )
    if any(t.device.type == "xla" for t in tensors):
        raise RuntimeError(f"{name}: not on XLA: move the model to the host, operate, and move it back")


@torch.no_grad()
def fire(weight: nn.Parameter, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Replace weight (A,B) by its nearest matrix with orthonormal rows or columns, in place; reset its optimizer state.

    Newton-Schulz X <- 1.5 X - 0.5 X X^T X, 15 times in fp32 from X / |X|_2: singular values above 0.007 of the largest
    end within 1e-3 of 1. Raises ValueError if weight is not a matrix or is zero, RuntimeError as eager_only.
    """
    eager_only("fire", weight)
    if weight.ndim != 2:
        raise ValueError(f"fire: needs a matrix, not shape {tuple(weight.shape)}")
    wide = weight.shape[0] < weight.shape[1]
    x = weight.float().mT if wide else weight.float()
    norm = torch.linalg.matrix_norm(x, 2)
    if not norm > 0:
        raise ValueError("fire: a zero matrix has no nearest orthogonal one")
    x = x / norm
    for _ in range(FIRE_ITERATIONS):
        x = 1.5 * x - 0.5 * x @ (x.mT @ x)
    weight.copy_(x.mT if wide else x)
    if optimizer is not None:
        optimizer.state.pop(weight, None)


def fire_model(model: Hybrid, optimizer: torch.optim.Optimizer, context: bool = False) -> list[str]:
    """Apply FIRE to every linear map, once per phase; `context` (a longer context begins) skips the Mamba blocks.

    The embedding, the head and stacks of experts are not changed, and weights that are zero by design
    (a feature's output at its start) stay zero. -> the names of the changed parameters.
    """
    letters = enumerate(model.config.letters)
    spared = ("head.", *(f"blocks.{i}." for i, letter in letters if context and letter == "M"))
    changed = []
    for prefix, owner in model.named_modules():
        for name, p in owner.named_parameters(prefix, recurse=False):
            linear = isinstance(owner, nn.Linear) and p.ndim == 2
            if linear and not name.startswith(spared) and bool(p.any()):
                fire(p, optimizer)
                changed.append(name)
    return changed


@torch.no_grad()
def dash(weights: Iterable[nn.Parameter]) -> None:
    """Shrink each row aligned with its gradient: w *= clamp(1 - 0.01 max(cos(w, g) - 0.05, 0), 0.5, 1).

    Call it between backward and zero_grad, on matrices (A,B) that are not under Muon, where rows have no scale.
    Raises ValueError if there is no gradient, RuntimeError as eager_only.
    """
    weights = list(weights)
    eager_only("dash", *weights)
    for weight in weights:
        if weight.grad is None or weight.ndim != 2:
            raise ValueError("dash: needs matrices with a gradient: call it after backward, before zero_grad")
    for weight in weights:
        w, g = weight.float(), weight.grad.float()
        cosine = torch.cosine_similarity(w, g, dim=1)  # (A,), 0 where a row is zero
        shrink = (1 - DASH_RATE * (cosine - DASH_THRESHOLD).clamp(min=0)).clamp(DASH_FLOOR, 1)
        weight.mul_(shrink.unsqueeze(1).to(weight.dtype))


class ReDo:
    """Recycle dormant hidden units of one MLP: those whose mean |activation| fell below 0.025 of the layer's mean.

    `activity` (F,) fp32 is a moving average with rate 0.1. Source: Sokar et al. 2023 (arXiv 2302.12902).
    """

    def __init__(self, units: int, device: torch.device | str = "cpu") -> None:
        self.activity = torch.zeros(units, device=device)

    @torch.no_grad()
    def observe(self, activation: Tensor) -> None:
        """Update the average with activation (..., F). Raises RuntimeError as eager_only."""
        eager_only("redo", activation)
        mean = activation.float().abs().flatten(0, -2).mean(0)
        self.activity.lerp_(mean.to(self.activity.device), REDO_RATE)

    def dormant(self) -> Tensor:
        """Return the mask of dormant units, (F,) bool."""
        return self.activity < REDO_DORMANT * self.activity.mean()

    @torch.no_grad()
    def recycle(
        self, incoming: Tensor, outgoing: Tensor, generator: torch.Generator, bias: Tensor | None = None
    ) -> int:
        """Draw new weights for the dormant units of incoming (F,D) and outgoing (D,F), in place -> their number.

        Incoming rows are normal with the matrix's own standard deviation, outgoing columns with 0.1 of theirs, so that
        a revived unit starts small; its bias (F,) is 0 and its activity restarts at the layer's mean. Other units are
        unchanged. Raises RuntimeError as eager_only.
        """
        eager_only("redo", incoming, outgoing)
        units = self.dormant().nonzero().squeeze(1).to(incoming.device)
        living = (~self.dormant()).to(incoming.device)

        def drawn(shape: torch.Size, kept: Tensor) -> Tensor:
            # On the generator's device, so that the numbers do not depend on the weights'.
            normal = torch.randn(shape, generator=generator, device=generator.device)
            return normal.to(kept.device) * kept.float().std()

        incoming[units] = drawn(incoming[units].shape, incoming[living]).to(incoming.dtype)
        columns = drawn(outgoing[:, units].shape, outgoing[:, living])
        outgoing[:, units] = (REDO_OUTGOING * columns).to(outgoing.dtype)
        if bias is not None:
            bias[units] = 0
        self.activity[units.to(self.activity.device)] = self.activity.mean()
        return len(units)
