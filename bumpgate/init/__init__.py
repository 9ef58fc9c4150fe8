"""`bumpgate init`: writes the files that give a repository a lane, rows and a gate."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer
from packaging.requirements import Requirement

from bumpgate.core.errors import BumpgateError, one_fault
from bumpgate.core.lanes import NAME, OWN
from bumpgate.core.rows import write_atomic
from bumpgate.core.toml import tomllib
from bumpgate.env.requirements import COMMENT, LOCKS, locked, of_project

HERE = Path(__file__).parent
# Without one of these, pytest uses the folder of the tests as the root of the repository.
CONFIGURATION = ("pyproject.toml", "pytest.ini", "tox.ini", "setup.cfg")
VERSION = re.compile(r"\d+(\.\d+)+[\w.]*(\+[\w.]+)?")
# What to do with the environment of conda: uv, which builds the sides, installs from PyPI alone.
CONDA = (
    "add its packages to {}, or gate two conda environments: --python-adopted A/bin/python --python-candidate "
    "B/bin/python"
)
FACTORY = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):([A-Za-z_]\w*(?:\.\w+)*)")
TORCH = re.compile(r"torch\s*==\s*\d")


def command(
    lane: Annotated[str, typer.Option(help="Name of the lane: a pytest marker.")] = "mine",
    torch: Annotated[str, typer.Option(help="The adopted torch; by default the installed one.")] = "",
    tests: Annotated[
        list[str] | None,
        typer.Option(
            help="Existing tests, which join the lane unchanged; repeatable. No example is written."
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="package:factory of a torch.nn.Module, or a Hugging Face class; its stock rows."),
    ] = "",
    first_run: Annotated[
        bool, typer.Option("--run/--no-run", help="Measure the rows of the example once.")
    ] = True,
) -> None:
    """Write a lane of this machine's CPU, an example test and a CI workflow into this folder.

    The rows go where pytest collects (testpaths). A project with a build is installed on both sides of a gate; the
    versions are those of its lock, of a requirements.txt that pins torch, or of the installed torch.

    Exit codes: 0 done, 4 bad input or an existing file (then nothing is written).
    """
    if not NAME.fullmatch(lane):
        raise BumpgateError(
            f"--lane {lane!r}: a lane's name is a pytest marker in lower case such as mine or h100"
        )
    module, name = _factory(model) if model else ("", "")
    torch = torch or _installed()
    if not VERSION.fullmatch(torch):
        raise BumpgateError(f"--torch {torch!r} is not a version such as 2.13.0")
    root = Path.cwd()
    if missing := [path for path in tests or () if not (root / path).exists()]:
        raise BumpgateError(f"--tests {missing[0]}: no such file or folder below {root}")
    for path in map(PurePosixPath, tests or ()):
        if path.is_absolute() or ".." in path.parts:
            raise BumpgateError(f"--tests {path}: name it relative to {root}, without '..'")
    found = read(root)
    requirements = found.requirements or f"{found.folder}/requirements.txt"
    example = "test_model.py" if model else "test_bump.py"
    rows = {f"{found.folder}/{example}": f"{example}.in"}
    files = {
        OWN: "bumpgate.toml",
        **({} if found.requirements else {requirements: "requirements.txt"}),
        **({} if tests and not model else rows),
        ".github/workflows/bumpgate.yml": "workflow.yml",
    }
    if not (tests or any((root / name).exists() for name in CONFIGURATION)):
        files["pytest.ini"] = "pytest.ini"
    if existing := [name for name in files if (root / name).exists()]:
        raise BumpgateError(f"{existing[0]} already exists: init overwrites nothing")
    values = {
        "@LANE@": lane,
        "@TORCH@": torch,
        "@REQUIREMENTS@": requirements,
        "@MODULE@": module,
        "@NAME@": name.partition(".")[0],
        "@FACTORY@": name,
        "@CASE@": re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[._]", "-", name).lower(),
        "@NEEDS@\n": 'needs = ["c++"]  # its compiled rows\n' if model else "",
        "@INSTALL@\n": "install = true\n" if found.install else "",
        "@TESTS@\n": f"tests = {json.dumps(tests)}\n\n" if tests else "\n",
    }
    for name, template in files.items():
        text = (HERE / template).read_text(encoding="utf-8")
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(root / name, text)
        typer.echo(f"wrote {name}")
    _ignore(root)
    typer.echo(f"adopted: {found.says or f'torch {torch}'}")
    if (root / "environment.yml").is_file() and not found.requirements:
        typer.echo(f"environment.yml is not read: {CONDA.format(requirements)}")
    if tests and not model:
        more = "" if found.requirements else f"add to {requirements} what the tests import, then: "
        typer.echo(f"next: {more}pytest -m {lane}")
        return
    if first_run and find_spec("pytest") and find_spec("torch"):
        subprocess.run([sys.executable, "-m", "pytest", "-m", lane], cwd=root, check=False)
        typer.echo(f"next: bumpgate rebaseline --lane {lane}")
    else:
        typer.echo(f"next: pytest -m {lane}, then: bumpgate rebaseline --lane {lane}")


@dataclass(frozen=True)
class Found:
    """What init reads of a project.

    folder: of the rows, where pytest collects. requirements: a lock or a file that pins torch; "" if there is none.
    install: the project declares a build. says: what the adopted versions are taken from.
    """

    folder: str
    requirements: str = ""
    install: bool = False
    says: str = ""


def read(root: Path) -> Found:
    """Read a project's pytest configuration, build and locks. Raises BumpgateError on a broken pyproject.toml."""
    file = root / "pyproject.toml"
    with one_fault("pyproject.toml: cannot be read", fix="correct it"):
        project = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        own = of_project(root)
    build = {"project", "build-system"} & project.keys() or "poetry" in project.get("tool", {})
    install = bool(build) or (root / "setup.py").is_file()
    folders = [path for path in _testpaths(root, project) if (root / path).is_dir()]
    folder = f"{folders[0].rstrip('/')}/bumps" if folders else "bumps"
    if any(Requirement(each).name == "torch" for each in own):
        for name in filter(lambda each: (root / each).is_file(), LOCKS):
            if version := locked((root / name).read_text(encoding="utf-8")).get("torch"):
                return Found(folder, name, install, f"torch {version} and the dependencies of {name}")
    lines = root / "requirements.txt"
    listed = lines.read_text(encoding="utf-8").splitlines() if lines.is_file() else []
    texts = [text for line in listed if (text := COMMENT.sub("", line).strip())]
    if not any(text.startswith("-") for text in texts) and any(TORCH.match(text) for text in texts):
        return Found(folder, "requirements.txt", install, "requirements.txt")
    return Found(folder, install=install)


