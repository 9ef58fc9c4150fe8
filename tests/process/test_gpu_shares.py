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
    VISIBLE,
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
    for name in (VISIBLE, gpu_shares.VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(host, "GPUS", tmp_path / "gpus")
    monkeypatch.setattr(timing, "LOCK", tmp_path / "machine")
    return tmp_path / "gpus"


def list_gpus(driver: Path, *models: str) -> None:
    """Let the driver list GPUs with the UUIDs GPU-a0, GPU-a1, ..."""
    for i, model in enumerate(models):
        (driver / f"0000:{i}").mkdir(parents=True)
        text = f"Model: \t NVIDIA {model}\nGPU UUID: \t GPU-a{i}\n"
        (driver / f"0000:{i}" / "information").write_text(text)


def share(gpus: str, *cores: int) -> GpuShare:
    return GpuShare(tuple(gpus), cores)


@pytest.mark.parametrize(
    ("gpus", "count", "cores", "shares"),
    [
        ("0123", 1, 10, [share("0", 0, 1), share("1", 2, 3), share("2", 4, 5), share("3", 6, 7)]),
        ("0123", 2, 6, [share("01", 0, 1, 2), share("23", 3, 4, 5)]),
        ("012", 2, 0, [share("01")]),
        ("0", 2, 4, []),
        ("01", 1, 1, [share("0"), share("1")]),
    ],
)
def test_shares_have_equal_numbers_of_neighbouring_cores(
    gpus: str, count: int, cores: int, shares: list[GpuShare]
) -> None:
    assert divide(gpus, count, range(cores)) == shares


def test_lanes_at_once_get_neighbouring_shares() -> None:
    three = divide(FOUR[:3], 1, range(24))
    assert parts(three, 2) == [three[:1], three[1:2]], (
        "no lane gets twice the machine: an odd share is unused"
    )
    assert {len(merged(own).cores) for own in parts(three, 2)} == {8}
    assert parts(three, 1) == [three]
    assert merged(parts(divide(FOUR, 1, range(8)), 2)[1]) == share("23", 4, 5, 6, 7)
    assert parts(three, 3) == [[each] for each in three]
    for number in (0, 4):
        with pytest.raises(ValueError, match=f"3 shares cannot be given to {number} lanes"):
            parts(three, number)


def test_share_starts_a_process_on_its_gpus_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    core = min(os.sched_getaffinity(0))
    found = GpuShare(("2", "GPU-a"), (core,)).variables()
    assert found == {VISIBLE: "2,GPU-a", "BUMPGATE_SHARE": f"[{core}]"}
    moved = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: moved.append((process, cores)))
    keep_to_cores()
    monkeypatch.setenv("BUMPGATE_SHARE", "[]")
    keep_to_cores()
    assert moved == [], "a share without cores may use all"
    monkeypatch.setenv("BUMPGATE_SHARE", found["BUMPGATE_SHARE"])
    keep_to_cores()
    assert moved == [(0, [core])]


