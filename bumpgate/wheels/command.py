"""`bumpgate wheels`: the kernel wheels of a lane for a torch, and their sources."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from packaging.utils import canonicalize_name

from bumpgate.core.baseline import find_root
from bumpgate.core.errors import BumpgateError, check_number
from bumpgate.env.build import build
from bumpgate.env.lane import LaneContext, smoke_tests
from bumpgate.env.store import sha256_of
from bumpgate.wheels import store
from bumpgate.wheels.audit import Target, WheelFile, audit
from bumpgate.wheels.build import Limits, WheelBuildError, build_wheel, download_sdist
from bumpgate.wheels.plan import build_of, make_target, plan

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)

Lane = Annotated[str, typer.Option(help="A declared lane.")]
Torch = Annotated[str, typer.Option(help="A version: its environment is built, or read from the cache.")]
Python = Annotated[str, typer.Option(help="Instead of --torch: this interpreter and its torch.")]
FindLinks = Annotated[list[str] | None, typer.Option(help="A folder or page of wheels; repeatable.")]


def targets(lane: LaneContext, torches: list[str], python: str, find_links: list[str] | None) -> list[Target]:
    """Return the target environments. Raises BumpgateError without torch and interpreter."""
    if bool(torches) == bool(python):
        raise BumpgateError("name the torch: --torch 2.14.1, or --python PATH")
    if python and not Path(python).is_file():
        raise BumpgateError(f"--python {python}: no such interpreter")
    pythons = [Path(python).absolute()] if python else []
    for torch in torches:
        request = lane.request(f"torch=={torch}", find_links=tuple(find_links or ()))
        pythons.append(build(request, say=lambda line: typer.echo(line, err=True)).python)
    return [make_target(lane, each) for each in pythons]


def _title(target: Target) -> str:
    parts = [f"torch {target.found.torch_version}", f"Python {target.python}"]
    return ", ".join([*parts, f"sm_{target.arch}"] if target.arch else parts)


@app.command("plan")
def plan_command(
    lane: Lane,
    torch: Annotated[list[str] | None, typer.Option(help="A version; repeatable.")] = None,
    python: Python = "",
    find_links: FindLinks = None,
) -> None:
    """Show for each kernel wheel of a lane whether it can be reused, built or neither.

    Exit codes: 0 done, 4 bad input, 125 an environment could not be built.
    """
    context = LaneContext(find_root(Path.cwd()), lane)
    for target in targets(context, torch or [], python, find_links):
        choices = plan(context, target, find_links or ())
        typer.echo(f"{_title(target)}: {'no kernel wheels in this lane' if not choices else ''}".rstrip(": "))
        for choice in choices:
            typer.echo(f"  {choice.package} {choice.version}: {choice.action}: {choice.reason}")
            for reason in choice.refused:
                if reason != choice.reason:
                    typer.echo(f"    refused: {reason}")


@app.command("audit")
def audit_command(
    wheels: Annotated[list[Path], typer.Argument(help="Wheel files.")],
    lane: Lane,
    torch: Torch = "",
    python: Python = "",
) -> None:
    """Audit wheel files against a torch, without installing them.

    Exit codes: 0 all of them pass, 1 one is refused, 4 bad input, 125 an environment could not be built.
    """
    context = LaneContext(find_root(Path.cwd()), lane)
    absent = [path for path in wheels if not path.is_file()]
    if absent:
        raise BumpgateError(f"{absent[0]}: no such wheel file")
    (target,) = targets(context, [torch] if torch else [], python, None)
    known = {w.sha256: w.torch for w in context.packages.known_wheels if w.sha256}
    smoke = smoke_tests(context.root)
    refused = False
    for path in wheels:
        built_for = known.get(sha256_of(path), "")
        package = str(canonicalize_name(path.name.partition("-")[0]))
        found = audit(WheelFile(path, package, built_for=built_for), target, smoke.get(package))
        refused = refused or bool(found.faults)
        typer.echo(f"{path.name}: {'refused' if found.faults else 'passes'} on {_title(target)}")
        for line in (*(f"{fault.kind}: {fault.reason}" for fault in found.faults), *found.notes):
            typer.echo(f"  {line}")
    raise typer.Exit(1 if refused else 0)


@app.command("build")
def build_command(
    lane: Lane,
    torch: Torch = "",
    python: Python = "",
    package: Annotated[
        list[str] | None, typer.Option(help="One of the lane's kernel wheels; by default all.")
    ] = None,
    sdist: Annotated[
        Path | None, typer.Option(help="The source archive of --package, instead of the index's.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Compiler processes at once.", min=1)] = 2,
    hours: Annotated[float, typer.Option(help="Wall time for each package.")] = 4.0,
    memory: Annotated[float, typer.Option(help="GiB of each compiler process; 0 for no limit.")] = 0.0,
) -> None:
    """Compile kernel wheels from their sdists against a torch, into the kernel store. No GPU is needed.

    A build that failed or was stopped continues with the same command. A wheel is audited before it is kept.

    Exit codes: 0 done, 1 a package could not be built, 4 bad input, 125 an environment could not be built.
    """
    check_number("--hours", hours, 1000)
    check_number("--memory", memory, 1e6)
    context = LaneContext(find_root(Path.cwd()), lane)
    (target,) = targets(context, [torch] if torch else [], python, None)
    wheels = {wheel.name: wheel for wheel in context.packages.known_wheels}
    names = package or list(wheels)
    if unknown := [name for name in names if name not in wheels]:
        known = ", ".join(wheels) or "none"
        raise BumpgateError(f"lane {lane} has no kernel wheel {unknown[0]!r}; it has: {known}")
    if sdist and (len(names) != 1 or not sdist.is_file()):
        raise BumpgateError(f"--sdist {sdist}: name one --package and an existing archive")
    limits, failed = Limits(jobs, 3600 * hours, memory), False
    for name in names:
        spec = build_of(context, wheels[name], target)
        kept = store.find(spec)
        try:
            found = kept or build_wheel(
                spec, target, sdist or download_sdist(spec), limits, context.patch(wheels[name])
            )
            typer.echo(f"{name} {spec.version}: {'kept' if kept else 'built'}: {found}")
        except WheelBuildError as error:
            typer.echo(f"{error}", err=True)
            failed = True
    raise typer.Exit(1 if failed else 0)
