"""The `bumpgate` command. Each command is in its own file; this one loads it and prints errors as one line.

Exit codes: 0 done, 1 refused, 4 bad input, 125 the machine or an index failed, or bumpgate itself.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import bumpgate as package
from bumpgate.core.errors import BumpgateError, RefusedError
from bumpgate.core.text import printable, redacted

SETTINGS: dict[str, Any] = {
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}
# Name -> where the command, or the group of commands, is; in the order of the help.
COMMANDS = {
    "init": "bumpgate.init:command",
    "gate": "bumpgate.gate.command:command",
    "adopt": "bumpgate.review.adopt:command",
    "rebaseline": "bumpgate.review.rebaseline:command",
    "bisect": "bumpgate.bisect.command:command",
    "reproduce": "bumpgate.reproduce.command:command",
    "accept": "bumpgate.review.accept:command",
    "report": "bumpgate.report.command:command",
    "compare": "bumpgate.report.compare:command",
    "diff": "bumpgate.reproduce.diff:command",
    "history": "bumpgate.report.history:command",
    "dashboard": "bumpgate.report.dashboard:command",
    "logs": "bumpgate.logs.command:command",
    "notify": "bumpgate.notify.command:command",
    "environments": "bumpgate.env.cached:command",
    "versions": "bumpgate.env.versions:command",
    "mirror": "bumpgate.env.mirror:command",
    "doctor": "bumpgate.doctor.command:command",
    "freeze": "bumpgate.env.freeze:command",
    "rollback": "bumpgate.review.rollback:command",
    "image": "bumpgate.env.image:command",
    "findings": "bumpgate.report.findings:app",
    "fleet": "bumpgate.fleet:app",
    "lanes": "bumpgate.env.lanes_command:app",
    "wheels": "bumpgate.wheels.command:app",
}
GROUPS = {
    "findings": "Findings of the history: list, link to an issue, own.",
    "fleet": "Gates and bisects on the hosts of a Ray cluster.",
    "lanes": "Lanes: list them, write a new one, install an adopted set.",
    "wheels": "Kernel wheels of a lane: plan, audit and build them.",
}


FIXES = {
    errno.ENOENT: "name a path that exists",
    errno.EEXIST: "move it away, or name another path",
    errno.ENOTDIR: "name a path below a folder",
    errno.EISDIR: "name a file",
    errno.EACCES: "change its permissions, or name another path",
    errno.ENOSPC: "free space on the disk",
}


def load(name: str) -> Any:
    """Import a command or a group. Importing all of them would take longer than a short command itself."""
    module, _, attribute = COMMANDS[name].partition(":")
    return getattr(import_module(module), attribute)


class LazyGroup(TyperGroup):
    """The commands by name, each imported when it is looked up."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names: Any = dict.fromkeys(COMMANDS)  # typer lists them, and suggests one for a misspelt name
        self.commands = names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        one = typer.Typer(**SETTINGS, add_completion=False)
        if cmd_name in GROUPS:
            one.add_typer(load(cmd_name), name=cmd_name, help=GROUPS[cmd_name])
            group: Any = typer.main.get_command(one)
            return group.commands[cmd_name]
        one.command(cmd_name)(load(cmd_name))
        found: Any = typer.main.get_command(one)
        found.params += _options_of_output()
        return found


def _export(on: object, **variables: str) -> None:
    """Set variables of this process, and of those that it starts."""
    os.environ.update(variables if on else {})


def _colour(value: str) -> None:
    if value not in ("auto", "always", "never"):
        raise BumpgateError(f"--color {value}: auto, always or never")
    _export(value == "always", FORCE_COLOR="1")
    _export(value == "never", NO_COLOR="1")


def _output(
    quiet: Annotated[
        bool,
        typer.Option(
            "-q", "--quiet", callback=lambda on: _export(on, BUMPGATE_QUIET="1"), help="Leave out progress."
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "-v",
            "--verbose",
            callback=lambda on: _export(on, BUMPGATE_VERBOSE="1"),
            help="All lines of a finding.",
        ),
    ] = False,
    color: Annotated[str, typer.Option(callback=_colour, help="auto, always or never.")] = "auto",
) -> None:
    """The options of every command; the callbacks have their effects."""


def _options_of_output() -> list[Any]:
    made = typer.Typer(**SETTINGS, add_completion=False)
    made.command()(_output)
    found: Any = typer.main.get_command(made)
    for option in found.params:
        option.expose_value = False
    return list(found.params)


app = typer.Typer(cls=LazyGroup, **SETTINGS)


@app.callback(invoke_without_command=True)
def bumpgate(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Is this torch, triton or kernel-wheel bump safe, and if not, which package broke what?"""
    if version:
        typer.echo(f"bumpgate {package.__version__}")
    elif context.invoked_subcommand is None:
        raise BumpgateError("name a command; see bumpgate --help")


class Screen:
    """A stream of text without secrets and, unless it is a terminal, without control characters."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that is not UTF-8 can be printed

    def write(self, text: str) -> Any:
        text = redacted(text)
        coloured = self._stream.isatty() or os.environ.get("FORCE_COLOR")
        return self._stream.write(text if coloured else printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main() -> None:
    """Entry point. Errors that a user can fix are printed as one line on stderr, never as a traceback."""
    if sys.flags.optimize:
        _fail("bumpgate: PYTHONOPTIMIZE or -O removes checks that are assert statements: leave it out", 4)
    # A command ends soon and builds long lists of rows: collecting garbage took a fifth of the report of 10,000 rows.
    gc.set_threshold(100_000, 20, 100)
    with redirect_stdout(Screen(sys.stdout)), redirect_stderr(Screen(sys.stderr)):
        _main()


def _main() -> NoReturn:
    try:
        sys.exit(app(prog_name="bumpgate", standalone_mode=False) or 0)
    except RefusedError as refusal:
        _fail("\n".join(f"refused: {reason}" for reason in refusal.args), 1)
    except BumpgateError as error:
        _fail(f"bumpgate: {error}", error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fix = f"; {FIXES[error.errno]}" if error.errno in FIXES else ""
        _fail(f"bumpgate: {where}{error.strerror or error}{fix}", 4)
    except Exception as error:
        # The module of typer's usage errors depends on its version; all of them have format_message().
        if not hasattr(error, "format_message"):
            traceback.print_exc()  # Python's own exit code for it, 1, would read as a verdict
            _fail(
                "bumpgate: this is a bug in bumpgate, and there is no verdict: report it with the lines above",
                125,
            )
        _fail(f"bumpgate: {' '.join(error.format_message().split())}", 4)


def _fail(text: str, code: int) -> NoReturn:
    print(printable(text), file=sys.stderr)
    sys.exit(code)
