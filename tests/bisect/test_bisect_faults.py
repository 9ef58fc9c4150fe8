"""Bisect with invalid options, when killed, or on a failing machine: one line, the right exit code, no lost results."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bumpgate.bisect import bisection
from suites.support.child import ROOT
from tests.support import golden
from tests.support.bisects import KillPoints, check_every_kill_point, readings, run_loop
from tests.support.builds import JUDGE, RAISES, Bisect, answer_of, bisecting, make_builds, start
from tests.support.local_index import LocalIndex, isolated
from tests.support.project import wait_for


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalIndex]:
    """The fault is in triton from week 7 on; the torch of week 5 does not import."""
    with LocalIndex() as index:
        make_builds(tmp_path_factory.mktemp("wheels"), index, triton_fault=7, import_text={5: RAISES})
        yield index


@pytest.fixture
def index(served: LocalIndex, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIndex]:
    isolated(monkeypatch, cache, served.url)
    yield served
    served.fail(0)


ENDS = ("--good", "2.0.0", "--bad", "2.11.0")
TRUE = ("--command", "true")
LANE = ("--lane", "cpu", "--", "tests/core/test_rows.py")
REFUSED: dict[str, tuple[str, ...]] = {
    "swapped": ("--good", "2.11.0", "--bad", "2.0.0", *TRUE),
    "fix_swapped": (*ENDS, "--find-fix", *TRUE),
    "equal": ("--good", "2.3.0", "--bad", "2.3", *TRUE),
    "unknown_version": ("--good", "2.0.0", "--bad", "2.12.0", *TRUE),
    "no_version": ("--good", "2.0.0", "--bad", "newest", *TRUE),
    "no_such_day": ("--good", "2026-02-30", "--bad", "2.3.0", *TRUE),
    "before_the_first_day": ("--good", "2025-12-24", "--bad", "2.3.0", *TRUE),
    "unknown_package": ("--package", "torchx", *ENDS, *TRUE),
    "unreachable": (*ENDS, "--index", "http://127.0.0.1:1/index", *TRUE),
    "no_folder": (*ENDS, "--find-links", "wheels", *TRUE),
    "nothing_to_run": ENDS,
    "lane_without_tests": (*ENDS, "--lane", "cpu"),
    "both_tests": (*ENDS, *TRUE, *LANE),
    "unknown_lane": (*ENDS, "--lane", "tpu", "--", "suites"),
    "noise_without_information": (*ENDS, "--false-bad", "0.5", *TRUE),
    "no_time": (*ENDS, "--timeout", "0", *TRUE),
    "no_end": ("--good", "2.0.0", *TRUE),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_bisect_options_are_refused_before_install(
    case: str, run: Bisect, index: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path / "home"))
    with bisecting(ROOT) as of_repository:  # it declares lanes
        ran = (of_repository if case == "unknown_lane" else run)(*REFUSED[case])
    assert (ran.code, ran.out, len(ran.err.splitlines())) == (4, "", 1), ran
    golden.check(f"bisect_{case}", golden.transcript(["bisect", *REFUSED[case]], ran.code, ran.out, ran.err))
    assert list(tmp_path.iterdir()) == [], "files remain"


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (("tests/core/test_rows.py",), "selects no test of lane cpu"),
        (("suites/kernels/test_moe.py", "-k", "nothing_like_it"), "selects no test of lane cpu"),
        (("suites/none.py",), "file or directory not found: suites/none.py"),
    ],
    ids=str,
)
def test_bisect_refuses_empty_selection(
    selection: tuple[str, ...], words: str, index: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path / "home"))
    with bisecting(ROOT) as call:
        ran = call(*ENDS, "--lane", "cpu", "--out", str(tmp_path / "out"), "--", *selection)
    assert (ran.code, ran.out, len(ran.err.splitlines())) == (4, "", 1), ran
    assert words in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("ends_swapped_in_fact", "{python} -c 'import torch; raise SystemExit(torch.graph_breaks() == 13)'"),
        ("good_end_is_bad", "false"),
        ("bad_end_is_good", "true"),
        ("cannot_be_run", "no-such-program"),
        ("strange_exit", "exit 255"),
        ("always_skipped", "exit 125"),
    ],
)
def test_endpoints_without_claimed_result_are_refused(
    name: str, command: str, run: Bisect, index: LocalIndex
) -> None:
    ran = run(*ENDS, "--command", command, "--out", "out")
    assert (ran.code, len(ran.err.splitlines())) == (4, 1), ran
    line = ["bisect", *ENDS, "--command", command]
    golden.check(f"bisect_{name}", golden.transcript(line, ran.code, ran.out, ran.err))


def test_out_folder_holds_only_one_bisect(run: Bisect, index: LocalIndex, tmp_path: Path) -> None:
    judged = (*ENDS, "--command", JUDGE, "--no-attribution")
    assert run(*judged, "--out", "out").code == 0
    state = (tmp_path / "out/state.jsonl").read_bytes()
    for arguments, words in (
        (judged, "out already holds a bisect: continue it with --resume"),
        ((*ENDS, *TRUE, "--resume"), "another bisect"),
    ):
        ran = run(*arguments, "--out", "out")
        assert (ran.code, ran.out, len(ran.err.splitlines())) == (4, "", 1), ran
        assert words in ran.err
    # A finished bisect prints its answer again, without probes.
    repeated = run(*judged, "--out", "out", "--resume")
    assert repeated.code == 0
    assert "first bad   torch 2.7.0" in repeated.out
    assert not re.search("^(GOOD|BAD) ", repeated.out, re.MULTILINE)
    assert (tmp_path / "out/state.jsonl").read_bytes() == state


def held_test_command(folder: Path) -> str:
    """Return a test command that logs a line for each probe, and hangs in the one whose number is in `at`."""
    here = f'test "$(wc -l < {folder}/probed)" = "$(cat {folder}/at)" && touch {folder}/held && sleep 600'
    return f"{JUDGE}; code=$?; echo {{version}} >> {folder}/probed; {here}; exit $code"


def start_and_hold(folder: Path, number: int, *arguments: str) -> subprocess.Popen[str]:
    """Start a bisect with that command, and wait until it hangs in probe `number` of those it has yet to make."""
    probed = folder / "probed"
    (folder / "at").write_text(str(number + (len(probed.read_text().split()) if probed.exists() else 0)))
    (folder / "held").unlink(missing_ok=True)
    process = start(folder, *arguments)
    wait_for((folder / "held").exists, process)
    return process


def running_processes(marker: str) -> list[str]:
    """Return processes with the marker on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in line and path.parent.name != str(os.getpid()):
            found.append(line)
    return found


