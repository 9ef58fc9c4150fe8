"""Rollback: the adopted set is restored without an index, or the first wrong byte is reported."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bumpgate import cli
from bumpgate.core.baseline import load
from bumpgate.core.rows import Judgement, Record, Row, Verdict
from bumpgate.env import freeze, store
from bumpgate.env.build import installed
from bumpgate.env.lane import LaneContext, lane_lock
from bumpgate.env.locks import Wheel, read_lock
from bumpgate.env.store import StoreError
from bumpgate.process.home import home
from bumpgate.process.runner import LaneRun
from bumpgate.review import rollback
from bumpgate.review.rollback import smoke_tests
from suites.support.lanes import LANES
from suites.support.planted import planted
from tests.support.lane_files import FAST, declare_lanes, write_lane
from tests.support.local_index import LocalIndex, fake_wheel, isolated
from tests.support.tree import ROOT

EXTRAS = """[project]
name = "bumpgate"
[project.optional-dependencies]
cpu = ["torch==1.0"]
h200 = ["torch==1.0"]
h200x2 = ["torch==1.0"]
v6e = ["torch==1.0", "torch-xla==1.0"]
"""
STUBS = "import pathlib, sys\npathlib.Path(sys.prefix, 'stubs').touch()\n"
PASSED = Judgement(Row("a/b/n", 1, "n", 1, "C1"), Verdict.PASS, "")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Frozen lanes whose index, and whose folder of kernel wheels, are no longer available."""
    root = tmp_path / "tree"
    root.mkdir()
    declare_lanes(root)
    write_lane(root, "h200", FAST.format(torch="1.0"))
    for name, text in (
        ("pyproject.toml", EXTRAS),
        ("lanes/v6e/make_cuda_stubs.py", STUBS),
    ):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    wheels = [
        fake_wheel(tmp_path / "wheels", "torch", "1.0", requires=["triton"]),
        fake_wheel(tmp_path / "wheels", "triton", "3.0"),
        fake_wheel(tmp_path / "wheels", "torch-xla", "1.0"),
    ]
    fake_wheel(tmp_path / "built", "fast", "1.0+torch1.0", requires=["torch"])
    with LocalIndex(wheels) as index:
        isolated(monkeypatch, tmp_path, index.url)
        for lane in LANES:
            freeze.freeze(LaneContext(root, lane), find_links=(str(tmp_path / "built"),))
    shutil.rmtree(tmp_path / "built")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "another cache"))
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch) -> dict[str, LaneRun]:
    """Fake the run of the smoke suite; tests replace its "run"."""
    fake = {"run": LaneRun(0, Record({}, (PASSED,)), "", 2.0, Path("smoke.log"))}
    monkeypatch.setattr(rollback, "run_lane", lambda *_, **__: fake["run"])
    return fake


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bumpgate", "rollback", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


Run = Callable[..., tuple[int, str, str]]


def stored(tree: Path, name: str) -> Path:
    lock = read_lock(lane_lock(tree, "cpu"))
    return store.verify(next(p.wheels[0] for p in lock.packages if p.name == name))


def test_rollback_restores_the_adopted_set_offline(tree: Path, run: Run, smoke: dict[str, LaneRun]) -> None:
    code, out, err = run("cpu")
    assert (code, err, len(out.splitlines())) == (0, "", 1)
    assert out.startswith("rollback cpu: 2 wheels verified, built offline in ")
    files = dict.fromkeys(test.partition("::")[0] for test in LANES["cpu"].smoke)
    assert f", {'; '.join(files)} green in 2 s: " in out


@pytest.mark.parametrize(
    ("lane", "names"),
    [("h200", {"torch", "triton", "fast"}), ("v6e", {"torch", "triton", "torch-xla"})],
)
def test_rollback_restores_a_lane_and_runs_its_smoke_tests(
    tree: Path, run: Run, monkeypatch: pytest.MonkeyPatch, lane: str, names: set[str]
) -> None:
    calls = []

    def run_lane(
        python: Path, root: Path, name: str, tests: tuple[str, ...], *_: object, **__: object
    ) -> LaneRun:
        calls.append((name, tests, set(installed(python.parents[1])), (python.parents[1] / "stubs").exists()))
        return LaneRun(0, Record({}, (PASSED,)), "", 2.0, Path("smoke.log"))

    monkeypatch.setattr(rollback, "run_lane", run_lane)
    code, out, err = run(lane)
    assert (code, err) == (0, "")
    assert calls == [(lane, LANES[lane].smoke, names, lane == "v6e")]
    assert out.startswith(f"rollback {lane}: 3 wheels verified, built offline in ")


