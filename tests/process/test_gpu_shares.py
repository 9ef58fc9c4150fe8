"""Shares of a machine: which GPUs and cores a lane or session gets, and how `--gpus` is read."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from bumpgate.core.errors import BumpgateError
from bumpgate.core.lanes import Lane
from bumpgate.plugin import timing
from bumpgate.plugin.timing import machine
from bumpgate.process import gpu_shares, host
from bumpgate.process.gpu_shares import (
    GpuShare,
    Place,
    divide,
    first_gpu,
    keep_to_cores,
    lock_names,
    merged,
    parts,
    requested,
    take_place,
    unused,
    used_gpus,
)
from bumpgate.process.locks import device_lock, lock_file, try_lock

FOUR = ["0", "1", "2", "3"]
ONE, TWO = Lane("h200", device="cuda"), Lane("h200x2", device="cuda", count=2)


@pytest.fixture(autouse=True)
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a driver that lists no GPU; no variable names one."""
    for name in (gpu_shares.VISIBLE, gpu_shares.VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(host, "GPUS", tmp_path / "gpus")
    return tmp_path / "gpus"


def list_gpus(driver: Path, *models: str) -> None:
    """Let the driver list GPUs with the UUIDs GPU-a0, GPU-a1, ..."""
    for i, model in enumerate(models):
        (driver / f"0000:{i}").mkdir(parents=True)
        (driver / f"0000:{i}" / "information").write_text(
            f"Model: \t NVIDIA {model}\nGPU UUID: \t GPU-a{i}\n"
        )


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
    for worker, count, gpus in ((0, 1, "4"), (7, 1, "7"), (3, 2, "6,7")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        place = take_place(worker, count)
        assert (os.environ["CUDA_VISIBLE_DEVICES"], place) == (
            gpus,
            Place(gpus.split(","), ["4", "5", "6", "7"]),
        )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert take_place(None, 1) == Place(["4"], ["4", "6"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6", "the controller keeps its GPUs"


@pytest.mark.parametrize(("visible", "count", "own"), [("4", 1, "4"), ("2,3,1", 2, "1,2,3"), (None, 1, "0")])
def test_run_without_two_groups_has_all_its_gpus(
    visible: str | None, count: int, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert take_place(0, count) == Place(own.split(","), own.split(","))
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


def test_run_without_the_variable_uses_the_first_gpus(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (used_gpus(1), used_gpus(2)) == (["0"], ["0", "1"])
    list_gpus(driver, *["H200"] * 4)
    assert (used_gpus(1), used_gpus(2)) == (["0"], FOUR), "a lane of several may use all"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-b,-1,2")
    assert used_gpus(1) == ["5", "GPU-b"], "an invalid entry ends the list"


def test_locks_name_a_gpu_by_its_index(driver: Path) -> None:
    assert lock_names(["GPU-a1", "0"]) == ["0", "GPU-a1"], "the driver lists nothing"
    list_gpus(driver, "H200", "H200")
    assert lock_names(["GPU-a1", "0", "1"]) == ["0", "1"]
    assert lock_names(["GPU-a", "GPU-b", "MIG-a1"]) == ["GPU-a", "GPU-b", "MIG-a1"], "of no or several GPUs"
    list_gpus(driver / "of two models", "H200", "L4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "GPUS", driver / "of two models")
        assert lock_names(["GPU-a1"]) == ["GPU-a1"], "CUDA numbers the fastest first"


def test_gpus_of_the_option(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert requested("", 1, 4) == []
    assert requested("all", 1, 2) == ["0", "1"]
    assert requested("2, 0", 1, 4) == ["2", "0"]
    assert requested("5", 1, 0) == ["5"], "the driver lists nothing here: CUDA decides"
    assert requested("GPU-a,GPU-b", 2, 8) == ["GPU-a", "GPU-b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert requested("all", 1, 8) == ["3", "5"]
    assert requested("5", 1, 8) == ["5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    list_gpus(driver, "H200", "H200")
    with pytest.raises(BumpgateError, match="name each GPU once"):
        requested("0,GPU-a0", 1, 2)


@pytest.mark.parametrize(
    ("text", "count", "present", "visible", "message"),
    [
        ("0,0", 1, 4, None, "--gpus 0,0: name each GPU once, such as --gpus 0,1,2,3, or --gpus all"),
        ("0,", 1, 4, None, "--gpus 0,: name each GPU once, such as --gpus 0,1,2,3, or --gpus all"),
        ("0,7", 1, 2, None, "--gpus 0,7: no GPU 7 here (found 0, 1)"),
        ("1", 1, 8, "3,5", "--gpus 1: no GPU 1 here (found 3, 5)"),
        ("GPU-x", 1, 8, "GPU-a", "--gpus GPU-x: no GPU GPU-x here (found GPU-a)"),
        ("1", 2, 8, None, "--gpus 1: 1 GPU, and the lane needs 2"),
        ("all", 1, 0, None, "--gpus all: the NVIDIA driver lists no GPU: name them, such as --gpus 0,1"),
        ("all", 1, 8, "", "--gpus all: CUDA_VISIBLE_DEVICES='' hides all GPUs: unset it, or list GPUs"),
        ("0", 1, 8, "-1", "--gpus 0: CUDA_VISIBLE_DEVICES='-1' hides all GPUs: unset it, or list GPUs"),
    ],
)
def test_bad_gpus_are_refused_in_one_line(
    text: str, count: int, present: int, visible: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(BumpgateError) as refused:
        requested(text, count, present)
    assert str(refused.value) == message


def free(path: Path) -> bool:
    with lock_file(path) as lock:
        return try_lock(lock)


def test_timed_test_of_a_share_holds_only_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LOCK", tmp_path / "machine")
    place = Place(["1"], ["0", "1"])
    locks = {name: tmp_path / f"machine{name}.lock" for name in ("", "-gpu-0", "-gpu-1")}
    with machine(exclusive=True, place=place):
        assert {name: free(path) for name, path in locks.items()} == {
            "": False,
            "-gpu-0": True,
            "-gpu-1": False,
        }
        with machine(exclusive=True, place=Place(["0"], place.gpus)):
            assert not any(map(free, locks.values()))
    with machine(exclusive=False, place=place), machine(exclusive=False, place=place):
        assert not any(map(free, locks.values())), "no timed test starts on any GPU of the run meanwhile"
    with machine(exclusive=False), machine(exclusive=False, place=place):
        assert not free(locks[""])


@pytest.mark.parametrize("visible", ["2", None])
def test_timed_test_on_a_gpu_ignores_runs_on_other_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    """Sessions of another gate hold the machine shared all the time."""
    monkeypatch.setattr(timing, "LOCK", tmp_path / "machine")
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    place = take_place(None, 1)
    with machine(exclusive=True, patient=True, place=Place(["7"], ["7"])):
        assert not free(tmp_path / "machine.lock")
        entered = threading.Event()

        def timed() -> None:
            with machine(exclusive=True, patient=True, place=place):
                entered.set()

        thread = threading.Thread(target=timed, daemon=True)
        thread.start()
        assert entered.wait(5)
        thread.join()


def test_timed_tests_of_overlapping_lanes_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane of two GPUs locks each of them, for a lane of one."""
    monkeypatch.setattr(timing, "LOCK", tmp_path / "machine")
    with machine(exclusive=True, place=take_place(None, 2)):
        assert not free(tmp_path / "machine-gpu-0.lock")
        assert not free(tmp_path / "machine-gpu-1.lock")


def test_gate_locks_each_of_its_gpus(tmp_path: Path, driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))

    def held() -> list[str]:
        return sorted(path.name.rpartition("cuda-")[2] for path in tmp_path.glob("*cuda-*") if not free(path))

    list_gpus(driver, *["H200"] * 4)
    with device_lock(ONE, print, ["3", "GPU-a1", "1"]):
        assert held() == ["1", "3"]
    assert held() == []
    with device_lock(ONE, print):
        assert held() == ["0"]
    with device_lock(TWO, print):
        assert held() == FOUR
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert first_gpu() == "6"
    with device_lock(ONE, print):
        assert held() == ["6", "7"], "the lane is spread over both"
    with device_lock(Lane("cpu"), print):
        assert len([*tmp_path.glob("*.gate-cpu")]) == 1


@pytest.mark.parametrize(
    ("variables", "rows", "found"),
    [
        ({}, ["a/b/c"], False),
        ({"BUMPGATE_UNTIMED": "1"}, ["a/b/c"], True),
        ({"BUMPGATE_SESSION": "rows.json"}, ["a/b/c", "a/b/d"], False),
        ({"BUMPGATE_SESSION": "rows.json"}, ["a/b/d"], True),
    ],
)
def test_rows_that_nothing_uses(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    rows: list[str],
    found: bool,
) -> None:
    (tmp_path / "rows.json").write_text('["a/b/c"]')
    monkeypatch.chdir(tmp_path)
    gpu_shares._paired.cache_clear()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert unused(*rows) is found
