"""A failed launch is restarted once, for listed errors only, and with changes. Rules C25, C21.

Patches 2 to 4, which the new process applies to itself, are in test_process_group.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bumpgate.logs import TRACEBACK, classify, load_families
from launch import retry as retries
from launch.children import ChildError
from launch.environment import RETRY, RUN
from launch.retry import BEGUN, DEBUG, REASON, Stall, failure, load_retry, main, passed, relaunch, supervise
from suites.launch.trainers import first_launch
from suites.support.child import ROOT
from suites.support.lanes import lanes
from suites.support.planted import planted
from suites.support.processes import eventually, gone

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane")]

# Every child here first writes a file per launch with the environment that it was started with.
RECORD_ENVIRONMENT = """
import json, os, sys
started = dict(
    entry.split("=", 1) for entry in open("/proc/self/environ").read().split("\\0") if "=" in entry
)
name = f"{started.get('BUMPGATE_RETRY', '0')}-{os.getpid()}"
open(os.path.join(os.environ["HOME"], name), "w").write(json.dumps(started))
"""
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def fails(text: str, code: int = 1) -> list[str]:
    """Return a program that prints `text` and fails in every launch."""
    return recording(f"print({text!r}); raise SystemExit({code})")


def fails_once(text: str) -> list[str]:
    return recording(f"if 'BUMPGATE_RETRY' not in started: raise SystemExit({text!r})")


def recording(program: str, site: bool = False) -> list[str]:
    return [*([] if site else ["-S"]), "-c", f"{RECORD_ENVIRONMENT}\n{program}"]


class Launches:
    """Runs commands under the supervisor in a separate home, and reads the environment of each launch."""

    def __init__(self, home: Path) -> None:
        self.home, self.log = home, home.with_suffix(".log")
        home.mkdir()

    def __call__(self, command: list[str], ranks: int = 0, **given: str) -> int:
        for path in self.home.iterdir():
            path.unlink()
        return supervise(
            ranks, command, first_launch(HOME=str(self.home), **given), seconds=120, log=self.log
        )

    @property
    def started(self) -> list[dict[str, str]]:
        """Return the environment of each process, first launches first."""
        return [json.loads(path.read_text()) for path in sorted(self.home.iterdir())]


@pytest.fixture
def launches(tmp_path: Path) -> Launches:
    return Launches(tmp_path / "home")


def a_line_of_each_class() -> dict[str, str]:
    """Return alerting class -> a line of the corpus that belongs to this class only."""
    found = {}
    for path in sorted((ROOT / "fixtures" / "logs").glob("*.log")):
        for line in path.read_text().splitlines(keepends=True):
            report = classify([line])
            if not line.startswith(("#", "[rank")) and len(report.findings) == 1 and report.findings[0].alert:
                found.setdefault(report.findings[0].family.name, line.rstrip("\n"))
    return found


@planted("C25", "an error that is not listed")
def test_only_listed_errors_are_retried(launches: Launches, row) -> None:
    """Every alerting class of the log, each printed by a real child that fails."""
    lines, again = a_line_of_each_class(), set()
    listed = set(load_retry().errors)
    assert listed < {c.name for c in load_families() if c.action == "alert"}
    for name, line in lines.items():
        assert launches(fails(line)) == 1
        if len(launches.started) > 1:
            again.add(name)
    about = {"expected": len(listed), "seen": lines, "rule": "C25"}
    about["evidence"] = [f"not listed: {name}" for name in sorted(again - listed)]
    row.count("launch/retry/classes_launched_again", len(again & listed), **about)
    assert again == listed
    assert len(lines) > 4 * len(listed)
    for text, code in (("", 1), ("nothing that a class knows", 7), ("refused: the contract", 3)):
        assert launches(fails(text, code)) == code
        assert len(launches.started) == 1


@planted("C25", "a retry that is retried without end")
def test_failed_launch_is_retried_once(launches: Launches, monkeypatch, capsys, row) -> None:
    assert launches(fails(OOM, code=9)) == 9
    count = len(launches.started)
    row.count("launch/retry/launches_of_a_lasting_error", count, expected=2, seen=count, rule="C25")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("; run:")[0] for line in lines] == [
        "launched again: cuda_out_of_memory",
        "final: cuda_out_of_memory again in launch 2",
    ]
    assert [line.endswith(f"exit 9: {OOM}") for line in lines] == [True, True]
    # A supervisor inside a retry detects that it is one.
    assert launches(fails(OOM), BUMPGATE_RETRY="1") == 1
    assert len(launches.started) == 1
    monkeypatch.setattr(retries, "load_retry", lambda: replace(load_retry(), times=4))
    launches(fails(OOM))
    assert len(launches.started) == 5, "more often if the contract allows it: the row can fail"


@planted("C25", "the retry inherits DETAIL")
def test_patch_1_lowers_the_debug_level_in_the_environment(launches: Launches, monkeypatch, row) -> None:
    """Read from /proc: the environment that the new process was started with, not what it set itself."""
    expected = {"DETAIL": "INFO", "detail": "INFO", "INFO": "INFO", "OFF": "OFF", None: None}
    levels = {}
    for given in expected:
        assert launches(fails_once(OOM), **({DEBUG: given} if given else {})) == 0
        first, second = launches.started
        assert (first.get(DEBUG), first.get(RETRY)) == (given, None)
        assert (second.get(RETRY), second.get(REASON)) == ("1", "cuda_out_of_memory")
        levels[given] = second.get(DEBUG)
    about = {"expected": load_retry().debug_level, "seen": levels, "rule": "C25"}
    row.bound("launch/retry/debug_level_in_environment", levels["DETAIL"], "setting", **about)
    assert levels == expected
    monkeypatch.setattr(retries, "quiet_environment", lambda retry, given: dict(given))
    launches(fails_once(OOM), **{DEBUG: "DETAIL"})
    assert launches.started[1][DEBUG] == "DETAIL"


@planted("C25", "a run that fails after its first steps is restarted")
def test_training_past_its_first_steps_is_not_retried(launches: Launches, row) -> None:
    last = load_retry().last_step

    def count(steps: int, last_step: int = last) -> int:
        program = f"for step in range({steps}): passed(step, {last_step})\nraise SystemExit({OOM!r})"
        assert launches(recording(f"from launch.retry import passed\n{program}", site=True)) == 1
        return len(launches.started)

    found = {steps: count(steps) for steps in range(5)}
    about = {"expected": last, "seen": found, "rule": "C25"}
    about["evidence"] = [f"{steps} steps done: {count} launches" for steps, count in found.items()]
    lost = max(steps for steps, count in found.items() if count == 2)
    row.count("launch/retry/steps_that_may_be_lost", lost, **about)
    assert found == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1}
    assert count(4, last_step=99) == 2, "a run that reports no step is restarted: the row can fail"
    passed(last, last, {})  # without a supervisor: nothing to report, and no error


@planted("C25", "a memory error that the run recovered from, before the failure")
def test_last_traceback_decides_the_failure() -> None:
    trace = [TRACEBACK, '  File "a.py", line 1, in f']
    survived, nan = [*trace, OOM], [*trace, "ArithmeticError: step 9: the loss is nan"]
    assert failure([*survived, "step 1", *nan]) == ("non_finite",)
    assert failure([*nan, *survived]) == ("cuda_out_of_memory",)
    assert failure(["no class knows this"]) == ()
    error = ChildError("a", 1, "exit 1", [*survived, *nan])
    assert relaunch(load_retry(), error, {}, begun=False)[0] is None
    both = [*trace, "RuntimeError: CUDA out of memory. Tried to allocate; No space left on device"]
    assert failure(both)[0] == "disk_full", "the first class of the contract has a line that two would have"


# A rank on gloo. In the first launch rank 0 fails as a retry in the reports did, and rank 1 waits for it.
RANK = """
import torch, torch.distributed as dist
from launch.dist import process_group
from launch.contract import load
from launch.retry import load_retry

