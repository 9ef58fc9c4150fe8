"""Rollback: the adopted set is restored without an index, or the first wrong byte is reported."""

from __future__ import annotations

import shutil
from datetime import date
from pathlib import Path

import pytest

from bumpgate.core.baseline import load
from bumpgate.core.rows import Judgement, Record, Row, Verdict
from bumpgate.env import freeze, store
from bumpgate.env.build import installed
from bumpgate.env.lane import LaneContext, lane_lock
from bumpgate.env.locks import Wheel, read_lock
from bumpgate.env.store import StoreError
from bumpgate.history import adoptions
from bumpgate.history.adoptions import Adoption, Log
from bumpgate.process.file_transaction import AdoptionError, digest
from bumpgate.process.home import home
from bumpgate.process.runner import LaneCall, LaneRun
from bumpgate.review import rollback
from bumpgate.review.rollback import smoke_tests
from suites.support.lanes import LANES
from suites.support.planted import planted
from tests.review.conftest import Call
from tests.support.git_repository import GitRepository
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
RED = Judgement(Row("a/b/n", 2, "n", 1, "C1"), Verdict.REGRESSION, "")


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tree of frozen lanes and its home; the index and the kernel wheels are not available any more."""
    folder = tmp_path_factory.mktemp("frozen")
    root = folder / "tree"
    root.mkdir()
    declare_lanes(root)
    write_lane(root, "h200", FAST.format(torch="1.0"))
    (root / "pyproject.toml").write_text(EXTRAS)
    (root / "lanes/v6e/make_cuda_stubs.py").write_text(STUBS)
    made = folder / "wheels"
    wheels = [fake_wheel(made, "torch", "1.0", requires=["triton"]), fake_wheel(made, "triton", "3.0")]
    fake_wheel(folder / "built", "fast", "1.0+torch1.0", requires=["torch"])
    with (
        LocalIndex([*wheels, fake_wheel(made, "torch-xla", "1.0")]) as index,
        pytest.MonkeyPatch.context() as patch,
    ):
        isolated(patch, folder, index.url)
        for lane in LANES:
            freeze.freeze(LaneContext(root, lane), find_links=(str(folder / "built"),))
    shutil.rmtree(folder / "built")
    return folder


@pytest.fixture
def tree(frozen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the tree and of the wheel store, for one test."""
    isolated(monkeypatch, tmp_path, "http://127.0.0.1:9/none")
    root = shutil.copytree(frozen / "tree", tmp_path / "tree")
    shutil.copytree(frozen / "home", home())
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch) -> dict[str, LaneRun]:
    """Fake the run of the smoke suite; tests replace its "run"."""
    fake = {"run": LaneRun(0, Record({}, (PASSED,)), "", 2.0, Path("smoke.log"))}
    monkeypatch.setattr(rollback, "run_lane", lambda *_, **__: fake["run"])
    return fake


def stored(tree: Path, name: str) -> Path:
    lock = read_lock(lane_lock(tree, "cpu"))
    return store.verify(next(p.wheels[0] for p in lock.packages if p.name == name))


@pytest.mark.parametrize(
    ("lane", "names"),
    [
        ("cpu", {"torch", "triton"}),
        ("h200", {"torch", "triton", "fast"}),
        ("v6e", {"torch", "triton", "torch-xla"}),
    ],
)
def test_rollback_restores_a_lane_offline_and_runs_its_smoke_tests(
    tree: Path, call: Call, monkeypatch: pytest.MonkeyPatch, lane: str, names: set[str]
) -> None:
    calls = []

    def run_lane(run: LaneCall, _: float) -> LaneRun:
        place = run.python.parents[1]
        calls.append((run.lane, run.selection, set(installed(place)), (place / "stubs").exists()))
        return LaneRun(0, Record({}, (PASSED,)), "", 2.0, Path("smoke.log"))

    monkeypatch.setattr(rollback, "run_lane", run_lane)
    code, out, err = call("rollback", lane)
    assert (code, err, len(out.splitlines())) == (0, "", 1)
    assert calls == [(lane, LANES[lane].smoke, names, lane == "v6e")]
    assert out.startswith(f"rollback {lane}: {len(names)} wheels verified, built offline in ")
    files = dict.fromkeys(test.partition("::")[0] for test in LANES[lane].smoke)
    assert f", {'; '.join(files)} green in 2 s: " in out


@pytest.mark.parametrize("lane", LANES)
def test_smoke_suite_runs_kernels_that_the_lane_judges(lane: str) -> None:
    """Its node ids are those of rows in the baseline, so that a renamed test is not first found in a rollback."""
    judged = LANES[lane].inherits or lane  # an heir's baseline is its parent's
    tests = {row.test for row in load(ROOT / "baselines" / f"{judged}.json", judged).rows.values()}
    smoke = smoke_tests(ROOT, lane)
    assert not LANES[lane].canaries or LANES[lane].canaries in smoke
    assert len(smoke) > 1
    for name in (each.replace(f"{lane}]", f"{judged}]") for each in smoke):
        below = (f"{name}/", f"{name}::", f"{name}[")
        assert any(test == name or test.startswith(below) for test in tests), name


