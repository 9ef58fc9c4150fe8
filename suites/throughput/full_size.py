"""A full-size hybrid on one GPU under a compile policy, in bf16, and the measurements of its steps.

B batch, T tokens, E experts, K top-k.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bumpgate.plugin.instruments import DynamoWatch, dynamo_config, read_dynamo_config, reset_dynamo
from bumpgate.plugin.instruments.work import DeviceWork
from bumpgate.plugin.rows import Interval, RowRecorder
from bumpgate.process.gpu_shares import untimed
from launch.contract import apply_dynamo, load
from launch.policies import CompiledHybrid, apply
from launch.step import make_optimizer, train_step
from model import Hybrid, HybridConfig, preset
from model.moe import MoEBlock
from suites.support.gpu_memory import claimed
from suites.support.hybrids import SEED, token_batch

# Model -> policies that are timed. Only nam12's twelve layers are compiled as a single graph, to keep the lane short.
POLICIES = {
    "nam52": ("eager", "whole_disabled", "per_block", "regional"),
    "nam12": ("whole_disabled", "regional", "whole_opaque"),
    "nam56r": ("eager", "regional"),
}
# The least batch size that Dynamo does not specialize: a step at 1 would compile everything a second time.
BATCH = 2
# More than one, so that no step finds its own input in the L2, and a guard on values would miss.
BATCHES = 4
# The claim of GPU memory by processes that share it: measured peaks of a compiled forward and backward, with a margin.
GIB = {"nam52": 42, "nam12": 8, "nam56r": 56}
STACK_GIB = 10  # a block of each kind
# With 16 calls the 99 % interval of the median excludes the slowest: with 8 a single step of the peers' made it 14 %
# wide.
CALLS = {"nam52": 20, "nam12": 20, "nam56r": 16}
WARMUP = {"nam52": 5, "nam12": 5, "nam56r": 2}
# Of tokens per second. A step of nam52 or nam12 takes little longer than the launches of its kernels: on hosts with 16
# to 64 cores nam52's rates were up to 71 % apart, nam12's 98 %, nam56r's 11 %. The device time is the sharper row.
HOST_TOLERANCE = {"nam52": 0.3, "nam12": 0.45, "nam56r": 0.12}
# A step of nam56r takes longer than the launches of its kernels.
HOST_BOUND = {
    "nam52": "launch, memory, matmul",
    "nam12": "launch, memory, matmul",
    "nam56r": "memory, matmul",
}
DEVICE_BOUND = "memory, matmul"
# Of the device time, whose clocks drop under a power cap, and of a memory peak.
TOLERANCE = {"device": 0.06, "peak": 0.02}
# Small: these steps are timed and need not learn, but must stay finite.
LEARNING_RATE = 1e-4


def active_parameters(model: Hybrid) -> int:
    """Count the parameters used by one token: K of the E experts, and the tied embedding once, as the loss head."""
    E, K = model.config.experts, model.config.top_k
    routed = sum(p.numel() for b in model.modules() if isinstance(b, MoEBlock) for p in (b.up, b.down))
    return sum(p.numel() for p in model.parameters()) - routed * (E - K) // E


def step_flops(model: Hybrid, tokens: int) -> int:
    """Return the FLOP of a training step by the usual formula, 6 x active parameters x tokens: the useful work."""
    return 6 * active_parameters(model) * tokens


@dataclass
class FullSize:
    """A model under a policy with its optimizer, and batches (B,T) on the device that its steps use in turn."""

    config: HybridConfig
    model: Hybrid
    compiled: CompiledHybrid
    watch: DynamoWatch
    optimizer: torch.optim.Optimizer
    batches: list[Tensor]
    held: int  # bytes that were allocated before the model was built
    steps: int = field(default=0, init=False)

    @property
    def tokens(self) -> int:
        return self.batches[0].numel()

    def first_step(self) -> float:
        """Run the first forward and backward and return its seconds, including compilation."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.compiled.warm_up(self.batches[0])
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def step(self) -> Tensor:
        """Run forward, backward and update on the next batch; return the loss before the update, () fp32."""
        self.steps += 1
        return train_step(self.compiled, self.optimizer, self.batches[self.steps % len(self.batches)])

    def loss(self) -> float:
        """Return the loss of the next batch, without an update: an optimizer's state would take 16 GiB more."""
        self.steps += 1
        return float(self.compiled(self.batches[self.steps % len(self.batches)]).detach())

    def peak_memory(self) -> int:
        """Return the peak bytes of one step, including weights and optimizer state, above those held before the
        model.
        """
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self.held


def memory(name: str) -> AbstractContextManager[None]:
    """Claim the memory of a timed test's model if the run fills compile caches: the test does not run alone then."""
    return claimed(GIB[name]) if untimed() else nullcontext()


@contextmanager
def full_size(name: str, policy: str) -> Iterator[FullSize]:
    """Yield the preset `name` at full size under `policy`; apply the contract, watch Dynamo.

    Memory is freed at exit. The caller has claimed the memory (GIB) if other tests use the GPU.
    """
    contract, config = load(), preset(name, "full")
    with dynamo_config(read_dynamo_config(contract.dynamo)), DynamoWatch() as watch:
        torch.manual_seed(SEED)
        held = torch.cuda.memory_allocated()
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
        gc.freeze()  # excludes the objects of earlier tests from collections during its steps
        try:
            yield hybrid
        finally:
            gc.unfreeze()
            # The caller's reference outlives the block, and a compiled block is part of reference cycles.
            vars(hybrid).clear()
            reset_dynamo()
            gc.collect()
            torch.cuda.empty_cache()


def report_device_time(row: RowRecorder, case: str, work: DeviceWork, evidence: str) -> None:
    about = {"tolerance": TOLERANCE["device"], "bound": DEVICE_BOUND, "rule": "C37", "seen": work.kernels}
    row.cost(f"{case}/device_milliseconds_per_step", work.milliseconds, "ms", evidence=[evidence], **about)


def report_rate(
    row: RowRecorder, case: str, name: str, rate: Interval, seen: int, evidence: list[str], **about: Any
) -> None:
    """Report the tokens per second of the model `name`, whose host may slow its steps down."""
    about |= {"tolerance": HOST_TOLERANCE[name], "bound": HOST_BOUND[name], "evidence": evidence}
    row.timed(f"{case}/tokens_per_second", rate, "tokens/s", better="higher", rule="C37", seen=seen, **about)


def load_kernels(name: str) -> float:
    """Return the seconds of an eager forward and backward of a stack with one block of each kind of the model.

    It compiles and loads the ops' own kernels: a following first step takes only the time of compiling its graphs.
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
    """Return a config of the same widths with one layer of each kind, in the order of their first occurrence."""
    kinds = [*dict.fromkeys(config.kinds)]
    attention = [kind for kind in kinds if kind[0] == "A"]
    ranks = tuple(rank for rank, kind in enumerate(attention, 1) if kind == "A:dsa")
    return config.replace(
        layer_pattern="".join(kind[0] for kind in kinds),
        depth=len(kinds),
        dsa=replace(config.dsa, ranks=ranks) if config.dsa else None,
    )