if "BUMPGATE_RETRY" not in started and os.environ["RANK"] == "0":
    raise RuntimeError("Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] Connection refused")
process_group.start(load(), load_retry(), "gloo", expert_parallel=True)
total = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(total)
print(json.dumps({"sum": total.item(), "level": dist.get_debug_level().name}), flush=True)
print(dist.get_rank(), flush=True)
dist.destroy_process_group()
"""


def test_two_gloo_ranks_are_relaunched(launches: Launches, capsys, row) -> None:
    """The rank that hangs in its rendezvous is stopped with the other; the second launch connects and adds up."""
    given = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "MASTER_PORT": "29500"}  # as of an earlier launch
    assert launches(recording(RANK, site=True), ranks=2, **given) == 0
    lines = launches.log.read_text().splitlines()
    sums = [json.loads(line.partition("]: ")[2]) for line in lines if line.endswith("}")]
    about = {"expected": 2, "seen": launches.started, "rule": "C25", "evidence": lines[-5:]}
    right = sum(found == {"sum": 3.0, "level": "INFO"} for found in sums)
    row.count("launch/retry-gloo_2_ranks/ranks_that_added_up", right, **about)
    out, err = capsys.readouterr()
    assert "launched again: bootstrap; rank0: exit 1: RuntimeError: Gloo" in err
    assert out == "0\n", "the last line of rank 0"
    first, second = launches.started[:-2], launches.started[-2:]
    assert {env["MASTER_PORT"] for env in first}.isdisjoint(env["MASTER_PORT"] for env in second)
    assert [env["WORLD_SIZE"] for env in second] == ["2", "2"]


def test_ranks_share_the_cores_of_the_host(launches: Launches, monkeypatch) -> None:
    """Unless the environment sets the number of threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)))
    for ranks, given, threads in ((2, "", ["4", "4"]), (2, "3", ["3", "3"]), (0, "", [None])):
        environment = first_launch(HOME=str(launches.home), OMP_NUM_THREADS=given)
        if not given:
            del environment["OMP_NUM_THREADS"]
        for path in launches.home.iterdir():
            path.unlink()
        assert supervise(ranks, recording(""), environment, seconds=120, log=launches.log) == 0
        assert [env.get("OMP_NUM_THREADS") for env in launches.started] == threads


