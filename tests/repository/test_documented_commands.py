"""Every command line of the documents, the action and the workflows is executed, or its table gives the reason why not.

documented.py extracts the commands, documented_commands.toml defines how each is checked, scratch.py executes them.
"""

from __future__ import annotations

import ast
import configparser
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from bumpgate.cli import app
from bumpgate.core.toml import tomllib
from tests.support.documented import documented, of_markdown
from tests.support.local_index import LocalIndex
from tests.support.scratch import Scratch
from tests.support.tree import ROOT

pytestmark = pytest.mark.long(110)

TABLE: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("documented_commands.toml").read_text()
)
RUN, TOX, TEST = TABLE["run"], TABLE["tox"], TABLE["test"]
FIELDS = {"exit", "prints", "files", "writes", "replace", "children", "collect"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scratch]:
    home = tmp_path_factory.mktemp("scratch")
    with LocalIndex() as index:
        yield Scratch(home, index)
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def scratch(shared: Scratch) -> Iterator[Scratch]:
    """The scratch tree, restored after each command."""
    yield shared
    shared.restore()


def test_every_documented_command_has_one_entry() -> None:
    found = {d.text: d.place for d in documented(ROOT)}
    listed = [text for entries in TABLE.values() for text in entries]
    assert set(TABLE) == {"run", "tox", "test", "reason"}
    assert len(listed) == len(set(listed))
    assert {text: place for text, place in found.items() if text not in listed} == {}, "no entry"
    assert set(listed) - set(found) == set(), "no such command in the documents"


@pytest.mark.parametrize("text", RUN)
def test_command_runs_as_documented(scratch: Scratch, text: str) -> None:
    entry = RUN[text]
    assert set(entry) <= FIELDS
    scratch.provide(entry.get("files", {}))
    line = text
    for old, new in entry.get("replace", {}).items():
        assert old in line, f"nothing to replace: {old!r}"
        line = line.replace(old, new)
    done = scratch.run(line, collect=entry.get("collect", ""))
    assert done.code == entry["exit"], done.output
    for words in entry.get("prints", ()):
        assert words in done.output, done.output
    for words in entry.get("children", ()):
        assert any(words in child for child in done.children), (done.children, done.output)
    # Evidence quoted by a bisect from its own test is indented.
    assert not any(line.startswith("Traceback") for line in done.output.splitlines())
    assert "INTERNALERROR" not in done.output
    assert [path for path in entry.get("writes", ()) if not (scratch.root / path).is_file()] == []


def sections() -> dict[str, configparser.SectionProxy]:
    """Map each tox environment to its section, with families expanded."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini")
    found = {}
    for name in parser.sections():
        environment = name.removeprefix("testenv:")
        family = re.fullmatch(r"(.*)\{(.+)\}(.*)", environment)
        names = [family[1] + part + family[3] for part in family[2].split(",")] if family else [environment]
        found |= dict.fromkeys(names, parser[name])
    return found


@pytest.mark.parametrize("text", TOX)
def test_documented_tox_environment_exists_and_resolves(text: str) -> None:
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    declared = {re.match(r"\w+", marker)[0] for marker in markers}
    for name in TOX[text]:
        section = sections()[name]
        lines = [*section.get("commands_pre", "").splitlines(), *section["commands"].splitlines()]
        assert lines
        for words in map(shlex.split, filter(None, lines)):
            if words[0] == "pytest" and "-m" in words:
                marked = words[words.index("-m") + 1]
                assert set(re.findall(r"\w+", marked)) - {"not", "and"} <= declared
            paths = [w for w in words[1:] if "/" in w and not w.startswith(("-", "{"))]
            assert [p for p in paths if not (ROOT / p).exists()] == []


@pytest.mark.parametrize("node", sorted(set(TEST.values())))
def test_test_that_executes_a_command_exists(node: str) -> None:
    path, name = node.split("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]


def test_command_extraction_finds_each_form() -> None:
    text = (
        "Run `pytest -m a\n-n 2` or `bumpgate gate`.\n\n"
        "```\nX=1 bumpgate a \\\n    --b  # why\nmake all\n```\n\n"
        "```\n$ make all; bumpgate c 'd'\nbumpgate is output\n```\n\n"
        "    tox -e f\n\n"
        "```bash\nset -u\n```\n\n```python\npytest = 1\n```\n<!-- table: python -m g --h -->\n"
    )
    assert list(of_markdown(text, "x.md")) == [
        "X=1 bumpgate a --b",
        "make all",
        "make all; bumpgate c 'd'",
        "x.md: bash",
        "tox -e f",
        "pytest -m a -n 2",
        "python -m g --h",
    ]
    with pytest.raises(ValueError, match="'ruby'"):
        list(of_markdown("```ruby\nputs\n```\n", "x.md"))


@pytest.mark.parametrize(
    "text", [text for entries in (TEST, TABLE["reason"]) for text in entries if text.startswith("bumpgate ")]
)
def test_options_of_a_command_that_is_not_run_exist(text: str) -> None:
    """Parse it as the program does, without running it."""
    command, words = typer.main.get_command(app), shlex.split(text)[1:]
    context = command.make_context("bumpgate", words)
    while hasattr(command, "resolve_command"):
        # Of a group, typer keeps the command's name apart; the attribute's name depends on its version.
        ahead = getattr(context, "_protected_args", None) or getattr(context, "protected_args", [])
        name, command, words = command.resolve_command(context, [*ahead, *context.args])
        assert command is not None
        context = command.make_context(name, words, parent=context)


def test_unknown_option_of_a_documented_command_is_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        test_options_of_a_command_that_is_not_run_exist("bumpgate gate --lane cpu --candidat torch==2.14.0")
