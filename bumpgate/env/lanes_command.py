"""`bumpgate lanes`: the lanes of a repository, a new one, and the installation of an adopted set."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import Version

from bumpgate.core import lanes
from bumpgate.core.baseline import find_root
from bumpgate.core.errors import BumpgateError
from bumpgate.core.rows import write_atomic
from bumpgate.env import store
from bumpgate.env.lane import LaneContext
from bumpgate.env.request import RUNNING
from bumpgate.env.uv import find_uv, host_settings

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def list_command(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="The names as a JSON list.")] = False,
) -> None:
    """List the lanes with their devices and the torch of their locks.

    Exit codes: 0 done, 4 bad input.
    """
    if context.invoked_subcommand:
        return
    root = find_root(Path.cwd())
    declared = lanes.load(root)
    if as_json:
        typer.echo(json.dumps(list(declared)))
        return
    for lane in declared.values():
        lock = LaneContext(root, lane.name).lock
        torch = f"torch {lock.versions.get('torch', 'absent')}" if lock else "no lock"
        device = " ".join([lane.device, lane.gpu, f"x{lane.count}" if lane.count > 1 else ""]).split()
        typer.echo(f"{lane.name}: {' '.join(device)}, {torch}")


@app.command("new")
def new_command(
    name: Annotated[str, typer.Argument(help="A pytest marker in lower case such as h100.")],
    inherits: Annotated[str, typer.Option(help="A lane whose tests and reviewed counts it takes.")] = "",
    gpu: Annotated[str, typer.Option(help="A part of the GPU's name; by default the name of the lane.")] = "",
) -> None:
    """Write the folder of a new lane. An heir has the adopted set of the lane that it inherits.

    Exit codes: 0 done, 4 bad input.
    """
    root = find_root(Path.cwd())
    declared = lanes.load(root)
    path = root / lanes.FOLDER / name / lanes.FILE
    if not lanes.NAME.fullmatch(name) or name in declared or path.exists():
        raise BumpgateError(f"invalid new lane {name!r}: name a pytest marker that no lane has, such as h100")
    if declared and not any(lane.folder for lane in declared.values()):
        raise BumpgateError(
            f"the lanes are in {next(iter(declared.values())).where}: add [lanes.{name}] there"
        )
    device = declared[inherits].device if inherits in declared else "cpu"
    fields = {"inherits": inherits} if inherits else {"extra": name, "device": device}
    fields |= {"gpu": gpu or name.upper()} if device == "cuda" else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items()))
    try:
        lanes.load(root)
    except lanes.LaneError:
        path.unlink()
        raise
    then = f"pytest -m {name}" if inherits else f"bumpgate freeze --lane {name}"
    typer.echo(f"wrote {lanes.FOLDER}/{name}/{lanes.FILE}; next: {then}")


@app.command("install")
def install_command(lane: Annotated[str, typer.Argument(help="A declared lane.")]) -> None:
    """Install the adopted set of a lane into the interpreter that runs this, by version.

    An index may have another build of a version than the lock, as PyPI has of the CPU build of torch; a gate compares
    hashes. With another Python than the lock's only the pins of the lane's requirements hold.

    Exit codes: 0 done, 4 bad input, 125 uv failed.
    """
    context = LaneContext(find_root(Path.cwd()), lane)
    lock = context.lock
    if lock and lock.python in ("", RUNNING):
        lines = [f"{name}=={Version(version).public}" for name, version in lock.versions.items()]
        stored = store.find_links(lock.packages)
    else:
        lines, stored = list(context.requirements()), []
        typer.echo(f"lane {lane}: no lock for Python {RUNNING}: installing its requirements", err=True)
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        flags = ["--override", str(context.overrides)] if context.overrides else []
        command = [find_uv(), "pip", "install", "--quiet", "--python", sys.executable, *flags, *stored]
        done = subprocess.run([*command, "-r", str(requirements)], env=host_settings())
    if done.returncode == 0 and context.script:
        done = subprocess.run([sys.executable, str(context.script)])
    raise typer.Exit(125 if done.returncode else 0)
