"""A small trainer: contract, checked data, a hybrid under a compile policy, checkpoints that resume bit for bit.

    python -m launch.train --preset nam12 --steps 200 --data fixtures/corpus --checkpoint run.pt
    torchrun --nproc-per-node 2 -m launch.train --preset nam12 --steps 200 --data fixtures/corpus

Ranks train one model: each takes --batch rows of every step's batch, so two ranks with --batch 8 train as one process
with --batch 16. Rank 0 alone writes checkpoint, log and summary.

The last line on standard output is one JSON summary; its `kind` is "training" only if the data passed its contract.
Exit codes: 0 done, 2 usage, 3 contract or data refused, 4 a loss was not finite, 5 the disk is full, 6 more programs
than the budget; then the last line is the alert.

B batch, T tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from launch import caches, environment, outputs

if __name__ == "__main__":
    environment.enter()  # before torch is imported, the only time it reads its environment

import torch
from torch import Tensor

from launch.autofit import ALONE, Share, accumulated_step, device_batch
from launch.capabilities import trained_in
from launch.contract import Contract, ContractError, apply_dynamo, load
from launch.data import DataError, PackedBatches, Source, SyntheticBatches, TokenFile, receipt
from launch.dist import process_group
from launch.dist.parallel import STYLES, average_buffers, overflow, parallelize
from launch.dist.ranks import Layout, Ranks
from launch.dist.shards import distributed, whole
from launch.memory import memory_of
from launch.optimizers import OPTIMIZERS, build_optimizer
from launch.outputs import NO_FILES, Files
from launch.policies import POLICIES, Backend, CompiledHybrid, apply
from launch.programs import ProgramBudgetError, Programs, load_spare, pattern_programs
from launch.retry import load_retry, passed
from launch.warmup import Start, load_warmup
from model import Hybrid, HybridConfig, preset
from model.dsa import scaled_losses
from model.presets import NAMES, SIZES

REFUSED, NOT_FINITE, DISK_FULL, OVER_BUDGET = environment.REFUSED, 4, environment.DISK_FULL, 6

SAVED = {"config", "plan", "step", "model", "optimizer", "source", "rng"}  # keys of a checkpoint
# float16 only where the contract has it in place of bfloat16: there is no loss scaling.
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float64", "float16")}


class NonFiniteError(ArithmeticError):
    """A loss or a weight became infinite or NaN. The message is one line; such a weight is never checkpointed."""


@dataclass(frozen=True)
class TrainingPlan:
    """Configuration of a run; `steps` is the length of the whole schedule, even if the run stops or resumes earlier."""

    steps: int
    policy: str = "regional"
    dtype: str = "float32"
    optimizer: str = "muon"
    lr: float = 3e-3
    warmup: int = 20
    seed: int = 0
    compile_optimizer: bool = False
    checkpoint_every: int = 0

    def lr_at(self, step: int) -> float:
        """Linear warm-up over `warmup` steps, then linear decay to a tenth at the last step."""
        rising = min(1.0, (step + 1) / max(self.warmup, 1))
        return self.lr * rising * (1.0 - 0.9 * step / max(self.steps - 1, 1))


class Trainer:
    """One model, one optimizer, one batch source. `losses` has a float for each step that this object has run.

    source: of several ranks, all have the same one, with the batch of all of them.
    files: what the run leaves.
    rows: batch rows per forward, all by default.
    ranks: this process's place among several, or None.
    Raises ContractError if this torch cannot satisfy contract.toml, ValueError on an unknown policy or optimizer.
    """

    def __init__(
        self,
        config: HybridConfig,
        plan: TrainingPlan,
        source: Source,
        *,
        device: str = "cpu",
        files: Files = NO_FILES,
        backend: Backend = "inductor",
        rows: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        contract = load()
        apply_dynamo(contract)
        torch.manual_seed(plan.seed)
        self.config, self.plan, self.source, self.device = config, plan, source, device
        self.checkpoint, self.log, self.rows, self.ranks = files.checkpoint, files.log, rows, ranks
        self.step, self.warm, self.losses = 0, False, list[float]()
        self.warm_up_seconds, self.share = 0.0, ALONE
        # A CPU draws billions of weights in minutes; XLA would compile the drawing.
        with torch.device(device if torch.device(device).type == "cuda" else "cpu"):
            self.model = Hybrid(config).to(device=device, dtype=DTYPES[plan.dtype])
        allowed = pattern_programs(self.model, plan.policy, contract) + plan.compile_optimizer + load_spare()
        self.programs = Programs(allowed, backend)
        start = self._start()
        self.no_warm_up = load_warmup().skipped(start)
        self.last_step_of_start = load_retry().last_step
        if ranks is None:
            self.compiled = apply(self.model, plan.policy, contract, self.programs.backend)
        else:
            self._parallelize(ranks, contract, start)
        options = {"compile": plan.compile_optimizer, "backend": self.programs.backend}
        self.optimizer = build_optimizer(self.model, plan.optimizer, plan.lr, **options)

    def _start(self) -> Start:
        """Return what decides whether the run has a warm-up."""
        return Start(
            torch.device(self.device).type,
            regional=self.plan.policy in ("regional", "per_block"),
            moe="E" in self.config.letters,
            fsdp=self.ranks is not None and self.ranks.layout.style == "fsdp2",
            compiled=self.plan.policy != "eager",
        )

    def _parallelize(self, ranks: Ranks, contract: Contract, start: Start) -> None:
        """Set the compiled model and this rank's share of each batch."""

        def before_ddp(compiled: CompiledHybrid) -> None:
            self.compiled = compiled
            process_group.warm_up(load_warmup(), start, lambda: self._warm_up_ahead(ranks), ranks.start)

        mesh, data, shard = ranks.place()
        self.share = Share(*data, mean=ranks.mean)
        how = {"backend": self.programs.backend, "shard": shard, "before_ddp": before_ddp}
        wrapped = parallelize(self.model, contract, mesh, ranks.layout.style, self.plan.policy, **how)
        self.compiled = wrapped.compiled
        self.share = replace(self.share, held=wrapped.held)

    def _warm_up_ahead(self, ranks: Ranks) -> None:
        """Warm up on the next batch, without taking it, and wait for the ranks that compile longer."""
        position = self.source.state_dict()
        self.warm_up(*self._rows_of(next(self.source)))
        self.source.load_state_dict(position)
        ranks.meet()

    def _rows_of(self, ids: Tensor) -> tuple[Tensor, float]:
        """Return the rows of a batch with which this process begins, and which part of its rows they are."""
        mine = self.share.of(ids.to(self.device))
        return mine[: self.rows], min(self.rows or len(mine), len(mine)) / len(mine)

    def warm_up(self, ids: Tensor, part: float = 1.0) -> None:
        """Compile on ids (B,T) without changing the model's state, so that a resumed run reproduces the original.

        part: share of a step's rows that the ids are; a step takes as many at a time.
        """
        began = time.perf_counter()
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        with scaled_losses(self.model, part):
            self.compiled.warm_up(ids)
        self.model.load_state_dict(before)
        for buffer, value in buffers:  # the counts of dropped pairs are in no state dict
            buffer.copy_(value)
        self.warm, self.warm_up_seconds = True, time.perf_counter() - began

    def run(self, until: int | None = None, allow_synthetic: str = "") -> dict[str, Any]:
        """Train up to step `until` (the plan's end by default) -> the summary.

        Raises DataError on a source that is not a checked token file, unless it is SyntheticBatches and
        allow_synthetic is "smoke"; NonFiniteError at the first non-finite loss, or weight at a checkpoint.
        """
        data = receipt(self.source)
        if data["kind"] != "tokens" and allow_synthetic != "smoke":
            raise DataError("random ids are not training data: pass a token file, or request a smoke test")
        ours, theirs = ((of["vocab_size"], of["bos_id"]) for of in (asdict(self.config), data))
        if theirs[0] > ours[0] or theirs[1] != ours[1]:
            raise DataError(
                f"data of {theirs[0]} ids with BOS {theirs[1]}, a model of {ours[0]} with BOS {ours[1]}"
            )
        until = self.plan.steps if until is None else min(until, self.plan.steps)
        first, tokens, seconds = self.step, 0, 0.0
        while self.step < until:
            ids = next(self.source).to(self.device)
            if not (self.warm or self.no_warm_up):
                self.warm_up(*self._rows_of(ids))
            began = time.perf_counter()
            loss = self._one(ids)
            if self.step > first:  # the first step still compiles the optimizer and fills caches
                tokens, seconds = tokens + ids.numel(), seconds + time.perf_counter() - began
            self._after(loss)
            self.programs.check(self.step)
        if self.step > first:
            self.save()
        return self._summary(data, tokens / seconds if seconds else None)

    def _one(self, ids: Tensor) -> float:
        for group in self.optimizer.param_groups:
            group["lr"].fill_(self.plan.lr_at(self.step))
        rows = self.rows or len(ids)
        taking = partial(scaled_losses, self.model)
        bos = self.config.bos_id
        loss = float(accumulated_step(self._forward, self.optimizer, ids, rows, bos, self.share, taking))
        if self.ranks is not None and self.config.bias_rate:
            average_buffers(self.model)
        if not math.isfinite(loss):
            raise NonFiniteError(f"step {self.step}: the loss is {loss}; the last checkpoint is good")
        return loss

    def _forward(self, ids: Tensor) -> Tensor:
        """Forward of ids (B,T) -> loss (). Without a warm-up, the first call marks the batch axis."""
        warm, self.warm = self.warm, True
        return self.compiled(ids) if warm else self.compiled.first(ids)

    def _after(self, loss: float) -> None:
        self.losses.append(loss)
        passed(len(self.losses) - 1, self.last_step_of_start)
        if self.log is not None and self.writes:
            line = {"step": self.step, "loss": loss, "lr": self.plan.lr_at(self.step)}
            line |= memory_of(torch.device(self.device))
            with self.log.open("a" if self.step else "w") as file:
                file.write(json.dumps(line) + "\n")
        self.step += 1
        if self.plan.checkpoint_every and self.step % self.plan.checkpoint_every == 0:
            self.save()

    @property
    def writes(self) -> bool:
        """Whether this process writes what the run leaves: of several ranks only the first."""
        return self.ranks is None or self.ranks.rank == 0

    def _summary(self, data: dict[str, Any], rate: float | None) -> dict[str, Any]:
        ranks = None
        if self.ranks is not None:
            warm_up = [round(seconds, 3) for seconds in self.ranks.gather("warm-up", self.warm_up_seconds)]
            ranks = {"world": self.ranks.world, "backend": self.ranks.backend, "warm_up_seconds": warm_up}
            ranks |= asdict(self.ranks.layout)
        return {
            "kind": "training" if data["kind"] == "tokens" else "smoke, not training",
            "model": f"{self.config.name}-{self.config.size}",
            "plan": asdict(self.plan),
            "step": self.step,
            "loss_first": self.losses[0] if self.losses else None,
            "loss_last": self.losses[-1] if self.losses else None,
            "tokens_per_second": rate,
            "dropped_pairs": self.model.overflow() if self.ranks is None else overflow(self.model),
            "rows_at_once": self.rows,
            "device": self.device,
            "ranks": ranks,
            "torch": torch.__version__,
            "data": data,
        }

    def save(self) -> None:
        """Write everything that the next step depends on, atomically (temporary file, then rename).

        The file is the same for any number of ranks. All of them must call this; rank 0 writes.
        """
        if self.checkpoint is None:
            return
        model, optimizer = whole(self.model.state_dict()), whole(self.optimizer.state_dict())
        if not all(bool(model[name].isfinite().all()) for name, _ in self.model.named_parameters()):
            raise NonFiniteError(f"step {self.step}: a weight is not finite; the last checkpoint is good")
        if not self.writes:
            return
        state = {"config": asdict(self.config), "plan": asdict(self.plan), "step": self.step}
        state |= {"model": model, "optimizer": optimizer}
        state |= {"source": self.source.state_dict(), "rng": torch.get_rng_state()}
        # With a path, torch.save hides the reason of a failed write.
        outputs.replace(self.checkpoint, lambda file: torch.save(state, file))

    def resume(self) -> None:
        """Resume from the checkpoint. Raises DataError, one line, if it is of another run."""
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise DataError(f"{self.checkpoint}: no checkpoint ({type(error).__name__})") from None
        if not isinstance(state, dict) or not state.keys() >= SAVED:
            raise DataError(f"{self.checkpoint}: no checkpoint of a training")
        for name, mine in (("config", asdict(self.config)), ("plan", asdict(self.plan))):
            changed = [key for key in mine if state[name].get(key) != mine[key]]
            if changed:
                raise DataError(f"{self.checkpoint}: of another run: {name} differs in {', '.join(changed)}")
        own = self.model.state_dict()
        self.model.load_state_dict({n: distributed(value, own[n]) for n, value in state["model"].items()})
        self.optimizer.load_state_dict(state["optimizer"])
        self.source.load_state_dict(state["source"])
        torch.set_rng_state(state["rng"])
        self.step = state["step"]
        if self.log is not None and self.writes and self.log.exists():
            outputs.drop_steps(self.log, self.step)  # they are written again


