"""A rank's process group: the contract's timeout read back, a retry's patches 2, 3 and 4, and ranks with skewed
compiles.

Rules C23, C25, C5.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from launch.children import Child, run
from launch.contract import ContractError, load
from launch.dist import process_group
from launch.dist.parallel import average_buffers
from launch.dist.process_group import barrier, lazy, monitor_again, new_group, quiet_process, start, warm_up
from launch.environment import RETRY, check, child_environment, expected
from launch.retry import REASON, load_retry
from launch.warmup import MONITORING, Start, WarmUp, load_warmup
from model import Hybrid, preset
from suites.support.child import ROOT
from suites.support.instruments import group_timeout
from suites.support.lanes import lanes
from suites.support.planted import planted

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane")]

EXPECTED_SECONDS = 7200.0
AGAIN = {RETRY: "1", REASON: "cuda_out_of_memory"}


def alone() -> dict[str, object]:
    return {"store": dist.HashStore(), "rank": 0, "world_size": 1}


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    level = dist.get_debug_level()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.set_debug_level(level)


@planted("C23", "a further group is made without a timeout")
def test_every_group_has_the_contract_timeout(canaries, row) -> None:
    canaries("group_timeout")
    contract = load()
    start(contract, load_retry(), "gloo", given={}, **alone())
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "expert"))
    groups = {
        "default": dist.group.WORLD,
        "further": new_group(contract, [0]),
        "data": mesh.get_group("data"),
        "expert": mesh.get_group("expert"),
    }
    found = {name: group_timeout(group) for name, group in groups.items()}
    row.count(
        "launch/process_group/groups_with_the_timeout",
        sum(seconds == EXPECTED_SECONDS for seconds in found.values()),
        expected=len(groups),
        seen=found,
        rule="C23",
        evidence=[f"{name}: {seconds:.0f} s" for name, seconds in found.items()],
        instruments=("group_timeout",),
    )
    assert group_timeout(dist.new_group([0])) == 1800.0, "torch gives a further group its own default"


INERT = """
import os, torch.distributed as dist
from suites.support.instruments import group_timeout
found = []
for late in (None, "77"):
    if late:
        os.environ["TORCH_DISTRIBUTED_DEFAULT_TIMEOUT"] = late
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found.append(group_timeout(dist.group.WORLD))
    dist.destroy_process_group()
