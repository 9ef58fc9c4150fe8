"""Bisects and gates on a real Ray cluster: `tox -e fleet`. The hosts are Ray nodes on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.lanes import PYTHONS, two_lanes
from tests.support.builds import JUDGE, Ran, make_builds
from tests.support.clusters import RayCluster
from tests.support.local_index import LocalIndex, fake_wheel, isolated
from tests.support.tree import ROOT

pytestmark = pytest.mark.fleet

NIGHTS = 60
ENDS = ("--good", "2.0.0", "--bad", "2.11.0")
# Names the host: a variable of the environment in which the node was started.
SLOW = f"{JUDGE}; code=$?; sleep 0.3; echo {{version}} $NODE >> probed; exit $code"
SLOWLY = ("bisect", *ENDS, "--command", SLOW, "--out", "out")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalIndex]:
    """The fault is in triton from week 7 on. `night` has 60 versions, and its fault since the 38th."""
    with LocalIndex() as index:
        folder = tmp_path_factory.mktemp("wheels")
        make_builds(folder, index, triton_fault=7)
        for n in range(NIGHTS):
            index.add(fake_wheel(folder, "night", f"1.{n}", f"FAULT = {int(n >= 38)}"))
        yield index


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def short() -> Iterator[str]:
    """A temporary folder with a path short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="fleet", dir="/tmp") as folder:
        yield folder


@pytest.fixture(scope="module")
def hosts(
    served: LocalIndex, cache: Path, short: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayCluster]:
    """Two hosts: `a` with four places, `b` with one and the lane `other`."""
    with pytest.MonkeyPatch.context() as patch:
        isolated(patch, cache, served.url)
        # The lock of the device is in TMPDIR: a gate of this machine's own must not keep these waiting.
        patch.setenv("TMPDIR", short)
        with RayCluster(tmp_path_factory.mktemp("ray"), {**os.environ}) as cluster:
            cluster.start("lane_mine", slots=4, NODE="a")
            cluster.start("lane_mine", "lane_other", NODE="b")
            yield cluster


