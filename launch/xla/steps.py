"""Training steps on XLA: the extent of one program, and when it is compiled.

Mode A  the whole step is one program: forward and backward of every micro-batch, and the update
Mode B  a micro-batch's forward and backward is a program, the update another one; with accumulation the first
        micro-batch creates the gradients and the others add to them: two programs at step 0, then none

A model with experts uses Mode B: whole-step programs with top-k routing have crashed libtpu. Model-level
torch.compile stays off, and so does a warm-up at another batch size: shapes are static, and XLA compiles by itself.

B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from launch.optimizers import TensorOptimizer
from launch.policies import CompiledHybrid
from model import Hybrid, HybridConfig

MODES = ("A", "B")


class XlaError(RuntimeError):
    """A step or a reading is not supported on XLA. The message is one line."""


def mode_of(config: HybridConfig) -> str:
    """Return the mode in which a model of this configuration trains."""
    return "B" if "E" in config.letters else "A"


def own_buffers(scalars: Sequence[Tensor]) -> None:
    """Give each 0-d tensor its own device buffer.

    torch_xla shares one buffer between equal scalars, one input of a program; the step after would have more inputs.
    """
    with torch.no_grad():
        for scalar in scalars:
            scalar.add_(torch.zeros((), dtype=scalar.dtype, device=scalar.device))
    torch_xla.sync()


def set_learning_rate(optimizer: TensorOptimizer, lr: float) -> None:
    """Fill the rate of every group in a separate small program, so that it does not change the step's program.

    The rates are uploaded as one vector and sliced: as scalars, equal ones would share a buffer.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    fresh = torch.full((len(rates),), lr, dtype=rates[0].dtype).to(rates[0].device)
    with torch.no_grad():
        for rate, value in zip(rates, fresh.unbind()):
            rate.copy_(value)
    torch_xla.sync()


def prepare(model: Hybrid, optimizer: TensorOptimizer) -> None:
    """Create the optimizer's state and unshare scalars, so that the first step has the same program as all others."""
    if not optimizer.capturable:
        raise XlaError(
            "the optimizer must be capturable: its step count would be read on the host at every step"
        )
    scalars = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.ndim == 0]
    for group in optimizer.param_groups:
        scalars += optimizer.hyper(group).values()
        for p in group["params"]:
            state = optimizer._state(group["rule"], p)
            scalars += [tensor for tensor in state.values() if tensor.ndim == 0]
    own_buffers(scalars)


class Barrier(torch.autograd.Function):
    """Identity that executes everything traced so far, in the forward and again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch_xla.sync()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        torch_xla.sync()
        return dx


def barrier_layers(depth: int, every: int) -> tuple[int, ...]:
    """Return the layers followed by a barrier: every `every`-th, except the last one, which precedes the head."""
    return tuple(range(every - 1, depth - 1, every)) if every else ()


def add_barriers(model: Hybrid, every: int) -> list[RemovableHandle]:
    """Split the step after every `every` layers, if one program would be too large; 0 for no split.

    With n barriers a step is 2 n + 1 programs: the backward is cut at the same places. Returns the hooks' handles.
    """

    def cut(block: nn.Module, inputs: Any, output: Any) -> Any:
        return (Barrier.apply(output[0]), *output[1:]) if isinstance(output, tuple) else Barrier.apply(output)

    layers = barrier_layers(len(model.blocks), every)
    return [model.blocks[layer].register_forward_hook(cut) for layer in layers]


def check_no_torch_compile(model: Hybrid | CompiledHybrid) -> None:
    """Raise XlaError if a compile policy or Module.compile is on: torch.compile with XLA has hung."""
    if isinstance(model, CompiledHybrid):
        if model.policy != "eager":
            raise XlaError(
                f"policy {model.policy!r}: on XLA the policy is eager, because XLA itself compiles"
            )
        model = model.model
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    if compiled:
        raise XlaError(
            f"{compiled[0]} and {len(compiled) - 1} more are under torch.compile: leave it off on XLA"
        )


class TrainStep:
    """One optimizer step of a hybrid on XLA; call it with the step's micro-batches.

    `mode` defaults to mode_of(config). `barrier_every` layers split the step into smaller programs instead.
    A host read inside a program raises RuntimeError, because the whole program is traced.
    Raises XlaError on Mode A with experts, on torch.compile, and on an optimizer whose scalars are on the host.
    """

    def __init__(
        self,
        model: Hybrid | CompiledHybrid,
        optimizer: TensorOptimizer,
        mode: str | None = None,
        barrier_every: int = 0,
    ) -> None:
        check_no_torch_compile(model)
        self.model = model.model if isinstance(model, CompiledHybrid) else model
        self.mode = mode or mode_of(self.model.config)
        if self.mode not in MODES:
            raise XlaError(f"unknown mode {mode!r}: expected one of {', '.join(MODES)}")
        if self.mode == "A" and mode_of(self.model.config) == "B":
            raise XlaError(
                f"{self.model.config.name} has experts: Mode A has crashed libtpu on them, use Mode B"
            )
        self.optimizer = optimizer
        prepare(self.model, optimizer)
        self._barriers = add_barriers(self.model, barrier_every)
        self._step: Callable[[Sequence[Tensor]], Tensor] = self._plain_step
        if not self._barriers and self.mode == "A":
            self._step = torch_xla.compile(self._plain_step, full_graph=True, name="train_step")
        elif not self._barriers:
            self._step = self._two_programs(
                torch_xla.compile(self._forward_backward, full_graph=True, name="forward_backward"),
                torch_xla.compile(self._update, full_graph=True, name="update"),
            )

    def __call__(self, batches: Sequence[Tensor]) -> Tensor:
        """Micro-batches of ids (B,T) int64 on the device -> their mean loss before the update, () fp32, on it."""
        loss = self._step(batches)
        torch_xla.sync()
        return loss

    def _forward_backward(self, ids: Tensor, share: float) -> Tensor:
        loss = self.model(ids) * share
        loss.backward()
        return loss.detach()

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _plain_step(self, batches: Sequence[Tensor]) -> Tensor:
        loss = sum(self._forward_backward(ids, 1 / len(batches)) for ids in batches)
        self._update()
        return loss

    def _two_programs(
        self, forward_backward: Callable[..., Tensor], update: Callable[[], None]
    ) -> Callable[[Sequence[Tensor]], Tensor]:
        def step(batches: Sequence[Tensor]) -> Tensor:
            losses = [forward_backward(ids, 1 / len(batches)) for ids in batches]
            update()
            return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

        return step


def memory_in_use(device: torch.device | str | None = None) -> int:
    """Return bytes in use on a physical device. Raises XlaError if no reading is available; never returns 0 instead."""
    try:
        info = xm.get_memory_info(torch_xla.device() if device is None else device)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise XlaError(f"no memory reading of {device or 'this device'}: {reason}") from None
    if not (used := int(info.get("bytes_used", 0))):
        raise XlaError(f"no memory reading of {device or 'this device'}: the runtime returned {info}")
    return used
