"""Recorded autotuning results of mamba-ssm, which tunes over hundreds of configurations, two to four minutes per shape.

The winners belong in peer_tuning.json and a run uses only them, so that the peer is as fast as it can be and the lane
does not wait. A kernel without a record there is tuned in full. `python -m suites.kernels.peer_tuning` tunes at the
timed shapes and rewrites the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bumpgate.core.rows import write_atomic
from suites.ops import specs, timed_cases
from suites.support.absent import absent, installed

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

    Other peers that are not installed are left out.

    Raises KeyError on another name, ImportError on a peer that is installed and does not import.
    """
    import torch

    torch.manual_seed(0)
    case = timed_cases()[name].make(B)
    case = case._replace(others=tuple(each for each in case.others if installed(each.package)))
    if absent(peer_packages(name)):
        return case._replace(peer=None)
    if case.peer and specs()[op_of(name)].tuned_peer:
        keep_winners()
    return case


def peer_packages(name: str) -> tuple[str, ...]:
    """Return import names that the peer of a case needs; empty if the peer is torch itself, or there is none."""
    return specs()[op_of(name)].packages


def op_of(case: str) -> str:
    return case.partition("-")[0]


def tune() -> dict[str, list[dict[str, Any]]]:
    """Return the winners by kernel, after forward and backward of each tuned peer at each timed shape."""
    import torch

    from suites.support.gpu_timing import forward_and_backward

    torch.manual_seed(0)
    load_peers()
    for name, timed in timed_cases().items():
        if specs()[op_of(name)].tuned_peer:
            case = timed.make(4)
            forward_and_backward(case.peer, case.inputs)[1]()
    winners: dict[str, list[dict[str, Any]]] = {}
    for name, tuner in autotuners():
        found = [described(config) for config in tuner.cache.values()]
        if found:
            winners[name] = [config for i, config in enumerate(found) if config not in found[:i]]
    return winners


def main() -> None:
    """Exit with 2 on a machine without an H200."""
    from bumpgate.plugin.devices import detect
    from suites.support.lanes import LANES

    if missing := detect(LANES["h200"]):
        print(missing, file=sys.stderr)
        sys.exit(2)
    write_atomic(WINNERS, json.dumps(tune(), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
