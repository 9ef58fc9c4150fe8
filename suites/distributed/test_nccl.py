"""NCCL's groups under the contract: their timeout and sequence numbers, and what the watchdog does to a rank.

Rules C23, R1.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.warmup import MONITORING
from suites.distributed.nccl import COLLECTIVES, killed_by
from suites.distributed.ranks import run_shared
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

pytestmark = [lanes("h200x2"), pytest.mark.usefixtures("lane")]

TIMEOUT = 7200.0
HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
# After a timeout the watchdog waits for the flight record to be written: 15 s by default.
QUICK = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
# Seconds: the timeout and the heartbeat of the planted cases. The group starts within both.
TIMED_OUT, BEAT = 10, 4
LATE, KEPT = 20.0, 30.0  # seconds for which a rank is late, and for which its watchdog is kept
ABORTED = {"error": "ended with -6"}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def results(lane: Lane, logs: Path) -> dict[str, list[dict]]:
    """The results of one start of the ranks for all tests of this file."""
    late = {"program": "late_rank", "seconds": LATE}
    beat = {HEARTBEAT: str(BEAT), **QUICK}
    stopped = {"program": "stopped_watchdog", "seconds": KEPT, "given": beat}
    return run_shared(
        {
            "facts": {"program": "group_facts"},
            "late": late,
            "late, short timeout": {
                **late,
                "seconds": 3 * LATE,  # the rank that waits is ended before
                "given": QUICK,
                "group_timeout": TIMED_OUT,
                "log": str(logs / "late"),
            },
            "stopped": stopped,
            "stopped, monitored": {
                **stopped,
                "seconds": 2 * KEPT,
                "given": {**beat, MONITORING: "1"},
                "log": str(logs / "stopped"),
            },
        },
        lane.device,
    )


def sound(results: dict[str, list[dict]], name: str) -> list[dict]:
    """Return the results of all ranks in a case, none of which may have raised or ended."""
    assert not any("error" in one for one in results[name]), results[name]
    return results[name]


def test_nccl_groups_have_the_contract_timeout(results, row) -> None:
    """Read back from ProcessGroupNCCL, not the default since torch 2.15; each group is bound to its rank's GPU."""
    ranks = sound(results, "facts")
    row.count(
        "distributed/nccl/groups_with_the_timeout",
        sum(seconds == TIMEOUT for one in ranks for seconds in one["timeouts"].values()),
        expected=len(ranks) * len(COLLECTIVES),
        seen=sum(len(one["timeouts"]) for one in ranks),
        rule="C23",
        evidence=[str(one) for one in ranks],
    )
    for rank, one in enumerate(ranks):
        assert (one["class"], one["bound"]) == ("ProcessGroupNCCL", f"cuda:{rank}")


def test_sequence_numbers_agree_between_ranks(results, row) -> None:
    """Each group counts its collectives alike on all ranks."""
    first, *others = sound(results, "facts")
    row.count(
        "distributed/nccl/sequence_numbers_that_differ",
        sum(one["after"][name] != number for one in others for name, number in first["after"].items()),
        expected=0,
        seen=sum(first["after"].values()),
        rule="R1",
        evidence=[f"before {one['before']}, after {one['after']}" for one in (first, *others)],
    )
    for one in (first, *others):
        assert {name: one["after"][name] - one["before"][name] for name in COLLECTIVES} == COLLECTIVES
        assert one["sum"] == float(len(results["facts"])) ** sum(COLLECTIVES.values())


def test_traces_number_collectives_alike_on_all_ranks(lane: Lane, row) -> None:
    """Since torch 2.12 a trace has the number of each collective, by which the traces of ranks can be joined."""
    results = run_shared({"trace": {"program": "traced_numbers"}}, lane.device)
    first, *others = sound(results, "trace")
    assert {name: len(numbers) for name, numbers in first.items()} == COLLECTIVES
    numbered = not any(None in numbers for numbers in first.values())
    row.cost(
        "distributed/nccl_trace/capability",
        int(numbered),
        "capability",
        better="higher",
        seen=sum(map(len, first.values())),
        rule="R1",
        evidence=[f"rank 0: {first}"],
    )
    if numbered:
        row.count(
            "distributed/nccl_trace/sequence_numbers_that_differ",
            sum(one[name] != numbers for one in others for name, numbers in first.items()),
            expected=0,
            seen=sum(map(len, first.values())),
            rule="R1",
            evidence=[str(one) for one in (first, *others)],
        )
        assert all(len({*numbers}) == len(numbers) for numbers in first.values())


@planted("C23", "a group whose timeout is shorter than one rank's compilation")
def test_late_rank_is_waited_for(results, logs: Path, row) -> None:
    """Under a short timeout the watchdog aborts the rank that waits, with a reason in its log."""
    ranks = results["late"]
    row.count(
        "distributed/nccl_watchdog/ranks_lost_to_a_late_one",
        sum(one != {"sum": float(len(ranks))} for one in ranks),
        expected=0,
        seen=ranks,
        rule="C23",
        evidence=[killed_by(f"{logs / 'late'}-0")],
    )
    assert results["late, short timeout"][0] == ABORTED
    assert f"Timeout(ms)={TIMED_OUT}000" in killed_by(f"{logs / 'late'}-0")


@planted("C23", "the monitor is on, with a short heartbeat, while the watchdog is kept")
def test_kept_watchdog_does_not_end_a_rank(results, logs: Path, row) -> None:
    """The heartbeat is short, but the contract turns the monitor off until the warm-up has ended."""
    ranks = results["stopped"]
    row.count(
        "distributed/nccl_watchdog/ranks_ended_by_the_monitor",
        sum(one.get("sum") != float(len(ranks)) ** 2 for one in ranks),
        expected=0,
        seen=sum(one.get("threads", 0) for one in ranks),
        rule="C23",
        evidence=[killed_by(f"{logs / 'stopped'}-{rank}") for rank in range(len(ranks))],
    )
    assert results["stopped, monitored"] == [ABORTED] * len(ranks)
    assert "watchdog got stuck for" in killed_by(f"{logs / 'stopped'}-0")