@planted("C39", "one bit of a wheel in the store has flipped")
def test_rollback_refuses_a_corrupt_wheel_and_names_it(tree: Path, call: Call) -> None:
    path = stored(tree, "torch")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    stored(tree, "triton").unlink()
    code, out, err = call("rollback", "cpu")
    assert (code, out) == (1, "")
    first, second, third = err.splitlines()
    assert first.startswith("refused: torch-1.0-py3-none-any.whl: corrupt in the wheel store (sha256 ")
    assert second.startswith("refused: triton-3.0-py3-none-any.whl: not in the wheel store")
    assert third == "refused: fetch what is missing with: bumpgate freeze --lane cpu"
    assert not (home() / "rollback").exists(), "nothing is built before every wheel is verified"


@planted("C39", "the restored set fails its smoke suite")
def test_rollback_fails_if_the_smoke_suite_is_red(tree: Path, call: Call, smoke: dict[str, LaneRun]) -> None:
    for ended, record, failure, words in (
        (1, Record({}, (PASSED, RED)), "", "1 red rows, first a/b/n"),
        (-11, None, "import torch: died of SIGSEGV", "died of SIGSEGV"),
        (5, None, "", "pytest ended with 5"),
    ):
        smoke["run"] = LaneRun(ended, record, failure, 2.0, Path("smoke.log"))
        code, out, err = call("rollback", "cpu")
        assert (code, out, len(err.splitlines()), words in err) == (1, "", 1, True), err


def test_rollback_accepts_an_older_lock(tree: Path, call: Call) -> None:
    older = tree / "pylock.older.toml"
    lane_lock(tree, "cpu").rename(older)
    code, _, err = call("rollback", "cpu")
    assert (code, len(err.splitlines()), "bumpgate freeze writes it" in err) == (4, 1, True)
    (tree / "baselines").mkdir(exist_ok=True)
    (tree / adoptions.FILE).write_text(adoptions.text(Log(unverified=frozenset({"cpu"}))))
    assert call("rollback", "cpu", "--lock", str(older), "--no-smoke")[0] == 0
    assert adoptions.load(tree).unverified == {"cpu"}, "the lane's own lock is not rebuilt"
    assert call("rollback", "tpu")[0] == 4


def test_store_refuses_another_content_and_replaces_a_corrupt_wheel(tree: Path) -> None:
    before = sorted(store.store_root().iterdir())
    with pytest.raises(StoreError, match="does not match the sha256 of the lock"):
        store.put(Wheel("x-1.0-py3-none-any.whl", "0" * 64), [b"x"])
    assert sorted(store.store_root().iterdir()) == before
    path = stored(tree, "torch")
    whole = path.read_bytes()
    path.write_bytes(b"")
    assert store.put(Wheel(path.name, path.parent.name), [whole]).read_bytes() == whole


FILE = "lanes/cpu/pylock.toml"
UNDO = date(2026, 3, 2)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree whose lock an adoption has replaced."""
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path / "home"))
    root = tmp_path / "tree"
    for name, text in (
        ("bumpgate.toml", "[lanes.cpu]\n"),
        (FILE, "old"),
        ("baselines/x", ""),
        ("src/code.py", ""),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def adopt(root: Path, path: str = FILE, commit: str = "", copy: str = "") -> None:
    """Leave what an adoption of "new" over "old" leaves. copy: this machine's copy of the old text."""
    files = {path: digest("old")}, {path: digest("new")}
    entry = Adoption("cpu", date(2026, 3, 1), "", "1", "2", "ADOPT", "", commit, *files)
    (root / adoptions.FILE).write_text(adoptions.text(Log((entry,))))
    (root / path).write_text("new")
    place = home() / "adoptions" / digest("old")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(copy) if copy else place.unlink(missing_ok=True)


@planted("C39", "the local copy of a file that a rollback restores is corrupt")
def test_file_is_restored_only_with_the_content_that_it_had(root: Path) -> None:
    repository = GitRepository(root)
    good, other = (repository.commit(text, {FILE: text}) for text in ("old", "another"))
    words = r"its content before the adoption is neither in .* nor in git"
    for copy, commit in (("", ""), ("corrupt", ""), ("", other), ("corrupt", other)):
        adopt(root, commit=commit, copy=copy)
        with pytest.raises(AdoptionError, match=words):
            adoptions.undo(root, "cpu", UNDO)
        assert (root / FILE).read_text() == "new"
    for copy, commit in (("old", ""), ("corrupt", good), ("", good), ("old", other)):
        adopt(root, commit=commit, copy=copy)
        adoptions.undo(root, "cpu", UNDO)
        assert (root / FILE).read_text() == "old"
        assert adoptions.load(root).unverified == {"cpu"}


@planted("C39", "an adoption of a pull request names files of the user")
@pytest.mark.parametrize("path", ["../other", "src/code.py"])
def test_committed_adoption_cannot_name_other_files(root: Path, path: str) -> None:
    adopt(root, path, copy="old")
    with pytest.raises(AdoptionError, match="is no reviewed file of this repository"):
        adoptions.undo(root, "cpu", UNDO)
    assert (root / path).read_text() == "new"


def test_adoption_supersedes_an_unverified_rollback(root: Path) -> None:
    adopt(root)
    (entry,) = adoptions.load(root).entries
    later = Log((entry,), frozenset({"cpu", "h200"})).adding(entry)
    assert (later.entries, later.unverified) == ((entry, entry), {"h200"})
    (root / adoptions.FILE).write_text(adoptions.text(later))
    assert adoptions.load(root) == later
