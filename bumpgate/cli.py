"""The `bumpgate` command. Each command is in its own file; this one registers them and prints errors as one line.

Exit codes: 0 done, 1 refused, 4 bad input, 125 the machine or an index failed.
"""

from __future__ import annotations

import gc
import sys
from importlib import metadata
from typing import Annotated

import typer

from bumpgate import accept, init, rebaseline
from bumpgate.adopt import command as adopt
from bumpgate.adopt import rollback
from bumpgate.bisect import command as bisect
from bumpgate.core.rows import BumpgateError
from bumpgate.doctor import command as doctor
from bumpgate.env import cached, freeze, image, installation, mirror, versions
from bumpgate.fleet import command as fleet
from bumpgate.gate import command as gate
from bumpgate.notify import command as notify
from bumpgate.report import command as report
from bumpgate.report import dashboard, findings, history
from bumpgate.wheels import command as wheels

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command("init")(init.command)
app.command("gate")(gate.command)
app.command("adopt")(adopt.command)
app.command("rebaseline")(rebaseline.command)
app.command("bisect")(bisect.command)
app.command("accept")(accept.command)
app.command("report")(report.command)
app.command("history")(history.command)
app.command("dashboard")(dashboard.command)
app.command("notify")(notify.command)
app.command("environments")(cached.command)
app.command("versions")(versions.command)
app.command("mirror")(mirror.command)
app.command("doctor")(doctor.command)
app.command("freeze")(freeze.command)
app.command("rollback")(rollback.command)
app.command("image")(image.command)
app.add_typer(findings.app, name="findings", help="Findings of the history: list, link to an issue, own.")
app.add_typer(fleet.app, name="fleet", help="Gates and bisects on many hosts, through Ray or Slurm.")
app.add_typer(wheels.app, name="wheels", help="Kernel wheels of a lane: plan, audit, fetch and build them.")


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
    try:
        sys.exit(app(prog_name="bumpgate", standalone_mode=False) or 0)
    except rebaseline.RefusedError as refusal:
        _fail("\n".join(f"refused: {reason}" for reason in refusal.args), 1)
    except installation.BuildError as error:
        _fail(f"bumpgate: {error}", 4 if isinstance(error, installation.NotInstallable) else 125)
    except BumpgateError as error:
        _fail(f"bumpgate: {error}", 4)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"bumpgate: {where}{error.strerror or error}", 4)
    except Exception as error:
        # The module of typer's usage errors depends on its version; all of them have format_message().
        if not hasattr(error, "format_message"):
            raise
        _fail(f"bumpgate: {' '.join(error.format_message().split())}", 4)


def _fail(text: str, code: int) -> None:
    print(text, file=sys.stderr)
    sys.exit(code)


def _version() -> str:
    try:
        return metadata.version("bumpgate")
    except metadata.PackageNotFoundError:
        return "(not installed: run from the source tree)"
