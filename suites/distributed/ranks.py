"""Ranks in forked processes after one import of torch: functions of programs, training, steps or nccl.

`python -m suites.distributed.ranks cpu 2 FILE '{"case": {"program": ...}}'` writes the results of each case to a JSON
file: on gloo, or on NCCL with "cuda", where each rank has its own GPU. A rank has the contract's variables. One that
has returned its result stays alive until the others have returned their own: leaving would abort their collective.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bumpgate.plugin.timing import machine
from launch.children import Child, run
from launch.contract import apply_dynamo, load
from launch.dist.ranks import Ranks
from launch.retry import free_port
from suites.support.child import ROOT
from suites.support.lanes import Lane

SECONDS = 900.0
CASE = 120.0


def run_cases(
    cases: Mapping[str, Mapping[str, Any]],
    device: str = "cpu",
    ranks: int = 2,
    variables: Mapping[str, str] = {},
) -> dict[str, list[dict[str, Any]]]:
    """Return case -> the result of each rank. A case names its `program`; its other keys are the program's arguments.

    group_timeout: seconds that the rank's launcher sets for the group, in place of the contract's. within: seconds that
    the harness waits for a rank. given: environment variables that the rank sets before its group, after the
    contract's. log: the ranks' standard error goes to this path and "-0", "-1", ... A rank that raised returns `error`,
    one line; so does one that ended or never answered.

    variables: what the environment of all ranks has from the start, before torch is imported.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # compile times are of this process
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # CUDA must not start before the ranks are forked
    with tempfile.TemporaryDirectory(prefix="bumpgate-ranks-") as folder:
        file = Path(folder) / "results.json"
        program = [
            sys.executable,
            "-m",
            "suites.distributed.ranks",
            device,
            str(ranks),
            str(file),
            json.dumps(cases),
        ]
        run([Child("ranks", program, environment)], seconds=SECONDS, cwd=ROOT)
        return json.loads(file.read_text())


def run_shared(
    cases: Mapping[str, Mapping[str, Any]], device: str, ranks: int = 2, variables: Mapping[str, str] = {}
) -> dict[str, list[dict[str, Any]]]:
    """Run cases for the fixture of a module: on a GPU no test is timed meanwhile, as during a test."""
    with machine(exclusive=False) if device == "cuda" else nullcontext():
        return run_cases(cases, device, ranks, variables)


def ranks_of(lane: Lane) -> int:
    """Return how many ranks a test starts whose contract holds for any number: one a GPU, two on the CPU."""
    return max(2, lane.count)


def sound(results: Mapping[str, list[dict[str, Any]]], *names: str) -> list[dict[str, Any]]:
    """Return the results of all ranks in the named cases. Raises AssertionError if one has raised or ended."""
    found = [one for name in names for one in results[name]]
    assert not any("error" in one for one in found), found
    return found


def _case(
    device: str,
    ranks: int,
    program: str,
    within: float = CASE,
    group_timeout: int = 0,
    given: Mapping[str, str] = {},
    log: str = "",
    **arguments: Any,
) -> list[dict[str, Any]]:
    fork = multiprocessing.get_context("fork")
    processes, connections = [], []
    meet = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in range(ranks):
        here, there = fork.Pipe(duplex=False)
        place = {**meet, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        errors = f"{log}-{rank}" if log else ""
        options = (there, device, place, {**given}, group_timeout, errors, program, arguments)
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
    device: str,
    place: dict[str, str],
    given: dict[str, str],
    group_timeout: int,
    errors: str,
    program: str,
    arguments: dict[str, Any],
) -> None:
    from suites.distributed import nccl, programs, steps, training

    if errors:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    contract = load()
    os.environ.update({**contract.rank_variables, **place, **given})
    apply_dynamo(contract)
    if group_timeout:
        changed = {**contract.rank_variables, "TORCH_DISTRIBUTED_DEFAULT_TIMEOUT": str(group_timeout)}
        contract = replace(contract, rank_variables=changed)
    function = next(vars(m)[program] for m in (programs, training, steps, nccl) if program in vars(m))
    try:
        ranks = Ranks(contract, device, given=place)
        ranks.start()
        found = function(ranks, **arguments)
    except Exception as error:  # whatever torch raises is the result
        found = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    connection.send(found)
    time.sleep(SECONDS)


def main() -> None:
    import suites.distributed.nccl
    import suites.distributed.programs
    import suites.distributed.steps
    import suites.distributed.training  # noqa: F401  (before the forks, which share them)

    device, ranks, file, cases = sys.argv[1:]
    found = {case: _case(device, int(ranks), **options) for case, options in json.loads(cases).items()}
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