@pytest.mark.parametrize(
    ("visible", "worker", "count", "own", "gpus"),
    [
        ("4,5,6,7", 0, 1, "4", "4,5,6,7"),
        ("4,5,6,7", 7, 1, "7", "4,5,6,7"),
        ("4,5,6,7", 3, 2, "6,7", "4,5,6,7"),
        ("4,6", None, 1, "4", "4,6"),
        ("4", 0, 1, "4", "4"),
        ("2,3,1", 0, 2, "1,2,3", "1,2,3"),
        (None, 0, 1, "0", "0"),
    ],
)
def test_workers_take_the_visible_gpus_in_turn(
    visible: str | None, worker: int | None, count: int, own: str, gpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without two groups has all its GPUs, and the controller keeps those that it sees."""
    if visible:
        monkeypatch.setenv(VISIBLE, visible)
    assert take_place(worker, count) == Place(own.split(","), gpus.split(","))
    moved = worker is not None and own != gpus
    assert os.environ.get(VISIBLE) == (own if moved else visible)


def test_run_without_the_variable_uses_the_first_gpus(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (used_gpus(1), used_gpus(2)) == (["0"], ["0", "1"])
    list_gpus(driver, *["H200"] * 4)
    assert (used_gpus(1), used_gpus(2)) == (["0"], FOUR), "a lane of several may use all"
    monkeypatch.setenv(VISIBLE, "5,GPU-b,-1,2")
    assert used_gpus(1) == ["5", "GPU-b"], "an invalid entry ends the list"


def test_locks_name_a_gpu_by_its_index(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lock_names(["GPU-a1", "0"]) == ["0", "GPU-a1"], "the driver lists nothing"
    list_gpus(driver, "H200", "H200")
    assert lock_names(["GPU-a1", "0", "1"]) == ["0", "1"]
    assert lock_names(["GPU-a", "GPU-b", "MIG-a1"]) == ["GPU-a", "GPU-b", "MIG-a1"], "of no or several GPUs"
    list_gpus(driver / "of two models", "H200", "L4")
    monkeypatch.setattr(host, "GPUS", driver / "of two models")
    assert lock_names(["GPU-a1"]) == ["GPU-a1"], "CUDA numbers the fastest first"


@pytest.mark.parametrize(
    ("text", "count", "present", "visible", "found"),
    [
        ("", 1, 4, None, []),
        ("all", 1, 2, None, ["0", "1"]),
        ("2, 0", 1, 4, None, ["2", "0"]),
        ("5", 1, 0, None, ["5"]),  # the driver lists nothing here: CUDA decides
        ("GPU-a,GPU-b", 2, 8, None, ["GPU-a", "GPU-b"]),
        ("all", 1, 8, "3,5", ["3", "5"]),
        ("5", 1, 8, "3,5", ["5"]),
        ("0,GPU-a0", 1, 2, None, "name each GPU once, such as --gpus 0,1,2,3, or --gpus all"),
        ("0,0", 1, 4, None, "name each GPU once, such as --gpus 0,1,2,3, or --gpus all"),
        ("0,", 1, 4, None, "name each GPU once, such as --gpus 0,1,2,3, or --gpus all"),
        ("0,7", 1, 2, None, "no GPU 7 here (found 0, 1)"),
        ("1", 1, 8, "3,5", "no GPU 1 here (found 3, 5)"),
        ("GPU-x", 1, 8, "GPU-a", "no GPU GPU-x here (found GPU-a)"),
        ("1", 2, 8, None, "1 GPU, and the lane needs 2"),
        ("all", 1, 0, None, "the NVIDIA driver lists no GPU: name them, such as --gpus 0,1"),
        ("all", 1, 8, "", "CUDA_VISIBLE_DEVICES='' hides all GPUs: unset it, or list GPUs"),
        ("0", 1, 8, "-1", "CUDA_VISIBLE_DEVICES='-1' hides all GPUs: unset it, or list GPUs"),
    ],
)
def test_gpus_of_the_option(
    text: str,
    count: int,
    present: int,
    visible: str | None,
    found: list[str] | str,
    driver: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "GPU-a0" in text:
        list_gpus(driver, "H200", "H200")
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    if isinstance(found, list):
        assert requested(text, count, present) == found
        return
    with pytest.raises(BumpgateError) as refused:
        requested(text, count, present)
    assert str(refused.value) == f"--gpus {text}: {found}"


def free(path: Path) -> bool:
    with lock_file(path) as lock:
        return try_lock(lock)


def free_locks(folder: Path) -> list[str]:
    """Return which of the locks of the machine, GPU 0 and GPU 1 are free."""
    return [name for name in ("", "-gpu-0", "-gpu-1") if free(folder / f"machine{name}.lock")]


def test_timed_test_of_a_share_holds_only_its_gpu(tmp_path: Path) -> None:
    one, zero = Place(["1"], ["0", "1"]), Place(["0"], ["0", "1"])
    with machine(exclusive=True, place=one):
        assert free_locks(tmp_path) == ["-gpu-0"]
        with machine(exclusive=True, place=zero):
            assert free_locks(tmp_path) == []
    with machine(exclusive=False, place=one), machine(exclusive=False, place=one):
        assert free_locks(tmp_path) == [], "no timed test starts on any GPU of the run meanwhile"
    with machine(exclusive=False), machine(exclusive=False, place=one):
        assert "" not in free_locks(tmp_path)
    with machine(exclusive=True, place=take_place(None, 2)):
        assert not {"-gpu-0", "-gpu-1"} & {*free_locks(tmp_path)}, (
            "a lane of two GPUs locks each, for one of one"
        )


@pytest.mark.parametrize("visible", ["2", None])
def test_timed_test_on_a_gpu_ignores_runs_on_other_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    """Sessions of another gate hold the machine shared all the time."""
    if visible:
        monkeypatch.setenv(VISIBLE, visible)
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


def test_gate_locks_each_of_its_gpus(tmp_path: Path, driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))

    def held(lane: Lane, *gpus: str) -> list[str]:
        with device_lock(lane, print, gpus):
            places = [path for path in tmp_path.glob("*.gate-*") if not free(path)]
            return sorted(path.name.partition(".gate-")[2].removeprefix("cuda-") for path in places)

    list_gpus(driver, *["H200"] * 4)
    assert held(ONE, "3", "GPU-a1", "1") == ["1", "3"]
    assert held(ONE) == ["0"]
    assert held(TWO) == FOUR
    monkeypatch.setenv(VISIBLE, "6,7")
    assert first_gpu() == "6"
    assert held(ONE) == ["6", "7"], "the lane is spread over both"
    assert held(Lane("cpu")) == ["cpu"]


@pytest.mark.parametrize(
    ("variable", "value", "rows", "found"),
    [
        ("OTHER", "", ["a/b/c"], False),
        ("BUMPGATE_UNTIMED", "1", ["a/b/c"], True),
        ("BUMPGATE_SESSION", "rows.json", ["a/b/c", "a/b/d"], False),
        ("BUMPGATE_SESSION", "rows.json", ["a/b/d"], True),
    ],
)
def test_rows_that_nothing_uses(
    variable: str, value: str, rows: list[str], found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.json").write_text('["a/b/c"]')
    monkeypatch.chdir(tmp_path)
    gpu_shares._paired.cache_clear()
    monkeypatch.setenv(variable, value)
    assert unused(*rows) is found
