"""A rank's process group: the contract's timeout read back, a retry's patches 2, 3 and 4, and ranks with skewed
compiles.

Rules C23, C25, C5.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from launch.contract import ContractError, load
from launch.dist import process_group
from launch.dist.parallel import average_buffers
from launch.dist.process_group import barrier, lazy, monitor_again, new_group, quiet_process, start, warm_up
from launch.environment import RETRY, check, child_environment, expected
from launch.retry import REASON, load_retry
from launch.warmup import MONITORING, Start, WarmUp, load_warmup
from model import Hybrid, preset
from suites.distributed.ranks import run_cases
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
    groups = {"default": dist.group.WORLD, "further": new_group(contract, [0])}
    groups |= {name: mesh.get_group(name) for name in ("data", "expert")}
    found = {name: group_timeout(group) for name, group in groups.items()}
    about = {"seen": found, "rule": "C23", "instruments": ("group_timeout",)}
    about["evidence"] = [f"{name}: {seconds:.0f} s" for name, seconds in found.items()]
    right = sum(seconds == EXPECTED_SECONDS for seconds in found.values())
    row.count("launch/process_group/groups_with_the_timeout", right, expected=len(groups), **about)
    assert group_timeout(dist.new_group([0])) == 1800.0, "torch gives a further group its own default"


@planted("C23", "NCCL's variables exported without LOCAL_RANK")
def test_nccl_variables_are_set_iff_local_rank(row) -> None:
    """By LOCAL_RANK alone: schedulers set RANK and WORLD_SIZE in single-process jobs, too."""
    contract = load()
    variables = set(contract.rank_variables)
    others = ({}, {"RANK": "0", "WORLD_SIZE": "8"})
    locals_ = ({}, {"LOCAL_RANK": ""}, {"LOCAL_RANK": "0"}, {"LOCAL_RANK": "7"})
    cases = [({**other, **own}, bool(own.get("LOCAL_RANK"))) for other in others for own in locals_]
    right = [
        variables & set(expected(contract, given)) == (variables if rank else set()) for given, rank in cases
    ]
    about = {"expected": len(cases), "seen": sum(rank for _, rank in cases), "rule": "C23"}
    row.count("launch/process_group/ranks_told_by_local_rank", sum(right), **about)
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
    about = {"expected": "1", "seen": seen, "rule": "C23"}
    row.bound("launch/process_group/monitoring_after_warm_up", seen[0][0], "setting", **about)
    assert contract.rank_variables[MONITORING] == "0"
    assert seen == [("1", False)], "the warm-up's groups are gone when the run's are made"
    assert dist.group.WORLD is not of_warm_up
    assert group_timeout(dist.group.WORLD) == EXPECTED_SECONDS, "the long timeout stays for the whole run"
    # Set after it, the group is made without monitoring.
    monkeypatch.setenv(MONITORING, "0")
    dist.destroy_process_group()
    regroup()
    os.environ[MONITORING] = value
    assert seen[-1][0] == "0"


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
    for level, given, after in (("OFF", AGAIN, "OFF"), ("INFO", AGAIN, "INFO"), ("DETAIL", {}, "DETAIL")):
        dist.set_debug_level(dist.DebugLevel.__members__[level])
        quiet_process(retry, given)
        assert dist.get_debug_level().name == after
    for case in ("first", "retry", "unpatched"):
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
        if case == "unpatched":
            monkeypatch.setattr(process_group, "quiet_process", lambda *_: None)
        place = alone()
        start(contract, retry, "gloo", given={} if case == "first" else AGAIN, **place)
        made[case] = place["store"].num_keys(), dist.get_debug_level().name
        dist.destroy_process_group()
    about = {"expected": retry.debug_level, "seen": made["first"][0] - made["retry"][0], "rule": "C25"}
    about["evidence"] = [
        f"{case}: {keys} groups in the store, {level}" for case, (keys, level) in made.items()
    ]
    row.bound("launch/retry/debug_level_in_process", made["retry"][1], "setting", **about)
    assert made == {"first": (2, "DETAIL"), "retry": (1, "INFO"), "unpatched": (2, "DETAIL")}


REASONS = (None, "cuda_out_of_memory", "bootstrap", "hbm_out_of_memory")
STARTS = list(itertools.product(("cuda", "cpu"), REASONS, (False, True)))


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
    assert right["cuda"] != right["listed"]
    found = {
        reading: [lazily(replace(retry, lazy_groups=reading), *case) for case in STARTS] for reading in right
    }
    wanted = right[retry.lazy_groups]
    about = {"expected": len(STARTS), "seen": sum(wanted), "rule": "C25"}
    same = sum(a == b for a, b in zip(found[retry.lazy_groups], wanted))
    row.count("launch/retry/lazy_groups_as_the_rule", same, **about)
    assert found == right
    assert not any(lazy(retry, d, {}, ep) for d, _, ep in STARTS), "a first launch is eager"
    monkeypatch.setattr(process_group, "lazy", lambda *_: False)
    assert [lazily(retry, *case) for case in STARTS] != right["cuda"]


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[dict]]:
    """The results of one start of two ranks for the tests below."""
    skewed = {"program": "skewed", "group_timeout": 10}
    starts = {"program": "passes_barrier", "given": AGAIN | {REASON: "bootstrap"}, "expert": True}
    return run_cases(
        {
            "contract": {**skewed, "collectives": False},
            "on": {**skewed, "collectives": True},
            "expert retry": starts,
            "expert first": {**starts, "given": {}},
            "plain retry": {**starts, "expert": False},
        }
    )


@planted("C25", "an expert-parallel retry waits at the bootstrap barrier")
def test_patch_4_no_barrier_for_expert_parallelism(ranks, row) -> None:
    found = {case: ranks[case] for case in ("expert retry", "expert first", "plain retry")}
    passed = {case: not any("error" in one for one in each) for case, each in found.items()}
    about = {"seen": passed, "rule": "C25", "evidence": [f"{case}: {each}" for case, each in found.items()]}
    row.count("launch/retry/starts_past_the_barrier", sum(passed.values()), expected=1, **about)
    assert passed == {"expert retry": True, "expert first": False, "plain retry": False}
    table = {(again, ep): barrier(AGAIN if again else {}, ep) for again in (0, 1) for ep in (0, 1)}
    assert table == {(0, 0): True, (0, 1): True, (1, 0): True, (1, 1): False}


@planted("C5", "compiler collectives are on")
def test_ranks_with_skewed_shapes_finish(ranks, row) -> None:
    """Rank 0 gets a new shape in each step and compiles for it, rank 1 does not."""
    graphs = [one.get("graphs", 0) for one in ranks["contract"]]
    about = {"expected": 2, "seen": sum(graphs), "rule": "C5"}
    about["evidence"] = [f"{case}: {ranks[case]}" for case in ("contract", "on")]
    row.count("launch/compiler_collectives/ranks_that_finish", sum(map(bool, graphs)), **about)
    assert graphs == [3, 1]
    assert all("error" in one for one in ranks["on"])


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