def _testpaths(root: Path, project: Mapping[str, Any]) -> list[str]:
    """Return the testpaths of the file that pytest reads."""
    if (root / "pytest.ini").is_file():
        sections = [("pytest.ini", "pytest")]
    elif "pytest" in project.get("tool", {}):
        found = project["tool"]["pytest"].get("ini_options", {}).get("testpaths", [])
        return found.split() if isinstance(found, str) else list(found)
    else:
        sections = [("tox.ini", "pytest"), ("setup.cfg", "tool:pytest")]
    for name, section in sections:
        parser = ConfigParser(interpolation=None)
        with suppress(ConfigParserError):
            parser.read(root / name, encoding="utf-8")
            if parser.has_section(section):
                return parser.get(section, "testpaths", fallback="").split()
    return []


def _factory(text: str) -> tuple[str, str]:
    """Return the module and the name of a factory. Raises BumpgateError if the module is not installed here."""
    if not (found := FACTORY.fullmatch(text)):
        raise BumpgateError(f"--model {text}: name a factory as package.module:factory")
    package = found[1].partition(".")[0]
    if not (find_spec(package) or Path(package).is_dir() or Path(f"{package}.py").is_file()):
        raise BumpgateError(f"--model {text}: no package {package} is installed here: pip install -e .")
    return found[1], found[2]


def _ignore(root: Path) -> None:
    """Add what runs write to .gitignore, in a repository of git."""
    path = root / ".gitignore"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    lines = [line for line in ("/record.json", "/build/gate/") if line not in text.splitlines()]
    if lines and (root / ".git").exists():
        kept = text if not text or text.endswith("\n") else f"{text}\n"
        write_atomic(path, kept + "".join(f"{line}\n" for line in lines))
        typer.echo(f"added {' '.join(lines)} to .gitignore")


def _installed() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise BumpgateError("torch is not installed here: name the adopted version, --torch 2.13.0") from None
