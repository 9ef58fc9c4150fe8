"""Bisects and gates on real engines: `tox -e fleet`.

Marked `fleet` and run only in that environment. The hosts are Ray nodes on this machine, and submitit's own processes.
"""

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

from bumpgate.fleet.engine import Done, Lost, Task
from bumpgate.fleet.slurm_engine import SlurmEngine
from tests.support.builds import JUDGE, Ran, make_builds
from tests.support.clusters import RayCluster, SlurmCluster
from tests.support.foreign import LANE, Foreign
from tests.support.local_index import LocalIndex, fake_wheel, isolated
from tests.support.project import wrapped_python
from tests.support.tree import ROOT

pytestmark = pytest.mark.fleet

NIGHTS = 60
ENDS = ("--good", "2.0.0", "--bad", "2.11.0")
# Names the host: a variable of the environment in which the node was started.
SLOW = "sleep 0.3; echo {version} $NODE >> probed"


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
    """Two hosts: `a` with four places of the class `fast`, `b` with one and the lane `mine`."""
    with pytest.MonkeyPatch.context() as patch:
        isolated(patch, cache, served.url)
        # The lock of the device is in TMPDIR: a gate of this machine's own must not keep these waiting.
        patch.setenv("TMPDIR", short)
        with RayCluster(tmp_path_factory.mktemp("ray"), {**os.environ}) as cluster:
            cluster.start("class_fast", "lane_mine", slots=4, NODE="a")
            cluster.start("lane_mine", "lane_other", NODE="b", PIP_NODE="b")
            yield cluster


