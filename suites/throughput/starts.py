"""Starts of the model in fresh processes, for suites/throughput/test_cold_start.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bumpgate.plugin.duet import Duet, partner, shared_cores
from bumpgate.plugin.provenance import versions
from bumpgate.plugin.rows import InfraError
from bumpgate.plugin.timing import Watch
from bumpgate.process.gpu_shares import first_gpu
from bumpgate.process.locks import locked
from bumpgate.process.tree_digest import measured_tree
from suites.support.child import ENVIRONMENT, ROOT, run_json
from suites.support.environment import compiler
from suites.support.lanes import Lane

LONGEST = 300.0
ATTEMPTS = 2
Start = dict[str, Any]


def cold_start(lane: Lane) -> Start:
    """Return the result of a fresh process on an empty cache, which it leaves filled for `warm_start`."""
    return _undisturbed(lambda duet: _cold(lane, duet))


def warm_start(lane: Lane) -> Start:
    """Return the result of a fresh process on the cache of the last cold start; cold: losses and searches of that one.

    The cold start is made first if there was none with this run's compile caches, this build and these sources.
    """
    return _undisturbed(lambda duet: _warm(lane, duet))


def _undisturbed(start: Callable[[Duet | None], Start]) -> Start:
    """Return the result of `start`, repeated if other processes used the machine meanwhile.

    In a paired session both sides repeat together. Only one start uses the caches at a time: a run that fills compile
    caches makes the cold and the warm start at once. Raises InfraError if they were disturbed every time.
    """
    duet = partner()
    _folder().parent.mkdir(parents=True, exist_ok=True)
    with locked(_folder(), exclusive=True):
        for _ in range(ATTEMPTS):
            watch = Watch()
            found = start(duet)
            if duet is None or watch.was_quiet(duet):
                return found
    raise InfraError(f"other processes used this machine during {ATTEMPTS} starts")


def _cold(lane: Lane, duet: Duet | None) -> Start:
    shutil.rmtree(_folder(), ignore_errors=True)
    found = _started(lane, duet)
    kept = {"made_by": _made_by(), "losses": found["losses"], "searches": found["searches"]}
    (_folder() / "cold.json").write_text(json.dumps(kept), encoding="utf-8")
    return found


def _warm(lane: Lane, duet: Duet | None) -> Start:
    empty = _last_cold() is None
    if duet:
        empty = duet.exchange(empty, "whether the caches are empty") or empty
    if empty:
        _cold(lane, duet)
    return _started(lane, duet) | {"cold": _last_cold()}


def _last_cold() -> Start | None:
    """Return what is kept of the cold start that filled the caches; None if it was of other packages or sources."""
    try:
        kept = json.loads((_folder() / "cold.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return kept if kept["made_by"] == _made_by() else None


def _made_by() -> dict[str, str | None]:
    return {**versions(), "tree": measured_tree(ROOT, ROOT / "record.json")}


def _folder() -> Path:
    """Return the folder of the starts' own caches: each side, each pair of compile caches and each GPU has its own."""
    return Path(ENVIRONMENT["TORCHINDUCTOR_CACHE_DIR"]) / "starts" / first_gpu()


def _started(lane: Lane, duet: Duet | None) -> Start:
    """Start one process on these caches; in a paired session, when the other side is ready too."""
    if duet:
        duet.agree("start", "what they start")
    environment = {
        **compiler(),
        "TORCHINDUCTOR_CACHE_DIR": str(_folder()),
        "TRITON_CACHE_DIR": str(_folder() / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        # Compile in the process itself: a phase counts only what its own compilers use.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    with shared_cores():
        return run_json("suites.throughput.cold_start", lane.device, environment=environment, timeout=LONGEST)