def test_resume_after_kill_9_loses_no_probe(index: LocalIndex, tmp_path: Path) -> None:
    """After four kills, each resume continues, and the answer is that of an undisturbed run."""
    arguments = [*ENDS, "--command", held_test_command(tmp_path), "--out", "out"]
    numbers = (1, 3, 2, 2)
    for attempt, number in enumerate(numbers):
        process = start_and_hold(tmp_path, number, *arguments, *(["--resume"] if attempt else []))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    process = start(tmp_path, *arguments, "--resume")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    answer = answer_of(tmp_path / "out")
    assert (answer["suspects"], answer["last"]) == (["2.7.0"], "2.6.0")
    assert [change["name"] for change in answer["at_fault"]] == ["triton"]
    assert "first bad   torch 2.7.0" in out
    # Only the probes in which it was killed are made again.
    ended = (tmp_path / "probed").read_text().split()
    kept = [code for code in readings(tmp_path / "out").values() if code is not None]
    assert len(ended) == len(kept) + len(numbers)
    wait_for(lambda: not running_processes(index.url) + running_processes(str(tmp_path)))


def test_ctrl_c_exits_130_and_printed_command_resumes(index: LocalIndex, tmp_path: Path) -> None:
    process = start_and_hold(tmp_path, 2, *ENDS, "--command", held_test_command(tmp_path))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    wait_for(lambda: not running_processes(str(tmp_path)))
    message, command = err.splitlines()
    assert message.endswith("probes are saved. Continue with:")
    process = start(tmp_path, *shlex.split(command)[2:])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "resuming after" in out
    assert "at fault    triton 3.6.0 -> 3.7.0, not torch" in out
    runs = Counter((tmp_path / "probed").read_text().split())
    kept = Counter(
        place.rpartition(".")[0] for place in readings(tmp_path / f"bisect-torch-{ENDS[1]}-{ENDS[3]}")
    )
    # 2.6.0 and 2.7.0 are the torch versions of two mixtures; one probe was interrupted.
    assert sum((runs - kept).values()) <= 3, (runs, kept)