def test_port_of_ranks_is_free_and_of_no_connection(monkeypatch) -> None:
    """Linux: a port of an outgoing connection could be taken between the choice and rank 0's store."""
    range_of_connections = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if range_of_connections.exists():
        assert retries.PORTS.stop <= int(range_of_connections.read_text().split()[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(retries, "PORTS", range(port - 1, port + 2))
        assert {retries.free_port() for _ in range(20)} <= {port - 1, port + 1}


def test_options_reach_the_supervisor(tmp_path: Path, monkeypatch) -> None:
    found = {}

    def recorded(count: int, command: list[str], given: dict[str, str], **rest: object) -> int:
        found.update(rest, count=count, command=command, run=given.get(RUN))
        return 0

    monkeypatch.setattr(retries, "supervise", recorded)
    log = tmp_path / "log"
    options = ["--ranks", "2", "--seconds", "9", "--stall", "3", "--run", "a", "--log", str(log)]
    assert main([*options, "--", "-m", "x"]) == 0
    assert found == {
        "count": 2, "command": ["-m", "x"], "run": "a", "seconds": 9.0, "stall": 3.0, "log": log,
        "stops": [],
    }  # fmt: skip


def test_retry_command(tmp_path: Path, monkeypatch, capsys) -> None:
    log = ["--log", str(tmp_path / "log")]
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert main([*log, "--", "-S", "-c", "print('done')"]) == 0
    assert main([*log, "--", "-S", "-c", "raise SystemExit(5)"]) == 5
    assert main([*log, "--seconds", "0.2", "--", "-S", "-c", "import time; time.sleep(60)"]) == 1
    assert main([*log, "--", "-S", "-c", kill]) == 1
    assert (tmp_path / "log").read_text().splitlines()[0] == "[run]: done"
    out, err = (text.splitlines() for text in capsys.readouterr())
    assert out == ["done"]
    ends = ("exit 5", "not ended in 0.2 s", "killed by SIGKILL")
    assert err == [f"final: no known error: not listed; run: {end}: no output" for end in ends]
    with pytest.raises(SystemExit) as caught:
        main(["--", "-c", "pass"])
    assert caught.value.code == 2
    monkeypatch.setattr(retries, "load_retry", lambda: load_retry(tmp_path / "contract.toml"))
    assert main([*log, "--", "-c", "pass"]) == 3
    assert BEGUN not in os.environ


@pytest.mark.parametrize("signals", [["HUP"], ["INT"], ["TERM"], ["TERM", "TERM"], ["KILL"]], ids="-".join)
@planted("C25", "a closed terminal, a second stop signal, a launcher that cannot clean up")
def test_stop_signals_leave_no_process(tmp_path: Path, signals: list[str]) -> None:
    """The run ignores SIGTERM, so that the second signal arrives while the launcher waits for its end."""
    wait = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(99)"
    log, numbers = tmp_path / "log", [getattr(signal, f"SIG{name}") for name in signals]
    command = [*supervised(log), "-c", wait]
    # A test run under nohup ignores SIGHUP, and its children inherit that.
    killed = numbers[0] == signal.SIGKILL
    default = None if killed else partial(signal.signal, numbers[0], signal.SIG_DFL)
    with subprocess.Popen(command, cwd=ROOT, preexec_fn=default) as launcher:
        assert eventually(lambda: log.exists() and log.read_text().endswith("\n"), 60)
        run = int(log.read_text().split()[1])
        for number in numbers:
            launcher.send_signal(number)
            time.sleep(0.5)
        code = launcher.wait(60)
    if not (ended := eventually(lambda: gone(run))):
        os.kill(run, signal.SIGKILL)
    assert (code, ended) == (-numbers[0] if killed else 128 + numbers[0], True)


@planted("C25", "a stopped run whose last lines have a listed error")
def test_stopped_launch_is_not_launched_again(launches: Launches, monkeypatch) -> None:
    """As if a stop signal reached the run while its memory ran out."""
    stops: list[int] = []

    def failing(*_: object, **__: object) -> None:
        stops.append(signal.SIGTERM)
        raise ChildError("run", 1, "exit 1", OOM.splitlines())

    monkeypatch.setattr(retries, "run", failing)
    code = retries.supervise(0, ["-c", "pass"], {}, seconds=9, log=launches.log, stops=stops)
    assert (code, len(stops)) == (128 + signal.SIGTERM, 1), "launched again although it was stopped"


def test_ignored_stop_signal_stays_ignored(tmp_path: Path) -> None:
    """As under nohup."""
    program = "import os, signal, time; os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.5); print('done')"
    command = ["nohup", *supervised(tmp_path / "log"), "-c", program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "done\n")


def supervised(log: Path) -> list[str]:
    return [sys.executable, "-m", "launch.retry", "--log", str(log), "--", "-S"]


@planted("C25", "the clock is set while a run trains, a rank that hangs")
def test_set_clock_is_no_stall(tmp_path: Path, monkeypatch) -> None:
    """The file's time and the system's clock may differ by any amount; only a time that stays is a stall."""
    begun, now = tmp_path / "begun", [0.0]
    stall = Stall(begun, 3.0)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert stall() == ""
    for step, clock in enumerate((1e9, 1e9 + 1, 1e9 + 7200, 1e9 - 7200)):
        begun.touch()
        os.utime(begun, (clock, clock))
        now[0] = 2.0 * step
        assert stall() == ""
    now[0] += 3.5
    assert stall() == "no step for 3 s"
