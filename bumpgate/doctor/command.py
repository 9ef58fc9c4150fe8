"""`bumpgate doctor`: checks a machine for a lane. Lists each defect with code, reason and fix, as text or JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.version import Version

from bumpgate.core import lanes
from bumpgate.core.baseline import find_root
from bumpgate.core.errors import BumpgateError
from bumpgate.doctor.checks import CHECKS
from bumpgate.doctor.examination import CheckResult, Status, examine, healthy, make_site
from bumpgate.env.build import Environment, build
from bumpgate.env.lane import LaneContext
from bumpgate.env.lanes_command import newest_candidate
from bumpgate.env.packages import lock_variables
from bumpgate.table import listing

SCHEMA = 1
STYLE = {Status.OK: "green", Status.WARNING: "yellow", Status.DEFECT: "bold red", Status.NOT_RUN: "dim"}


def command(
    lane: Annotated[str, typer.Option(help="A declared lane; by default the first.")] = "",
    python: Annotated[
        Path | None, typer.Option(help="The interpreter to examine; by default this one.")
    ] = None,
    nightly: Annotated[
        str, typer.Option(help="Build and examine the newest nightly of this package, such as torch.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Examine this machine before a run: environment, versions, instruments, and last the accelerator.

    Exit codes: 0 healthy (a warning is not a defect), 1 a defect, 4 bad input.
    """
    root = find_root(Path.cwd())
    lane = lane or next(iter(lanes.load(root)), "")
    lanes.require(root, lane)
    variables = dict(os.environ)
    if nightly:
        built = newest_nightly(LaneContext(root, lane), nightly)
        python, variables = built.python, variables | lock_variables(built.lock)
    site = make_site(root, lane, python or Path(sys.executable), variables, own_lock=bool(nightly))
    findings = examine(site, CHECKS)
    if as_json:
        # Fields are only added; `schema` changes if the meaning of one does.
        shown: dict[str, Any] = {"schema": SCHEMA, "lane": lane, "python": str(site.interpreter.python)}
        shown |= {"healthy": healthy(findings), "checks": [f.to_json() for f in findings]}
        typer.echo(json.dumps(shown, indent=1))
    else:
        counts = [f"{n} {s.value}" for s in Status if (n := sum(f.status is s for f in findings))]
        verdict = "healthy" if healthy(findings) else "not fit"
        typer.echo(
            f"{render(findings, terminal=sys.stdout.isatty())}doctor: lane {lane}: {verdict}: {', '.join(counts)}"
        )
    raise typer.Exit(0 if healthy(findings) else 1)


def newest_nightly(lane: LaneContext, package: str) -> Environment:
    """Build a lane's environment with the newest nightly of a package that resolves there.

    Raises BumpgateError (one line), also if no index answers.
    """
    candidate = newest_candidate(lane, package, pre=True)
    if not (candidate and Version(candidate.partition("==")[2]).is_devrelease):
        fix = "name an index of nightlies in UV_INDEX"
        raise BumpgateError(f"--nightly {package}: none is newer than lane {lane.name}'s and resolves: {fix}")
    typer.echo(f"{candidate}: the newest nightly that resolves in lane {lane.name}", err=True)
    return build(lane.request(candidate), say=lambda line: typer.echo(line, err=True))


def render(findings: Iterable[CheckResult], *, terminal: bool = False) -> str:
    """Format findings in the order of the checks, fixes below defects. terminal: with colours."""
    lines = ((f.status, f"{f.code}  {f.check}: {f.reason}", f.fix) for f in findings)
    return listing(((s.value, STYLE[s], text, fix) for s, text, fix in lines), terminal=terminal)
