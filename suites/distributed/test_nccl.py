"""NCCL's groups under the contract: their timeout and sequence numbers, and what the watchdog does to a rank.

Rules C23, R1.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.warmup import MONITORING
from suites.distributed.nccl import COLLECTIVES, killed_by
from suites.distributed.ranks import ranks_of, run_shared, sound
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
def logs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def results(lane: Lane, logs: Path) -> dict[str, list[dict]]:
    """The results of one start of the ranks for all tests of this file."""
    late = {"program": "late_rank", "seconds": LATE}
    # The rank that waits is ended before.
    short = {"seconds": 3 * LATE, "given": QUICK, "group_timeout": TIMED_OUT, "log": str(logs / "late")}
    beat = {HEARTBEAT: str(BEAT), **QUICK}
    stopped = {"program": "stopped_watchdog", "seconds": KEPT, "given": beat}
    monitored = {"seconds": 2 * KEPT, "given": {**beat, MONITORING: "1"}, "log": str(logs / "stopped")}
    cases = {"facts": {"program": "group_facts"}, "late": late, "stopped": stopped}
    cases |= {"late, short timeout": {**late, **short}, "stopped, monitored": {**stopped, **monitored}}
    return run_shared(cases, lane.device, ranks_of(lane))


def test_nccl_groups_have_the_contract_timeout(results, row) -> None:
    """Read back from ProcessGroupNCCL, not the default since torch 2.15; each group is bound to its rank's GPU."""
    ranks = sound(results, "facts")
    timeouts = [seconds for one in ranks for seconds in one["timeouts"].values()]
    about = {"seen": timeouts, "rule": "C23", "evidence": ranks}
    expected = len(ranks) * len(COLLECTIVES)
    row.count("distributed/nccl/groups_with_the_timeout", timeouts.count(TIMEOUT), expected=expected, **about)
    for rank, one in enumerate(ranks):
        assert (one["class"], one["bound"]) == ("ProcessGroupNCCL", f"cuda:{rank}")


def test_sequence_numbers_agree_between_ranks(results, row) -> None:
    """Each group counts its collectives alike on all ranks."""
    first, *others = ranks = sound(results, "facts")
    differ = [
        one for one in others for name, number in first["after"].items() if one["after"][name] != number
    ]
    about = {"seen": sum(first["after"].values()), "rule": "R1"}
    about["evidence"] = [f"before {one['before']}, after {one['after']}" for one in ranks]
    row.count("distributed/nccl/sequence_numbers_that_differ", len(differ), expected=0, **about)
    for one in ranks:
        assert {name: one["after"][name] - one["before"][name] for name in COLLECTIVES} == COLLECTIVES
        assert one["sum"] == float(len(ranks)) ** sum(COLLECTIVES.values())


def test_traces_number_collectives_alike_on_all_ranks(lane: Lane, row) -> None:
    """Since torch 2.12 a trace has the number of each collective, by which the traces of ranks can be joined."""
    cases = {"trace": {"program": "traced_numbers"}}
    first, *others = ranks = sound(run_shared(cases, lane.device, ranks_of(lane)), "trace")
    assert {name: len(numbers) for name, numbers in first.items()} == COLLECTIVES
    numbered = not any(None in numbers for numbers in first.values())
    about = {"seen": sum(map(len, first.values())), "rule": "R1", "evidence": ranks}
    row.cost("distributed/nccl_trace/capability", int(numbered), "capability", better="higher", **about)
    if numbered:
        differ = sum(one[name] != numbers for one in others for name, numbers in first.items())
        row.count("distributed/nccl_trace/sequence_numbers_that_differ", differ, expected=0, **about)
        assert all(len({*numbers}) == len(numbers) for numbers in first.values())


@planted("C23", "a group whose timeout is shorter than one rank's compilation")
def test_late_rank_is_waited_for(results, logs: Path, row) -> None:
    """Under a short timeout the watchdog aborts the rank that waits, with a reason in its log."""
    ranks, reason = results["late"], killed_by(f"{logs / 'late'}-0")
    lost = sum(one != {"sum": float(len(ranks))} for one in ranks)
    about = {"seen": ranks, "rule": "C23", "evidence": [reason]}
    row.count("distributed/nccl_watchdog/ranks_lost_to_a_late_one", lost, expected=0, **about)
    assert results["late, short timeout"][0] == ABORTED
    assert f"Timeout(ms)={TIMED_OUT}000" in reason


@planted("C23", "the monitor is on, with a short heartbeat, while the watchdog is kept")
def test_kept_watchdog_does_not_end_a_rank(results, logs: Path, row) -> None:
    """The heartbeat is short, but the contract turns the monitor off until the warm-up has ended."""
    ranks = results["stopped"]
    reasons = [killed_by(f"{logs / 'stopped'}-{rank}") for rank in range(len(ranks))]
    ended = sum(one.get("sum") != float(len(ranks)) ** 2 for one in ranks)
    about = {"seen": sum(one.get("threads", 0) for one in ranks), "rule": "C23", "evidence": reasons}
    row.count("distributed/nccl_watchdog/ranks_ended_by_the_monitor", ended, expected=0, **about)
    assert results["stopped, monitored"] == [ABORTED] * len(ranks)
    assert "watchdog got stuck for" in reasons[0]