print(found)
"""


def test_environment_variable_sets_no_timeout() -> None:
    """A property of torch that the contract relies on, not a fault of ours: set before the start, and set late."""
    given = {**os.environ, "TORCH_DISTRIBUTED_DEFAULT_TIMEOUT": "55", "PYTHONPATH": str(ROOT)}
    tail = run([Child("rank0", [sys.executable, "-c", INERT], given)], seconds=120)["rank0"]
    assert json.loads(tail[-1]) == [1800.0, 1800.0]


@planted("C23", "NCCL's variables exported without LOCAL_RANK")
def test_nccl_variables_are_set_iff_local_rank(row) -> None:
    """By LOCAL_RANK alone: schedulers set RANK and WORLD_SIZE in single-process jobs, too."""
    contract = load()
    variables = set(contract.rank_variables)
    others = ({}, {"RANK": "0", "WORLD_SIZE": "8"})
    cases = [({**other, **own}, bool(own.get("LOCAL_RANK"))) for other in others for own in (
        {}, {"LOCAL_RANK": ""}, {"LOCAL_RANK": "0"}, {"LOCAL_RANK": "7"}
    )]  # fmt: skip
    right = [
        variables & set(expected(contract, given)) == (variables if rank else set()) for given, rank in cases
    ]
    row.count(
        "launch/process_group/ranks_told_by_local_rank",
        sum(right),
        expected=len(cases),
        seen=sum(rank for _, rank in cases),
        rule="C23",
    )
    assert len(variables) == 4
    for other in others:
        careless = child_environment(contract, other) | contract.rank_variables
        with pytest.raises(ContractError, match=r"^\w+ is set without LOCAL_RANK: .* \(and 3 more\)$"):
            check(contract, careless)


@planted("C23", "monitoring is set after the groups that should have it")
def test_monitoring_is_on_before_the_run_groups_start(monkeypatch, row) -> None:
    contract, retry, value = load(), load_retry(), load_warmup().monitoring
    monkeypatch.setenv(MONITORING, contract.rank_variables[MONITORING])
    start(contract, retry, "gloo", given={}, **alone())
    of_warm_up, seen = dist.group.WORLD, []

    def regroup() -> None:
        seen.append((os.environ[MONITORING], dist.is_initialized()))
        start(contract, retry, "gloo", given={}, **alone())

    monitor_again(value, regroup)
    row.bound(
        "launch/process_group/monitoring_after_warm_up",
        seen[0][0],
        "setting",
        expected="1",
        seen=seen,
        rule="C23",
    )
    assert contract.rank_variables[MONITORING] == "0"
    assert seen == [("1", False)], "the warm-up's groups are gone when the run's are made"
    assert dist.group.WORLD is not of_warm_up
    assert group_timeout(dist.group.WORLD) == EXPECTED_SECONDS, "the long timeout stays for the whole run"

    def too_late() -> None:
        dist.destroy_process_group()
        regroup()
        os.environ[MONITORING] = value

    monkeypatch.setenv(MONITORING, "0")
    too_late()
    assert seen[-1][0] == "0", "set after it, the group is made without monitoring"


@planted("C23", "the monitor is on for groups under which the first steps compile")
def test_monitoring_waits_for_a_warm_up(monkeypatch) -> None:
    """If the contract skips the warm-up, the compilation is still to come: the groups stay unmonitored."""
    contract, retry, table = load(), load_retry(), load_warmup()
    compiles_in_steps = Start("cuda", regional=True, moe=True)
    seen: list[str] = []

    def regroup() -> None:
        start(contract, retry, "gloo", given={}, **alone())
        seen.append(os.environ[MONITORING])

    def sequence(table: WarmUp, begin: Start) -> tuple[str, list[str]]:
        monkeypatch.setenv(MONITORING, contract.rank_variables[MONITORING])
        seen.clear()
        regroup()
        skipped = warm_up(table, begin, lambda: seen.append("warm-up"), regroup)
        dist.destroy_process_group()
        return skipped, list(seen)

    assert sequence(table, Start("cuda", regional=False, moe=True)) == ("", ["0", "warm-up", "1"])
    assert sequence(table, compiles_in_steps) == ("cuda_regional_moe", ["0"])
    assert sequence(table, Start("cpu", regional=True, moe=True, requested=False)) == ("not_requested", ["0"])
    careless = WarmUp({}, table.monitoring)
    assert sequence(careless, compiles_in_steps)[1][-1] == "1", "without the table they would be monitored"


@planted("C25", "the retry keeps the process's own DETAIL")
def test_patch_2_lowers_the_debug_level_in_the_process(monkeypatch, row) -> None:
    """The value that C++ read at import outlives a changed environment; with DETAIL each group creates a second one."""
    contract, retry, made = load(), load_retry(), {}
    for case in ("first", "retry", "unpatched"):
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
        if case == "unpatched":
            monkeypatch.setattr(process_group, "quiet_process", lambda *_: None)
        place = alone()
        start(contract, retry, "gloo", given={} if case == "first" else AGAIN, **place)
        made[case] = place["store"].num_keys(), dist.get_debug_level().name
        dist.destroy_process_group()
    row.bound(
        "launch/retry/debug_level_in_process",
        made["retry"][1],
        "setting",
        expected=retry.debug_level,
        seen=made["first"][0] - made["retry"][0],
        rule="C25",
        evidence=[f"{case}: {keys} groups in the store, {level}" for case, (keys, level) in made.items()],
    )
    assert made == {"first": (2, "DETAIL"), "retry": (1, "INFO"), "unpatched": (2, "DETAIL")}


def test_patch_2_keeps_other_debug_levels() -> None:
    for level, given, after in (("OFF", AGAIN, "OFF"), ("INFO", AGAIN, "INFO"), ("DETAIL", {}, "DETAIL")):
        dist.set_debug_level(dist.DebugLevel.__members__[level])
        quiet_process(load_retry(), given)
        assert dist.get_debug_level().name == after


STARTS = list(
    itertools.product(
        ("cuda", "cpu"), (None, "cuda_out_of_memory", "bootstrap", "hbm_out_of_memory"), (False, True)
    )
)


def lazily(retry, device: str, reason: str | None, expert_parallel: bool) -> bool:
    """Return whether `start` created the group without a device; a device would make it connect at once."""
    given, seen = ({RETRY: "1", REASON: reason} if reason else {}), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda *_, **options: seen.update(options))
        patch.setattr(dist, "barrier", lambda: None)
        options = {"device": torch.device(device, 3), "expert_parallel": expert_parallel}
        start(load(), retry, "nccl", given=given, **options)
    assert seen["timeout"] == timedelta(seconds=EXPECTED_SECONDS)
    assert seen["device_id"] in (None, torch.device(device, 3))
    return seen["device_id"] is None


@planted("C25", "the retry's group is eager")
def test_patch_3_makes_retry_groups_lazy(monkeypatch, row) -> None:
    """The contract's reading (every retry on CUDA), and the other one in the sources (listed errors only)."""
    retry = load_retry()
    right = {
        "cuda": [bool(why) and (d == "cuda" or ep or why == "bootstrap") for d, why, ep in STARTS],
        "listed": [bool(why) and (ep or why == "bootstrap") for _, why, ep in STARTS],
    }
    for reading, outcomes in right.items():
        found = [lazily(replace(retry, lazy_groups=reading), *case) for case in STARTS]
        assert found == outcomes, reading
        if reading == retry.lazy_groups:
            row.count(
                "launch/retry/lazy_groups_as_the_rule",
                sum(a == b for a, b in zip(found, outcomes)),
                expected=len(STARTS),
                seen=sum(outcomes),
                rule="C25",
            )
    assert right["cuda"] != right["listed"]
    assert not any(lazy(retry, d, {}, ep) for d, _, ep in STARTS), "a first launch is eager"
    monkeypatch.setattr(process_group, "lazy", lambda *_: False)
    assert [lazily(retry, *case) for case in STARTS] != right["cuda"]


