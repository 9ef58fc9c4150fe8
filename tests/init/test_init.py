"""`bumpgate init`: what it writes and refuses, and that the example works as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from bumpgate.core import lanes
from bumpgate.core.errors import BumpgateError
from bumpgate.env.lane import LaneContext
from bumpgate.plugin import devices
from tests.support.foreign import Foreign
from tests.support.project import in_process

FILES = ("bumpgate.toml", "bumps/requirements.txt", "bumps/test_bump.py", ".github/workflows/bumpgate.yml")

Init = Callable[..., tuple[int, str, str]]


@pytest.fixture
def init(tmp_path: Path) -> Init:
    """`bumpgate init` in tmp_path -> exit code, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        ran = in_process(tmp_path, "init", "--no-run", *args)
        return ran.code, ran.out, ran.err

    return run


def written(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_init_writes_a_lane_an_example_and_a_workflow(init: Init, tmp_path: Path) -> None:
    code, out, err = init("--lane", "nightly", "--torch", "2.13.0")
    assert (code, err) == (0, "")
    assert written(tmp_path) == {*FILES, "pytest.ini"}
    assert [line.removeprefix("wrote ") for line in out.splitlines()[:-2]] == [*FILES, "pytest.ini"]
    assert out.splitlines()[-1] == "next: pytest -m nightly, then: bumpgate rebaseline --lane nightly"
    assert list(lanes.load(tmp_path)) == ["nightly"]
    assert "torch==2.13.0" in LaneContext(tmp_path, "nightly").requirements()
    assert "pytest.mark.nightly" in (tmp_path / "bumps/test_bump.py").read_text()
    assert "gate --lane nightly " in (tmp_path / ".github/workflows/bumpgate.yml").read_text()
    texts = {name: (tmp_path / name).read_text() for name in FILES}
    assert not {name: text for name, text in texts.items() if re.search(r"@[A-Z]+@", text)}


def test_init_adopts_the_installed_torch(init: Init, tmp_path: Path) -> None:
    assert init()[0] == 0
    torch = metadata.version("torch")
    assert f"torch=={torch}" in (tmp_path / "bumps/requirements.txt").read_text().splitlines()


def test_init_adds_existing_tests_to_the_lane(init: Init, tmp_path: Path) -> None:
    for name in ("tests/test_a.py", "more/test_b.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("def test_it(): pass\n")
    code, out, err = init("--torch", "2.13.0", "--tests", "tests", "--tests", "more/test_b.py")
    assert (code, err) == (0, "")
    assert "bumps/test_bump.py" not in written(tmp_path)
    assert "pytest.ini" not in written(tmp_path)
    assert out.endswith("next: add to bumps/requirements.txt what the tests import, then: pytest -m mine\n")
    assert lanes.load(tmp_path)["mine"].tests == ("tests", "more/test_b.py")
    foreign = Foreign(tmp_path)
    ran = foreign.pytest("-m", "mine", "--gate")
    assert (ran.code, set(foreign.verdicts().values())) == (0, {"PASS"}), ran.out
    assert len(foreign.verdicts()) == 2


GPUS = {
    "h100": ("NVIDIA H100 80GB HBM3", 1, "9.0"),
    "b200": ("NVIDIA B200", 1, ""),
    "h200x2": ("NVIDIA H200", 2, ""),
}


def test_init_ships_valid_lanes_of_gpus(init: Init, tmp_path: Path, monkeypatch) -> None:
    assert init("--torch", "2.13.0")[0] == 0
    text = (tmp_path / "bumpgate.toml").read_text()
    shown = text[text.index("# [lanes.h100]") :]
    (tmp_path / "bumpgate.toml").write_text(re.sub(r"^# ?", "", shown, flags=re.MULTILINE))
    found = lanes.load(tmp_path)
    assert found.keys() == GPUS.keys()
    for name, gpu in GPUS.items():
        for other, lane in found.items():
            monkeypatch.setattr(devices, "_probe", lambda _, gpu=gpu: ([*gpu], None))
            devices.find.cache_clear()
            assert (devices.detect(lane) is None) == (name == other), (name, other)
    monkeypatch.setattr(devices, "_probe", lambda _: (["NVIDIA H200", 1, ""], None))
    devices.find.cache_clear()
    assert "the lane needs 2 GPUs and torch sees 1" in (devices.detect(found["h200x2"]) or "")
    devices.find.cache_clear()


@pytest.mark.parametrize("code", [0, 1, 125])
def test_workflow_passes_the_candidate_and_the_exit_code(init: Init, tmp_path: Path, code: int) -> None:
    """The script of the workflow, with a `python3` that makes a folder of stubs instead of an environment."""
    assert init("--torch", "2.13.0")[0] == 0
    path = tmp_path / ".github/workflows/bumpgate.yml"
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    checked = subprocess.run([*check, str(path)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    used = re.findall("uses: (.+)", path.read_text())
    assert all(re.match(r"[\w./-]+@[0-9a-f]{40} # v\d", action) for action in used)
    steps = YAML(typ="safe").load(path.read_text())["jobs"]["gate"]["steps"]
    (script,) = (step["run"] for step in steps if "run" in step)
    stub = tmp_path / "bin/python3"
    stub.parent.mkdir()
    stub.write_text(
        '#!/bin/sh\nmkdir -p "$3/bin"\nfor name in pip bumpgate; do\n'
        f'printf \'#!/bin/sh\\necho %s "$@" >> calls\\ntest %s = pip || exit {code}\\n\' $name $name > "$3/bin/$name"\n'
        'chmod +x "$3/bin/$name"\ndone\n'
    )
    stub.chmod(0o755)
    variables = {"PATH": f"{stub.parent}:{os.environ['PATH']}", "RUNNER_TEMP": str(tmp_path / "temp")}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=tmp_path,
        env=os.environ | variables | {"CANDIDATE": "torch==2.14.0; true"},
    )
    assert done.returncode == code
    assert (tmp_path / "calls").read_text().splitlines() == [
        "pip install --quiet bumpgate",
        "bumpgate gate --lane mine --candidate torch==2.14.0; true --out build/gate",
    ]


@pytest.mark.parametrize("name", ["pyproject.toml", "pytest.ini", "tox.ini", "setup.cfg"])
def test_init_keeps_an_existing_pytest_configuration(init: Init, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("# mine\n")
    assert init("--torch", "2.13.0")[0] == 0
    assert written(tmp_path) == {*FILES, name}
    assert (tmp_path / name).read_text() == "# mine\n"


@pytest.mark.parametrize("name", FILES)
def test_init_overwrites_nothing(init: Init, tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine\n")
    code, out, err = init("--torch", "2.13.0")
    assert (code, out, err) == (4, "", f"bumpgate: {name} already exists: init overwrites nothing\n")
    assert written(tmp_path) == {name}
    assert (tmp_path / name).read_text() == "mine\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--lane", "My Lane"), "--lane 'My Lane': a lane's name is a pytest marker in lower case"),
        (("--torch", "latest"), "--torch 'latest' is not a version such as 2.13.0"),
        (("--torch", "torch==2.13.0"), "--torch 'torch==2.13.0' is not a version"),
        (("--lanes", "mine"), "No such option"),
        (("--model", "net"), "--model net: name a factory as package.module:factory"),
        (
            ("--model", "gone.net:Net"),
            "--model gone.net:Net: no package gone is installed here: pip install -e .",
        ),
        (("--tests", "none"), "--tests none: no such file or folder below {root}"),
        (("--tests", "{root}/tests"), "--tests {root}/tests: name it relative to {root}, without '..'"),
        (("--tests", "tests/../tests"), "--tests tests/../tests: name it relative to {root}, without '..'"),
    ],
)
def test_init_refuses_bad_options(init: Init, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    (tmp_path / "tests").mkdir()
    torch = [] if "--torch" in options else ["--torch", "2.13.0"]
    code, out, err = init(*torch, *(option.format(root=tmp_path) for option in options))
    assert (code, out, len(err.splitlines())) == (4, "", 1)
    assert words.format(root=tmp_path) in err
    assert written(tmp_path) == set()


def test_init_without_torch_names_the_option(init: Init, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    line = "bumpgate: torch is not installed here: name the adopted version, --torch 2.13.0\n"
    assert init() == (4, "", line)


def test_init_example_passes_and_detects_a_regression(init: Init, tmp_path: Path) -> None:
    assert init()[0] == 0
    foreign = Foreign(tmp_path)
    first = foreign.pytest("-m", "mine")
    assert first.code == 1, first.out + first.err
    assert foreign.verdicts() == {"model/example/loss": "NEW", "model/example/step_seconds": "PASS"}
    assert "bumpgate rebaseline --lane mine" in first.out
    accepted = foreign.bumpgate("rebaseline")
    assert accepted.code == 0, accepted.err
    second = foreign.pytest("-m", "mine", "-k", "test_loss")
    assert (second.code, foreign.verdicts()) == (0, {"model/example/loss": "PASS"}), second.out
    example = tmp_path / "bumps/test_bump.py"
    example.write_text(example.read_text().replace("lr=1e-2", "lr=1e-4"))
    slower = foreign.pytest("-m", "mine", "-k", "test_loss")
    assert (slower.code, foreign.verdicts()) == (1, {"model/example/loss": "REGRESSION"}), slower.out


UV_LOCK = """
[[package]]
name = "torch"
version = "2.12.0"
resolution-markers = ["python_full_version < '3'"]

[[package]]
name = "torch"
version = "2.13.0+cpu"
resolution-markers = ["python_full_version >= '3'"]

[[package]]
name = "numpy"
version = "1.0"
resolution-markers = ["python_full_version < '3'"]

[[package]]
name = "numpy"
version = "2.4.6"
resolution-markers = ["python_full_version >= '3'"]

[[package]]
name = "unused"
version = "1"
"""
PROJECT = """
[project]
name = "net"
version = "1"
dependencies = ["torch>=2.12", "numpy", "torchvision>=0.2"]
[tool.pytest.ini_options]
testpaths = ["checks"]
"""


@pytest.mark.parametrize("lock", ["uv.lock", "poetry.lock", "pdm.lock"])
def test_init_takes_the_versions_of_a_lock(init: Init, tmp_path: Path, lock: str) -> None:
    (tmp_path / "checks").mkdir()
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / lock).write_text(UV_LOCK)
    code, out, err = init("--torch", "2.14.0")
    assert (code, err) == (0, "")
    assert f"adopted: torch 2.13.0+cpu and the dependencies of {lock}" in out
    assert (tmp_path / "checks/bumps/test_bump.py").is_file()
    assert not (tmp_path / "checks/bumps/requirements.txt").exists()
    lane = LaneContext(tmp_path, "mine")
    assert (lane.declared.requirements, lane.declared.install) == (lock, True)
    assert lane.requirements()[:3] == ("torch==2.13.0+cpu", "numpy==2.4.6", "torchvision>=0.2")
    moved = lane.request("torch==2.14.1").requirements
    assert moved[:3] == ("torch==2.14.1", "numpy==2.4.6", "torchvision>=0.2")


def test_init_says_what_to_do_with_an_environment_of_conda(init: Init, tmp_path: Path) -> None:
    (tmp_path / "environment.yml").write_text("dependencies: [pytorch=2.13]\n")
    code, out, _ = init("--torch", "2.13.0")
    line = "environment.yml is not read: add its packages to bumps/requirements.txt, or gate two conda environments: "
    assert (code, line in out) == (0, True)
    lane = tmp_path / "bumpgate.toml"
    lane.write_text(lane.read_text().replace("bumps/requirements.txt", "environment.yml"))
    with pytest.raises(
        BumpgateError, match=r"environment\.yml: conda's file is not read: list its packages for pip"
    ):
        LaneContext(tmp_path, "mine").requirements()


FACTORY = """
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return self.linear(x.sin()).cos()
"""


def test_init_writes_rows_of_a_model_that_find_a_graph_break(init: Init, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FACTORY)
    code, _, err = init("--torch", "2.13.0", "--model", "net:Block")
    assert (code, err) == (0, ""), err
    assert lanes.load(tmp_path)["mine"].needs == ("c++",)
    foreign = Foreign(tmp_path)
    one = ("-m", "mine", "-k", "test_graphs")
    assert foreign.pytest(*one).code == 1
    rows = {"model/block/graph_breaks": "NEW", "model/block/recompiles": "NEW"}
    assert foreign.verdicts() == rows
    assert foreign.bumpgate("rebaseline").code == 0
    assert foreign.pytest(*one).code == 0
    (tmp_path / "net.py").write_text(FACTORY.replace("return", "print(end='')\n        return"))
    broken = foreign.pytest(*one)
    assert broken.code == 1
    assert "net.py:8 `print(end='')`" in broken.out
    assert foreign.verdicts()["model/block/graph_breaks"] == "CHANGED", broken.out


def test_init_takes_the_pins_of_a_requirements_file(init: Init, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("torch==2.12.1  # ours\nnumpy\n")
    assert init("--torch", "2.14.0")[0] == 0
    assert LaneContext(tmp_path, "mine").requirements()[:2] == ("torch==2.12.1", "numpy")
    assert not (tmp_path / "bumps/requirements.txt").exists()


def test_init_reads_the_dependencies_of_an_sdist(init: Init, tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text("from setuptools import setup; setup()")
    (tmp_path / "PKG-INFO").write_text(
        "Name: net\nRequires-Dist: scipy>1\nRequires-Dist: six; extra == 'dev'\n\nA net."
    )
    assert init("--torch", "2.13.0")[0] == 0
    assert LaneContext(tmp_path, "mine").requirements()[:3] == ("torch==2.13.0", "numpy", "scipy>1")
    assert not [each for each in LaneContext(tmp_path, "mine").requirements() if "six" in each]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pytest.ini", "[pytest]\ntestpaths = gone\n  checks\n"),
        ("tox.ini", "[pytest]\ntestpaths = checks\n"),
        ("setup.cfg", "[tool:pytest]\ntestpaths = checks more\n"),
        ("pyproject.toml", "[tool.pytest.ini_options]\ntestpaths = 'checks'\n"),
    ],
)
def test_init_puts_rows_where_pytest_looks(init: Init, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "checks").mkdir()
    (tmp_path / name).write_text(text)
    assert init("--torch", "2.14.0")[0] == 0
    assert (tmp_path / "checks/bumps/test_bump.py").is_file()
    ran = Foreign(tmp_path).pytest("-m", "mine", "--collect-only", "-q")
    assert "checks/bumps/test_bump.py::test_loss" in ran.out, ran.out + ran.err


def test_init_ignores_what_runs_write(init: Init, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text(".venv/")
    assert init("--torch", "2.14.0")[0] == 0
    assert (tmp_path / ".gitignore").read_text() == ".venv/\n/record.json\n/build/gate/\n"
