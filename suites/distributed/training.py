"""Trainings over ranks, compared with the same training in one process; each program returns numbers for JSON.

The one process takes the rows of all ranks as its batch, and as many of them at a time as a rank.
"""

from __future__ import annotations

import hashlib
import inspect
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import Partial
from torch.nn.parallel import DistributedDataParallel

from bumpgate.plugin.instruments import DynamoWatch
from launch import autofit, caches, optimizers, train
from launch.contract import Contract, apply_dynamo
from launch.data import PackedBatches, TokenFile
from launch.dist import model_parallel, parallel
from launch.dist.ranks import Layout, Ranks
from launch.dist.shards import whole
from launch.environment import RUN, child_environment, run_caches, seed_caches
from launch.outputs import Files
from launch.train import Trainer, TrainingPlan
from launch.warmup import WarmUp
from model import preset
from suites.launch.trainers import CORPUS
from suites.support.instruments import group_timeout
from suites.support.reduce import largest

ROWS, TOKENS, STEPS, SAVED = 2, 32, 4, 2  # the run saves a checkpoint after SAVED steps
PATTERN = "AEMR"  # all kinds of blocks

LAYOUTS = {
    "ddp": Layout(),
    "fsdp2": Layout("fsdp2"),
    "expert": Layout("fsdp2", expert=True),
    "tensor": Layout("fsdp2", tensor=2),
    "expert and tensor": Layout("fsdp2", tensor=2, expert=True),
}


def trainer(
    ranks: Ranks,
    plan: TrainingPlan,
    division: str,
    pattern: str = PATTERN,
    alone: bool = False,
    rows: int = ROWS,
    bias_rate: float = 0.0,
    **options: Any,
) -> Trainer:
    """Build a trainer of a narrow model. alone: one process with the batch of all ranks. rows: per forward."""
    chosen = LAYOUTS[division]
    source = PackedBatches(TokenFile(CORPUS), ROWS * chosen.shares(ranks.world), TOKENS, 0)
    config = preset("nam12", "narrow", layer_pattern=pattern, depth=len(pattern), bias_rate=bias_rate)
    ranks.layout = chosen
    shared = {} if alone else {"ranks": ranks}
    return Trainer(config, plan, source, device=str(ranks.device), rows=rows, **shared, **options)


def first_gradients(run: Trainer) -> dict[str, Tensor]:
    """Return a dict that is filled with the whole gradients of the first step of `run`."""
    seen: dict[str, Tensor] = {}
    step = run.optimizer.step

    def recorded() -> None:
        if not seen:
            seen.update({name: whole(p.grad).clone() for name, p in run.model.named_parameters()})
        step()

    run.optimizer.step = recorded  # type: ignore[method-assign]
    return seen


def apart(found: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, Any]:
    """Return how two sets of tensors differ: how many bitwise, and the largest distances.

    relative: to a tensor's norm. farthest: of two elements.
    """
    pairs = [(found[name], other) for name, other in reference.items()]
    return {
        "tensors": len(reference),
        "zero": sum(not other.any() for other in reference.values()),
        "different": sum(not torch.equal(one, other) for one, other in pairs),
        "relative": largest(
            float((one - other).norm() / other.norm().clamp(min=1e-30)) for one, other in pairs
        ),
        "farthest": largest(float((one.double() - other.double()).abs().max()) for one, other in pairs),
    }


