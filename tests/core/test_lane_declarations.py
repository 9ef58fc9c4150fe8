"""Lanes that a repository declares: how they are read, and the one line on each mistake."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bumpgate import cli
from bumpgate.core import lanes
from bumpgate.core.baseline import Baseline, Reviewed, inherited, judge
from bumpgate.core.lanes import Lane, LaneError
from bumpgate.core.rows import Row
from bumpgate.env.lane import LaneContext
from bumpgate.plugin import devices
from tests.support.foreign import LANE, Foreign

H100 = {"device": "cuda", "gpu": "H100"}


def declare(root: Path, text: str) -> Path:
    (root / "bumpgate.toml").write_text(text)
    return root


def test_lanes_load_from_pyproject_or_bumpgate_toml(tmp_path: Path) -> None:
    assert lanes.load(tmp_path) == {}
    table = "{}device = 'cuda'\ngpu = 'H100'\ncount = 2\ncapability = '9.0'\nextra = 'gpu'\n"
    (tmp_path / "pyproject.toml").write_text(table.format("[tool.bumpgate.lanes.h100x2]\n"))
    expected = Lane("h100x2", device="cuda", gpu="H100", count=2, capability="9.0", extra="gpu")
    assert lanes.load(tmp_path) == {"h100x2": expected}
    margins = "[lanes.mine.margins]\n'a/*' = 0.2\n'b/c/s' = 0.4\n"
    declare(tmp_path, f"[lanes.mine]\nneeds = ['c++']\n{margins}")
    found = Lane("mine", needs=("c++",), margins=(("a/*", 0.2), ("b/c/s", 0.4)))
    assert lanes.load(tmp_path) == {"mine": found}, "bumpgate.toml has precedence over pyproject.toml"
    assert hash(lanes.load(tmp_path)["mine"])


def test_extra_of_another_project_includes_its_dependencies(tmp_path: Path) -> None:
    declare(tmp_path, "[lanes.mine]\nextra = 'test'\n")
    (tmp_path / "pyproject.toml").write_text(
        "[project]\nname = 'theirs'\ndependencies = ['torch>=2.2', 'scipy']\n"
        "[project.optional-dependencies]\ntest = ['theirs[more]', 'pytest>=8.3']\nmore = ['einops']\n"
    )
    found = LaneContext(tmp_path, "mine").requirements()
    assert set(found[:4]) == {"torch>=2.2", "scipy", "einops", "pytest>=8.3"}
    assert any(text.startswith("psutil") for text in found), "what the plugin imports"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[lanes.mine", "bumpgate.toml: cannot be read"),
        ("lanes = 3", "lanes must be a table of lanes"),
        ("lanes.mine = 3", "bumpgate.toml: lanes.mine: must be a table"),
        ("[lanes.H100]", "lanes.H100: a lane's name is a pytest marker in lower case"),
        ("[lanes.mine]\nmarker = 'x'", "unknown field 'marker'; fields: device, gpu, count"),
        ("[lanes.mine]\ndevice = 3", "device must be a string, got 3"),
        ("[lanes.mine]\ndevice = 'gpu'", "device must be one of cpu, cuda, xla, got 'gpu'"),
        ("[lanes.mine]\nneeds = 'c++'", "needs must be a list of strings, got 'c++'"),
        ("[lanes.mine]\ntests = [1]", "tests must be a list of strings, got [1]"),
        ("[lanes.mine]\nneeds = ['gcc']", "needs must be of c++, avx2, got 'gcc'"),
        ("[lanes.mine]\nmargins = 0.2", 'margins must be a table such as {"throughput/*" = 0.2}, got 0.2'),
        ("[lanes.mine.margins]\n'a/*' = 1.0", "margins: 'a/*' must be between 0 and 1, got 1.0"),
        ("[lanes.mine.margins]\n'a/*' = true", "margins: 'a/*' must be between 0 and 1, got True"),
        ("[lanes.mine.margins]\n'a/*' = 0", "margins: 'a/*' must be between 0 and 1, got 0"),
        ("[lanes.mine]\ndevice = 'cuda'\ncount = true", "count must be a number, got True"),
        ("[lanes.mine]\ndevice = 'cuda'\ncount = 0", "count must be at least 1, got 0"),
        ("[lanes.mine]\ndevice = 'cuda'\ngpu = '('", "gpu is not a regular expression"),
        ("[lanes.mine]\ngpu = 'H100'", "gpu, count and capability are for device = 'cuda'"),
        ("[lanes.mine]\nextra = 'a'\nrequirements = 'b.txt'", "extra or requirements, not both"),
    ],
)
def test_invalid_declaration_raises_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(LaneError) as error:
        lanes.load(declare(tmp_path, text))
    assert words in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_unknown_lane_lists_the_declared_lanes(tmp_path: Path) -> None:
    with pytest.raises(LaneError) as error:
        lanes.require(declare(tmp_path, LANE), "h100")
    assert str(error.value).startswith("unknown lane 'h100'; lanes: mine; declare one: ")
    assert "[lanes.h100] in bumpgate.toml, device = 'cpu'" in str(error.value)


@pytest.mark.parametrize(
    ("name", "lane"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA B200", "b200"), ("NVIDIA A100-SXM4-80GB", "mine")],
)
def test_unknown_gpu_refusal_suggests_a_valid_declaration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, lane: str
) -> None:
    monkeypatch.setattr(devices, "_probe", lambda _: ([name, 1, ""], None))
    devices.find.cache_clear()
    refusal = devices.detect(Lane("h200", device="cuda", gpu="H200")) or ""
    assert len(refusal.splitlines()) == 1
    assert "no NVIDIA H200 seen by torch.cuda" in refusal
    assert f"the device is {name!r}; declare one: " in refusal
    found = re.search(r"or (\[lanes\.\w+\]) in bumpgate\.toml, device = ('cuda'), gpu = ('[^']+')$", refusal)
    assert found, refusal
    declared = lanes.load(declare(tmp_path, f"{found[1]}\ndevice = {found[2]}\ngpu = {found[3]}\n"))
    assert list(declared) == [lane]
    assert devices.detect(declared[lane]) is None
    assert devices.find(declared[lane]).device == name
    devices.find.cache_clear()


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ({"count": 2}, "the lane needs 2 GPUs and torch sees 1: set CUDA_VISIBLE_DEVICES, or lower count"),
        ({"capability": "10.0"}, "the lane declares capability 10.0 and the device has 9.0"),
    ],
)
def test_gpu_below_the_lanes_requirements_is_refused(needs: dict, words: str) -> None:
    assert devices._other_gpu(Lane("h100", **H100, **needs), "NVIDIA H100", 1, "9.0") == words
    assert devices._other_gpu(Lane("h100", **H100), "NVIDIA H100", 1, "") is None


def test_test_of_two_lanes_runs_in_each(tmp_path: Path) -> None:
    foreign = Foreign(declare(tmp_path, "[lanes.one]\n[lanes.two]\n"))
    marks = "@pytest.mark.one\n@pytest.mark.two\n"
    row = 'row.count("a/b/c", 1, unit="x", seen=1, expected=1)'
    foreign.write("test_a.py", f"import pytest\n{marks}def test_a(row): {row}\n")
    for lane in ("one", "two"):
        result = foreign.pytest("-m", lane)
        assert result.code == 1, "not reviewed"
        assert f"{lane}: 1 row: 1 NEW" in result.out


@pytest.mark.parametrize(
    "expression", ["not one", "not (one)", "not(one or two)", "three and not (two or one)"]
)
def test_run_without_the_tests_of_a_lane_is_no_lane_run(tmp_path: Path, expression: str) -> None:
    foreign = Foreign(declare(tmp_path, "[lanes.one]\n[lanes.two]\n"))
    foreign.write("pytest.ini", "[pytest]\nmarkers = three\n")
    tests = "@pytest.mark.one\ndef test_a(): pass\n@pytest.mark.three\ndef test_b(): pass\n"
    foreign.write("test_a.py", f"import pytest\n{tests}")
    result = foreign.pytest("-m", expression)
    assert result.code == 0, result.err
    assert "1 passed, 1 deselected" in result.out
    assert not (tmp_path / "record.json").exists()


def test_pytest_refuses_an_invalid_declaration_in_one_line(tmp_path: Path) -> None:
    foreign = Foreign(tmp_path)
    foreign.write("pytest.ini", "[pytest]\n")
    foreign.write("test_a.py", "def test_a(): pass\n")
    foreign.write("bumpgate.toml", "[lanes.mine")
    for args in ((), ("-m", "mine")):
        refused = foreign.pytest(*args)
        assert (refused.code, refused.out) == (4, "")
        assert refused.err.startswith("ERROR: bumpgate.toml: cannot be read")
        assert len(refused.err.strip().splitlines()) == 1


def test_rows_outside_a_lane_suggest_a_declaration(tmp_path: Path) -> None:
    foreign = Foreign(tmp_path)
    foreign.write("pytest.ini", "[pytest]\n")
    foreign.write("test_a.py", "def test_a(row): row.count('a/b/c', 1, unit='n', seen=1)\n")
    bare = foreign.pytest()
    assert bare.code == 1
    assert "test_a.py::test_a has rows but no lane: declare one: [tool.bumpgate.lanes.mine]" in bare.out
    assert "--gate: no lanes here; declare one: " in foreign.pytest("--gate").err
    foreign.write("bumpgate.toml", LANE)
    shown = foreign.pytest()
    assert (shown.code, "rows, not judged: no lane; pytest -m mine judges" in shown.out) == (0, True)
    refused = foreign.bumpgate("gate", "--lane", "h100", "--candidate", "torch==2.14.0")
    assert (refused.code, refused.out, len(refused.err.splitlines())) == (4, "", 1)
    assert "unknown lane 'h100'; lanes: mine; declare one: " in refused.err


FOLDERS = {"h200": "device = 'cuda'\ngpu = 'H200'\n", "h100": "inherits = 'h200'\ndevice = 'cuda'\n"}


def folders(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = root / "lanes" / name / "lane.toml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return root


def test_folders_have_precedence_over_tables(tmp_path: Path) -> None:
    declare(folders(tmp_path, **FOLDERS), LANE)
    found = lanes.load(tmp_path)
    assert list(found) == ["h100", "h200"]
    assert (found["h100"].inherits, found["h100"].lock) == ("h200", "lanes/h200/pylock.toml")
    assert replace(found["h200"], overrides="o.txt").path("o.txt") == "lanes/h200/o.txt"


@pytest.mark.parametrize("parent", ["h300", "h100", "a100"])
def test_lane_inherits_a_lane_that_does_not_inherit(tmp_path: Path, parent: str) -> None:
    root = folders(tmp_path, **FOLDERS | {"a100": "inherits = 'h200'\n", "h100": f"inherits = '{parent}'\n"})
    with pytest.raises(
        LaneError, match=r"^lanes/h100/lane.toml: inherits must name a lane that does not inherit"
    ):
        lanes.load(root)


def test_lane_inherits_rows_that_no_host_decides() -> None:
    test = "suites/a.py::test_a[x-h200]"
    taken = {
        "a/x/n": Reviewed(3, "count", "exact", test=test),
        "a/x-h200/sound": Reviewed(True, "bool", "derived", test=test),
        "a/x/code": Reviewed(None, "counts", "code", test=test, values={"3.9.0": "mma=1"}),
        "a/x/defect": Reviewed(1, "present", "defect", test=test),
        "a/x/limit": Reviewed(2.0, "s", "derived", test=test),
        "a/x/guards": Reviewed(300, "count", "lower", 0.1, test=test),
        "a/own/n": Reviewed(5, "count", "exact", test=test),
    }
    left = {
        "a/x/seconds": Reviewed(1.0, "s", "lower", 0.1, test=test),
        "a/x/fraction": Reviewed(0.5, "fraction", "higher", 0.1, test=test),
        "a/x/rate": Reviewed(900.0, "tokens/s", "higher", 0.1, test=test),
        "calibration/memory/rate": Reviewed(1.0, "bytes/s", "derived", test=test),
    }
    parent = Baseline("h200", {"torch": "2.15.0", "cpu": "Xeon", "driver": "580"}, {**taken, **left})
    own = Baseline("h100", {}, {"a/own/n": Reviewed(6, "count", "exact")})
    found = inherited(own, parent)
    assert set(found.rows) == {*taken, "a/x-h100/sound"} - {"a/x-h200/sound"}
    assert found.elsewhere == {"a/x/seconds", "a/x/fraction", "a/x/rate"}
    time = Row("a/x/seconds", 2.0, "s", 1, "C1", better="lower")
    shown = judge(time, found, failed_instruments={})
    assert (shown.label, shown.red) == ("INCONCLUSIVE (not judged)", False)
    assert shown.command == "bumpgate rebaseline --lane h100 --times"
    assert found.rows["a/x/n"].test == "suites/a.py::test_a[x-h100]"
    assert found.rows["a/own/n"].value == 6
    assert found.made_with == {"torch": "2.15.0"}
    other = Baseline("h100", {"torch": "2.16.0"}, {})
    assert inherited(other, parent).made_with == {"torch": "2.16.0"}


def test_new_lane_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = "extra = 'h200'\nsmoke = ['a.py::b[c-h200]']\n[margins]\n'a-h200/*' = 0.2\n"
    monkeypatch.chdir(folders(tmp_path, h200=FOLDERS["h200"] + fields))

    def run(*args: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["bumpgate", "lanes", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), "".join(capsys.readouterr())

    assert run("--json") == (0, '["h200"]\n')
    code, out = run("new", "h100", "--inherits", "h200")
    assert (code, out) == (0, "wrote lanes/h100/lane.toml; next: pytest -m h100\n")
    made = lanes.load(tmp_path)["h100"]
    assert (made.inherits, made.extra, made.device, made.gpu) == ("h200", "h200", "cuda", "H100")
    assert (made.smoke, made.margins) == (("a.py::b[c-h100]",), (("a-h100/*", 0.2),))
    assert run() == (0, "h100: cuda H100, no lock\nh200: cuda H200, no lock\n")
    assert run("new", "h100")[0] == 4
    assert run("new", "b200", "--inherits", "absent")[0] == 4
    assert run("--json") == (0, '["h100", "h200"]\n')
