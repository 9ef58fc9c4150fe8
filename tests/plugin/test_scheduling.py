"""The lanes' scheduler in real runs: a worker that dies fails only the test it was running."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from bumpgate.plugin.assignment import TestByTest, pytest_xdist_make_scheduler
from bumpgate.plugin.scheduling import unit
from bumpgate.process.locks import lock_file, locked, try_lock
from suites.kernels.model_shapes import keep
from suites.support import gpu_memory
from suites.support.gpu_memory import LOCKS, held
from tests.support.tree import ROOT

CONFTEST = """
import sys
sys.path.insert(0, {root!r})
from bumpgate.plugin import assignment, scheduling
def pytest_configure(config):
    config.addinivalue_line("markers", "long(seconds)")
    config.pluginmanager.register(scheduling)
    config.pluginmanager.register(assignment)
"""
FILE = "tests/plugin/test_scheduling.py"
# All of the first workers die at the same time.
TESTS = """
import os, time
import pytest
WORKERS = 3
def log(text):
    with open("ran", "a") as f:
        f.write(text + "\\n")
@pytest.mark.parametrize("i", range(WORKERS))
def test_dies(i):
    log("died")
    while open("ran").read().count("died") < WORKERS:
        time.sleep(0.01)
    os._exit(1)
@pytest.mark.parametrize("i", range(10))
def test_lives(i):
    log(f"lived {i}")
"""


SHARING = """
import pytest
@pytest.fixture
def exclusive_machine(): pass
@pytest.mark.parametrize("i", range(6))
def test_timed(i, worker_id, exclusive_machine, record_property):
    record_property("alone", worker_id)
@pytest.mark.parametrize("i", range(8))
def test_other(i, worker_id):
    pass
"""


def run(folder: Path, tests: str, workers: int, options: Iterable[str] = ()) -> str:
    """Run these tests with our scheduler and return the output."""
    (folder / "conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\njunit_family = xunit1\n")
    command = [sys.executable, "-m", "pytest", "-n", str(workers), "-p", "no:cacheprovider", "test_it.py"]
    command += [*options, "--max-worker-restart=9", "--junitxml=ran.xml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120).stdout


ORDER = """
import pytest
@pytest.fixture(scope="module")
def made(worker_id):
    return worker_id
@pytest.fixture
def timer(exclusive_machine): pass
@pytest.fixture
def exclusive_machine(): pass
def test_timed(timer): pass
def test_short(): pass
@pytest.mark.long(5)
def test_long(): pass
@pytest.mark.parametrize("i", range(3))
def test_shared(i, made, record_property):
    record_property("made", made)
@pytest.mark.long(9)
def test_longest(): pass
"""


def test_single_worker_runs_short_tests_first(tmp_path: Path) -> None:
    printed = run(tmp_path, ORDER, workers=0, options=("-v",))
    ran = [line.split("::")[1].split()[0] for line in printed.splitlines() if "PASSED" in line]
    shared = [f"test_shared[{i}]" for i in range(3)]
    assert ran == ["test_short", *shared, "test_long", "test_longest", "test_timed"]


def test_several_workers_run_long_tests_first(tmp_path: Path) -> None:
    printed = run(tmp_path, FIRST, workers=2)
    assert "4 passed" in printed, printed
    assert sorted((tmp_path / "begun").read_text().split()[:2]) == ["long", "longest"]


def test_unit_of_a_test_follows_from_its_fixtures(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(ORDER)
    (tmp_path / "below").mkdir()
    (tmp_path / "conftest.py").write_text("def speed(benchmark): pass\n")
    (tmp_path / "below/test_it.py").write_text("class TestIt:\n    def test_speed(self, speed): pass\n")
    (tmp_path / "usage.md").write_text(">>> 1 +\n")
    units = {
        "test_it.py::test_shared[1]": "test_it.py",
        "test_it.py::test_short": "test_it.py::test_short",
        "test_it.py::test_timed": "alone",
        "below/test_it.py::TestIt::test_speed[a::b]": "alone",
        "usage.md::usage.md": "usage.md::usage.md",
    }
    assert {test: unit(tmp_path, test) for test in units} == units


@pytest.mark.parametrize("workers", [0, 2])
def test_long_without_seconds_fails_in_one_line(tmp_path: Path, workers: int) -> None:
    printed = run(tmp_path, ORDER.replace("long(5)", "long"), workers)
    assert "test_it.py::test_long: mark it with its seconds, as @pytest.mark.long(40)" in printed
    assert "6 passed, 1 error" in printed, printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(("tests", "passed"), [(ORDER, 7), (SHARING, 14)], ids=["module fixture", "alone"])
def test_tests_that_share_something_have_one_worker(tmp_path: Path, tests: str, passed: int) -> None:
    printed = run(tmp_path, tests, workers=4)
    assert f"{passed} passed" in printed, printed
    properties = ElementTree.parse(tmp_path / "ran.xml").iter("property")
    assert len({p.attrib["value"] for p in properties}) == 1


# Each of the two workers waits for the first test of the other one.
FIRST = """
import time
from pathlib import Path
import pytest
def begin(name):
    with open("begun", "a") as log:
        log.write(f"{name} ")
    until = time.monotonic() + 20
    while len(Path("begun").read_text().split()) < 2 and time.monotonic() < until:
        time.sleep(0.01)
