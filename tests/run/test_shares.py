"""Shares of a machine: which GPUs and cores a lane or session gets, and how `--gpus` is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bumpgate.core.rows import BumpgateError
from bumpgate.plugin import timing
from bumpgate.plugin.timing import lock_file, machine, try_lock
from bumpgate.run import shares
from bumpgate.run.device import device_lock
from bumpgate.run.shares import (
    GpuShare,
    Place,
    divide,
    first_gpu,
    keep_to_cores,
    merged,
    parts,
    requested,
    take_place,
)

FOUR = ["0", "1", "2", "3"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (shares.VISIBLE, shares.VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_shares_have_equal_numbers_of_neighbouring_cores() -> None:
    assert divide(FOUR, 1, range(10)) == [
        GpuShare(("0",), (0, 1)),
        GpuShare(("1",), (2, 3)),
        GpuShare(("2",), (4, 5)),
        GpuShare(("3",), (6, 7)),
    ]
    assert divide(FOUR, 2, range(6)) == [GpuShare(("0", "1"), (0, 1, 2)), GpuShare(("2", "3"), (3, 4, 5))]
    assert divide(["0", "1", "2"], 2, ()) == [GpuShare(("0", "1"))]
    assert divide(["0"], 2, range(4)) == []
    assert divide(["0", "1"], 1, [7]) == [GpuShare(("0",)), GpuShare(("1",))]


def test_lanes_at_once_get_neighbouring_shares() -> None:
    three = divide(FOUR[:3], 1, range(24))
    assert parts(three, 2) == [three[:1], three[1:2]], (
        "an odd share is unused: no lane gets twice the machine"
    )
    assert {len(merged(own).cores) for own in parts(three, 2)} == {8}
    assert parts(three, 1) == [three]
    assert merged(parts(divide(FOUR, 1, range(8)), 2)[1]) == GpuShare(("2", "3"), (4, 5, 6, 7))
    assert parts(three, 3) == [[share] for share in three]
    for number in (0, 4):
        with pytest.raises(ValueError, match=f"3 shares cannot be given to {number} lanes"):
            parts(three, number)


def test_share_starts_a_process_on_its_gpus_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    core = min(os.sched_getaffinity(0))
    found = GpuShare(("2", "GPU-a"), (core,)).variables()
    assert found == {"CUDA_VISIBLE_DEVICES": "2,GPU-a", "BUMPGATE_SHARE": f"[{core}]"}
    moved = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: moved.append((process, cores)))
    keep_to_cores()
    assert moved == []
    monkeypatch.setenv("BUMPGATE_SHARE", "[]")
    keep_to_cores()
    assert moved == [], "a share without cores may use all"
    monkeypatch.setenv("BUMPGATE_SHARE", found["BUMPGATE_SHARE"])
    keep_to_cores()
    assert moved == [(0, [core])]


def test_workers_take_the_visible_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert take_place(0, 1) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert take_place(0, 1) is None, "a run on one GPU has the machine"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"
    for worker, count, gpus, own in ((0, 1, "4", "gpu-4"), (7, 1, "7", "gpu-7"), (3, 2, "6,7", "gpu-6-7")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        place = take_place(worker, count)
        assert place is not None
        assert (os.environ["CUDA_VISIBLE_DEVICES"], place.own, len(place.gpus)) == (gpus, own, 4 // count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert take_place(None, 1) == Place("gpu-4", ("gpu-4", "gpu-6"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6", "the controller keeps its GPUs"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setenv("BUMPGATE_SHARE", "[0]")
    assert take_place(None, 1) == Place("gpu-5", ("gpu-5",)), "a share of one GPU is a share"


def test_gpus_of_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requested("", 1, 4) == []
    assert requested("all", 1, 2) == ["0", "1"]
    assert requested("2, 0", 1, 4) == ["2", "0"]
    assert requested("5", 1, 0) == ["5"], "the driver lists nothing here: CUDA decides"
    assert requested("GPU-a,GPU-b", 2, 8) == ["GPU-a", "GPU-b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert requested("all", 1, 8) == ["3", "5"]
    assert requested("5", 1, 8) == ["5"]


@pytest.mark.parametrize(
    ("text", "count", "present", "visible", "message"),
    [
        ("0,0", 1, 4, "", "--gpus 0,0: name each GPU once, such as --gpus 0,1,2,3, or --gpus all"),
        ("0,", 1, 4, "", "--gpus 0,: name each GPU once, such as --gpus 0,1,2,3, or --gpus all"),
        ("0,7", 1, 2, "", "--gpus 0,7: no GPU 7 here (found 0, 1)"),
        ("1", 1, 8, "3,5", "--gpus 1: no GPU 1 here (found 3, 5)"),
        ("GPU-x", 1, 8, "GPU-a", "--gpus GPU-x: no GPU GPU-x here (found GPU-a)"),
        ("1", 2, 8, "", "--gpus 1: 1 GPU, and the lane needs 2"),
        ("all", 1, 0, "", "--gpus all: the NVIDIA driver lists no GPU: name them, such as --gpus 0,1"),
    ],
)
def test_bad_gpus_are_refused_in_one_line(
    text: str, count: int, present: int, visible: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(BumpgateError) as refused:
        requested(text, count, present)
    assert str(refused.value) == message


def free(path: Path) -> bool:
    with lock_file(path) as lock:
        return try_lock(lock)


def test_timed_test_of_a_share_holds_only_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LOCK", tmp_path / "machine")
    place = Place("gpu-1", ("gpu-0", "gpu-1"))
    locks = {name: tmp_path / f"machine{name}.lock" for name in ("", "-gpu-0", "-gpu-1")}
    with machine(exclusive=True, place=place):
        assert {name: free(path) for name, path in locks.items()} == {
            "": False,
            "-gpu-0": True,
            "-gpu-1": False,
        }
        with machine(exclusive=True, place=Place("gpu-0", place.gpus)):
            assert not any(map(free, locks.values()))
    with machine(exclusive=False, place=place), machine(exclusive=False, place=place):
        assert not any(map(free, locks.values())), "no timed test starts on any GPU of the run meanwhile"
    with machine(exclusive=False), machine(exclusive=False, place=place):
        assert not free(locks[""])


def test_gate_locks_each_of_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with device_lock("cuda", print, ["3", "1"]):
        held = {path.name.rpartition("-")[2]: free(path) for path in tmp_path.glob("*cuda-*")}
        assert held == {"1": False, "3": False}
    assert all(free(path) for path in tmp_path.glob("*cuda-*"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert first_gpu() == "6"
    with device_lock("cuda", print):
        assert [path.name.rpartition("-")[2] for path in tmp_path.glob("*cuda-6")] == ["6"]
    with device_lock("cpu", print):
        assert len([*tmp_path.glob("*.gate-cpu")]) == 1