@pytest.mark.parametrize("lane", LANES)
def test_smoke_suite_runs_kernels_that_the_lane_judges(lane: str) -> None:
    """Its node ids are those of rows in the baseline, so that a renamed test is not first found in a rollback."""
    judged = LANES[lane].inherits or lane
    tests = {row.test for row in load(ROOT / "baselines" / f"{judged}.json", judged).rows.values()}
    smoke = smoke_tests(ROOT, lane)
    assert not LANES[lane].canaries or LANES[lane].canaries in smoke
    assert len(smoke) > 1
    for name in (
        each.replace(f"{lane}]", f"{judged}]") for each in smoke
    ):  # an heir's baseline is its parent's
        assert any(
            test == name or test.startswith((f"{name}/", f"{name}::", f"{name}[")) for test in tests
        ), name


@planted("C39", "one bit of a wheel in the store has flipped")
def test_rollback_refuses_a_corrupt_wheel_and_names_it(
    tree: Path, run: Run, smoke: dict[str, LaneRun]
) -> None:
    path = stored(tree, "torch")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    stored(tree, "triton").unlink()
    code, out, err = run("cpu")
    assert (code, out) == (1, "")
    first, second, third = err.splitlines()
    assert first.startswith("refused: torch-1.0-py3-none-any.whl: corrupt in the wheel store (sha256 ")
    assert second.startswith("refused: triton-3.0-py3-none-any.whl: not in the wheel store")
    assert third == "refused: fetch what is missing with: bumpgate freeze --lane cpu"
    assert not (home() / "rollback").exists(), "nothing is built before every wheel is verified"


@planted("C39", "the restored set fails its smoke suite")
def test_rollback_fails_if_the_smoke_suite_is_red(tree: Path, run: Run, smoke: dict[str, LaneRun]) -> None:
    red = Judgement(Row("a/b/n", 2, "n", 1, "C1"), Verdict.REGRESSION, "")
    log = Path("smoke.log")
    for lane_run, words in (
        (LaneRun(1, Record({}, (PASSED, red)), "", 2.0, log), "1 red rows, first a/b/n"),
        (LaneRun(-11, None, "import torch: died of SIGSEGV", 2.0, log), "died of SIGSEGV"),
        (LaneRun(5, None, "", 2.0, log), "pytest ended with 5"),
    ):
        smoke["run"] = lane_run
        code, out, err = run("cpu")
        assert (code, out, len(err.splitlines())) == (1, "", 1)
        assert words in err


def test_rollback_accepts_an_older_lock(tree: Path, run: Run, smoke: dict[str, LaneRun]) -> None:
    older = tree / "pylock.older.toml"
    lane_lock(tree, "cpu").rename(older)
    code, _, err = run("cpu")
    assert (code, len(err.splitlines()), "bumpgate freeze writes it" in err) == (4, 1, True)
    assert run("cpu", "--lock", str(older), "--no-smoke")[0] == 0
    assert run("tpu")[0] == 4


def test_store_refuses_a_wheel_with_another_hash(tree: Path) -> None:
    wheel = Wheel("x-1.0-py3-none-any.whl", "0" * 64)
    before = sorted(store.store_root().iterdir())
    with pytest.raises(StoreError, match="does not match the sha256 of the lock"):
        store.put(wheel, [b"x"])
    assert sorted(store.store_root().iterdir()) == before


def test_store_replaces_a_corrupt_wheel(tree: Path) -> None:
    path = stored(tree, "torch")
    whole = path.read_bytes()
    path.write_bytes(b"")
    assert store.put(Wheel(path.name, path.parent.name), [whole]).read_bytes() == whole
