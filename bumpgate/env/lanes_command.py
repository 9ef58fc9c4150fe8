"""`bumpgate lanes`: the lanes of a repository, a new one, an adopted set installed, and what a gate could judge."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from bumpgate.core import lanes
from bumpgate.core.baseline import find_root
from bumpgate.core.errors import BumpgateError, one_fault, one_line
from bumpgate.core.rows import write_atomic
from bumpgate.core.toml import tomllib
from bumpgate.env import requirements, store
from bumpgate.env.build import NotInstallable, resolve
from bumpgate.env.lane import LaneContext
from bumpgate.env.packages import exact_version
from bumpgate.env.request import RUNNING
from bumpgate.env.uv import find_uv, host_settings
from bumpgate.env.versions import UnreachableError, VersionsError, versions

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


# A release without a wheel of a package that the lane needs, as of torch_xla, is followed by more such releases.
TRIED = 6


@app.command("candidates")
def candidates_command(
    pre: Annotated[bool, typer.Option("--pre", help="Nightlies and other pre-releases too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A list for the matrix of a workflow.")] = False,
) -> None:
    """Find the newest version of each pinned package that a lane could be gated against.

    A version is newer than the adopted one, and resolves together with the rest of the lane. A lane without one has
    the candidate "".

    Exit codes: 0 done, 4 bad input or an index that does not answer, 125 a resolution that failed for another reason.
    """
    root = find_root(Path.cwd())
    found = []
    for name, lane in lanes.load(root).items():
        context = LaneContext(root, name)
        packages = [*lane.pins, *context.kernel_wheels]
        newest = [text for package in packages if (text := newest_candidate(context, package, pre=pre))]
        found += [{"lane": name, "device": lane.device, "candidate": text} for text in newest or [""]]
    if as_json:
        typer.echo(json.dumps(found))
        return
    for each in found:
        typer.echo(f"{each['lane']}: {each['candidate'] or 'no newer candidate'}")


def newest_candidate(lane: LaneContext, package: str, *, pre: bool = False) -> str:
    """Return the newest version of a package that resolves in a lane, as torch==2.14.0; "" if none is newer.

    Raises BumpgateError if the index does not answer.
    """
    adopted = (lane.lock.versions if lane.lock else _pins(lane.requirements())).get(package)
    if adopted is None:
        return ""
    try:
        listed = versions(package, python=lane.python, pre=pre)
    except UnreachableError:
        raise
    except VersionsError:  # sources only
        return ""
    newer = [f.version for f in listed if f.yanked is None and Version(f.version) > Version(adopted)]
    public = dict.fromkeys(Version(version).public for version in reversed(newer))
    for version in list(public)[:TRIED]:
        if version == Version(adopted).public:
            break
        candidate = f"{package}=={version}"
        with suppress(NotInstallable):
            resolve(lane.request(candidate))
            return candidate
    return ""


# Locks of package managers, next to the lane's own files.
LOCKS = ("uv.lock", "poetry.lock")


@app.command("moved")
def moved_command(
    lane: Annotated[str, typer.Argument(help="A declared lane.")],
    base: Annotated[str, typer.Option(help="A commit, such as the base of a pull request.")],
    restore: Annotated[bool, typer.Option("--restore", help="Put back the files as they are there.")] = False,
) -> None:
    """Print the candidate of a pull request: the pinned package that it moves, as torch==2.14.0.

    Its requirements file, its lock, pyproject.toml, uv.lock and poetry.lock are compared with another commit. With
    --restore the tree then has the adopted side. It prints nothing if no package of the lane moved.

    Exit codes: 0 done, 4 bad input.
    """
    context = LaneContext(find_root(Path.cwd()), lane)
    own = requirements.requirements_file(context.root, context.declared).relative_to(context.root).as_posix()
    files = [name for name in (own, context.declared.lock, *LOCKS) if (context.root / name).exists()]
    found: dict[str, str] = {}
    for name in files:
        shown = ["git", "-C", str(context.root), "show", f"{base}:./{name}"]
        done = subprocess.run(shown, capture_output=True, text=True)
        if done.returncode and "does not exist" not in done.stderr and "exists on disk" not in done.stderr:
            raise BumpgateError(f"--base {base}: {one_line(done.stderr, 120)}: fetch it, or name a commit")
        before = _exact(context, name, done.stdout)
        after = _exact(context, name, (context.root / name).read_text(encoding="utf-8"))
        found |= {package: version for package, version in after.items() if before.get(package) != version}
        if restore and done.returncode == 0:
            (context.root / name).write_text(done.stdout, encoding="utf-8")
    for package in (*context.declared.pins, *context.kernel_wheels):
        if package in found:
            typer.echo(f"{package}=={found[package]}")
            return


def _exact(lane: LaneContext, file: str, text: str) -> dict[str, str]:
    """Return package -> exact version of a lock, or of a lane's requirements."""
    with one_fault(f"{file}: cannot be read"):
        if file.endswith(".lock") or file == lane.declared.lock:
            raw = tomllib.loads(text)
            packages = [*raw.get("package", ()), *raw.get("packages", ())]
            return {str(canonicalize_name(p["name"])): str(p["version"]) for p in packages if "version" in p}
        return _pins(found for _, found in requirements.places(lane.declared, text))


def _pins(texts: Iterable[str]) -> dict[str, str]:
    """Return package -> version of the requirements that are exact pins."""
    each = map(Requirement, texts)
    exact = {str(canonicalize_name(r.name)): exact_version(r.specifier) for r in each}
    return {name: version for name, version in exact.items() if version}
