"""Commands that README, docs/ and CI name exist with their options; README's quick ones run in a scratch clone."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from bumpgate.cli import app
from tests.support.tree import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CI = [ROOT / "action.yml", *sorted((ROOT / ".github" / "workflows").glob("*.yml"))]
# A call of bumpgate and its arguments, up to a comment or the next command of the line.
CALL = re.compile(r"(?:^\s*(?:\$ |(?:- )?run: )?|[(`;&] ?)bumpgate ([a-z]+)\b([^|;&)`#]*)")
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
# Command lines of README, in order; and what is added where the line alone would take minutes. They need no network.
RUN = [
    ("pytest -m cpu", "-n 0 suites/model/test_structure.py"),
    ("bumpgate report record.json", ""),
    ("bumpgate history add record.json", ""),
    ("bumpgate findings list", ""),
    ("bumpgate dashboard site", ""),
]


def blocks(page: Path) -> str:
    """Return the fenced blocks of a page; the whole text of a CI file."""
    text = page.read_text()
    if page.suffix == ".md":
        text = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    return text.replace("\\\n", " ")


@pytest.mark.parametrize("page", [*PAGES, *CI], ids=lambda page: page.stem)
def test_commands_of_a_page_exist_with_their_options(page: Path) -> None:
    group = typer.main.get_command(app)
    for line in blocks(page).splitlines():
        for name, rest in CALL.findall(line):
            command = group.get_command(None, name)
            assert command, line
            known = {option for each in parameters(command) for option in (*each.opts, *each.secondary_opts)}
            given = re.findall(r"(?<!\S)--[a-z][a-z-]*", QUOTED.sub("", rest).split(" -- ")[0])
            assert {*given} - {"--help"} <= known, line


def test_links_of_readme_also_work_on_pypi() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 5
    assert [link for link in links if not link.startswith("https://")] == []
    pages = [link.partition("/blob/main/")[2] for link in links if "/blob/main/" in link]
    assert [page for page in pages if not (ROOT / page).is_file()] == []


def parameters(command: typer.core.TyperCommand) -> list[typer.core.TyperOption]:
    below = [each for child in getattr(command, "commands", {}).values() for each in parameters(child)]
    return [*command.params, *below]


@pytest.mark.long(60)
def test_commands_of_readme_run_in_a_clone(tmp_path: Path) -> None:
    clone, text = tmp_path / "clone", blocks(ROOT / "README.md")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    clean = {name: x for name, x in os.environ.items() if not name.startswith(("PYTEST_", "BUMPGATE_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), clean["PATH"]])
    clean |= {"PATH": path, "PYTHONPATH": str(clone), "BUMPGATE_HOME": str(tmp_path / "home")}
    for line, more in RUN:
        assert line in text, f"README no longer has `{line}`"
        command = [*shlex.split(line), *shlex.split(more)]
        done = subprocess.run(command, cwd=clone, env=clean, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{line}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert {"record.html", "record.md", "record.junit.xml", "site"} <= {p.name for p in clone.iterdir()}