def parser() -> argparse.ArgumentParser:
    """Build the argument parser. Defaults are in TrainingPlan."""
    p, plan = argparse.ArgumentParser(prog="python -m launch.train", description=__doc__), TrainingPlan
    add = p.add_argument
    add("--preset", choices=NAMES, default="nam12")
    add("--size", choices=SIZES, default="narrow")
    add("--policy", choices=POLICIES, default=plan.policy)
    weights = "of weights, activations and gradients; the optimizer's state is float32 (default: %(default)s)"
    add("--dtype", choices=[*DTYPES][:3], default=plan.dtype, help=weights)
    add("--steps", type=int, required=True)
    add("--data", type=Path, help="a token file or its directory; absent only with --smoke")
    add("--smoke", action="store_true", help="random ids: a step runs, nothing is trained")
    add("--batch", type=int, default=8, help="rows of a step; of several ranks: of each")
    rows = "rows of a forward; gradients add up over the batch (default: all)"
    add("--rows", type=int, metavar="N", help=rows)
    add("--tokens", type=int, default=0, help="tokens of a row (default: the preset's seq_len)")
    add("--optimizer", choices=sorted(OPTIMIZERS), default=plan.optimizer)
    add("--compile-optimizer", action="store_true")
    add("--lr", type=float, default=plan.lr)
    add("--warmup", type=int, default=plan.warmup)
    add("--seed", type=int, default=plan.seed)
    add("--device", default="cpu", help="cuda for ranks: each takes the GPU of its LOCAL_RANK")
    add("--style", choices=STYLES, default=Layout.style, help="of several ranks: how they share the model")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="ranks that divide attention heads")
    add("--expert-parallel", action="store_true", help="the ranks divide the experts")
    add("--checkpoint", type=Path, help="where to save the state, at the end and every N steps")
    add("--checkpoint-every", type=int, default=plan.checkpoint_every, metavar="N")
    add("--resume", action="store_true", help="continue from --checkpoint")
    add("--log", type=Path, help="one JSON line a step, with the memory of the device")
    return p


