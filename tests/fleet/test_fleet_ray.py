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

from bumpgate.fleet import Done, Task, run_tasks
from tests.fleet.lanes import PYTHONS, two_lanes
from tests.support.builds import JUDGE, Ran, make_builds
from tests.support.clusters import RayCluster
from tests.support.local_index import LocalIndex, isolated
from tests.support.project import COMMAND
from tests.support.tree import ROOT

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalIndex]:
    """The fault is in triton from week 7 on."""
    with LocalIndex() as index:
        make_builds(tmp_path_factory.mktemp("wheels"), index, triton_fault=7)
        yield index


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cluster(
    served: LocalIndex, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RayCluster]:
    """A cluster of one host, `a`."""
    isolated(monkeypatch, cache, served.url)
    # Ray's sockets need a short path. The lock of the device is in TMPDIR, too: a gate of this machine's own must not
    # keep these waiting.
    with tempfile.TemporaryDirectory(prefix="fleet", dir="/tmp") as short:
        monkeypatch.setenv("TMPDIR", short)
        with RayCluster(tmp_path, {**os.environ}) as made:
            made.start("lane_mine", slots=2, NODE="a")
            yield made


def start(folder: Path, cluster: RayCluster, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "fleet", "--ray", cluster.address, *arguments],
        cwd=folder,
        env={**os.environ, **cluster.variables, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> Ran:
    out, err = process.communicate(timeout=300)
    return Ran(process.returncode, out, err)


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.02)
    return found


def test_task_runs_on_a_host_that_offers_its_lane(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start("lane_mine", "lane_other", NODE="b")
    for name, value in cluster.variables.items():
        monkeypatch.setenv(name, value)

    def values(name: str, lane: str) -> set[str]:
        task = Task(subprocess.getoutput, (f"sleep 1; echo ${{{name}-unset}}",), lane)
        results = dict(run_tasks(cluster.address, [task] * 6, patience=1))
        return {result.value if isinstance(result, Done) else "lost" for result in results.values()}

    assert values("NODE", "mine") == {"a", "b"}
    assert values("NODE", "other") == {"b"}
    assert values("NODE", "none") == {"lost"}
    assert values("OMP_NUM_THREADS", "other") == {"unset"}


def test_lanes_are_gated_on_their_hosts(cluster: RayCluster, tmp_path: Path) -> None:
    cluster.start("lane_other", NODE="b")
    two_lanes(tmp_path, "open('ran', 'a').write(os.environ['NODE'] + os.environ['SIDE'] + ' ')")
    gates = ("gate", "--lane", "mine", "--lane", "other", "--out", "night", "--", *PYTHONS)
    ran = ended(start(tmp_path, cluster, *gates))
    assert ran.code == 0, ran
    verdicts = {line.split(" on ")[0] for line in ran.out.splitlines() if " on " in line}
    assert verdicts == {"ADOPT    mine", "ADOPT    other"}
    nodes = (tmp_path / "ran").read_text().split()
    for host in ("a", "b"):
        assert nodes.count(f"{host}good") == nodes.count(f"{host}bad") > 0, "both sides of a lane on its host"
    again = ended(start(tmp_path, cluster, *gates))
    assert (again.code, "night holds gates of mine, other" in again.err) == (4, True)


# Names the host: a variable of the environment in which the node was started.
SLOW = f"{JUDGE}; code=$?; sleep 0.3; echo $NODE >> probed; exit $code"
ENDS = ("--good", "2.0.0", "--bad", "2.11.0", "--command", SLOW)
BISECT = ("bisect", "--lane", "mine", "--out", "out", "--", *ENDS)


def probed(folder: Path) -> Counter[str]:
    """Return the host of each finished probe."""
    path = folder / "probed"
    return Counter(path.read_text().split()) if path.exists() else Counter()


def check_answer(folder: Path, ran: Ran, lost: int) -> None:
    """The answer is that of an undisturbed bisect, and no more than `lost` finished probes have no reading."""
    assert ran.code == 0, ran
    assert "FOUND    mine on " in ran.out
    assert "first bad torch 2.7.0; out/mine/bisect.json" in ran.out
    found = json.loads((folder / "out/mine/bisect.json").read_text())
    assert (found["suspects"], found["last"], found["sure"]) == (["2.7.0"], "2.6.0", True)
    assert [change["name"] for change in found["at_fault"]] == ["triton"]
    readings = [json.loads(path.read_text()) for path in (folder / "out").rglob("reading.json")]
    assert probed(folder).total() <= sum(reading["code"] is not None for reading in readings) + lost


def test_killed_worker_loses_only_its_probe(cluster: RayCluster, tmp_path: Path) -> None:
    process = start(tmp_path, cluster, *BISECT)
    for after in (1, 4):
        until(lambda after=after: probed(tmp_path).total() >= after)
        os.kill(until(cluster.nodes[0].workers)[0], signal.SIGKILL)
    check_answer(tmp_path, ended(process), lost=2)


def test_killed_host_leaves_the_bisect_to_another(cluster: RayCluster, tmp_path: Path) -> None:
    spare = cluster.start("lane_other", NODE="spare")
    process = start(tmp_path, cluster, *BISECT[:2], "other", *BISECT[3:])
    until(lambda: probed(tmp_path)["spare"])
    spare.kill()
    cluster.start("lane_other", NODE="b")
    ran = ended(process)
    assert ran.code == 0, ran
    assert "first bad torch 2.7.0" in ran.out
    assert probed(tmp_path)["b"] > 0


def test_killed_head_is_no_verdict(cluster: RayCluster, tmp_path: Path) -> None:
    process = start(tmp_path, cluster, *BISECT)
    until(lambda: probed(tmp_path).total() >= 2)
    cluster.nodes[0].kill()
    ran = ended(process)
    assert (ran.code, ran.out) == (125, "UNKNOWN  mine: no result: the head of the cluster is lost\n"), ran
