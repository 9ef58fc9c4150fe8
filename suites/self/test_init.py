"""`bumpgate init`: what it writes and refuses, and that the example works as written."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from bumpgate import cli, lanes
from bumpgate.environments.request import lane_requirements
from suites.self.foreign import Foreign

FILES = ("bumpgate.toml", "bumps/requirements.txt", "bumps/test_bump.py", ".github/workflows/bumpgate.yml")

Init = Callable[..., tuple[int, str, str]]


@pytest.fixture
def init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Init:
    """`bumpgate init` in tmp_path -> exit code, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["bumpgate", "init", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run


def written(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_init_writes_a_lane_an_example_and_a_workflow(init: Init, tmp_path: Path) -> None:
    code, out, err = init("--lane", "nightly", "--torch", "2.13.0")
    assert (code, err) == (0, "")
    assert written(tmp_path) == {*FILES, "pytest.ini"}
    assert [line.removeprefix("wrote ") for line in out.splitlines()[:-1]] == [*FILES, "pytest.ini"]
    assert out.splitlines()[-1] == "next: pytest -m nightly, then: bumpgate rebaseline --lane nightly"
    assert list(lanes.load(tmp_path)) == ["nightly"]
    assert "torch==2.13.0" in lane_requirements(tmp_path, "nightly")
    assert "pytest.mark.nightly" in (tmp_path / "bumps/test_bump.py").read_text()
    assert "gate --lane nightly " in (tmp_path / ".github/workflows/bumpgate.yml").read_text()
    texts = {name: (tmp_path / name).read_text() for name in FILES}
    assert not {name: text for name, text in texts.items() if re.search(r"@[A-Z]+@", text)}


def test_init_adopts_the_installed_torch(init: Init, tmp_path: Path) -> None:
    assert init()[0] == 0
    torch = metadata.version("torch").partition("+")[0]
    assert f"torch=={torch}" in (tmp_path / "bumps/requirements.txt").read_text().splitlines()


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
    ],
    ids=["lane name", "torch name", "torch requirement", "option"],
)
def test_init_refuses_bad_options(init: Init, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    code, out, err = init(*options)
    assert (code, out, len(err.splitlines())) == (4, "", 1)
    assert words in err
    assert written(tmp_path) == set()


def test_init_without_torch_names_the_option(init: Init, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    code, _, err = init()
    assert (code, err) == (
        4,
        "bumpgate: torch is not installed here: name the adopted version, --torch 2.13.0\n",
    )


def test_init_example_passes_and_detects_a_regression(init: Init, tmp_path: Path) -> None:
    assert init()[0] == 0
    foreign = Foreign(tmp_path)
    first = foreign.pytest("-m", "mine")
    assert first.code == 1, first.out + first.err
    assert foreign.verdicts() == {"model/example/loss": "MISSING", "model/example/step_seconds": "PASS"}
    assert "bumpgate rebaseline --lane mine" in first.out
    accepted = foreign.bumpgate("rebaseline", "--lane", "mine")
    assert accepted.code == 0, accepted.err
    second = foreign.pytest("-m", "mine", "-k", "test_loss")
    assert (second.code, foreign.verdicts()) == (0, {"model/example/loss": "PASS"}), second.out
    example = tmp_path / "bumps/test_bump.py"
    example.write_text(example.read_text().replace("lr=1e-2", "lr=1e-4"))
    slower = foreign.pytest("-m", "mine", "-k", "test_loss")
    assert (slower.code, foreign.verdicts()) == (1, {"model/example/loss": "REGRESSION"}), slower.out