def test_short():
    begin("short")
def test_shorter():
    begin("shorter")
@pytest.mark.long(5)
def test_long():
    begin("long")
@pytest.mark.long(9)
def test_longest():
    begin("longest")
"""


HOLD = """
import sys
sys.path.insert(0, {root!r})
from suites.support.gpu_memory import held
def log(text):
    with open("log", "a") as f:
        f.write(text + "\\n")
print("waits", flush=True)
with held({count}, slots=6, first={first}):
    log("+{count}")
    print("holds", flush=True)
    sys.stdin.read()
    log("-{count}")
"""
PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
UNSEEN = 0.3  # seconds after which a claim that should wait, but does not, would be in the log


class Claims:
    """Processes that each hold some of six slots, from acquisition until they are released.

    Their log has only one possible order: each writer waits for the existing entries.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[subprocess.Popen[str]] = []

    def log(self) -> list[str]:
        time.sleep(UNSEEN)
        return (self.folder / "log").read_text().split()

    def request(self, count: int, first: bool = False, says: str = "waits") -> subprocess.Popen[str]:
        """Start a process that requests slots, and wait until it `says` that it waits, or holds them."""
        script = HOLD.format(root=str(ROOT), count=count, first=first)
        environment = {**os.environ, "TMPDIR": str(self.folder)}
        child = subprocess.Popen([sys.executable, "-c", script], cwd=self.folder, env=environment, **PIPES)
        self.children.append(child)
        wait_until(child, says)
        return child


def wait_until(child: subprocess.Popen[str], says: str) -> None:
    assert child.stdout
    while child.stdout.readline().rstrip() != says:
        assert child.poll() is None


def release(child: subprocess.Popen[str]) -> None:
    """Wait until a process holds its slots, and end it."""
    child.communicate("", timeout=60)
    assert child.returncode == 0


@pytest.fixture
def claims(tmp_path: Path) -> Iterator[Claims]:
    made = Claims(tmp_path)
    yield made
    for child in made.children:
        child.kill()
        child.communicate()


def test_claims_do_not_exceed_the_memory_slots(claims: Claims) -> None:
    """With 2 of 6 slots taken, 5 must wait, and 1 need not; 9 means all slots. A dead process holds none."""
    dead = claims.request(6, says="holds")
    dead.kill()
    dead.wait()
    two, five = claims.request(2, says="holds"), claims.request(5)
    one, nine = claims.request(1, says="holds"), claims.request(9)
    assert claims.log() == ["+6", "+2", "+1"]
    release(two)
    wait_until(five, "holds")
    release(one)
    assert claims.log() == ["+6", "+2", "+1", "-2", "+5", "-1"]
    release(five)
    release(nine)
    assert claims.log()[6:] == ["-5", "+9", "-9"]


def test_claim_with_priority_is_not_overtaken(claims: Claims) -> None:
    """Of 6 slots 4 are held; the 2 free ones are not granted before the waiting claim of 5."""
    four, five = claims.request(4, says="holds"), claims.request(5, first=True)
    with lock_file(Path(f"{claims.folder / LOCKS.name}-0.turn.lock")) as lock:
        while try_lock(lock):  # until the claim with priority blocks the others
            fcntl.flock(lock, fcntl.LOCK_UN)
            time.sleep(0.01)
    two = claims.request(2)
    assert claims.log() == ["+4"]
    release(four)
    release(five)
    release(two)
    assert claims.log() == ["+4", "-4", "+5", "-5", "+2", "-2"]