# Two ranks, of which the second never reaches the barrier: it waits for a sign that the first is past it.
BARRIER = """
import json, os, sys
from datetime import timedelta
import torch.distributed as dist
from launch.dist import process_group
from launch.contract import load
from launch.retry import load_retry

def passes(case, given, expert_parallel):
    place = os.path.join(sys.argv[1], case)
    pids = []
    for rank in (0, 1):
        if pid := os.fork():
            pids.append(pid)
            continue
        group = {"store": dist.FileStore(place, 2), "rank": rank, "world_size": 2}
        code = 0
        try:
            if rank == 0:
                process_group.start(load(), load_retry(), "gloo", expert_parallel=expert_parallel, given=given, **group)
                group["store"].set("passed", "1")
                group["store"].wait(["gone"], timedelta(seconds=20))
            else:
                dist.init_process_group("gloo", **group)
                group["store"].wait(["passed"], timedelta(seconds=2))
                group["store"].set("gone", "1")
        except dist.DistError:
            code = 7
        except RuntimeError:
            code = 8
        os._exit(code)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]

again = {"BUMPGATE_RETRY": "1", "BUMPGATE_RETRY_REASON": "bootstrap"}
print(json.dumps({
    "expert retry": passes("a", again, True),
    "expert first": passes("b", {}, True),
    "plain retry": passes("c", again, False),
}))
"""


@planted("C25", "an expert-parallel retry waits at the bootstrap barrier")
def test_patch_4_no_barrier_for_expert_parallelism(tmp_path: Path, row) -> None:
    program = [sys.executable, "-c", BARRIER, str(tmp_path)]
    tail = run([Child("ranks", program, {**os.environ, "PYTHONPATH": str(ROOT)})], seconds=180)["ranks"]
    found = json.loads(tail[-1])
    passed = {case: codes == [0, 0] for case, codes in found.items()}
    row.count(
        "launch/retry/starts_past_the_barrier",
        sum(passed.values()),
        expected=1,
        seen=passed,
        rule="C25",
        evidence=[f"{case}: exit codes {codes}" for case, codes in found.items()],
    )
    assert passed == {"expert retry": True, "expert first": False, "plain retry": False}
    table = {(again, ep): barrier(AGAIN if again else {}, ep) for again in (0, 1) for ep in (0, 1)}
    assert table == {(0, 0): True, (0, 1): True, (1, 0): True, (1, 1): False}


# Rank 0 gets a new shape in each step and compiles for it, rank 1 does not.
SKEWED = """
import json, os, signal, sys
import torch, torch.distributed as dist
from launch.dist import process_group
from launch.contract import apply_dynamo, load
from launch.retry import load_retry

def finish(case, **lines):
    pids = []
    for rank in (0, 1):
        if pid := os.fork():
            pids.append(pid)
            continue
        signal.alarm(60)  # a rank that waits for a collective which the other never enters
        try:
            apply_dynamo(load())
            with torch._dynamo.config.patch(lines):
                place = dist.FileStore(os.path.join(sys.argv[1], case), 2)
                process_group.start(load(), load_retry(), "gloo", store=place, rank=rank, world_size=2)
                graphs = []
                def count(graph, inputs):
                    graphs.append(1)
                    return graph.forward
                compiled = torch.compile(lambda x: x.sin().sum(), backend=count)
                for step in range(3):
                    total = compiled(torch.ones(2 + step if rank == 0 else 2))
                    dist.all_reduce(total)
                code = 10 * len(graphs)
        except Exception as error:
            print(f"{case}, rank {rank}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            code = 1
        os._exit(code)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]

print(json.dumps({"contract": finish("contract"), "on": finish("on", enable_compiler_collectives=True)}))
"""


@planted("C5", "compiler collectives are on")
def test_ranks_with_skewed_shapes_finish(tmp_path: Path, row) -> None:
    """Exit codes are ten times the number of graphs: the ranks did compile differently."""
    program = [sys.executable, "-c", SKEWED, str(tmp_path)]
    tail = run([Child("ranks", program, {**os.environ, "PYTHONPATH": str(ROOT)})], seconds=180)["ranks"]
    codes = json.loads(tail[-1])
    row.count(
        "launch/compiler_collectives/ranks_that_finish",
        sum(code >= 10 for code in codes["contract"]),
        expected=2,
        seen=sum(codes["contract"]) // 10,
        rule="C5",
        evidence=[f"contract: {codes['contract']}", f"on: {codes['on']}", *tail[:-1]],
    )
    assert codes["contract"] == [30, 10]
    assert not any(code >= 10 for code in codes["on"])


def test_averaged_buffers_keep_float64() -> None:
    """The mean over one rank is the buffer itself, in the precision of the training."""
    dist.init_process_group("gloo", **alone())
    model = Hybrid(preset("nam12", "narrow", bias_rate=0.01)).double()
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    for buffer in buffers:
        buffer.fill_(0.1)
    average_buffers(model)
    assert buffers
    assert all(bool((buffer == 0.1).all()) for buffer in buffers)
