"""A rank that fails ends the whole training: in bounded time, in one line, with its exit code. Rules C21, C25.

`launch.retry --ranks N` around the real `launch.train`, on gloo or NCCL; the last checkpoint stays whole, no process is
left.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.environment import DISK_FULL
from launch.retry import supervise
from suites.distributed.ranks import ranks_of, run_shared, sound
from suites.launch.trainers import OPTIONS, first_launch
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted
from suites.support.processes import gone

pytestmark = [lanes("cpu", "h200x2"), pytest.mark.usefixtures("lane")]

# launch.train, in which the last rank stops or dies, or the writing one finds a full disk, after step 3.
FAULTY = """
import os, resource, signal, sys
from pathlib import Path
from launch import environment

environment.enter()
fault, place = sys.argv[1], Path(sys.argv[2])
Path(place, f"pid-{os.getpid()}").touch()
from launch import train

after = train.Trainer._after

def faulty(self, loss):
    after(self, loss)
    if self.step == 3:
        if fault == "full disk" and self.writes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if fault in ("SIGKILL", "SIGSTOP") and last:
            os.kill(os.getpid(), getattr(signal, fault))

train.Trainer._after = faulty
raise SystemExit(train.main(sys.argv[3:]))
"""
STALL = 3.0  # seconds; a step takes some milliseconds
# Seconds for start, three steps, the fault and its detection. On a GPU the kernels compile in the first step.
BOUND = {"cpu": 60.0, "cuda": 180.0}
SAVED = 2
# Fault -> exit code of the launcher, and a part of its line.
ENDS = {
    "SIGKILL": (1, "rank{last}: killed by SIGKILL"),
    "SIGSTOP": (1, f"no step for {STALL:g} s"),
    "full disk": (DISK_FULL, "File too large"),
}


@pytest.mark.parametrize("fault", ENDS)
@planted("C25", "a rank is killed, hangs or finds a full disk")
def test_failing_rank_ends_training(lane: Lane, fault: str, tmp_path: Path, capsys, row) -> None:
    code, words = ENDS[fault]
    ranks = ranks_of(lane)
    saved = tmp_path / "state.pt"
    options = [*OPTIONS, "--steps", "8", "--device", lane.device, "--log", str(tmp_path / "log")]
    options += ["--checkpoint", str(saved), "--checkpoint-every", str(SAVED)]
    command = ["-c", FAULTY, fault, str(tmp_path), *options]
    began, bound = time.monotonic(), BOUND[lane.device]
    limits = {"seconds": bound, "stall": STALL if fault == "SIGSTOP" else float("inf")}
    ended = supervise(ranks, command, first_launch(), log=tmp_path / "all", **limits)
    seconds = time.monotonic() - began
    lines = capsys.readouterr().err.strip().splitlines()
    started = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    about = {"expected": code, "seen": started, "rule": "C25", "evidence": [f"{seconds:.1f} s", *lines]}
    case = f"distributed/fault-{fault.lower().replace(' ', '_')}/exit_code"
    row.bound(case, ended, "exit code", **about)
    assert len(started) == ranks
    assert all(map(gone, started)), "a rank is left"
    assert len(lines) == 1, lines
    assert words.format(last=ranks - 1) in lines[0]
    assert lines[0].startswith("final: ")
    assert seconds < bound
    assert torch.load(saved, weights_only=True)["step"] == SAVED, "the checkpoint before the fault stays"
    steps = [json.loads(line)["step"] for line in (tmp_path / "log").read_text().splitlines()]
    assert steps[:3] == [0, 1, 2]
    assert not list(tmp_path.glob("*.new")), "a part of a checkpoint is left"


@pytest.fixture(scope="module")
def results(lane: Lane, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """The results of one start of the ranks for the cases without a launcher."""
    place = tmp_path_factory.mktemp("caches")
    slow = {"program": "slow_cache", "seconds": 2.0}
    same = ["2.13.0"] * ranks_of(lane)
    differ = {"program": "disagreeing", "name": "torch"}
    cases = {
        "torch": {**differ, "values": [*same[1:], "2.14.0"]},
        "same": {**differ, "values": same},
        "slow": {**slow, "place": str(place / "slow")},
        "too slow": {**slow, "place": str(place / "late"), "store_timeout": 0.5},
    }
    return run_shared(cases, lane.device, ranks_of(lane))


@planted("C39", "a rank with another torch")
def test_ranks_that_differ_are_refused(results, row) -> None:
    """Before the first collective, with the same line on every rank."""
    ranks = results["torch"]
    line = f"ContractError: rank {len(ranks) - 1} has torch 2.14.0, rank 0 has 2.13.0"
    refused = sum(one.get("error") == line for one in ranks)
    about = {"expected": len(ranks), "seen": ranks, "rule": "C39", "evidence": ranks}
    row.count("distributed/fault-another_torch/ranks_that_refuse", refused, **about)
    assert all(one["agreed"] for one in sound(results, "same"))


@planted("C21", "a cache directory that answers slowly, and one that is slower than the timeout")
def test_slow_cache_directory_delays_all_ranks(results, row) -> None:
    """Rank 0 copies the shared caches; no rank compiles before it has ended, and no collective waits for it."""
    first, *others = sound(results, "slow")
    about = {"expected": 2 * len(others), "seen": first["seeded"], "rule": "C21"}
    about["evidence"] = [f"rank {rank} waited {one['waited']:.1f} s" for rank, one in enumerate(others, 1)]
    seen = sum(one["files"] for one in others)
    row.count("distributed/fault-slow_cache/files_seen_by_other_ranks", seen, **about)
    assert first["seeded"] == 2
    assert all(one["waited"] >= 2.0 for one in others)
    late = results["too slow"][1]
    assert late == {"error": "ContractError: rank 0 has not sent its facts in 0.5 s"}, late
