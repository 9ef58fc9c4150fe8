"""A full-size hybrid on one GPU under a compile policy, in bf16, and what the throughput tests measure of its steps.

B batch, T tokens, E experts, K top-k.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from launch.contract import apply_dynamo, load
from launch.policies import CompiledHybrid, apply
from launch.step import make_optimizer, train_step
from model import Hybrid, HybridConfig, preset
from model.moe import MoEBlock
from suites.support.hybrids import SEED, token_batch
from suites.support.instruments import DynamoWatch, dynamo_config, forget_graphs, read_dynamo_config

# What is stepped. One graph of all layers is compiled of nam12's twelve alone, to keep the lane short.
POLICIES = {
    "nam52": ("eager", "whole_disabled", "per_block", "regional"),
    "nam12": ("whole_disabled", "regional", "whole_opaque"),
    "nam56r": ("eager", "regional"),
}
# The least batch that Dynamo does not specialise: a step at 1 would compile everything a second time.
BATCH = 2
# More than one, so that no step finds its own input in the L2, and a guard on values would miss.
BATCHES = 4
# A forward and backward of B 2 with the weights and their gradients: what the processes that share the GPU claim of it.
GIB = {"nam52": 48, "nam12": 12, "nam56r": 48}
# Small: these steps are timed and learn nothing, and must stay finite.
LEARNING_RATE = 1e-4


def active_parameters(model: Hybrid) -> int:
    """Parameters that one token meets: K of the E experts, and the tied embedding once, as the loss head."""
    config = model.config
    routed = sum(p.numel() for b in model.modules() if isinstance(b, MoEBlock) for p in (b.up, b.down))
    return (
        sum(p.numel() for p in model.parameters())
        - routed * (config.experts - config.top_k) // config.experts
    )


def step_flops(model: Hybrid, tokens: int) -> int:
    """FLOP of a training step by the usual formula, 6 x active parameters x tokens.

    Two for each parameter forward, four backward. Attention scores, scans and padded slots are not in it, so that it
    is the work asked for and not the work done.
    """
    return 6 * active_parameters(model) * tokens


@dataclass
class FullSize:
    """A model under a policy with its optimizer, and batches (B,T) on the device that its steps take in turn."""

    config: HybridConfig
    model: Hybrid
    compiled: CompiledHybrid
    watch: DynamoWatch
    optimizer: torch.optim.Optimizer
    batches: list[Tensor]
    held: int  # bytes that were allocated before the model was
    steps: int = field(default=0, init=False)

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batches[0].numel()

    def load_kernels(self) -> float:
        """Seconds of a forward and backward with nothing compiled: the ops' own kernels are on the device after it.

        A first step behind it costs what its graphs cost to compile, and not what ran in this process before.
        """
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.compiler.set_stance("force_eager"):
            self.compiled(self.batches[0]).backward()
        self.model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def first_step(self) -> float:
        """Seconds of the first forward and backward, compiling included."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.compiled.warm_up(self.batches[0])
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def step(self) -> Tensor:
        """Forward, backward and update on the next batch -> the loss before the update, () fp32."""
        self.steps += 1
        return train_step(self.compiled, self.optimizer, self.batches[self.steps % len(self.batches)])

    def loss(self) -> float:
        """Of the next batch, with nothing updated: an optimizer's state would take 16 GiB more."""
        self.steps += 1
        return float(self.compiled(self.batches[self.steps % len(self.batches)]).detach())

    def peak_memory(self) -> int:
        """Bytes that one step needs at most, weights and optimizer state included and nobody else's memory."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self.held


@contextmanager
def full_size(name: str, policy: str) -> Iterator[FullSize]:
    """The preset `name` at full size under `policy`: contract applied, Dynamo watched, its memory free at exit."""
    contract, config = load(), preset(name, "full")
    torch.manual_seed(SEED)
    held = torch.cuda.memory_allocated()
    with dynamo_config(read_dynamo_config(contract.dynamo)), DynamoWatch() as watch:
        apply_dynamo(contract)
        with torch.device("cuda"):
            model = Hybrid(config).to(torch.bfloat16)
        hybrid = FullSize(
            config, model, apply(model, policy, contract, watch.backend()), watch,
            make_optimizer(model, LEARNING_RATE),
            [token_batch(config, BATCH, seed=SEED + i, device="cuda") for i in range(BATCHES)], held,
        )  # fmt: skip
        del model
        try:
            yield hybrid
        finally:
            # The caller's name for it outlives the block; a compiled block stands in cycles.
            vars(hybrid).clear()
            forget_graphs()
            gc.collect()
            torch.cuda.empty_cache()


def kernels_launched(step: Callable[[], object]) -> int:
    """Kernels that the device ran in one call, by its own trace."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return sum(e.device_type == on_device and not e.name.startswith("Mem") for e in trace.events())