@pytest.fixture(autouse=True)
def here(served: LocalIndex, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolated(monkeypatch, cache, served.url)


def start(folder: Path, cluster: RayCluster | None, *arguments: str) -> subprocess.Popen[str]:
    """Start `bumpgate`, as the head of a fleet or alone."""
    command = ["fleet", "--ray", cluster.address, *arguments] if cluster else [*arguments]
    return subprocess.Popen(
        [sys.executable, "-c", "from bumpgate.cli import main; main()", *command],
        cwd=folder,
        env={**os.environ, **(cluster.variables if cluster else {}), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> Ran:
    out, err = process.communicate(timeout=300)
    return Ran(process.returncode, out, err)


def run(folder: Path, cluster: RayCluster | None, *arguments: str) -> Ran:
    return ended(start(folder, cluster, *arguments))


def answer(out: Path) -> dict[str, Any]:
    """What an answer consists of, without times, places and the number of probes."""
    raw = json.loads((out / "bisect.json").read_text())
    kept = ("suspects", "last", "first", "sure", "confirmed", "at_fault", "changed", "compare", "deciding")
    return {name: raw[name] for name in kept} | {"findings": [f["candidate"] for f in raw["findings"]]}


def probed(folder: Path) -> Counter[str]:
    """Return the host of each finished probe."""
    path = folder / "probed"
    return Counter(line.split()[1] for line in path.read_text().splitlines()) if path.exists() else Counter()


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.02)
    return found


def test_two_ray_hosts_give_the_answer_of_one_process(hosts: RayCluster, tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for folder, cluster in ((alone, None), (shared, hosts)):
        folder.mkdir()
        ran = run(folder, cluster, *SLOWLY)
        assert ran.code == 0, ran
        assert "first bad   torch 2.7.0" in ran.out
        assert "at fault    triton 3.6.0 -> 3.7.0, not torch" in ran.out
    assert answer(shared / "out") == answer(alone / "out")
    assert set(probed(shared)) == {"a", "b"}, "both hosts took part"
    readings = json.loads((shared / "out/bisect.json").read_text())["readings"]
    assert {reading["host"] for reading in readings} == {os.uname().nodename}


def test_four_workers_find_one_of_60_nights_in_3_rounds(hosts: RayCluster, tmp_path: Path) -> None:
    judge = "{python} -c 'import night; raise SystemExit(night.FAULT)'"
    nights = ("--package", "night", "--good", "1.0", "--bad", f"1.{NIGHTS - 1}", "--command", judge)
    ran = run(tmp_path, hosts, "--probes", "4", "bisect", *nights, "--out", "out")
    assert ran.code == 0, ran
    assert "first bad   night 1.38" in ran.out
    journal = [json.loads(line) for line in (tmp_path / "out/state.jsonl").read_text().splitlines()]
    rounds = [entry["probe"] for entry in journal if "probe" in entry]
    assert max(map(len, rounds)) == 4
    assert len(rounds) <= 1 + 3, "the round of the ends, and three"


def test_task_runs_on_a_host_that_offers_its_lane(hosts: RayCluster) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.fleet_calls", hosts.address],
        env={**os.environ, **hosts.variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "NODE mine": ["a", "b"],
        "NODE other": ["b"],
        "NODE none": ["lost"],
        "OMP_NUM_THREADS other": ["unset"],
    }


def test_lanes_are_gated_on_their_hosts(hosts: RayCluster, tmp_path: Path) -> None:
    two_lanes(tmp_path, "open('ran', 'a').write(os.environ['NODE'] + os.environ['SIDE'] + ' ')")
    gates = ("gate", "--lane", "mine", "--lane", "other", "--out", "night", "--", *PYTHONS)
    ran = run(tmp_path, hosts, *gates)
    assert ran.code == 0, ran
    verdicts = {line.split(" on ")[0] for line in ran.out.splitlines() if " on " in line}
    assert verdicts == {"ADOPT    mine", "ADOPT    other"}
    assert "bgood" in (tmp_path / "ran").read_text()
    nodes = (tmp_path / "ran").read_text().split()
    assert nodes.count("bgood") == nodes.count("bbad") > 0, "both sides of the lane `other` on its host"
    again = run(tmp_path, hosts, *gates)
    assert (again.code, "night holds gates of mine, other" in again.err) == (4, True)


# Each of these kills processes of a cluster of its own.


@pytest.fixture
def cluster(served: LocalIndex, cache: Path, short: str, tmp_path: Path) -> Iterator[RayCluster]:
    with RayCluster(tmp_path, {**os.environ, "TMPDIR": short}) as made:
        made.start("lane_mine", slots=2, NODE="a")
        yield made


def check_answer(folder: Path, ran: Ran, lost: int) -> None:
    """The answer is that of an undisturbed bisect, and no more than `lost` finished probes have no reading."""
    assert ran.code == 0, ran
    found = json.loads((folder / "out/bisect.json").read_text())
    assert (found["suspects"], found["last"], found["sure"]) == (["2.7.0"], "2.6.0", True)
    assert [change["name"] for change in found["at_fault"]] == ["triton"]
    kept = [
        p for p in (folder / "out").rglob("reading.json") if json.loads(p.read_text())["code"] is not None
    ]
    assert len(kept) <= probed(folder).total() <= len(kept) + lost


def test_killed_worker_loses_only_its_probe(cluster: RayCluster, tmp_path: Path) -> None:
    process = start(tmp_path, cluster, *SLOWLY)
    for after in (1, 4):
        until(lambda after=after: probed(tmp_path).total() >= after)
        os.kill(until(cluster.nodes[0].workers)[0], signal.SIGKILL)
    check_answer(tmp_path, ended(process), lost=2)


def test_killed_host_leaves_the_bisect_to_the_others(cluster: RayCluster, tmp_path: Path) -> None:
    second = cluster.start("lane_mine", slots=2, NODE="b")
    process = start(tmp_path, cluster, *SLOWLY)
    until(lambda: probed(tmp_path)["b"])
    until(second.workers)
    second.kill()
    count = probed(tmp_path)["b"]
    check_answer(tmp_path, ended(process), 2)
    assert probed(tmp_path)["b"] == count


def test_killed_driver_resumes_from_its_journal(cluster: RayCluster, tmp_path: Path) -> None:
    for after in (1, 5):
        process = start(tmp_path, cluster, *SLOWLY, *(["--resume"] if after > 1 else []))
        until(lambda after=after: probed(tmp_path).total() >= after)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    check_answer(tmp_path, run(tmp_path, cluster, *SLOWLY, "--resume"), 4)


@pytest.mark.parametrize("others", [0, 1], ids=["only host", "with another host"])
def test_killed_head_gives_a_partial_answer(cluster: RayCluster, tmp_path: Path, others: int) -> None:
    for _ in range(others):
        cluster.start("lane_mine", slots=2, NODE="b")
    process = start(tmp_path, cluster, *SLOWLY)
    until(lambda: probed(tmp_path).total() >= 4)
    cluster.nodes[0].kill()
    ran = ended(process)
    assert ran.code == 125, ran
    assert ran.out.splitlines()[-1].startswith("so far      ")
    (line,) = ran.err.splitlines()
    assert "readings so far are saved. Continue with: bumpgate fleet --ray" in line
    with RayCluster(tmp_path, cluster.env) as other:
        other.start("lane_mine", slots=2, NODE="c")
        check_answer(tmp_path, run(tmp_path, other, *SLOWLY, "--resume"), 2 * (1 + others))
    assert probed(tmp_path)["c"]
