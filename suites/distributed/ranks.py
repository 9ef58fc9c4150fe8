"""Two ranks on gloo: a function of suites/distributed/programs.py in two forked processes after one import of torch.

`python -m suites.distributed.ranks '{"case": {"program": ...}}'` prints a JSON line per case. A rank that has returned
its result stays alive until the other has returned its own: leaving would abort the other's collective.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from launch import process_group
from launch.children import Child, run
from launch.contract import apply_dynamo, load
from launch.retry import load_retry
from suites.support.child import ROOT

RANKS = 2
SECONDS = 500.0
CASE = 120.0


def run_cases(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return case -> the result of each rank. A case names its `program`; its other keys are the program's arguments.

    group_timeout: seconds that the rank's launcher sets for the group, in place of the contract's. within: seconds that
    the harness waits for a rank. A rank that raised returns `error`, one line; so does one that ended or never
    answered.
    """
    program = [sys.executable, "-m", "suites.distributed.ranks", json.dumps(cases)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    tail = run([Child("ranks", program, environment)], seconds=SECONDS, cwd=ROOT)["ranks"]
    lines = [json.loads(line) for line in tail if line.startswith('{"case"')]
    return {line["case"]: line["results"] for line in lines}


def _case(
    program: str, within: float = CASE, group_timeout: int = 0, **arguments: Any
) -> list[dict[str, Any]]:
    fork = multiprocessing.get_context("fork")
    processes, connections = [], []
    with tempfile.TemporaryDirectory() as place:
        for rank in range(RANKS):
            here, there = fork.Pipe(duplex=False)
            options = (there, Path(place) / "store", rank, group_timeout, program, arguments)
            process = fork.Process(target=_rank, args=options, daemon=True)
            process.start()
            there.close()  # otherwise the pipe of a rank that dies would stay open here
            processes.append(process)
            connections.append(here)
        end = time.monotonic() + within
        try:
            return [_result(process, here, end, within) for process, here in zip(processes, connections)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _result(process: Any, here: Connection, end: float, within: float) -> dict[str, Any]:
    if not here.poll(max(0.0, end - time.monotonic())):
        return {"error": f"no answer in {within:g} s"}
    try:
        return here.recv()
    except EOFError:
        process.join()
        return {"error": f"ended with {process.exitcode}"}


def _rank(
    connection: Connection,
    store: Path,
    rank: int,
    group_timeout: int,
    program: str,
    arguments: dict[str, Any],
) -> None:
    from suites.distributed import programs

    contract = load()
    apply_dynamo(contract)
    if group_timeout:
        changed = {**contract.rank_variables, "TORCH_DISTRIBUTED_DEFAULT_TIMEOUT": str(group_timeout)}
        contract = replace(contract, rank_variables=changed)
    meet = {"store": dist.FileStore(str(store), RANKS), "rank": rank, "world_size": RANKS}
    process_group.start(contract, load_retry(), "gloo", given={}, **meet)
    try:
        found = getattr(programs, program)(rank, **arguments)
    except Exception as error:  # whatever torch raises is the result
        found = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    connection.send(found)
    time.sleep(SECONDS)


def main() -> None:
    import suites.distributed.programs  # noqa: F401  (before the forks, which share it)

    for case, options in json.loads(sys.argv[1]).items():
        print(json.dumps({"case": case, "results": _case(**options)}), flush=True)


if __name__ == "__main__":
    main()
