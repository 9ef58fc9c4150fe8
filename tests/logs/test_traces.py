"""Structured traces of torch: what a process compiled, and the rank that compiled something else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bumpgate.logs.traces import divergences, read_traces
from tests.support.reports import bumpgate

RANKS = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
def main(rank, size, store):
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
    def step(x, flag):
        return x.sin().cos() if flag else x.sin()
    compiled = torch.compile(step, backend="eager")
    compiled(torch.ones(8, 4), True)
    compiled(torch.ones(8, 4), rank == 0)
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(main, (2, os.path.abspath("store")), 2)
"""


def test_rank_with_another_flag_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks on gloo, of which the second recompiles."""
    (tmp_path / "ranks.py").write_text(RANKS)
    environment = {"PATH": "/usr/bin:/bin", "TORCH_TRACE": "trace", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "ranks.py"], cwd=tmp_path, env=environment, check=True)
    assert bumpgate(monkeypatch, "logs", str(tmp_path / "trace")) == 1
    assert (
        "DIVERGED   rank 1 compile 0/1: step (ranks.py:5): only this rank compiles it, because 0/0: flag == True"
        in capsys.readouterr().out
    )
    found = {t.rank: [c.id for c in t.compilations] for t in read_traces(tmp_path / "trace")}
    assert (found[0], found[1]) == (["0/0"], ["0/0", "0/1"])


LINE = "V1129 01:28:01.337000 297 torch/x.py:28] "


def fake(folder: Path, rank: int, guard: str, frames: int = 1) -> None:
    lines = []
    for frame in range(frames):
        at = f'"rank": {rank}, "frame_id": {frame}, "frame_compile_id": 0, "attempt": 0'
        lines += [f'{LINE}{{"dynamo_start": {{"stack": [{{"name": "f", "line": 3}}]}}, {at}}}']
        lines += [f'{LINE}{{"dynamo_cpp_guards_str": {{}}, {at}, "has_payload": "a"}}', f"\t| +- {guard}"]
    lines.append(LINE + '{"dynamo_start": {"sta')  # the last line of a killed process
    (folder / f"dedicated_log_torch_trace_rank_{rank}_x.log").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("guards", "frames", "expected"),
    [
        (["A: s == 2", "A: s == 2", "A: s == 1"], [1, 1, 1], ["guards `A: s == 1`, elsewhere `A: s == 2`"]),
        (["A: s", "A: s", "A: s"], [2, 2, 1], ["only other ranks compile it"]),
        ([f"A: device={n}, id(G, {n + 139945924312208})" for n in range(3)], [1, 1, 1], []),
    ],
    ids=["guard", "frame", "devices and addresses"],
)
def test_rank_that_differs_from_most(
    tmp_path: Path, guards: list[str], frames: list[int], expected: list[str]
) -> None:
    for rank, guard in enumerate(guards):
        fake(tmp_path, rank, guard, frames[rank])
    at = f"rank 2 compile {frames[0] - 1}/0: f (?:3): "
    assert divergences(read_traces(tmp_path)) == [at + line for line in expected]
