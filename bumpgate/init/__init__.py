"""`bumpgate init`: writes the files that give a repository a lane, rows and a gate."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from bumpgate.core.errors import BumpgateError
from bumpgate.core.lanes import NAME, OWN
from bumpgate.core.rows import write_atomic

HERE = Path(__file__).parent
REQUIREMENTS = "bumps/requirements.txt"
# Without one of these, pytest uses the folder of the tests as the root of the repository.
CONFIGURATION = ("pyproject.toml", "pytest.ini", "tox.ini", "setup.cfg")
VERSION = re.compile(r"\d+(\.\d+)+[\w.]*")


def command(
    lane: Annotated[str, typer.Option(help="Name of the lane: a pytest marker.")] = "mine",
    torch: Annotated[str, typer.Option(help="The adopted torch; by default the installed one.")] = "",
    tests: Annotated[
        list[str] | None,
        typer.Option(
            help="Existing tests, which join the lane unchanged; repeatable. No example is written."
        ),
    ] = None,
) -> None:
    """Write a lane of this machine's CPU, an example test and a CI workflow into this folder.

    Exit codes: 0 done, 4 bad input or an existing file (then nothing is written).
    """
    if not NAME.fullmatch(lane):
        raise BumpgateError(
            f"--lane {lane!r}: a lane's name is a pytest marker in lower case such as mine or h100"
        )
    torch = torch or _installed()
    if not VERSION.fullmatch(torch):
        raise BumpgateError(f"--torch {torch!r} is not a version such as 2.13.0")
    root = Path.cwd()
    if missing := [path for path in tests or () if not (root / path).exists()]:
        raise BumpgateError(f"--tests {missing[0]}: no such file or folder below {root}")
    for path in map(PurePosixPath, tests or ()):
        if path.is_absolute() or ".." in path.parts:
            raise BumpgateError(f"--tests {path}: name it relative to {root}, without '..'")
    files = {
        OWN: "bumpgate.toml",
        REQUIREMENTS: "requirements.txt",
        **({} if tests else {"bumps/test_bump.py": "test_bump.py.in"}),
        ".github/workflows/bumpgate.yml": "workflow.yml",
    }
    if not (tests or any((root / name).exists() for name in CONFIGURATION)):
        files["pytest.ini"] = "pytest.ini"
    if existing := [name for name in files if (root / name).exists()]:
        raise BumpgateError(f"{existing[0]} already exists: init overwrites nothing")
    values = {
        "@LANE@": lane,
        "@TORCH@": torch,
        "@TESTS@\n": f"tests = {json.dumps(tests)}\n\n" if tests else "\n",
    }
    for name, template in files.items():
        text = (HERE / template).read_text(encoding="utf-8")
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(root / name, text)
        typer.echo(f"wrote {name}")
    after = (
        f"add to {REQUIREMENTS} what the tests import, then: pytest -m {lane}"
        if tests
        else f"pytest -m {lane}, then: bumpgate rebaseline --lane {lane}"
    )
    typer.echo(f"next: {after}")


def _installed() -> str:
    try:
        return metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        raise BumpgateError("torch is not installed here: name the adopted version, --torch 2.13.0") from None