@pytest.fixture(autouse=True)
def here(served: LocalIndex, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolated(monkeypatch, cache, served.url)


def start(folder: Path, cluster: RayCluster | SlurmCluster | None, *arguments: str) -> subprocess.Popen[str]:
    """Start `bumpgate`, as the head of a fleet or alone."""
    command = list(arguments)
    if cluster:
        engine = ["--ray", cluster.address] if isinstance(cluster, RayCluster) else ["--slurm", "jobs"]
        command = ["fleet", *engine, *command]
    return subprocess.Popen(
        [sys.executable, "-c", "from bumpgate.cli import main; main()", *command],
        cwd=folder,
        env={**os.environ, **(cluster.variables if cluster else {}), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], seconds: float = 300) -> Ran:
    out, err = process.communicate(timeout=seconds)
    return Ran(process.returncode, out, err)


def run(folder: Path, cluster: RayCluster | SlurmCluster | None, *arguments: str) -> Ran:
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


def lines(folder: Path) -> int:
    return sum(probed(folder).values())


def until(condition: Callable[[], Any], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.02)
    return found


def test_two_ray_hosts_give_the_answer_of_one_process(hosts: RayCluster, tmp_path: Path) -> None:
    judged = ("bisect", *ENDS, "--command", f"{JUDGE}; code=$?; {SLOW}; exit $code")
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for folder, cluster in ((alone, None), (shared, hosts)):
        folder.mkdir()
        ran = run(folder, cluster, *judged, "--out", "out")
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
    ran = run(tmp_path, hosts, "--host-class", "fast", "bisect", *nights, "--out", "out")
    assert ran.code == 0, ran
    assert "first bad   night 1.38" in ran.out
    journal = [json.loads(line) for line in (tmp_path / "out/state.jsonl").read_text().splitlines()]
    rounds = [entry["probe"] for entry in journal if "probe" in entry]
    assert max(map(len, rounds)) == 4
    assert len(rounds) <= 1 + 3, "that of the ends, and three"


def test_task_runs_on_a_host_that_offers_what_it_needs(hosts: RayCluster, tmp_path: Path) -> None:
    found = in_cluster(hosts, "node_of_each")
    assert found == {"lane_mine class_fast": ["a"] * 6, "lane_other": ["b"] * 6, "lane_none": ["lost"] * 6}
    assert in_cluster(hosts, "threads") == "unset", "Ray's own number of threads"


def in_cluster(cluster: RayCluster, name: str) -> Any:
    """Run a function of tests.support.fleet_calls in a process that has joined the cluster."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.fleet_calls", cluster.address, name],
        env={**os.environ, **cluster.variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_fleet_check_names_the_host_that_differs(hosts: RayCluster, tmp_path: Path) -> None:
    ran = run(tmp_path, hosts, "check")
    assert ran.code == 1, ran
    *offered, differs, total = ran.out.splitlines()
    assert sorted(line.partition(": ")[2] for line in offered) == [
        "class_fast, lane_mine",
        "lane_mine, lane_other",
    ]
    assert differs.startswith("settings: ")
    assert differs.count("PIP_NODE") == 1
    assert total == "2 hosts: 1 difference"
    ran = run(tmp_path, hosts, "check", "--lane", "other")
    assert (ran.code, ran.out.splitlines()[-1]) == (0, "1 host: equal")
    ran = run(tmp_path, hosts, "check", "--lane", "none")
    assert (ran.code, len(ran.err.splitlines())) == (4, 1)


def test_lanes_are_gated_on_their_hosts(hosts: RayCluster, tmp_path: Path) -> None:
    foreign = Foreign(tmp_path)
    foreign.write("bumpgate.toml", LANE + LANE.replace("mine", "other") + LANE.replace("mine", "none"))
    foreign.write("torch.py", "")
    for side in ("good", "bad"):
        foreign.write(f".{side}/python", wrapped_python(SIDE=side))
        (tmp_path / f".{side}/python").chmod(0o755)
    row = '{"name": "graphs", "value": 3, "unit": "graphs", "better": "exact"}'
    notes = "open('ran', 'a').write(os.environ['NODE'] + os.environ['SIDE'] + ' ')"
    foreign.write("bench.py", f"import os\nprint('{row}')\n{notes}")
    gates = ("gate", "--lane", "mine", "--lane", "other", "--out", "night")
    pythons = (
        "--python-adopted",
        ".good/python",
        "--python-candidate",
        ".bad/python",
        "--command",
        "python bench.py",
    )
    url = f"sqlite:///{tmp_path}/h.sqlite"
    ran = run(tmp_path, hosts, *gates, "--history", url, "--", *pythons)
    assert ran.code == 0, ran
    verdicts = {line.split(" on ")[0] for line in ran.out.splitlines() if " on " in line}
    assert verdicts == {"ADOPT    mine", "ADOPT    other"}
    assert "bgood" in (tmp_path / "ran").read_text()
    nodes = (tmp_path / "ran").read_text().split()
    assert nodes.count("bgood") == nodes.count("bbad") > 0, "both sides of the lane `other` on its host"
    again = run(tmp_path, hosts, *gates, "--", *pythons)
    assert (again.code, "night holds gates of mine, other: add --resume" in again.err) == (4, True)
    again = run(tmp_path, hosts, *gates, "--resume", "--", *pythons)
    assert (again.code, again.out) == (0, "")


# Each of these kills processes of a cluster of its own.


@pytest.fixture
def cluster(served: LocalIndex, cache: Path, short: str, tmp_path: Path) -> Iterator[RayCluster]:
    with RayCluster(tmp_path, {**os.environ, "TMPDIR": short}) as made:
        made.start("lane_mine", slots=2, NODE="a")
        yield made


def judged_slowly() -> tuple[str, ...]:
    return ("bisect", *ENDS, "--command", f"{JUDGE}; code=$?; {SLOW}; exit $code", "--out", "out")


def check_answer(folder: Path, ran: Ran, lost: int) -> None:
    """The answer is that of an undisturbed bisect, and no more than `lost` finished probes have no reading."""
    assert ran.code == 0, ran
    found = json.loads((folder / "out/bisect.json").read_text())
    assert (found["suspects"], found["last"], found["sure"]) == (["2.7.0"], "2.6.0", True)
    assert [change["name"] for change in found["at_fault"]] == ["triton"]
    kept = [
        p for p in (folder / "out").rglob("reading.json") if json.loads(p.read_text())["code"] is not None
    ]
    assert len(kept) <= lines(folder) <= len(kept) + lost


def test_killed_worker_loses_only_its_probe(cluster: RayCluster, tmp_path: Path) -> None:
    process = start(tmp_path, cluster, *judged_slowly())
    kills = 0
    for after in (1, 4):
        until(lambda after=after: lines(tmp_path) >= after)
        os.kill(until(cluster.nodes[0].workers)[0], signal.SIGKILL)
        kills += 1
    check_answer(tmp_path, ended(process), kills)


def test_killed_host_leaves_the_bisect_to_the_others(cluster: RayCluster, tmp_path: Path) -> None:
    second = cluster.start("lane_mine", slots=2, NODE="b")
    process = start(tmp_path, cluster, *judged_slowly())
    until(lambda: probed(tmp_path)["b"])
    until(second.workers)
    second.kill()
    count = probed(tmp_path)["b"]
    check_answer(tmp_path, ended(process), 2)
    assert probed(tmp_path)["b"] == count


def test_killed_driver_resumes_from_its_journal(cluster: RayCluster, tmp_path: Path) -> None:
    for after in (1, 5):
        process = start(tmp_path, cluster, *judged_slowly(), *(["--resume"] if after > 1 else []))
        until(lambda after=after: lines(tmp_path) >= after)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    check_answer(tmp_path, run(tmp_path, cluster, *judged_slowly(), "--resume"), 4)


@pytest.mark.parametrize("others", [0, 1], ids=["only host", "with another host"])
def test_killed_head_gives_a_partial_answer(cluster: RayCluster, tmp_path: Path, others: int) -> None:
    for _ in range(others):
        cluster.start("lane_mine", slots=2, NODE="b")
    process = start(tmp_path, cluster, *judged_slowly())
    until(lambda: lines(tmp_path) >= 4)
    cluster.nodes[0].kill()
    ran = ended(process)
    assert ran.code == 125, ran
    assert ran.out.splitlines()[-1].startswith("so far      ")
    (line,) = ran.err.splitlines()
    assert "readings so far are saved. Continue with: bumpgate fleet --ray" in line
    with RayCluster(tmp_path, cluster.env) as other:
        other.start("lane_mine", slots=2, NODE="c")
        check_answer(tmp_path, run(tmp_path, other, *judged_slowly(), "--resume"), 2 * (1 + others))
    assert probed(tmp_path)["c"]


@pytest.fixture
def jobs(tmp_path: Path) -> SlurmEngine:
    """Jobs of submitit as processes of this machine."""
    pytest.importorskip("submitit", reason="submitit is not installed: pip install 'bumpgate[fleet]'")
    return SlurmEngine(tmp_path / "jobs", {}, cluster="local")


def test_local_jobs_of_submitit_end_done_or_lost(jobs: SlurmEngine) -> None:
    tasks = [Task(divmod, (7, n)) for n in (2, 0, 3)]
    found = dict(jobs.run(tasks))
    assert [type(found[number]) for number in range(3)] == [Done, Lost, Done]
    assert (found[0].value, found[2].value) == ((3, 1), (2, 1))
    assert "ZeroDivisionError" in found[1].why


def test_killed_job_of_submitit_is_repeated(jobs: SlurmEngine, tmp_path: Path) -> None:
    once = f"test -e {tmp_path}/done || {{ touch {tmp_path}/done; kill -9 $PPID; sleep 9; }}; exit 3"
    ((_, found),) = jobs.run([Task(os.system, (once,))])
    assert isinstance(found, Done)
    assert found.value == 3 << 8


def test_slurm_jobs_give_the_answer_of_one_process(jobs: SlurmEngine, short: str, tmp_path: Path) -> None:
    slow = "sleep 0.3; echo {version} job$SLURM_JOB_ID >> probed"
    judged = ("bisect", *ENDS, "--command", f"{JUDGE}; code=$?; {slow}; exit $code", "--out", "out")
    (tmp_path / "alone").mkdir()
    assert run(tmp_path / "alone", None, *judged).code == 0
    folder = Path(short) / "slurm"
    folder.mkdir()
    with SlurmCluster(folder, "lane_mine,class_fast") as slurm:
        ran = run(tmp_path, slurm, "--host-class", "slow", *judged)
        assert (ran.code, ran.err.count("no host of the fleet offers class_slow")) == (125, 1), ran
        ran = run(tmp_path, slurm, "--host-class", "fast", *judged, "--resume")
        assert ran.code == 0, ran
        checked = run(tmp_path, slurm, "check", "--lane", "mine")
        refused = run(tmp_path, slurm, "--set", "slurm_partition=none", "check")
    assert answer(tmp_path / "out") == answer(tmp_path / "alone/out")
    assert len(probed(tmp_path)) == lines(tmp_path), "a job per reading"
    assert (checked.code, checked.out.splitlines()[-1]) == (0, "1 host: equal")
    assert (refused.code, refused.err.count("sbatch failed: ")) == (4, 1), refused
