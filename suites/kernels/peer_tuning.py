"""Recorded autotuning results of mamba-ssm, which tunes over hundreds of configurations sequentially, two to four
minutes per shape. The winners belong in peer_tuning.json and a run uses only them, so that the peer is as fast as it
can be and the lane does not wait. A kernel without a record there is tuned in full.

`python -m suites.kernels.peer_tuning` tunes at the timed shapes and rewrites the file. It skips the
configurations that spill most (see `promising`), and first compiles the rest in parallel processes, into Triton's
cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suites.ops import specs, timed_cases
from suites.support.absent import absent

if TYPE_CHECKING:
    from suites.ops.spec import Workload

WINNERS = Path(__file__).with_suffix(".json")


def autotuners() -> Iterator[tuple[str, Any]]:
    """Yield name and autotuner of every tuned Triton kernel in the imported mamba_ssm modules."""
    from triton.runtime.autotuner import Autotuner

    seen = set()
    for name, module in sorted(sys.modules.items()):
        if name.startswith("mamba_ssm.ops.triton"):
            for attribute, value in sorted(vars(module).items()):
                while value is not None and not isinstance(value, Autotuner):
                    value = getattr(value, "fn", None)
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    yield attribute, value


def described(config: Any) -> dict[str, Any]:
    """Return what distinguishes one configuration of a kernel from another."""
    launch = {name: getattr(config, name) for name in ("num_warps", "num_stages", "maxnreg")}
    return {**config.kwargs, **launch}


def load_peers() -> None:
    """Import the peers. Raises ImportError if mamba-ssm is absent."""
    for name, spec in specs().items():
        if spec.tuned_peer:
            import_module(f"kernels.{name}.upstream").load()


@cache
def keep_winners() -> int:
    """Load the peers and drop every configuration but the recorded winners; a kernel without a record keeps its own.

    Returns the number of kernels pruned. Raises ImportError if mamba-ssm is absent.
    """
    load_peers()
    winners, pruned = json.loads(WINNERS.read_text()), 0
    for name, tuner in autotuners():
        kept = [config for config in tuner.configs if described(config) in winners.get(name, [])]
        if kept:
            tuner.configs, pruned = kept, pruned + 1
    return pruned


def tuned_case(name: str, B: int) -> Workload:
    """Return a timed case on random inputs with the tuned peer, or None as the peer if it is not installed.

    Raises KeyError on another name, ImportError on a peer that is installed and does not import.
    """
    import torch

    torch.manual_seed(0)
    case = timed_cases()[name].make(B)
    if absent(peer_packages(name)):
        return case._replace(peer=None)
    if case.peer and specs()[op_of(name)].tuned_peer:
        keep_winners()
    return case


def peer_packages(name: str) -> tuple[str, ...]:
    """Return import names that the peer of a case needs; empty if the peer is torch itself, or there is none."""
    return specs()[op_of(name)].packages


def op_of(case: str) -> str:
    """Return the op of a timed case."""
    return case.partition("-")[0]


def call_peers(B: int) -> None:
    """Run forward and backward of each tuned peer at each timed shape."""
    from suites.support.gpu_timing import forward_and_backward

    for name, timed in timed_cases().items():
        if specs()[op_of(name)].tuned_peer:
            case = timed.make(B)
            _, both = forward_and_backward(case.peer, case.inputs)
            both()


def promising(configs: list[Any]) -> list[Any]:
    """Drop those that spill most: if configurations bound registers, keep the highest bound and 4 warps or more.

    A kernel that must spill and sets no bound gets 32 registers from ptxas, and 2 warps hold half the tile of 4: the
    codegen tier reads 25,360 bytes spilled per thread in mamba3_siso_fwd without a bound and 5,004 with one of 255.
    """
    bounded = [config for config in configs if config.maxnreg]
    highest = max((config.maxnreg for config in bounded), default=None)
    return [config for config in bounded if config.maxnreg == highest and config.num_warps >= 4] or configs


def footprint(config: Any) -> float:
    """Return a size that grows with the shared memory of a configuration."""
    return config.num_stages * prod(v for v in config.kwargs.values() if isinstance(v, int))


def run_once(call: Callable[[], object], quantiles: tuple[float, ...]) -> list[float]:
    """Replace the benchmark if a configuration is only to be compiled; all report equal times."""
    call()
    return [1.0] * len(quantiles)


def compile_share(number: int, shares: int) -> None:
    """Compile every `shares`-th configuration of each kernel, from `number` on, into Triton's cache.

    And the smallest one in every share: if none of a share fits into shared memory the tuner raises.
    """
    load_peers()
    for _, tuner in autotuners():
        kept = promising(tuner.configs)
        tuner.configs, tuner._do_bench = [*kept[number::shares], min(kept, key=footprint)], run_once
    call_peers(B=2)  # a size of 1 is specialized, and would compile other programs


def tune() -> dict[str, list[dict[str, Any]]]:
    """Return the winners by kernel, of the promising configurations at the timed shapes; each is timed for 30 ms."""
    from triton.testing import do_bench

    shares = os.cpu_count() or 1
    command = [sys.executable, "-m", "suites.kernels.peer_tuning"]
    for child in [subprocess.Popen([*command, str(i), str(shares)]) for i in range(shares)]:
        child.wait()
    load_peers()
    for _, tuner in autotuners():
        tuner.configs, tuner._do_bench = promising(tuner.configs), partial(do_bench, warmup=5, rep=30)
    call_peers(B=4)
    winners: dict[str, list[dict[str, Any]]] = {}
    for name, tuner in autotuners():
        found = [described(config) for config in tuner.cache.values()]
        if found:
            winners[name] = [config for i, config in enumerate(found) if config not in found[:i]]
    return winners


def main(arguments: list[str]) -> None:
    """Exit with 2 on a machine without an H200."""
    if arguments:
        compile_share(*map(int, arguments))
        return
    from bumpgate.plugin.devices import detect
    from suites.support.lanes import LANES

    if missing := detect(LANES["h200"]):
        print(missing, file=sys.stderr)
        sys.exit(2)
    temporary = WINNERS.with_suffix(".tmp")
    temporary.write_text(json.dumps(tune(), indent=1, sort_keys=True) + "\n")
    temporary.replace(WINNERS)


if __name__ == "__main__":
    main(sys.argv[1:])