def test_answer_is_saved_before_attribution(index: LocalIndex, tmp_path: Path) -> None:
    """Interrupted in the first mixture: the answer is printed and in bisect.json, and a resume attributes it."""
    held = "test -d out/mixtures && ! test -e go && touch mixed && sleep 60"
    holds = f"{JUDGE}; code=$?; {held}; exit $code"
    process = start(tmp_path, *ENDS, "--command", holds, "--out", "out")
    wait_for((tmp_path / "mixed").exists, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "first bad   torch 2.7.0" in out
    saved = answer_of(tmp_path / "out")
    assert (saved["first"], saved["sure"], saved["attribution"]) == ("2.7.0", True, None)
    (tmp_path / "go").touch()
    process = start(tmp_path, *ENDS, "--command", holds, "--out", "out", "--resume")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "at fault    triton 3.6.0 -> 3.7.0, not torch" in out


def test_killed_probe_gives_no_verdict_and_can_resume(run: Bisect, index: LocalIndex, tmp_path: Path) -> None:
    """Exit 125, no candidate is blamed; the same bisect succeeds once the index responds again."""
    dies = f"{JUDGE}; code=$?; test -e {tmp_path}/up || kill -9 $$; exit $code"
    arguments = (*ENDS, "--command", dies, "--out", "out", "--no-attribution")
    ran = run(*arguments)
    assert (ran.code, len(ran.err.splitlines())) == (125, 1), ran
    assert "died of SIGKILL; readings so far are saved. Continue with: bumpgate bisect" in ran.err
    (tmp_path / "up").touch()
    ran = run(*arguments, "--resume")
    assert ran.code == 0, ran
    assert "first bad   torch 2.7.0" in ran.out


def test_probe_timeout_gives_no_verdict(run: Bisect, index: LocalIndex) -> None:
    ran = run(*ENDS, "--command", "sleep 30", "--timeout", "0.2", "--out", "out")
    assert ran.code == 125
    assert "torch 2.0.0: no end within 0 s" in ran.err


def test_kill_at_every_step_gives_the_same_answer(tmp_path: Path) -> None:
    assert check_every_kill_point(bisection, tmp_path) > 40


def test_flaky_test_is_probed_again_until_settled(tmp_path: Path) -> None:
    """The good endpoint, a candidate in the middle and a mixture are misread once each."""
    runs: list[str] = []
    noise = {"false_bad": 0.1, "false_good": 0.1, "confidence": 0.99}
    result, blamed = run_loop(tmp_path / "noisy", KillPoints(), runs, misread=(1, 4, 20), **noise)
    assert (result.suspects, blamed) == ((7,), ["triton 3.6.0 -> 3.7.0"])
    assert result.misreads == 2
    assert len(runs) == sum(code is not None for code in readings(tmp_path / "noisy").values())
    assert max(Counter(runs).values()) > 2
