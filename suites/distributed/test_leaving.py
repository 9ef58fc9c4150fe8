"""A rank leaves its training and its groups without waiting forever. Rules C25, R1.

DDP's reducer owns its group. If it is the last owner, it destroys a gloo group with the GIL held, and waits for a
thread of the group, which needs the GIL to drop the tensors of its last collective.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.retry import supervise
from suites.distributed.ranks import run_shared
from suites.launch.trainers import OPTIONS, first_launch
from suites.support.lanes import Lane, lanes

DEADLOCK = "torch>=2.8,<2.14"  # seen on 2.8.0 and 2.13.0, not on 2.14.1 and 2.15.0
WAITED = 8.0  # seconds; dropping the model takes one
# launch.train, in which a collective of the group is still pending on rank 0 when `Ranks.leave` has returned.
PENDING = """
import sys, time
from launch import environment

environment.enter()
import torch
import torch.distributed as dist
from launch import train
from launch.dist.ranks import Ranks

leave = Ranks.leave

def pending(self):
    group, value = dist.group.WORLD, torch.ones(4)
    leave(self)
    if self.rank:
        time.sleep(1)
        group.allreduce([value]).wait()
    else:
        group.allreduce([value])

Ranks.leave = pending
raise SystemExit(train.main(sys.argv[1:]))
"""

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane")]


def test_ddp_that_outlives_its_group_deadlocks(lane: Lane, tmp_path: Path, row) -> None:
    """Defect present: rank 0 never returns from dropping the model, and does if Python references the group."""
    stages = tmp_path / "stages"
    options = {"program": "outlived", "place": str(stages), "within": WAITED}
    cases = {str(kept): {**options, "referenced": kept} for kept in (True, False)}
    results = run_shared(cases, lane.device)
    assert results["True"][0] == {"stages": "dropped the model"}
    alone = results["False"][0]
    deadlock = alone == {"error": f"no answer in {WAITED:g} s"}
    reached = Path(f"{stages}-0").read_text()
    assert reached == ("dropping the model" if deadlock else "dropped the model"), alone
    row.defect(
        "distributed/leaving/ddp_after_its_group",
        deadlock,
        known_in=DEADLOCK,
        reason="Reducer's destructor destroys the ProcessGroupGloo with the GIL held, and its thread needs the GIL to "
        "drop a tensor (https://github.com/pytorch/pytorch/issues/56297)",
        witness=len(results),
        rule="R1",
        evidence=[f"{reached}: {alone['error']}"] if deadlock else [],
    )


def test_ranks_end_while_a_thread_has_a_collective(tmp_path: Path, capsys) -> None:
    """On a loaded host, a thread of the group still has the last collective when `Ranks.leave` returns."""
    command = ["-c", PENDING, *OPTIONS, "--steps", "1", "--style", "ddp"]
    code = supervise(2, command, first_launch(), seconds=60, log=tmp_path / "log")
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert '"style": "ddp"' in shown.out