def digest(tensors: dict[str, Tensor]) -> str:
    """Return the sha256 of the values of all tensors."""
    values = b"".join(t.cpu().flatten().view(torch.uint8).numpy().tobytes() for t in tensors.values())
    return hashlib.sha256(values).hexdigest()


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Plant one of FAULTS in this process, if any."""
    with ExitStack() as stack:
        for owner, name, value in FAULTS.get(fault, []):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _same_rows(share: autofit.Share, batch: Tensor) -> Tensor:
    return batch.chunk(share.count)[0]


def _with_buckets(size: float) -> type[DistributedDataParallel]:
    class Bucketed(DistributedDataParallel):
        __signature__ = inspect.signature(DistributedDataParallel)

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, bucket_cap_mb=size, **options)

    return Bucketed


def _optimize_ddp(contract: Contract) -> None:
    apply_dynamo(replace(contract, dynamo={**contract.dynamo, "optimize_ddp": True}))  # torch's default


_OWN_SUMS = partial(model_parallel.RowwiseParallel, output_layouts=Partial())
# Fault -> what it replaces.
FAULTS: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "every rank takes the first rows": [(autofit.Share, "of", _same_rows)],
    "experts see their own rank's rows only": [(model_parallel, "exchange", lambda x, group: x)],
    "attention heads are not added up": [(model_parallel, "RowwiseParallel", _OWN_SUMS)],
    "Dynamo splits regions": [(train, "apply_dynamo", _optimize_ddp)],
    "each rank orthogonalizes the rows of a matrix that it has": [
        (optimizers, name, lambda rows, parameter: rows) for name in ("gathered", "part_of")
    ],
}


def compare(
    ranks: Ranks,
    division: str,
    policy: str = "eager",
    optimizer: str = "adamw",
    steps: int = STEPS,
    pattern: str = PATTERN,
    wide: bool = False,
    bucket: float = 0.0,
    fault: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Train over the ranks and in one process -> how losses, gradients and weights differ.

    wide: in fp64, and the one process is eager; otherwise it has the policy of the ranks.
    bucket: of DDP's gradients, in MiB; the ranks then compile in their first step, under DDP, as on a GPU.
    options: of both trainers.
    `repeated` is how a repetition of the one process differs, compiled on a GPU.
    """
    if bucket:
        parallel.DistributedDataParallel = _with_buckets(bucket)  # type: ignore[misc]
        torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = int(bucket * 2**20)
        train.load_warmup = lambda: WarmUp({"compiled": {"compiled": True}}, "1")
    if wide:
        torch.set_default_dtype(torch.float64)
    dtype = "float64" if wide else TrainingPlan.dtype
    plan = TrainingPlan(steps, policy=policy, dtype=dtype, optimizer=optimizer, warmup=1)
    if ranks.rank:
        ranks.meet()  # rank 0 compiles first, the others find its code in the cache
    single = replace(plan, policy="eager") if wide else plan
    one = trainer(ranks, single, division, pattern, alone=True, **options)
    expected = first_gradients(one)
    all_dropped = one.run()["dropped_pairs"]
    repeated: dict[str, Tensor] = {}
    if ranks.device.type == "cuda" and policy != "eager":
        torch.compiler.reset()
        again = trainer(ranks, single, division, pattern, alone=True, **options)
        repeated = first_gradients(again)
        again.run()
    if not ranks.rank:
        ranks.meet()
    torch.compiler.reset()
    with planted(fault), DynamoWatch() as watch:
        run = trainer(ranks, plan, division, pattern, backend=watch.backend(), **options)
        found = first_gradients(run)
        dropped = run.run()["dropped_pairs"]
        recompiles = len(watch.refresh().recompiles)
    return {
        "losses": run.losses,
        "one": one.losses,
        "gradients": apart(found, expected),
        "repeated": apart(repeated, expected) if repeated else None,
        "weights": apart(whole(run.model.state_dict()), one.model.state_dict()),
        "dropped": {"all": all_dropped, "stated": dropped, "own": run.model.overflow()},
        "state": digest(whole(run.model.state_dict())),
        "balance": {name: len(b.unique()) for name, b in run.model.named_buffers() if b.is_floating_point()},
        "programs": len(run.programs.seen),
        "expected_programs": run.programs.allowed,
        "recompiles": recompiles,
        "groups": ranks.started,
        "timeout": group_timeout(torch.distributed.group.WORLD, ranks.device.type),
    }


def resumed(ranks: Ranks, division: str, place: str) -> dict[str, Any]:
    """Train with a checkpoint half-way; train on from it over the ranks, and in one process -> how both differ."""
    plan = TrainingPlan(STEPS, policy="eager", optimizer="muon", warmup=1)
    folder = Path(place, f"{division}-{ranks.rank}")
    folder.mkdir()
    written = Files(folder / "state.pt", folder / "log.jsonl")
    run = trainer(ranks, plan, division, files=written)
    run.run(until=SAVED)
    saved = Path(place, f"{division}.pt")
    if run.writes:
        shutil.copy(folder / "state.pt", saved)
    ranks.meet()
    run.run()
    weights = whole(run.model.state_dict())

    def continued(alone: bool) -> Trainer:
        run = trainer(ranks, plan, division, alone=alone, files=Files(saved))
        run.resume()
        run.checkpoint = None  # the file is shared by the ranks of this test, and still to be read
        run.run()
        ranks.meet()
        return run

    again, alone = continued(alone=False), continued(alone=True)
    return {
        "files": sorted(path.name for path in folder.iterdir()),
        "losses": run.losses,
        "again": again.losses,
        "alone": alone.losses,
        "weights": apart(whole(again.model.state_dict()), weights),
        "weights_alone": apart(alone.model.state_dict(), weights),
        "steps_logged": len(written.log.read_text().splitlines()) if run.writes else 0,
    }


def disagreeing(ranks: Ranks, name: str, values: list[str]) -> dict[str, Any]:
    """Compare facts of which one differs between the ranks; raises ContractError on all of them."""
    ranks.agree({"python": "3.11.7", name: values[ranks.rank]})
    return {"agreed": True}


def slow_cache(ranks: Ranks, place: str, seconds: float, store_timeout: float = 0.0) -> dict[str, Any]:
    """Seed the caches of a named run as launch.train does, from a directory in which each file takes half of `seconds`.

    store_timeout: in place of the contract's, for what ranks send each other through the store.
    """
    given = child_environment(ranks.contract, {"XDG_CACHE_HOME": place, RUN: "slow"})
    folders = run_caches(ranks.contract, given)
    put, seeded, began = caches._put, 0, time.monotonic()
    if store_timeout:
        ranks.store.set_timeout(timedelta(seconds=store_timeout))

    def slowly(*arguments: Any) -> None:
        time.sleep(seconds / len(folders))
        put(*arguments)

    if not ranks.rank:
        for shared, own in folders:
            shared.mkdir(parents=True)
            own.mkdir(parents=True)
            (shared / "code").write_text("compiled")
        caches._put = slowly
        seeded = seed_caches(ranks.contract, given)
    ranks.agree({})
    found = sum((own / "code").exists() for _, own in folders)
    return {"seeded": seeded, "files": found, "waited": time.monotonic() - began}