def test_second_claim_of_a_process_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of 4 of 6 slots: it would wait for itself for ever. After the first is released it may claim again."""
    monkeypatch.setattr(gpu_memory, "LOCKS", tmp_path / "gpu_memory")
    with (
        held(4, slots=6),
        pytest.raises(RuntimeError, match="holds 4 of 6 slots: claim once"),
        held(4, slots=6),
    ):
        pass
    with held(6, slots=6):
        pass


def test_patient_exclusive_lock_lets_shared_holders_pass(tmp_path: Path) -> None:
    order: list[str] = []
    entered = Event()

    def exclusive(patient: bool) -> None:
        entered.set()
        with locked(tmp_path / "it", exclusive=True, patient=patient):
            order.append("exclusive")

    with locked(tmp_path / "it", exclusive=False):
        waiter = Thread(target=exclusive, args=(True,))
        waiter.start()
        entered.wait()
        time.sleep(0.3)
        with locked(tmp_path / "it", exclusive=False):
            order.append("shared")
    waiter.join(timeout=10)
    assert order == ["shared", "exclusive"]


def test_workers_dying_together_lose_one_test_each(tmp_path: Path) -> None:
    printed = run(tmp_path, TESTS, workers=3)
    assert "3 failed, 10 passed" in printed, printed
    ran = (tmp_path / "ran").read_text().splitlines()
    assert sorted(ran) == sorted(["died"] * 3 + [f"lived {i}" for i in range(10)])


class Worker:
    """A fake worker for the scheduler, without a process."""

    shutting_down = False

    def __init__(self) -> None:
        self.assigned: list[int] = []
        self.dead = False
        self.gateway = SimpleNamespace(id="gw")

    def send_runtest_some(self, indices: list[int]) -> None:
        if self.dead:
            raise OSError("cannot send (already closed?)")
        self.assigned += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduled(count: int, *workers: Worker) -> tuple[TestByTest, list[str]]:
    """Return a scheduler that has started the workers on so many tests, and the tests."""
    options = SimpleNamespace(verbose=0, loadscopereorder=False)
    config = SimpleNamespace(getvalue=lambda _: ["popen"] * len(workers), rootpath=ROOT, option=options)
    scheduler, tests = TestByTest(config), [f"{FILE}::test_lives[{i}]" for i in range(count)]
    for worker in workers:
        scheduler.add_node(worker)
    for worker in workers:
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    return scheduler, tests


def test_scheduler_reassigns_tests_of_an_undetected_dead_worker() -> None:
    """It dies in its second test, and is assigned another before its death is known: others must run that one."""
    dying, other = Worker(), Worker()
    scheduler, tests = scheduled(12, dying, other)
    first, second = dying.assigned[:2]
    dying.dead = True
    scheduler.mark_test_complete(dying, first)
    assert scheduler.remove_node(dying) == tests[second]
    for index in other.assigned:  # the list grows as tests are run
        scheduler.mark_test_complete(other, index)
    assert sorted([first, second, *other.assigned]) == list(range(12))
    assert scheduler.tests_finished


def test_scheduler_keeps_only_units_that_still_run() -> None:
    """Otherwise each of 10,000 tests costs a walk over all that have run."""
    workers = Worker(), Worker()
    scheduler, _ = scheduled(200, *workers)
    for place in range(100):
        for worker in workers:
            scheduler.mark_test_complete(worker, worker.assigned[place])
            assert len(scheduler.assigned_work[worker]) <= 3
    assert sorted(workers[0].assigned + workers[1].assigned) == list(range(200))
    assert scheduler.tests_finished


def test_xdist_that_reorders_units_is_refused() -> None:
    """Before 3.8 it has no option that keeps their order, and runs the tests that need the machine to itself first."""
    with pytest.raises(
        pytest.UsageError, match=r"^pytest-xdist [\d.]+ changes the order .* 'pytest-xdist>=3\.8', or -n 0$"
    ):
        pytest_xdist_make_scheduler(SimpleNamespace(option=SimpleNamespace(dist="load")), None)


def test_keep_adds_compiled_files_without_replacing_existing(tmp_path: Path) -> None:
    made, cache = tmp_path / "made", tmp_path / "cache"
    for place, text in ((made, "new"), (cache, "old")):
        (place / "shared").mkdir(parents=True)
        (place / "shared" / "launcher.so").write_text(text)
    (made / "kernel").mkdir()
    (made / "kernel" / "kernel.cubin").write_text("code")
    (made / "kernel" / "__grp__kernel.json").write_text(f'{{"cubin": "{made}/kernel/kernel.cubin"}}')
    mapped = (cache / "shared" / "launcher.so").stat().st_ino
    keep(made, cache)
    launcher = cache / "shared" / "launcher.so"
    assert (launcher.read_text(), launcher.stat().st_ino) == ("old", mapped)
    assert (cache / "kernel" / "kernel.cubin").read_text() == "code"
    listed = (cache / "kernel" / "__grp__kernel.json").read_text()
    assert listed == f'{{"cubin": "{cache}/kernel/kernel.cubin"}}'
