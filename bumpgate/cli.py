"""The `bumpgate` command. Each command is in its own file; this one loads it and prints errors as one line.

Exit codes: 0 done, 1 refused, 4 bad input, 125 the machine or an index failed, or bumpgate itself.
"""

from __future__ import annotations

import gc
import io
import sys
import traceback
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from bumpgate.core.errors import BumpgateError, RefusedError

SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}
# In the order of the help.
COMMANDS = (
    *("init", "gate", "adopt", "rebaseline", "bisect", "accept", "report", "history", "dashboard", "notify"),
    *("environments", "versions", "mirror", "doctor", "freeze", "rollback", "image"),
)
GROUPS = {
    "findings": "Findings of the history: list, link to an issue, own.",
    "fleet": "Gates and bisects on many hosts, through Ray or Slurm.",
    "wheels": "Kernel wheels of a lane: plan, audit, fetch and build them.",
}


def load(name: str) -> Any:
    """Import a command or a group. Importing all of them would take longer than a short command itself."""
    match name:
        case "init":
            from bumpgate.init import command as init

            return init
        case "gate":
            from bumpgate.gate.command import command as gate

            return gate
        case "adopt":
            from bumpgate.review.adopt import command as adopt

            return adopt
        case "rebaseline":
            from bumpgate.review.rebaseline import command as rebaseline

            return rebaseline
        case "bisect":
            from bumpgate.bisect.command import command as bisect

            return bisect
        case "accept":
            from bumpgate.review.accept import command as accept

            return accept
        case "report":
            from bumpgate.report.command import command as report

            return report
        case "history":
            from bumpgate.report.history import command as history

            return history
        case "dashboard":
            from bumpgate.report.dashboard import command as dashboard

            return dashboard
        case "notify":
            from bumpgate.notify.command import command as notify

            return notify
        case "environments":
            from bumpgate.env.cached import command as environments

            return environments
        case "versions":
            from bumpgate.env.versions import command as versions

            return versions
        case "mirror":
            from bumpgate.env.mirror import command as mirror

            return mirror
        case "doctor":
            from bumpgate.doctor.command import command as doctor

            return doctor
        case "freeze":
            from bumpgate.env.freeze import command as freeze

            return freeze
        case "rollback":
            from bumpgate.review.rollback import command as rollback

            return rollback
        case "image":
            from bumpgate.env.image import command as image

            return image
        case "findings":
            from bumpgate.report.findings import app as findings

            return findings
        case "fleet":
            from bumpgate.fleet.command import app as fleet

            return fleet
        case "wheels":
            from bumpgate.wheels.command import app as wheels

            return wheels
    raise KeyError(name)


class Commands(Mapping[str, Any]):
    """The commands by name, each imported when it is looked up."""

    def __iter__(self) -> Iterator[str]:
        return iter((*COMMANDS, *GROUPS))

    def __len__(self) -> int:
        return len(COMMANDS) + len(GROUPS)

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS or name in GROUPS

    def __getitem__(self, name: str) -> Any:
        one = typer.Typer(**SETTINGS)
        if name in GROUPS:
            one.add_typer(load(name), name=name, help=GROUPS[name])
            group: Any = typer.main.get_command(one)
            return group.commands[name]
        one.command(name)(load(name))
        return typer.main.get_command(one)


class LazyGroup(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        commands: Any = Commands()  # click only reads it
        self.commands = commands


app = typer.Typer(cls=LazyGroup, **SETTINGS)


@app.callback(invoke_without_command=True)
def bumpgate(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Is this torch, triton or kernel-wheel bump safe, and if not, which package broke what?"""
    if version:
        typer.echo(f"bumpgate {_version()}")
    elif context.invoked_subcommand is None:
        raise BumpgateError("name a command; see bumpgate --help")


def main() -> None:
    """Entry point. Errors that a user can fix are printed as one line on stderr, never as a traceback."""
    if sys.flags.optimize:
        _fail("bumpgate: PYTHONOPTIMIZE or -O removes checks that are assert statements: leave it out", 4)
    # A command ends soon and builds long lists of rows: collecting garbage took a fifth of the report of 10,000 rows.
    gc.set_threshold(100_000, 20, 100)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that is not UTF-8 can be printed
    try:
        sys.exit(app(prog_name="bumpgate", standalone_mode=False) or 0)
    except RefusedError as refusal:
        _fail("\n".join(f"refused: {reason}" for reason in refusal.args), 1)
    except BumpgateError as error:
        _fail(f"bumpgate: {error}", error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"bumpgate: {where}{error.strerror or error}", 4)
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
    print(text, file=sys.stderr)
    sys.exit(code)


def _version() -> str:
    try:
        return metadata.version("bumpgate")
    except metadata.PackageNotFoundError:
        return "(not installed: run from the source tree)"