def facts(options: argparse.Namespace, data: dict[str, Any]) -> dict[str, str]:
    """Return what all ranks of one training must have in common, by the name that a message uses."""
    given = {f"--{name.replace('_', '-')}": str(value) for name, value in vars(options).items()}
    known = {name: str(data[name]) for name in ("sha256", "tokenizer") if name in data}
    return {"torch": torch.__version__, "python": platform.python_version(), **known, **given}


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Return the checked options; argparse exits with 2."""
    o = (p := parser()).parse_args(arguments)
    if o.smoke == bool(o.data):
        p.error("pass either --data or --smoke")
    if (o.resume and not o.checkpoint) or min(o.steps, o.batch) < 1 or (o.tokens and o.tokens < 2):
        p.error("--resume needs --checkpoint; --steps and --batch are at least 1, --tokens at least 2")
    if o.rows is not None and (o.rows < 1 or o.batch % o.rows):
        p.error(f"--rows {o.rows} does not divide --batch {o.batch}")
    if layout_of(o) != Layout() and not os.environ.get("LOCAL_RANK"):
        p.error("--style and parallelism are for ranks: start them by torchrun or launch.retry --ranks")
    return o


def layout_of(o: argparse.Namespace) -> Layout:
    return Layout(o.style, o.tensor_parallel, o.expert_parallel)


def train(o: argparse.Namespace) -> None:
    """Run the training of these options in this process, one of several ranks if LOCAL_RANK is set."""
    config = preset(o.preset, o.size)
    plan = TrainingPlan(**{name: getattr(o, name) for name in TrainingPlan.__dataclass_fields__})
    environment.check(contract := load())
    plan = replace(plan, dtype=trained_in(plan.dtype, o.device))
    if environment.RETRY in os.environ:
        torch.compiler.reset()  # only here (rule C21): a retry rebuilds its model
    ranks = Ranks(contract, o.device, layout_of(o)) if os.environ.get("LOCAL_RANK") else None
    shape = o.batch * layout_of(o).shares(ranks.world if ranks else 1), o.tokens or config.seq_len
    source: Source
    if o.smoke:
        source = SyntheticBatches(config.vocab_size, *shape, o.seed, config.bos_id)
    else:
        source = PackedBatches(TokenFile(o.data), *shape, o.seed)
    if ranks is None or ranks.rank == 0:
        outputs.check({"--checkpoint": o.checkpoint, "--log": o.log})
    copied = {"seeded": 0, "published": 0}
    if ranks is None or ranks.local == 0:
        copied["seeded"] = environment.seed_caches(contract)
    if ranks is not None:
        ranks.agree(facts(o, receipt(source)))  # also waits for the seeded caches
        ranks.start()
    how = {"files": Files(o.checkpoint, o.log), "rows": device_batch(o.rows or o.batch), "ranks": ranks}
    trainer = Trainer(config, plan, source, device=str(ranks.device) if ranks else o.device, **how)
    if o.resume:
        trainer.resume()
    summary = trainer.run(allow_synthetic="smoke" if o.smoke else "")
    if trainer.writes:
        copied["published"] = environment.publish_caches(contract)
        print(json.dumps(summary | {"caches": environment.cache_report(contract) | copied}))
    if ranks is not None:
        del trainer  # DDP must go before its group: see Ranks.leave
        ranks.leave()


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code; argparse itself exits with 2."""
    o = parsed(arguments)
    try:
        train(o)
        return 0
    except (ContractError, DataError) as error:
        line, code = f"refused: {error}", REFUSED
    except NonFiniteError as error:
        line, code = f"stopped: {error}", NOT_FINITE
    except ProgramBudgetError as error:
        print(json.dumps(error.record))
        line, code = f"stopped: {error}", OVER_BUDGET
    except Exception as error:
        if (full := caches.disk_full(error)) is None:
            raise
        line, code = f"disk full: {full}", DISK_FULL
    print(line, file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
