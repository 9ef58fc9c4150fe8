"""A full-size hybrid on one GPU under a compile policy, in bf16, and what the throughput tests measure of its steps.

B batch, T tokens, E experts, K top-k.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

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
# A forward and backward of B 2 with the weights and their gradients, compiled: what the processes that share the GPU
# claim of it: their measured peaks less AdamW's state, and room for fragments.
GIB = {"nam52": 42, "nam12": 8, "nam56r": 56}
STACK_GIB = 10  # a block of each kind
# Of 16 calls the 99 % interval of the median leaves out the slowest: in one of 8 a single step of the peers' made it
# 14 % wide.
CALLS = {"nam52": 20, "nam12": 20, "nam56r": 16}
WARMUP = {"nam52": 5, "nam12": 5, "nam56r": 2}
# Of tokens per second. A step of nam52 or nam12 is little longer than the host takes to launch its kernels, 5800 at
# most: on four H200s nam52's rates were up to 19 % apart and nam12's 37 %. Those of nam56r, whose kernels outlast
# their launches, were 1.8 % apart on three. What the device works a step is the sharper row.
HOST_TOLERANCE = {"nam52": 0.2, "nam12": 0.4, "nam56r": 0.04}
# Of the time that the device works, whose clocks give way to a cap of power, and of a peak of memory.
TOLERANCE = {"device": 0.06, "peak": 0.02}
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
        gc.collect()
        gc.freeze()  # what the tests before it left on the heap is not walked through in its steps
        try:
            yield hybrid
        finally:
            gc.unfreeze()
            # The caller's name for it outlives the block; a compiled block stands in cycles.
            vars(hybrid).clear()
            forget_graphs()
            gc.collect()
            torch.cuda.empty_cache()


class DeviceWork(NamedTuple):
    """Of one call, by the device's own trace: kernels that ran, and milliseconds that they took in all.

    What a host that is too slow to keep the device busy adds to a step is not in them.
    """

    kernels: int
    milliseconds: float


def device_work(step: Callable[[], object]) -> DeviceWork:
    """Traces one call."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    kernels = [e for e in trace.events() if e.device_type == on_device and not e.name.startswith("Mem")]
    return DeviceWork(len(kernels), sum(e.time_range.elapsed_us() for e in kernels) / 1e3)


def load_kernels(name: str) -> float:
    """Seconds of an eager forward and backward of a stack with one block of each kind of the model's.

    The ops' own kernels are compiled and on the device after it: a first step of the model behind it costs what its
    graphs cost to compile. At the model's widths and batch, so that they are the same kernels.
    """
    config = one_of_each_kind(preset(name, "full"))
    torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.device("cuda"):
        stack = Hybrid(config).to(torch.bfloat16)
    stack(token_batch(config, BATCH, seed=SEED, device="cuda")).backward()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def one_of_each_kind(config: HybridConfig) -> HybridConfig:
    """The same widths with a layer of each kind, in the order in which they first come."""
    kinds = [*dict.fromkeys(config.kinds)]
    attention = [kind for kind in kinds if kind[0] == "A"]
    ranks = tuple(rank for rank, kind in enumerate(attention, 1) if kind == "A:dsa")
    return config.with_(
        layer_pattern="".join(kind[0] for kind in kinds),
        depth=len(kinds),
        dsa=replace(config.dsa, ranks=ranks) if config.dsa else None,
    )
